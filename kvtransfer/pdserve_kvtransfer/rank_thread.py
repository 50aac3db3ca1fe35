"""The transfer thread of a TP rank other than rank 0, which moves this rank's part of every block as rank 0 says."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec
import zmq

from pdserve.errors import TransferError
from pdserve.liveness import SHOWN_EVERY_MS, LifeSign, unseen_sign
from pdserve.patience import LOOKS
from pdserve.process import share_interpreter
from pdserve.wire.rank import (
    CloseLink,
    Direction,
    LeaveRank,
    LinkBroken,
    LinkClosed,
    LinkCommand,
    OpenLink,
    RankCommand,
    RankReport,
)
from pdserve_kvtransfer.fetch.port import FetchPort
from pdserve_kvtransfer.push.port import PushPort
from pdserve_kvtransfer.ranks import MakePort, Port
from pdserve_kvtransfer.region import KvRegion
from pdserve_kvtransfer.transport import BusyPoll, StepUnderWay, Transport

log = logging.getLogger(__name__)

LINGER_MS = 500
GIVE_UP_MS = 5_000

_MAKE_PORT: dict[Direction, MakePort] = {Direction.FETCH: FetchPort, Direction.PUSH: PushPort}


class RankThread:
    """Owns the ports of one rank. The thread ends on ``LeaveRank`` or ``close``."""

    def __init__(
        self,
        *,
        address: str,
        rank: int,
        ranks: int,
        heads: Sequence[int],
        region: KvRegion,
        transport: Callable[[], Transport],
        died: Callable[[str], None],
        life: LifeSign | None = None,
        step: StepUnderWay | None = None,
    ) -> None:
        """The thread binds ``address`` (``ipc://`` in a private folder), and rank 0 connects to it.

        ``heads`` are those of each group of ``region``. ``transport`` makes the transport inside the thread.
        The thread calls ``died`` with the reason if it ends for any other reason than ``LeaveRank`` and ``close``.
        ``life`` is where the thread shows life. ``step`` says when it has to leave the core to a step.
        """
        self._address = address
        self._rank, self._ranks, self._heads = rank, ranks, heads
        self._region = region
        self._died = died
        self._life = unseen_sign() if life is None else life
        self._step = StepUnderWay() if step is None else step
        self._make_transport = transport
        self._ports: dict[int, Port] = {}
        self._unsent: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RankCommand] = msgspec.msgpack.Decoder(RankCommand)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closing = threading.Event()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"kv-transfer-rank-{rank}", daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises TransferError if the channel cannot be bound or UCX cannot start."""
        share_interpreter()
        self._thread.start()
        self._started.result()

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Idempotent. Raises TransferError if it has not ended within ``timeout_s``."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread.ident is not None:
            os.eventfd_write(self._wakeup, 1)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TransferError(f"the transfer thread of rank {self._rank} did not end within {timeout_s} s")
        os.close(self._wakeup)
        self._context.term()

    def _run(self) -> None:
        channel = self._context.socket(zmq.PAIR)
        try:
            transport = self._make_transport()
            transport.step = self._step
            try:
                channel.bind(self._address)
                self._started.set_result(None)
                with self._life.shown_by_this_thread():
                    self._loop(channel, transport)
            finally:
                for port in self._ports.values():
                    port.close()
                transport.close()
        except Exception as exc:
            self._report_death(exc)
        finally:
            channel.close(LINGER_MS)

    def _report_death(self, exc: Exception) -> None:
        if not self._started.done():
            wrapped = exc if isinstance(exc, TransferError) else TransferError(f"cannot start: {exc}")
            self._started.set_exception(wrapped)
            return
        log.exception("the transfer thread of rank %d died", self._rank)
        self._died(f"{type(exc).__name__}: {exc}")

    def _loop(self, channel: zmq.Socket[bytes], transport: Transport) -> None:
        busy_poll = BusyPoll(self._step)
        while not self._closing.is_set():
            self._life.show()
            more = False
            while channel.poll(0):
                command = self._decoder.decode(channel.recv())
                if isinstance(command, LeaveRank):
                    return
                self._handle(command, transport)
                more = True
            for port in self._ports.values():
                more |= port.turn()
            self._collect_reports()
            self._send_reports(channel)
            if not busy_poll.again(more, any(port.moving() for port in self._ports.values()), time.monotonic()):
                self._wait(channel)

    def _handle(self, command: OpenLink | LinkCommand, transport: Transport) -> None:
        match command:
            case OpenLink(link, direction):
                self._open(link, _MAKE_PORT[direction], transport)
            case _ if command.link in self._ports:
                self._ports[command.link].handle(command)
            case CloseLink(link):
                # The link could not be opened.
                self._report(LinkClosed(link))
            case _:
                log.debug("%s for a link that is not open", type(command).__name__)

    def _open(self, link: int, make: MakePort, transport: Transport) -> None:
        try:
            self._ports[link] = make(link, self._rank, self._ranks, self._heads, self._region, transport)
        except TransferError as exc:
            self._report(LinkBroken(link, str(exc)))
        except Exception as exc:
            log.exception("link %d cannot be opened", link)
            self._report(LinkBroken(link, f"{type(exc).__name__}: {exc}"))

    def _report(self, report: RankReport) -> None:
        self._unsent.append(self._encoder.encode(report))

    def _collect_reports(self) -> None:
        for number, port in list(self._ports.items()):
            for report in port.reports:
                self._report(report)
            if any(isinstance(report, LinkClosed) for report in port.reports):
                del self._ports[number]
            port.reports.clear()

    def _send_reports(self, channel: zmq.Socket[bytes]) -> None:
        try:
            while self._unsent:
                channel.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            # Rank 0 is slow, or it has closed its end and its LeaveRank is on the way.
            return

    def _wait(self, channel: zmq.Socket[bytes]) -> None:
        if not all(port.arm() for port in self._ports.values()):
            return
        poller = zmq.Poller()
        poller.register(channel, zmq.POLLIN | (zmq.POLLOUT if self._unsent else 0))
        for fileno in (self._wakeup, *(port.fileno() for port in self._ports.values())):
            poller.register(fileno, zmq.POLLIN)
        # In parts, each of which a pause of this process may use up: rank 0 has a chance to read in the others.
        if not self._unsent:
            poller.poll(SHOWN_EVERY_MS)
        elif not any(poller.poll(GIVE_UP_MS // LOOKS) for _ in range(LOOKS)):
            raise TransferError("rank 0 has stopped reading its transfer channel")
