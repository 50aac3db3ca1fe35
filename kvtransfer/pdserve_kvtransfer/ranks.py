"""A link to another engine, in one direction, over the TP ranks of this node.

Each rank has a port, which has a ``RankLink`` of its own. Rank 0's transfer thread drives its own port directly, and
those of the other ranks over ``RankChannels``. A ``NodeLink`` is all of them together.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec
import zmq

from pdserve.errors import PeerLost, RankLost, TransferError
from pdserve.wire.discovery import TransportKind
from pdserve.wire.rank import (
    CloseLink,
    Direction,
    LeaveRank,
    LinkBroken,
    LinkClosed,
    LinkCommand,
    LinkInUse,
    LinkOpened,
    OpenLink,
    RankCommand,
    RankReport,
)
from pdserve_kvtransfer.region import KvRegion, Memory
from pdserve_kvtransfer.transport import Link, Transport

log = logging.getLogger(__name__)

_RANK_CHECK_POLL_S = 0.1
_POLLS_A_TURN = 32
"""The most polls of one link in a turn, because other links and the control channel wait meanwhile."""
_TURN_S = 1e-3
"""Beside a decode step, which waits too, a link is not polled again after so long. One poll copies a few MiB."""


class Port(Protocol):
    """One rank's end of a link: a ``FetchPort`` or a ``PushPort``."""

    @property
    def reports(self) -> list[RankReport]:
        """The reports for rank 0. The port's driver removes them."""

    def handle(self, command: LinkCommand) -> None: ...

    def turn(self) -> bool: ...

    def moving(self) -> bool: ...

    def arm(self) -> bool: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


MakePort: TypeAlias = Callable[[int, int, int, Sequence[int], KvRegion, Transport], Port]
"""Makes a port of ``(link, rank, ranks, heads of each group, region, transport)``. It raises TransferError."""


class RankLink:
    """The link of one port, with the port's reports. It is open from the start, breaks at most once, and is closed at
    the end.
    """

    def __init__(self, number: int, transport: Transport, memory: Memory) -> None:
        """Raises TransferError if the transport cannot open a link."""
        self.number = number
        self.reports: list[RankReport] = []
        self.transport_link: Link = transport.open_link(memory)
        self.broken = False
        self._step = transport.step
        self._in_use = False
        self.reports.append(LinkOpened(number, self.transport_link.address))

    def turn(self, poll: Callable[[], bool]) -> bool:
        """Calls ``poll`` until it finds no news or has been called often enough. Returns whether there was news.

        The link is broken if ``poll`` raises anything or the transport says so.
        """
        return not self.broken and self.attempt(lambda: self._polled(poll))

    def _polled(self, poll: Callable[[], bool]) -> bool:
        news, ends = False, time.monotonic() + _TURN_S if self._step.decodes else math.inf
        for _ in range(_POLLS_A_TURN):
            if not poll():
                break
            news = True
            if time.monotonic() >= ends:
                break
        if self.transport_link.broken():
            raise PeerLost("the connection that carries KV blocks broke")
        return news

    def moved(self) -> None:
        """Notes that pieces have moved. The first time, it reports by which transport."""
        if not self._in_use:
            self._in_use = True
            path = self.transport_link.path()
            self.reports.append(LinkInUse(self.number, path.kind, path.lanes, path.no_rdma))

    def attempt(self, action: Callable[[], bool | None]) -> bool:
        """Does ``action``, which concerns this link alone: if it raises, this link is broken, and no other.

        Returns what ``action`` returns, and False if it raised. An error that is no TransferError is a defect, and is
        logged with its traceback.
        """
        try:
            return bool(action())
        except TransferError as exc:
            self.mark_broken(str(exc))
        except Exception as exc:
            log.exception("link %d failed", self.number)
            self.mark_broken(f"{type(exc).__name__}: {exc}")
        return False

    def mark_broken(self, reason: str) -> None:
        """Reports that the link moves nothing any more. It is still to be closed."""
        self.broken = True
        self.reports.append(LinkBroken(self.number, reason))

    def arm(self) -> bool:
        return self.broken or self.attempt(self.transport_link.arm)

    def close(self) -> None:
        """Closes the link, which touches no memory from then on. Idempotent."""
        self.broken = True
        self.transport_link.close()


class Reported(msgspec.Struct, frozen=True, gc=False):
    """A report and the rank that sent it."""

    rank: int
    report: RankReport


class RankChannels:
    """Rank 0's sockets to the other ranks, which bind them: ``addresses[i]`` is rank ``i + 1``'s."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], addresses: tuple[str, ...]) -> None:
        self.sockets: list[zmq.Socket[bytes]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RankReport] = msgspec.msgpack.Decoder(RankReport)
        self._queues: dict[int, deque[Reported]] = {}
        self._numbers = itertools.count(1)
        for address in addresses:
            socket = context.socket(zmq.PAIR)
            socket.linger = 0
            self.sockets.append(socket)
            socket.connect(address)

    @property
    def ranks(self) -> int:
        return len(self.sockets) + 1

    def check_ranks(self, within_s: float) -> None:
        """Has every other rank open and close a link, to see that it can. Raises TransferError if one cannot."""
        number = self.open(Direction.FETCH)
        deadline = time.monotonic() + within_s
        opened: set[int] = set()
        while len(opened) < len(self.sockets):
            self.receive()
            while (reported := self.take(number)) is not None:
                if not isinstance(reported.report, LinkOpened):
                    raise TransferError(f"TP rank {reported.rank} cannot open a link: {reported.report}")
                opened.add(reported.rank)
            if time.monotonic() > deadline:
                raise TransferError(f"a TP rank did not open a link within {within_s:.0f} s; those that did: {opened}")
            zmq.select(self.sockets, [], [], _RANK_CHECK_POLL_S)
        self.send(CloseLink(number))
        self.forget(number)

    def open(self, direction: Direction) -> int:
        """Tells every other rank to open a link. Returns the link's number."""
        number = next(self._numbers)
        self._queues[number] = deque()
        self.send(OpenLink(number, direction))
        return number

    def send(self, command: RankCommand) -> None:
        """Sends a command to all other ranks. Raises RankLost if one has stopped reading."""
        if not self.sockets:
            return
        frame = self._encoder.encode(command)
        for rank, socket in enumerate(self.sockets, 1):
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again as exc:
                raise RankLost(
                    f"tensor-parallel rank {rank} has stopped reading its transfer channel", (rank,)
                ) from exc

    def receive(self) -> bool:
        """Sorts the reports that have arrived by link. Returns whether there were any. Raises RankLost for any other
        message.
        """
        found = False
        for rank, socket in enumerate(self.sockets, 1):
            while (frame := _next(socket)) is not None:
                found = True
                try:
                    report = self._decoder.decode(frame)
                except msgspec.DecodeError as exc:
                    raise RankLost(f"tensor-parallel rank {rank} says what is no report: {exc}", (rank,)) from exc
                queue = self._queues.get(report.link)
                if queue is not None:
                    queue.append(Reported(rank, report))
        return found

    def waiting(self, number: int) -> bool:
        """Returns whether a report of this link can be taken."""
        return bool(self._queues.get(number))

    def take(self, number: int) -> Reported | None:
        """Returns the next report of this link, if there is one."""
        queue = self._queues[number]
        return queue.popleft() if queue else None

    def forget(self, number: int) -> None:
        """Drops all reports of a link from now on, because every rank has closed it."""
        del self._queues[number]

    def close(self, linger_s: float) -> None:
        """Ends the other ranks' transfer threads."""
        try:
            self.send(LeaveRank())
        finally:
            for socket in self.sockets:
                socket.close(int(linger_s * 1000))


def _next(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


class NodeLink:
    """One link to another engine, over all ranks of this node."""

    def __init__(
        self,
        channels: RankChannels,
        direction: Direction,
        make_port: MakePort,
        heads: Sequence[int],
        region: KvRegion,
        transport: Transport,
        peer: str,
        links: Counter[TransportKind],
    ) -> None:
        """``make_port`` makes this rank's port for the direction. Raises TransferError if it cannot be opened.

        ``heads`` are those of each group.

        ``peer`` is the other engine's name for people. ``links`` counts this link for as long as it is in use.
        """
        self._channels = channels
        self._direction, self._peer = direction, peer
        self._links = links
        self._kinds: dict[int, TransportKind] = {}
        """What carries the pieces of each rank that has moved some."""
        self.number = channels.open(direction)
        self._closed_ranks: set[int] = set()
        try:
            self._port = make_port(self.number, 0, channels.ranks, heads, region, transport)
        except BaseException:
            channels.send(CloseLink(self.number))
            channels.forget(self.number)
            raise
        self._closing = False

    @property
    def ranks(self) -> int:
        return self._channels.ranks

    @property
    def closed(self) -> bool:
        """Whether the link touches no rank's memory any more."""
        return len(self._closed_ranks) == self.ranks

    def command(self, command: LinkCommand) -> None:
        """Gives a command to every rank. Raises RankLost if a rank has stopped reading."""
        self._port.handle(command)
        self._channels.send(command)

    def take(self) -> Reported | None:
        """Returns the next report of any rank, if there is one."""
        if self._port.reports:
            return self._note(Reported(0, self._port.reports.pop(0)))
        if self.closed:
            return None
        found = self._channels.take(self.number)
        return None if found is None else self._note(found)

    def _note(self, reported: Reported) -> Reported:
        match reported.report:
            case LinkInUse():
                self._count(reported.rank, reported.report)
            case LinkClosed():
                self._closed_ranks.add(reported.rank)
                if (kind := self._kinds.pop(reported.rank, None)) is not None:
                    self._links[kind] -= 1
                if self.closed:
                    self._channels.forget(self.number)
        return reported

    def _count(self, rank: int, report: LinkInUse) -> None:
        self._kinds[rank] = report.transport
        self._links[report.transport] += 1
        which = f"KV blocks {'from' if self._direction is Direction.FETCH else 'to'} {self._peer}"
        if self.ranks > 1:
            which += f" (rank {rank} here)"
        if report.no_rdma:
            log.warning("%s travel by %s, and not by RDMA: %s", which, report.lanes, report.no_rdma)
        else:
            log.info("%s travel by %s", which, report.lanes)

    def turn(self) -> bool:
        return not self._closing and self._port.turn()

    def close(self) -> None:
        """Begins to close the link. ``closed`` is true once every rank's report of that has been taken."""
        if not self._closing:
            self._closing = True
            self.command(CloseLink(self.number))

    def moving(self) -> bool:
        return self._port.moving()

    def arm(self) -> bool:
        unread = bool(self._port.reports) or self._channels.waiting(self.number)
        return not unread and (self._closing or self._port.arm())

    def pollables(self) -> list[int]:
        return [] if self._closing else [self._port.fileno()]
