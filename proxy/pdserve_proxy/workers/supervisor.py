"""Runs several worker processes behind one port, with one registry: nodes register once, and every worker knows them.

A worker that dies loses only its own streams, so the supervisor replaces it; connections that wait in its socket wait
for the next worker. The supervisor kills a worker that hangs. A worker that does not come up, or dies again and again,
ends the whole proxy: a service manager sees that, while half a proxy would fail half of its clients.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TypeAlias

from pdserve.config import ProxyConfig, RoleChoice
from pdserve.control.frame import Secrets
from pdserve.errors import PdserveError
from pdserve.http.server import bind_shared, url_of
from pdserve.http.tls import Trust
from pdserve.local_socket import folder_of
from pdserve.process import ChildProcess
from pdserve.wire.ids import new_id
from pdserve.wire.proxy_workers import Credentials
from pdserve_proxy.metrics import ProxyMetrics
from pdserve_proxy.registry.discovery_server import DiscoveryServer
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.responses.store import ResponseStore
from pdserve_proxy.roles import RoleController
from pdserve_proxy.serving import Addresses, store_limits
from pdserve_proxy.workers.worker import WORKER_COMMAND, WorkerLaunch
from pdserve_proxy.workers.worker_channel import SOCKET_NAME, WorkerChannel

log = logging.getLogger(__name__)

RenewCredentials: TypeAlias = Callable[[Credentials], None]

START_TIMEOUT_S = 30.0
STOP_MARGIN_S = 12.0
"""Seconds that a worker has after the drain, for last error events and for its own end."""
MAX_DEATHS = 5
DEATHS_WINDOW_S = 60.0


class WorkerDied(PdserveError):
    """A worker did not come up, or died too often."""


async def supervise(
    config: ProxyConfig,
    credentials: Credentials,
    stop: asyncio.Event,
    listening: Callable[[Addresses], None],
    command: Sequence[str] = WORKER_COMMAND,
    on_renewal: Callable[[RenewCredentials], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> None:
    """Runs workers until ``stop`` is set and all have drained. Calls ``listening`` once, when all take connections.

    ``on_renewal`` gets the function that passes new credentials to all workers, and is entered as long as they run.

    Raises ConfigError if an address cannot be bound or there is no room for a socket, WorkerDied if a worker cannot be
    started or kept alive.
    """
    metrics = ProxyMetrics("supervisor", config.request.timeout_s)
    secrets, trust = Secrets(credentials.secret), Trust(credentials.authorities)
    with ExitStack() as owned:
        folder = owned.enter_context(folder_of(SOCKET_NAME, prefix="pdserve-proxy-"))
        address = f"ipc://{folder}/workers"
        boot_id = new_id()
        registry = Registry(config.registry.heartbeat_ms / 1000, config.registry.missed_heartbeats, own_id=boot_id)
        limits = store_limits(config.store)
        store = None if limits is None else ResponseStore(limits)
        if store is not None:
            metrics.watch_store(store)
        channel = owned.enter_context(WorkerChannel(address, registry, metrics, store))
        listeners = bind_shared(config.http, config.workers.count)
        for listener in listeners:
            owned.enter_context(listener)
        discovery = owned.enter_context(
            DiscoveryServer.bind(
                config.registry,
                registry,
                secrets,
                boot_id,
                metrics.count_dropped_frame,
                metrics.counts.incidents,
                metrics.clocks,
            )
        )
        share = worker_share(config)
        workers = [
            _WorkerProcess(
                f"{number}",
                listener,
                lambda name, listener: WorkerLaunch(share, credentials, name, address, listener.fileno()),
                channel,
                command,
                config.http.drain_s + STOP_MARGIN_S,
            )
            for number, listener in enumerate(listeners)
        ]

        def renew(new: Credentials) -> None:
            nonlocal credentials
            credentials = new
            secrets.renew(new.secret)
            trust.renew(new.authorities)
            channel.renew(new)

        died: BaseExceptionGroup[WorkerDied] | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                owned.enter_context(on_renewal(renew))
                background = [tasks.create_task(channel.run()), tasks.create_task(discovery.run())]
                if config.roles.roles is RoleChoice.AUTO:
                    controller = RoleController(config.roles, config.targets, registry, secrets, trust, metrics)
                    background.append(tasks.create_task(controller.run()))
                running = [tasks.create_task(worker.run(stop)) for worker in workers]
                for worker in workers:
                    await worker.up.wait()
                listening(Addresses(url_of(listeners[0], tls=bool(config.tls.cert)), discovery.endpoint))
                await stop.wait()
                for listener in listeners:
                    listener.close()  # so that a worker that closes its own takes no more connections
                await asyncio.wait(running)
                for task in background:
                    task.cancel()
        except* WorkerDied as group:
            died = group
        # Not in the block above: some versions of Python 3.11 wrap what is raised there.
        if died is not None:
            raise WorkerDied(str(died.exceptions[0])) from died


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
        relay=dataclasses.replace(config.relay, max_resumes=part(config.relay.max_resumes)),
    )


class _WorkerProcess:
    """One worker, which is started again whenever it dies, until it is told to stop."""

    def __init__(
        self,
        number: str,
        listener: socket.socket,
        launch: Callable[[bytes, socket.socket], WorkerLaunch],
        channel: WorkerChannel,
        command: Sequence[str],
        stop_timeout_s: float,
    ) -> None:
        self._number = number
        self._listener = listener
        self._launch = launch
        self._channel = channel
        self._command = command
        self._stop_timeout_s = stop_timeout_s
        self._starts = 0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self.up = asyncio.Event()
        """Set when the first start of the worker takes connections."""

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._starts += 1
            await self._one_life(f"{self._number}.{self._starts}".encode(), stop)

    async def _one_life(self, name: bytes, stop: asyncio.Event) -> None:
        health = self._channel.expect(name)
        process = self._start(name)
        health.process = process.pid
        try:
            ended = asyncio.create_task(process.wait())
            await _first(ended, health.ready, stop, timeout_s=START_TIMEOUT_S)
            if not health.ready.is_set() and not stop.is_set():
                raise WorkerDied(f"{process.name} did not come up")
            self.up.set()
            await _first(ended, health.hung, stop)
            if health.hung.is_set() and not ended.done():
                log.error("%s hangs: it is killed", process.name)
                process.kill()
                await ended
            if not stop.is_set():
                self._died(process)
        finally:
            process.terminate()  # upon which it drains
            if not await process.end(self._stop_timeout_s):
                log.warning("%s did not end in time", process.name)
            self._channel.retire(name)

    def _start(self, name: bytes) -> ChildProcess:
        """Raises WorkerDied."""
        worker = f"worker {self._number} of the proxy"
        try:
            return ChildProcess(
                worker,
                self._command,
                launch=self._launch(name, self._listener),
                pass_fds=(self._listener.fileno(),),
                # A session of its own: Ctrl-C in a terminal reaches the supervisor alone.
                own_session=True,
            )
        except OSError as exc:
            raise WorkerDied(f"{worker} cannot be started: {exc}") from exc

    def _died(self, process: ChildProcess) -> None:
        now = asyncio.get_running_loop().time()
        self._deaths.append(now)
        how = process.describe_end()
        if len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_WINDOW_S:
            raise WorkerDied(f"{how}, the {MAX_DEATHS}th time in a minute")
        log.error("%s; another one is started", how)


async def _first(ended: asyncio.Task[int], *events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Returns when the process has ended, one of ``events`` is set, or the time is over."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([ended, *waits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
