"""The supervisor's end of the channel to its workers.

It sends the workers the nodes, adds up their metrics, and finds the workers that hang.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from pdserve.errors import ConfigError
from pdserve.liveness import Motion, Silence, motion_of
from pdserve.local_socket import bind
from pdserve.wire.proxy_workers import (
    AbandonResponse,
    AskStatus,
    AskTimeline,
    BeginResponse,
    Collect,
    CollectedParts,
    CollectStatus,
    CollectTimeline,
    Counts,
    Credentials,
    DeleteResponse,
    Family,
    FinishResponse,
    KnownNode,
    Nodes,
    NodesChanged,
    ReadResponse,
    Renewed,
    Scrape,
    Scraped,
    StatusPart,
    StatusReply,
    Suspected,
    TimelineReply,
    ToSupervisor,
    ToWorker,
    WorkerHello,
    WorkerPing,
    WorkerPong,
    WorkerReady,
)
from pdserve.wire.status import RelayStatus
from pdserve.wire.timeline import TimelinePart
from pdserve.wire.version import INSTALLED_VERSION
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.metrics import ProxyMetrics, lasting_families, nodes_of, of_nodes, render_families, sum_families
from pdserve_proxy.records.node_counts import OTHER_NODES
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.registry.snapshot import RegisteredNode
from pdserve_proxy.responses.store import ResponseStore, abandon, answer
from pdserve_proxy.status.report import Reporter, SharedReport, relay_status

log = logging.getLogger(__name__)

SOCKET_NAME = "the workers' socket"
PUBLISH_PAUSE_S = 0.05
"""Seconds between two messages with the nodes: however many heartbeats come, workers get at most 20 a second."""
RETRY_S = 1.0
"""Seconds until a worker that had no room for a message is tried again: all nodes are a long message."""
COLLECT_TIMEOUT_S = 1.0
"""Seconds that a worker has to send its metrics. After that, the last ones that it sent count."""
MAX_QUEUED = 64
PING_S = 1.0
STILL_S = 5.0
"""Seconds without an answer after which a worker counts as hung that does not run either: it is stopped or blocked."""
MAX_UNANSWERED = 30
"""The unanswered pings in a row after which any worker counts as hung. Bursts of thousands of requests take seconds.

The channel counts pings, not seconds, because a supervisor that is late itself, or was stopped, sends none meanwhile.
"""

_decoder: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class WorkerHealth:
    """The health of one start of a worker."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker takes connections."""
    hung: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker's event loop does not turn."""
    process: int = 0
    """The worker's process id, once it has started."""
    answers: int = 0
    """How many messages have come from it."""
    silence: Silence = field(default_factory=lambda: Silence(STILL_S, MAX_UNANSWERED * PING_S))

    def hangs(self) -> bool:
        """Looks whether anything has come since the last ping, and whether the worker's event loop runs."""
        # Where the system does not tell, it counts as running: an event loop may have much to do.
        motion = motion_of(self.process, self.process) or Motion(0.0, wants_core=True)
        return self.silence.look(self.answers, math.inf, motion, PING_S)


@dataclass(slots=True)
class _Collection:
    """One question to all workers, for their metrics, their status or a request."""

    missing: set[bytes]
    """The workers that have not answered yet."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[RelayStatus] = field(default_factory=list)
    """What those that were asked for their status have answered."""
    parts: list[TimelinePart] = field(default_factory=list)
    """What those that were asked for a request have answered."""

    def answered(self, name: bytes) -> None:
        self.missing.discard(name)
        if not self.missing:
            self.done.set()


class WorkerChannel:
    """The owner of the channel: binds it when it is made, and closes it as a context manager."""

    def __init__(
        self, address: str, registry: Registry, metrics: ProxyMetrics, store: ResponseStore | None = None
    ) -> None:
        """``store`` has the responses that are stored. Raises ConfigError if there is no room for the socket."""
        self._store = store
        self._registry = registry
        self._metrics = metrics
        self._touched: dict[bytes, None] = {}
        """The boot ids of the nodes that have come, gone, changed or been heard since the workers were told last."""
        self._changed = asyncio.Event()
        self._behind: dict[bytes, float] = {}
        """The workers that have not had all nodes, or missed changes, with the loop's time from which they get all."""
        self._outdated: set[bytes] = set()
        """The workers that lack the newest credentials: they get them before they hear of nodes again."""
        registry.on_node(self._touch)
        self._reporter = Reporter(registry.heartbeat_s, registry.generated_lately)
        self._report = SharedReport(self._make_report)
        self._unaware: set[bytes] = set()
        """The workers that a message with suspects did not reach: they get all of them with the next nodes."""
        self._suspects = Suspects(0.0)
        """What the workers have found, for those that start later."""
        self._workers: dict[bytes, tuple[Family, ...]] = {}
        """The metrics that each worker sent last, by its name."""
        self._retired: tuple[Family, ...] = ()
        """The sums of the metrics that outlive workers that are gone."""
        self._health: dict[bytes, WorkerHealth] = {}
        self._collections: dict[int, _Collection] = {}
        self._renewed: Renewed | None = None
        self._number = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # so that a message for which there is no room is not lost unseen
        self._socket.set(zmq.SNDHWM, MAX_QUEUED)
        self._socket.set(zmq.RCVHWM, MAX_QUEUED)
        try:
            bind(self._socket, address, SOCKET_NAME)
        except ConfigError:
            self._socket.close()
            self._context.term()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        self._socket.close(linger=0)
        self._context.term()

    def expect(self, name: bytes) -> WorkerHealth:
        """Returns the health of the worker ``name``, which is about to start."""
        return self._health.setdefault(name, WorkerHealth())

    def retire(self, name: bytes) -> None:
        """Forgets the worker ``name``, which is gone, and keeps what it counted."""
        self._health.pop(name, None)
        self._behind.pop(name, None)
        self._unaware.discard(name)
        self._outdated.discard(name)
        if self._store is not None:
            self._store.abandon_all(name)
        named = self._named_nodes()
        ended = lasting_families(self._workers.pop(name, ()))
        self._retired = sum_families([of_nodes(self._retired, named), ended])
        for collection in self._collections.values():
            collection.answered(name)

    def renew(self, credentials: Credentials) -> None:
        """Sends ``credentials`` to all workers, and later to those that are starting now."""
        self._renewed = Renewed(credentials)
        self._outdated.update(self._workers)
        self._changed.set()

    async def run(self) -> None:
        """Serves until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish())
            tasks.create_task(self._receive())
            tasks.create_task(self._ping())

    async def _publish(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._behind else None):
                    await self._changed.wait()
            self._changed.clear()
            await self._tell_workers(asyncio.get_running_loop().time())
            await asyncio.sleep(PUBLISH_PAUSE_S)

    def _touch(self, boot_id: bytes) -> None:
        self._touched[boot_id] = None
        self._changed.set()

    async def _tell_workers(self, now: float) -> None:
        """Tells every worker what is new to it. Each message is encoded once for all who get it."""
        found = self._changes()
        changes = _encoder.encode(found) if found.nodes or found.gone else None
        all_nodes: bytes | None = None
        for name in tuple(self._workers):
            nodes = changes
            if name in self._behind:
                if self._behind[name] > now:
                    continue
                nodes = all_nodes = all_nodes or _encoder.encode(self._nodes())
                del self._behind[name]
            told = await self._tell_credentials(name) and await self._tell_suspects(name)
            if not (told and (nodes is None or await self._send_encoded(name, nodes))):
                self._behind[name] = now + RETRY_S

    async def _tell_credentials(self, name: bytes) -> bool:
        """Returns whether the worker has the newest credentials, or was sent them."""
        if name not in self._outdated or self._renewed is None:
            return True
        self._outdated.discard(name)
        sent = await self._send(name, self._renewed)
        if not sent:
            self._outdated.add(name)
        return sent

    async def _tell_suspects(self, name: bytes) -> bool:
        """Returns whether the worker knows all suspects, or was sent them."""
        if name not in self._unaware:
            return True
        self._unaware.discard(name)
        sent = await self._send(name, Suspected(self._suspects.refused()))
        if not sent:
            self._unaware.add(name)
        return sent

    async def _receive(self) -> None:
        while True:
            name, data = await self._socket.recv_multipart()
            health = self._health.get(name)
            if health is None:
                continue  # the worker is gone
            health.answers += 1
            match _decoder.decode(data):
                case WorkerHello(version=version):
                    if version != INSTALLED_VERSION:
                        log.error(
                            "worker %s runs pdserve %s, its supervisor %s: pdserve was replaced under a running proxy; "
                            "restart the proxy",
                            name.decode(),
                            version,
                            INSTALLED_VERSION,
                        )
                    self._workers[name] = ()
                    self._outdated.add(name)
                    self._behind[name] = 0.0
                    self._changed.set()
                    self._unaware.add(name)
                case WorkerReady():
                    health.ready.set()
                case WorkerPong():
                    pass
                case Counts(number=number, families=families):
                    self._workers[name] = families
                    if (collection := self._collections.get(number)) is not None:
                        collection.answered(name)
                case StatusPart(number=number, status=status):
                    if (collection := self._collections.get(number)) is not None and name in collection.missing:
                        collection.statuses.append(status)
                        collection.answered(name)
                case Suspected(requests=requests) as suspected:
                    self._suspects.take(requests)
                    for other in self._workers.keys() - {name}:
                        if not await self._send(other, suspected):
                            self._unaware.add(other)
                            self._behind.setdefault(other, 0.0)
                            self._changed.set()
                case AskStatus(number=number):
                    self._begin(self._tell_status(name, number))
                case CollectedParts(number=number, parts=parts):
                    if (collection := self._collections.get(number)) is not None and name in collection.missing:
                        collection.parts += parts
                        collection.answered(name)
                case AskTimeline(number=number, request_id=request_id):
                    self._begin(self._tell_timeline(name, number, request_id))
                case Scrape(number=number):
                    self._begin(self._scrape(name, number))
                case BeginResponse() | FinishResponse() | ReadResponse() | DeleteResponse() as question:
                    if self._store is not None:
                        await self._send(name, answer(self._store, name, question))
                case AbandonResponse() as gone:
                    if self._store is not None:
                        abandon(self._store, name, gone)

    def _begin(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            for name, health in tuple(self._health.items()):
                if not health.ready.is_set():
                    continue
                if health.hangs():
                    health.hung.set()
                    continue
                await self._send(name, WorkerPing())

    async def _tell_status(self, asker: bytes, number: int) -> None:
        await self._send(asker, StatusReply(number, await self._report()))

    async def _make_report(self) -> bytes:
        statuses = (await self._collect(CollectStatus)).statuses
        own = relay_status(self._metrics.counts)
        report = self._reporter.report(self._registry.snapshot(), [own, *statuses], workers=len(statuses))
        return msgspec.json.encode(report)

    async def _tell_timeline(self, asker: bytes, number: int, request_id: str) -> None:
        parts = (await self._collect(partial(CollectTimeline, request_id=request_id))).parts
        await self._send(asker, TimelineReply(number, tuple(parts)))

    async def _scrape(self, asker: bytes, number: int) -> None:
        await self._collect(Collect)
        own = self._metrics.export_families(self._registry.snapshot())
        retired = of_nodes(self._retired, self._named_nodes())
        text = await render_families(sum_families([own, retired, *self._workers.values()]))
        await self._send(asker, Scraped(number, text))

    async def _collect(self, question: Callable[[int], ToWorker]) -> _Collection:
        """Asks every worker for its part, and returns when all have answered or their time is over."""
        self._number += 1
        number = self._number
        collection = self._collections[number] = _Collection(set(self._workers))
        try:
            for name in tuple(self._workers):
                await self._send(name, question(number))
            async with asyncio.timeout(COLLECT_TIMEOUT_S):
                await collection.done.wait()
        except TimeoutError:
            log.warning("%d workers did not send their part of what all know", len(collection.missing))
        finally:
            del self._collections[number]
        return collection

    def _named_nodes(self) -> frozenset[str]:
        """Returns the labels of the nodes that are registered, and those that workers have not forgotten."""
        registered = {node.info.name for node in self._registry.snapshot().nodes}
        return frozenset(registered).union([OTHER_NODES], *map(nodes_of, self._workers.values()))

    def _nodes(self) -> Nodes:
        entries = [self._entry(node) for node in self._registry.snapshot().nodes]
        return Nodes(tuple(entries), tuple(self._registry.prefilled), self._registry.lost)

    def _changes(self) -> NodesChanged:
        """Returns what has changed since the last call. It looks at the nodes that were heard, and not at all."""
        touched, self._touched = self._touched, {}
        found = {boot_id: self._registry.known(boot_id) for boot_id in touched}
        gone = tuple([boot_id for boot_id, node in found.items() if node is None])
        return NodesChanged(
            tuple([self._entry(node) for node in found.values() if node is not None]),
            tuple(self._registry.prefilled),
            tuple([boot_id for boot_id in gone if self._registry.is_lost(boot_id)]),
            gone,
        )

    def _entry(self, node: RegisteredNode) -> KnownNode:
        draining = node.info.boot_id in self._registry.draining
        return KnownNode(node.info, node.load, node.seen_s, draining, node.proxies, node.met)

    async def _send(self, name: bytes, message: ToWorker) -> bool:
        """Returns whether there was room for the message."""
        return await self._send_encoded(name, _encoder.encode(message))

    async def _send_encoded(self, name: bytes, data: bytes) -> bool:
        try:
            await self._socket.send_multipart([name, data], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            log.debug("a message to worker %s was not sent: %s", name.decode(), exc)
            return False
        return True
