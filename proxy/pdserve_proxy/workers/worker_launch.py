"""What a worker is told at its start, and its share of what the whole proxy may hold."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from pdserve.config import ProxyConfig
from pdserve.wire.proxy_workers import Credentials

WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "pdserve_proxy.workers.worker")
"""``-P`` keeps folders of the current directory from standing in for packages."""


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """Written as MessagePack to a worker's standard input."""

    config: ProxyConfig
    """The worker's share of it."""
    credentials: Credentials
    name: bytes
    """This start of this worker, on the supervisor's channel."""
    address: str
    """``ipc://`` path of that channel."""
    listener: int
    """Inherited file descriptor of its listening socket."""


def worker_share(config: ProxyConfig) -> ProxyConfig:
    """One worker's part of the limits on requests and connections, rounded up: connections are spread evenly."""
    count = config.workers.count

    def part(limit: int) -> int:
        return -(-limit // count)

    admission, http = config.admission, config.http
    return dataclasses.replace(
        config,
        admission=dataclasses.replace(
            admission,
            max_in_flight=part(admission.max_in_flight),
            max_in_flight_per_key=part(admission.max_in_flight_per_key),
            max_queued=part(admission.max_queued),
            max_uploads=part(admission.max_uploads),
            body_memory_mib=part(admission.body_memory_mib),
        ),
        http=dataclasses.replace(http, max_client_connections=part(http.max_client_connections)),
    )
