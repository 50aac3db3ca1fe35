"""Serves clients on one socket, in the proxy's only process or in one of its workers."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config import AdmissionConfig, ProxyConfig, StoreConfig, Switch
from pdserve.errors import PdserveError
from pdserve.http.server import HttpServer
from pdserve.machine.memory import give_large_blocks_back
from pdserve.tracing.tracing import Tracing
from pdserve.wire.ids import new_id
from pdserve_proxy.app import RenderMetrics, build_app
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.credentials import LiveCredentials
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.dispatch import TicketSigner
from pdserve_proxy.relay.relay import Relay
from pdserve_proxy.requests.admission_queue import AdmissionController, AdmissionLimits
from pdserve_proxy.requests.held_bodies import BodyLimits, HeldBodies
from pdserve_proxy.responses.store import ResponseStorage, StoreLimits
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.status.access import StatusAccess
from pdserve_proxy.status.routes import COMMANDS_PATH, Report, StatusRoutes
from pdserve_proxy.timelines import OwnParts, Timelines
from pdserve_proxy.upstream.node_command import NodeCommander

log = logging.getLogger(__name__)

AFTER_DRAIN_S = 8.0
"""The seconds after the drain in which last error events can leave, before all connections are closed."""
LAST_REQUEST_S = 1
"""A stopping proxy answers one more request of a client whose stream ends, if it comes within so many seconds."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses at which clients and nodes reach the proxy."""

    url: str
    control: str


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What one process of a proxy knows of the cluster and of itself."""

    registry: RegistryView
    attempts: Attempts
    metrics: ProxyMetrics
    scrape: RenderMetrics
    report: Report
    tracing: Tracing
    parts: OwnParts
    """Returns the parts that all processes of the proxy have."""
    suspects: Suspects
    storage: ResponseStorage | None = None
    """The responses that are stored; None if none are."""
    lives: Callable[[], bool] = lambda: True
    """Whether the other processes live that this one needs."""


async def serve_clients(
    config: ProxyConfig,
    credentials: LiveCredentials,
    state: ProcessState,
    listener: socket.socket,
    stop: asyncio.Event,
    listening: Callable[[], None],
) -> None:
    """Serves until ``stop`` is set and requests under way are over or cut short. Calls ``listening`` once."""
    give_large_blocks_back()
    tickets = TicketSigner(credentials.secrets, new_id())
    metrics, drain_s = state.metrics, config.http.drain_s
    bodies = HeldBodies(_body_limits(config))
    admission = AdmissionController(_limits(config.admission), lambda: state.registry.live_proxies)
    metrics.queued.set_function(lambda: admission.waiting)
    access = StatusAccess(config.status.page, config.http, credentials.keys, credentials.admins)
    async with (
        state.tracing.exporting({"pdserve.process": "proxy"}, metrics.spans),
        Relay(
            config,
            state.registry,
            state.attempts,
            tickets,
            metrics.counts,
            credentials.trust,
            state.tracing,
            state.suspects,
        ) as relay,
        NodeCommander(credentials.secrets, credentials.trust) as commander,
    ):
        status = StatusRoutes(access, state.report, state.registry, commander, metrics.counts.incidents)
        timelines = Timelines(state.registry, state.parts, commander)
        app = build_app(
            config,
            credentials,
            bodies,
            admission,
            state.registry,
            relay,
            metrics,
            state.scrape,
            timelines,
            state.storage,
            status,
            state.lives,
        )
        tls = None if credentials.tls is None else credentials.tls.context
        shutdown_s = math.ceil(drain_s + AFTER_DRAIN_S)
        # The status page sends commands with its own origin, which the server need not know by name.
        checks = (COMMANDS_PATH,)
        server = HttpServer(
            app, listener, config.http, tls=tls, shutdown_s=shutdown_s, own_checks=checks, last_request_s=LAST_REQUEST_S
        )
        stopping = asyncio.create_task(stop.wait())
        try:
            ended = await server.start()
            listening()
            await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise PdserveError("the HTTP server ended by itself")
            log.info("pdserve proxy draining for up to %.1f s", drain_s)
            asyncio.get_running_loop().call_later(drain_s, relay.cut_all)
            await server.stop()
        finally:
            stopping.cancel()
            server.cancel()


def store_limits(config: StoreConfig) -> StoreLimits | None:
    """Returns the bounds of the responses that the proxy stores; None if it stores none."""
    if config.store is Switch.OFF:
        return None
    return StoreLimits(config.store_mib * 2**20, config.responses, config.ttl_s)


def _limits(config: AdmissionConfig) -> AdmissionLimits:
    return AdmissionLimits(
        in_flight=config.max_in_flight,
        per_caller=config.max_in_flight_per_key,
        waiting=config.max_queued,
        wait_s=config.queue_timeout_s,
    )


def _body_limits(config: ProxyConfig) -> BodyLimits:
    return BodyLimits(
        uploads=config.admission.max_uploads,
        memory_bytes=config.admission.body_memory_mib * 2**20,
        body_bytes=config.http.max_body_bytes,
    )
