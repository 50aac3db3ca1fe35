"""Starts the other ranks as child processes of rank 0, tells them what to do, watches them, and ends them with it."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from pdserve.config import EngineConfig, RankLaunch
from pdserve.engine.tp.rank_channel import RankChannel
from pdserve.errors import EngineError, RankLost
from pdserve.liveness import LifeBoard
from pdserve.machine.core_share import CoreShare
from pdserve.models.tp.rank_board import RankBoard
from pdserve.patience import MOST_LOOK_S, PatientWait
from pdserve.process import ChildProcess, python_program
from pdserve.wire.rank import Arrived, Captured, FromRank, Loaded, Numbered, Order, RankFailed, Stop, Written

log = logging.getLogger(__name__)

START_S = 500.0
"""A rank may take this long to load libraries, and again to load weights."""
STOP_S = 2.0
LAST_MESSAGE_MS = 100
DEATH_S = 1.0
"""After a connection has closed, rank 0 waits this long for the process to end, so that it can say how."""
GRACE_S = 5.0
"""Rank 0 has this long to end by itself once a rank is gone."""

RANK_COMMAND = python_program("pdserve.engine.tp.rank_program")


class RankProcess(ChildProcess):
    """A rank other than 0, which shares this process's standard output and error."""

    def __init__(self, launch: RankLaunch, command: Sequence[str] = RANK_COMMAND) -> None:
        """Starts the process, which ends with the calling thread. Raises EngineError if it cannot start."""
        self.rank = launch.rank
        name = f"tensor-parallel rank {launch.rank}"
        try:
            super().__init__(name, command, launch=launch, pass_fds=(launch.board, launch.wake_fd, launch.life))
        except OSError as exc:
            raise EngineError(f"cannot start {name}: {exc}") from exc
        self.name = f"{name} (process {self.pid})"


class Ranks:
    """Ranks 1 to ``size - 1``, processes of their own. ``close`` ends them, whatever state they are in."""

    def __init__(
        self,
        config: EngineConfig,
        folder: str,
        shares: Sequence[CoreShare],
        board: RankBoard,
        wake_fd: int,
        life: LifeBoard,
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        """Starts a rank for each of ``shares`` but the first, rank 0's own. ``folder`` is private to this user.

        ``wake_fd`` is an eventfd that they write to when the board has news for rank 0. They show ``life``.
        """
        self.rendezvous = Path(folder, "ranks")
        self.board = board
        self.transfer_addresses: tuple[str, ...] = ()
        """The addresses at which the ranks from 1 on take orders for the KV transfer, once they are loaded."""
        self._number = 0
        self._timeout_s = config.parallel.timeout_ms / 1000
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ranks: list[tuple[RankProcess, RankChannel]] = []
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._lost = threading.Event()
        self._on_loss: Callable[[], None] = _nothing
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        try:
            for rank in range(1, len(shares)):
                address = f"ipc://{folder}/rank-{rank}"
                transfer_address = f"ipc://{folder}/transfer-{rank}"
                self.transfer_addresses += (transfer_address,)
                channel = RankChannel(self._context, address)
                launch = RankLaunch(
                    rank=rank,
                    address=address,
                    transfer_address=transfer_address,
                    rendezvous=str(self.rendezvous),
                    board=board.descriptor,
                    wake_fd=wake_fd,
                    life=life.descriptor,
                    cores=shares[rank].cores,
                    threads=shares[rank].threads,
                    config=config,
                )
                try:
                    self._ranks.append((RankProcess(launch, command), channel))
                except BaseException:
                    channel.close(0.0)
                    raise
        except BaseException:
            self.close(orderly=False)
            raise
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """The process ids in rank order, from rank 1."""
        return [process.pid for process, _ in self._ranks]

    def tell(self, order: Order) -> None:
        """Sends ``order`` to every rank. Raises RankLost, which says how a rank died, if one takes no more."""
        self._number += 1
        frame = self._encoder.encode(Numbered(self._number, order))
        try:
            for _, channel in self._ranks:
                channel.send(frame)
        except RankLost as exc:
            raise self.explain(exc) from exc

    def wait_for(self, report: type[Arrived | Loaded | Captured]) -> None:
        """Waits until every rank has sent ``report``. Raises RankLost if one fails, dies or needs over ``START_S``."""
        self._wait_for(report, START_S, "was not ready")

    def wait_for_blocks(self) -> None:
        """Waits until every rank has carried out the ``Clear`` or ``CopyBlocks`` that it was told last.

        Raises RankLost if a rank fails, dies or hangs.
        """
        self._wait_for(Written, self._timeout_s, "did not write its KV blocks")

    def _wait_for(self, report: type[FromRank], within_s: float, late: str) -> None:
        wait = PatientWait()
        for process, channel in self._ranks:
            message = self._next(process, channel, wait, within_s)
            if message is None:
                raise RankLost(f"tensor-parallel rank {process.rank} {late} in {within_s:.1f} s", (process.rank,))
            if not isinstance(message, report):
                raise RankLost(f"tensor-parallel rank {process.rank} said {message} in place of {report.__name__}")

    @property
    def copied(self) -> int:
        """How many ``DownloadBlocks`` and ``UploadBlocks`` orders every rank has carried out."""
        return min(self.board.copied(process.rank) for process, _ in self._ranks)

    def notify(self, on_loss: Callable[[], None]) -> None:
        """Has ``on_loss`` called, from another thread, when a rank has ended that should not have."""
        self._on_loss = on_loss
        if self._lost.is_set():
            on_loss()

    def check(self) -> None:
        """Raises RankLost if a rank has ended."""
        if self._lost.is_set():
            raise self.explain(RankLost("a tensor-parallel rank is gone"))

    def explain(self, error: RankLost) -> RankLost:
        """Returns an error that says how the ranks died, or ``error`` itself if it names a rank that hangs."""
        if error.ranks:
            return error
        poller = select.poll()
        for process, _ in self._ranks:
            poller.register(process.pidfd, select.POLLIN)
        poller.poll(int(DEATH_S * 1000))
        dead = [rank for rank in self._ranks if rank[0].ended(0.0)]
        return RankLost("; ".join(_how_it_ended(*rank) for rank in dead)) if dead else error

    def close(self, orderly: bool) -> None:
        """Ends every rank: if ``orderly``, by an order that it gets time for, else at once."""
        self._closing.set()
        os.eventfd_write(self._wake, 1)
        if orderly and not self._lost.is_set():
            try:
                self.tell(Stop())
            except RankLost:
                orderly = False
        deadline = time.monotonic() + (STOP_S if orderly else 0.0)
        for process, channel in self._ranks:
            process.reap(max(deadline - time.monotonic(), 0.0))
            channel.close(0.0)
        if self._watcher.is_alive():
            self._watcher.join()
        os.close(self._wake)
        self._context.term()

    def _next(self, process: RankProcess, channel: RankChannel, wait: PatientWait, within_s: float) -> FromRank | None:
        """Returns the next message, None if there is none when ``wait`` has taken ``within_s``."""
        poller = zmq.Poller()
        poller.register(channel.socket, zmq.POLLIN)
        for any_process, _ in self._ranks:
            poller.register(any_process.pidfd, zmq.POLLIN)
        while True:
            message = channel.receive()
            if isinstance(message, RankFailed):
                raise RankLost(_failed(process, message))
            if message is not None:
                return message
            if any(any_process.ended(0.0) for any_process, _ in self._ranks):
                raise self.explain(RankLost("a tensor-parallel rank is gone"))
            left_s = within_s - wait.look()
            if left_s <= 0:
                return None
            poller.poll(int(min(left_s, MOST_LOOK_S) * 1000))

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for process, _ in self._ranks:
            poller.register(process.pidfd, select.POLLIN)
        poller.poll()
        if self._closing.is_set():
            return
        self._lost.set()
        self.board.abandon()
        self._on_loss()
        if not self._closing.wait(GRACE_S):
            log.critical("a tensor-parallel rank is gone, and this process hangs because of it: it ends now")
            os._exit(1)


@contextmanager
def running_ranks(
    config: EngineConfig, folder: str, shares: Sequence[CoreShare], wake_fd: int, life: LifeBoard
) -> Iterator[Ranks]:
    """Runs the ranks for as long as the block. The ranks end in order after the block, and at once after an error."""
    board = RankBoard.create(len(shares))
    try:
        ranks = Ranks(config, folder, shares, board, wake_fd, life)
        try:
            yield ranks
        except BaseException:
            ranks.close(orderly=False)
            raise
        ranks.close(orderly=True)
    finally:
        board.close()


def _how_it_ended(process: RankProcess, channel: RankChannel) -> str:
    # The last message of a rank that failed may still be on its way through ZMQ. One that was killed has sent none.
    while channel.socket.poll(0 if process.ended_by_signal else LAST_MESSAGE_MS):
        message = channel.receive()
        if isinstance(message, RankFailed):
            return _failed(process, message)
    return process.describe_end()


def _failed(process: RankProcess, last: RankFailed) -> str:
    return f"tensor-parallel rank {process.rank} (process {process.pid}) failed: {last.message}"


def _nothing() -> None:
    pass
