"""Serves clients on one socket, in the proxy's only process or in one of its workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from pdserve.config import AdmissionConfig, ProxyConfig
from pdserve.http.guard import guarded_config
from pdserve.wire.ids import new_id
from pdserve_proxy.app import Scrape, build_app
from pdserve_proxy.credentials import LiveCredentials
from pdserve_proxy.listening import BACKLOG
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.relay import Relay, TicketSigner
from pdserve_proxy.relayed_routes import AsgiApp
from pdserve_proxy.requests.admission_queue import AdmissionController, AdmissionLimits
from pdserve_proxy.requests.held_bodies import BodyLimits, HeldBodies
from pdserve_proxy.routing.attempts import Attempts

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
"""For a client's TLS handshake. The connection counts as one only once it is over."""
AFTER_DRAIN_S = 8.0
"""Seconds after the drain for last error events to leave, before connections are closed on what is left."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What one process of a proxy knows of the cluster and of itself."""

    registry: RegistryView
    attempts: Attempts
    metrics: ProxyMetrics
    scrape: Scrape


async def serve_clients(
    config: ProxyConfig,
    credentials: LiveCredentials,
    state: ProcessState,
    listener: socket.socket,
    stop: asyncio.Event,
    listening: Callable[[], None],
) -> None:
    """Until ``stop`` is set and requests under way are over or cut short. ``listening`` is called once."""
    tickets = TicketSigner(credentials.secrets, new_id())
    metrics = state.metrics
    bodies = HeldBodies(_body_limits(config))
    admission = AdmissionController(_limits(config.admission))
    metrics.queued.set_function(lambda: admission.waiting)
    async with Relay(config, state.registry, state.attempts, tickets, metrics.counts, credentials.trust) as relay:
        app = build_app(config, credentials.keys, bodies, admission, state.registry, relay, metrics, state.scrape)
        tls = None if credentials.tls is None else credentials.tls.context
        settings = _uvicorn_config(config, app, tls)
        server = _HttpServer(settings, stop, listening, relay.cut_all, config.http.drain_s)
        await server.serve(sockets=[listener])


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


class _HttpServer(uvicorn.Server):
    """Uvicorn, told to stop by an event. (Its own signal handling raises the signal again after a clean shutdown.)"""

    def __init__(
        self,
        config: uvicorn.Config,
        stop: asyncio.Event,
        announce: Callable[[], None],
        cut_all: Callable[[], None],
        drain_s: float,
    ) -> None:
        super().__init__(config)
        self._stop = stop
        self._announce = announce
        self._cut_all = cut_all
        self._drain_s = drain_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        config, loop = self.config, asyncio.get_running_loop()
        tls = config.ssl
        # uvicorn has no setting for this timeout, and the loop's own is 60 s.
        timeout_s = None if tls is None else HANDSHAKE_TIMEOUT_S
        for listener in sockets or ():
            self.servers.append(
                await loop.create_server(
                    self._make_protocol,
                    sock=listener,
                    ssl=tls,
                    backlog=config.backlog,
                    ssl_handshake_timeout=timeout_s,
                )
            )

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn calls it
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def main_loop(self) -> None:
        self._announce()
        while not self._stop.is_set():
            await self.on_tick(0)  # renews the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()
        log.info("pdserve proxy draining for up to %.1f s", self._drain_s)
        asyncio.get_running_loop().call_later(self._drain_s, self._cut_all)


def _uvicorn_config(config: ProxyConfig, app: AsgiApp, tls: ssl.SSLContext | None) -> uvicorn.Config:
    shutdown_s = math.ceil(config.http.drain_s + AFTER_DRAIN_S)
    return guarded_config(
        app,
        keep_alive_s=config.http.keep_alive_s,
        shutdown_s=shutdown_s,
        max_connections=config.http.max_client_connections,
        write_timeout_s=config.http.write_timeout_s,
        tls=tls,
        backlog=BACKLOG,
    )
