"""Puts the proxy together and runs it: ``serve`` for the command line, ``run`` inside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import ssl
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from quart import Quart

from pdserve.config import AdmissionConfig, ProxyConfig
from pdserve.errors import ConfigError
from pdserve.http_guard import guarded_config, server_tls
from pdserve.wire.ids import new_id
from pdserve_proxy.admission import Limits
from pdserve_proxy.api_keys import read_api_keys
from pdserve_proxy.app import build_app
from pdserve_proxy.discovery import Discovery
from pdserve_proxy.flights import Flights
from pdserve_proxy.journal import ExchangeLog
from pdserve_proxy.listening import BACKLOG, Addresses, allow_open_files, bind_http, http_url
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry import Registry
from pdserve_proxy.relay import Relay
from pdserve_proxy.ticketing import TicketOffice
from pdserve_proxy.turnstile import Turnstile

log = logging.getLogger(__name__)

AFTER_DRAIN_S = 8.0
"""Seconds after the drain for last error events to leave, before connections are closed on what is left."""


def serve(config: ProxyConfig, secret: bytes) -> int:
    """Run a proxy until SIGTERM or SIGINT; requests under way get ``http.drain_s``. Returns the exit code.

    Raises ConfigError if it cannot start as configured.
    """
    _configure_logging(config)
    allow_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, secret))


async def _serve(config: ProxyConfig, secret: bytes) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await run(config, secret, stop)
    except ConfigError:
        raise
    except Exception:
        log.exception("the proxy failed")
        return 1
    return 0


async def run(
    config: ProxyConfig, secret: bytes, stop: asyncio.Event, listening: Callable[[Addresses], None] = lambda _: None
) -> None:
    """Run a proxy until ``stop`` is set and requests under way are over or cut short. Installs no signal handlers.

    ``listening`` is called once, when both addresses take connections. Raises ConfigError if they cannot be bound.
    """
    if not secret:
        raise ConfigError("the proxy needs a cluster secret: without one anybody could register a node")
    keys = read_api_keys(config.admission)
    tls = server_tls(config.tls.cert, config.tls.key) if config.tls.cert else None
    boot_id = new_id()
    metrics = ProxyMetrics()
    flights = Flights()
    registry = Registry(config.registry.heartbeat_ms / 1000, config.registry.missed_heartbeats, watcher=flights)
    tickets = TicketOffice(secret, boot_id)
    with (
        bind_http(config.http) as listener,
        Discovery(
            registry, metrics, secret, boot_id, host=config.registry.control_host, port=config.registry.control_port
        ) as discovery,
    ):
        addresses = Addresses(http_url(listener, tls is not None), discovery.endpoint)

        def announce() -> None:
            log.info("pdserve proxy listening url=%s control=%s", addresses.url, addresses.control)
            listening(addresses)

        async with Relay(config, registry, flights, tickets, ExchangeLog(metrics)) as relay:
            app = build_app(config, keys, Turnstile(_limits(config.admission), metrics), registry, relay, metrics)
            server = _HttpServer(_uvicorn_config(config, app, tls), stop, announce, relay.cut_all, config.http.drain_s)
            async with asyncio.TaskGroup() as tasks:
                ear = tasks.create_task(discovery.run())
                await server.serve(sockets=[listener])
                ear.cancel()


def _limits(config: AdmissionConfig) -> Limits:
    return Limits(
        in_flight=config.max_in_flight,
        per_caller=config.max_in_flight_per_key,
        waiting=config.max_queued,
        wait_s=config.queue_timeout_s,
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

    async def main_loop(self) -> None:
        self._announce()
        while not self._stop.is_set():
            await self.on_tick(0)  # renews the Date header
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()
        log.info("pdserve proxy draining for up to %.1f s", self._drain_s)
        asyncio.get_running_loop().call_later(self._drain_s, self._cut_all)


def _uvicorn_config(config: ProxyConfig, app: Quart, tls: ssl.SSLContext | None) -> uvicorn.Config:
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


def _configure_logging(config: ProxyConfig) -> None:
    """On stderr, unless the caller has set logging up already."""
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log.level.name,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
