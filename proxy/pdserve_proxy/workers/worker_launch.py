"""The message with which a worker starts, with its share of the limits of the whole proxy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pdserve.config import ProxyConfig
from pdserve.process import python_program
from pdserve.wire.proxy_workers import Credentials

WORKER_COMMAND = python_program("pdserve_proxy.workers.worker")


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """The settings of one start of a worker, which reads them as MessagePack from its standard input."""

    config: ProxyConfig
    """The configuration, in which the limits are this worker's share."""
    credentials: Credentials
    name: bytes
    """The name of this start of this worker on the supervisor's channel."""
    address: str
    """The ``ipc://`` address of that channel."""
    listener: int
    """The inherited file descriptor of the worker's listening socket."""


def worker_share(config: ProxyConfig) -> ProxyConfig:
    """Returns ``config`` with one worker's share of the limits, rounded up: connections are spread evenly."""
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
