"""Runs the proxy: ``serve`` for the command line, ``run`` inside an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import uvloop

from pdserve.config import ProxyConfig, RoleChoice
from pdserve.control.frame import Secrets
from pdserve.errors import ConfigError, PdserveError
from pdserve.http.server import bind, url_of
from pdserve.process import allow_open_files, collect_rarely, set_up_logging
from pdserve.settings import is_loopback
from pdserve.signals import Reread, on_hangup, stop_signals
from pdserve.tracing.tracing import Tracing
from pdserve.wire.ids import new_id
from pdserve.wire.timeline import TimelinePart
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.credentials import LiveCredentials, read_credentials
from pdserve_proxy.metrics import ProxyMetrics, render_families
from pdserve_proxy.registry.discovery_server import DiscoveryServer
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.responses.store import OwnStorage, ResponseStore
from pdserve_proxy.roles import RoleController
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.serving import Addresses, ProcessState, serve_clients, store_limits
from pdserve_proxy.status.report import Reporter, relay_status
from pdserve_proxy.workers.supervisor import RenewCredentials, supervise

log = logging.getLogger(__name__)


def serve(config: ProxyConfig, secret: bytes, read_secret: Callable[[], bytes] | None = None) -> int:
    """Runs a proxy until SIGTERM or SIGINT. Requests under way then have ``http.drain_s`` left. Returns the exit code.

    On SIGHUP the proxy calls ``read_secret`` for the secret from then on, and reads its keys and certificates again.

    Raises ConfigError if it cannot start as configured.
    """
    set_up_logging(config.log, "proxy")
    allow_open_files()
    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, secret, read_secret))


async def _serve(config: ProxyConfig, secret: bytes, read_secret: Callable[[], bytes] | None) -> int:
    try:
        with stop_signals() as signals:
            await run(config, secret, signals.drain, read_secret=read_secret)
    except ConfigError:
        raise
    except PdserveError as exc:
        log.error("the proxy ends: %s", exc)
        return 1
    except Exception:
        log.exception("the proxy failed")
        return 1
    return 0


async def run(
    config: ProxyConfig,
    secret: bytes,
    stop: asyncio.Event,
    listening: Callable[[Addresses], None] = lambda _: None,
    read_secret: Callable[[], bytes] | None = None,
) -> None:
    """Runs a proxy until ``stop`` is set and requests under way are over or cut short.

    It calls ``listening`` once, when both addresses take connections, and ``read_secret`` on SIGHUP; without
    ``read_secret`` it installs no signal handler.

    Raises ConfigError if the addresses cannot be bound or files cannot be used, and WorkerDied if its workers do not
    stay alive.
    """
    if not secret:
        raise ConfigError("the proxy needs a cluster secret: without one, any process could register a node")
    credentials = read_credentials(config, lambda: secret)

    if not credentials.keys and not is_loopback(config.http.host):
        log.warning(
            "whoever reaches this proxy may use it, because --host is %s and there are no API keys: --api-key-file "
            "names a file of keys",
            config.http.host,
        )

    def on_renewal(renew: RenewCredentials) -> AbstractContextManager[None]:
        if read_secret is None:
            return nullcontext()

        held = credentials

        def reread() -> Reread:
            nonlocal held
            before, new = held, read_credentials(config, read_secret)
            renew(new)
            held = new
            what = f"{len(Secrets(new.secret).lines)} cluster secret(s), {len(new.keys)} API key(s), certificates"
            return Reread(what, new != before)

        return on_hangup(reread)

    def announce(addresses: Addresses) -> None:
        log.info("pdserve proxy listening url=%s control=%s", addresses.url, addresses.control)
        listening(addresses)

    if config.workers.count > 1:
        await supervise(config, credentials, stop, announce, on_renewal=on_renewal)
        return
    live = LiveCredentials(credentials)
    metrics, attempts = ProxyMetrics(timeout_s=config.request.timeout_s), Attempts()
    boot_id = new_id()
    registry = Registry(
        config.registry.heartbeat_ms / 1000, config.registry.missed_heartbeats, watcher=attempts, own_id=boot_id
    )

    async def scrape() -> bytes:
        return await render_families(metrics.export_families(registry.snapshot()))

    reporter = Reporter(registry.heartbeat_s, registry.generated_lately)

    async def report() -> bytes:
        return msgspec.json.encode(reporter.report(registry.snapshot(), [relay_status(metrics.counts)]))

    with (
        bind(config.http) as listener,
        DiscoveryServer.bind(
            config.registry,
            registry,
            live.secrets,
            boot_id,
            metrics.count_dropped_frame,
            metrics.counts.incidents,
            metrics.clocks,
        ) as discovery,
        on_renewal(live.renew),
    ):
        addresses = Addresses(url_of(listener, tls=bool(config.tls.cert)), discovery.endpoint)
        limits = store_limits(config.store)
        store = None if limits is None else ResponseStore(limits)
        if store is not None:
            metrics.watch_store(store)
        tracing = Tracing(config.trace)

        async def parts(request_id: str) -> Sequence[TimelinePart]:
            return tracing.parts.recall(request_id)

        storage = None if store is None else OwnStorage(store)
        suspects = Suspects(config.relay.suspect_s)
        state = ProcessState(registry, attempts, metrics, scrape, report, tracing, parts, suspects, storage)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(discovery.run())]
            if config.roles.roles is RoleChoice.AUTO:
                controller = RoleController(config.roles, config.targets, registry, live.secrets, live.trust, metrics)
                background.append(tasks.create_task(controller.run()))
            await serve_clients(config, live, state, listener, stop, lambda: announce(addresses))
            for task in background:
                task.cancel()
