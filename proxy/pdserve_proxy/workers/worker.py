"""``python -m pdserve_proxy.workers.worker``: one of several processes that serve clients on one port.

The worker reads its ``WorkerLaunch`` as MessagePack from standard input, and ends with its supervisor, however that
ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import msgspec
import uvloop
import zmq
import zmq.asyncio

from pdserve.config import ProxyConfig
from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.process import allow_open_files, collect_rarely, python_program, read_launch, set_up_logging
from pdserve.signals import ignore_hangup, stop_signals
from pdserve.tracing.tracing import RecentParts, Tracing
from pdserve.wire.proxy_workers import (
    NO_QUESTION,
    AbandonResponse,
    AskStatus,
    AskTimeline,
    Collect,
    CollectedParts,
    CollectStatus,
    CollectTimeline,
    Counts,
    Credentials,
    Nodes,
    NodesChanged,
    Renewed,
    Scrape,
    Scraped,
    StatusPart,
    StatusReply,
    StoreQuestion,
    StoreReply,
    Suspected,
    TimelineReply,
    ToSupervisor,
    ToWorker,
    WorkerHello,
    WorkerPing,
    WorkerPong,
    WorkerReady,
)
from pdserve.wire.timeline import TimelinePart
from pdserve.wire.version import INSTALLED_VERSION
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.credentials import LiveCredentials
from pdserve_proxy.metrics import ProxyMetrics, export_families
from pdserve_proxy.registry.registry import RegistryMirror
from pdserve_proxy.responses.store import SupervisorStorage
from pdserve_proxy.routing.attempts import Attempts
from pdserve_proxy.serving import ProcessState, serve_clients, store_limits
from pdserve_proxy.status.report import relay_status

log = logging.getLogger(__name__)

WORKER_COMMAND = python_program("pdserve_proxy.workers.worker")
SUPERVISOR_TIMEOUT_S = 5.0
SUPERVISOR_SILENCE_S = 10.0
"""A supervisor that has not pinged for so long hangs: without it, no worker hears of nodes that come and go."""

Question: TypeAlias = Scrape | AskStatus | AskTimeline | StoreQuestion
Reply: TypeAlias = Scraped | StatusReply | TimelineReply | StoreReply
R = TypeVar("R", Scraped, StatusReply, TimelineReply, StoreReply)


class SupervisorSilent(PdserveError):
    """A worker's supervisor has not told it the nodes."""


_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """The settings of one start of a worker."""

    config: ProxyConfig
    """The configuration, in which the limits are this worker's share."""
    credentials: Credentials
    name: bytes
    """The name of this start of this worker on the supervisor's channel."""
    address: str
    """The ``ipc://`` address of that channel."""
    listener: int
    """The inherited file descriptor of the worker's listening socket."""


class SupervisorChannel:
    """A worker's end of the channel to its supervisor."""

    def __init__(
        self,
        address: str,
        name: bytes,
        mirror: RegistryMirror,
        metrics: ProxyMetrics,
        credentials: LiveCredentials,
        recent: RecentParts,
        suspects: Suspects,
    ) -> None:
        self._recent = recent
        self._suspects = suspects
        suspects.share = lambda found: self.post(Suspected((found,)))
        self._mirror = mirror
        self._credentials = credentials
        self._metrics = metrics
        self._told = 0
        """The number of ended requests when the metrics were sent last."""
        self._numbers = itertools.count(1)
        self._asked: dict[tuple[type[Reply], int], asyncio.Future[Reply]] = {}
        """The replies that are awaited, by their kind and the number of the question."""
        self._posts: set[asyncio.Task[None]] = set()
        self._heard_s = time.monotonic()
        self.has_nodes = asyncio.Event()
        """Set when the first message with the nodes has come."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, name)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for post in self._posts:
            post.cancel()
        self._socket.close(linger=0)
        self._context.term()

    async def run(self) -> None:
        """Serves until it is cancelled."""
        await self.send(WorkerHello(INSTALLED_VERSION))
        while True:
            frame = await self._socket.recv()
            self._heard_s = time.monotonic()
            match _decoder.decode(frame):
                case Nodes() as nodes:
                    self._mirror.take(nodes)
                    self.has_nodes.set()
                case NodesChanged() as changes:
                    self._mirror.take_changes(changes)
                case WorkerPing():
                    await self.send(self._news())
                case Renewed(credentials=credentials):
                    self._renew(credentials)
                case Collect(number=number):
                    await self.send(Counts(number, export_families(self._metrics.registry)))
                case CollectStatus(number=number):
                    await self.send(StatusPart(number, relay_status(self._metrics.counts)))
                case CollectTimeline(number=number, request_id=request_id):
                    await self.send(CollectedParts(number, self._recent.recall(request_id)))
                case Suspected(requests=requests):
                    self._suspects.take(requests)
                case Scraped() | StatusReply() | TimelineReply() | StoreReply() as reply:
                    asked = self._asked.get((type(reply), reply.number))
                    if asked is not None and not asked.done():
                        asked.set_result(reply)

    def supervised(self) -> bool:
        """Whether the supervisor lives, as its pings show."""
        return time.monotonic() - self._heard_s < SUPERVISOR_SILENCE_S

    def _news(self) -> WorkerPong | Counts:
        """Returns the metrics if requests have ended since they were sent last: they are lost if this worker dies."""
        ended = self._metrics.counts.ended_requests
        if ended == self._told:
            return WorkerPong()
        self._told = ended
        return Counts(NO_QUESTION, export_families(self._metrics.registry))

    def _renew(self, credentials: Credentials) -> None:
        try:
            self._credentials.renew(credentials)
        except ConfigError as exc:  # although its supervisor could use them
            log.error("a worker of the proxy keeps its old credentials: %s", exc)

    async def send(self, message: ToSupervisor) -> None:
        await self._socket.send(_encoder.encode(message))

    def post(self, message: AbandonResponse | Suspected) -> None:
        """Sends a message soon, from where nothing can wait."""
        task = asyncio.create_task(self.send(message))
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def ask(self, question: StoreQuestion) -> StoreReply:
        """Returns what the supervisor's store answers. Raises Unavailable if it does not."""
        return await self._reply(question, StoreReply, "the proxy's store of responses")

    async def scrape(self) -> bytes:
        """Returns the metrics of all the proxy's processes. Raises Unavailable if the supervisor does not answer."""
        return (await self._reply(Scrape(next(self._numbers)), Scraped)).text

    async def report(self) -> bytes:
        """Returns the report on all the proxy's processes. Raises Unavailable if the supervisor does not answer."""
        return (await self._reply(AskStatus(next(self._numbers)), StatusReply)).report

    async def parts(self, request_id: str) -> tuple[TimelinePart, ...]:
        """Returns what all workers remember of the requests with this id.

        Raises Unavailable if the supervisor does not answer.
        """
        return (await self._reply(AskTimeline(next(self._numbers), request_id), TimelineReply)).parts

    async def _reply(self, question: Question, kind: type[R], who: str = "the proxy's supervisor") -> R:
        awaited: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        key = kind, question.number
        self._asked[key] = awaited
        try:
            async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
                await self.send(question)
                reply = await awaited
        except TimeoutError as exc:
            raise Unavailable(f"{who} does not answer", retry_after_s=1) from exc
        finally:
            del self._asked[key]
        assert isinstance(reply, kind)
        return reply


async def work(launch: WorkerLaunch, stop: asyncio.Event) -> None:
    """Serves clients until ``stop`` is set and their requests are over or cut short. Raises SupervisorSilent."""
    number, _, _ = launch.name.decode().partition(".")
    metrics, attempts = ProxyMetrics(f"worker-{number}", launch.config.request.timeout_s), Attempts()
    mirror, credentials = RegistryMirror(attempts), LiveCredentials(launch.credentials)
    tracing, suspects = Tracing(launch.config.trace), Suspects(launch.config.relay.suspect_s)
    with (
        socket.socket(fileno=launch.listener) as listener,
        SupervisorChannel(
            launch.address, launch.name, mirror, metrics, credentials, tracing.parts, suspects
        ) as channel,
    ):
        async with asyncio.TaskGroup() as tasks:
            serving_channel = tasks.create_task(channel.run())
            limits = store_limits(launch.config.store)
            storage = None if limits is None else SupervisorStorage(limits, channel.ask, channel.post)
            state = ProcessState(
                mirror,
                attempts,
                metrics,
                channel.scrape,
                channel.report,
                tracing,
                channel.parts,
                suspects,
                storage,
                channel.supervised,
            )
            announcing: list[asyncio.Task[None]] = []

            def listening() -> None:
                announcing.append(tasks.create_task(channel.send(WorkerReady())))

            knows_nodes = await _is_set(channel.has_nodes, SUPERVISOR_TIMEOUT_S)
            if knows_nodes:
                await serve_clients(launch.config, credentials, state, listener, stop, listening)
            serving_channel.cancel()
    if not knows_nodes:
        raise SupervisorSilent(
            f"its supervisor has not told it the nodes within {SUPERVISOR_TIMEOUT_S:.0f} s: it hangs or is stopped"
        )


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    """Waits for the event, and returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
    return event.is_set()


async def _main(launch: WorkerLaunch) -> None:
    with stop_signals() as signals:
        await work(launch, signals.drain)


def main() -> int:
    ignore_hangup()
    launch = read_launch(WorkerLaunch)
    set_up_logging(launch.config.log, "worker")
    allow_open_files()
    collect_rarely()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(launch))
    except PdserveError as exc:
        log.error("a worker of the proxy ends: %s", exc)
        return 1
    except Exception:
        log.exception("a worker of the proxy failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
