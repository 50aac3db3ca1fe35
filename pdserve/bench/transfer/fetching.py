"""The decode side: fetches prompts, one or several at a time, and says when they have landed."""

from __future__ import annotations

import threading
import time

from pdserve.bench.transfer.engine import BLOCK_TOKENS, BenchEngine, CacheShape
from pdserve.bench.transfer.messages import TransferSetup
from pdserve.errors import BenchError
from pdserve.wire.discovery import Role
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.ticket import PrefillTarget
from pdserve_kvtransfer.events import FetchFailed, FetchLanded, FetchOrder, TransferThreadDied

_DEADLINE_S = 120.0
_SAMPLING = SamplingParams(max_tokens=1, seed=0)


class FetchingEngine:
    """``close`` has to be called."""

    def __init__(self, target: PrefillTarget, shape: CacheShape, setup: TransferSetup) -> None:
        """Raises TransferError if its sockets or UCX cannot be opened."""
        self._target = target
        self._woken = threading.Event()
        self._open = 0
        self._blocks = shape.blocks
        self._engine = BenchEngine(Role.DECODE, new_id(), shape, setup, self._woken.set)
        self.cpu_s = self._engine.cpu_s
        self.close = self._engine.close

    @property
    def open(self) -> int:
        """Fetches under way, as of the last ``turn``."""
        return self._open

    @property
    def bytes_received(self) -> int:
        return self._engine.thread.stats().bytes_received

    def order(self, blocks: int) -> None:
        """Begin to fetch so many blocks, at most those of the cache."""
        transfer_id = TransferId(new_id(), 0, self._engine.boot_id)
        tokens, destinations = [0] * (blocks * BLOCK_TOKENS), tuple(range(blocks))
        order = FetchOrder(transfer_id, self._target, tokens, 0, destinations, _SAMPLING, _DEADLINE_S)
        self._engine.thread.fetch(order)
        self._open += 1

    def turn(self) -> None:
        """See what has landed. Raises BenchError if anything failed."""
        self._woken.clear()
        for event in self._engine.thread.events():
            match event:
                case FetchLanded():
                    self._open -= 1
                case FetchFailed(reason=reason):
                    raise BenchError(f"a fetch failed: {reason}")
                case TransferThreadDied(message):
                    raise BenchError(f"the decode engine's transfer thread died: {message}")

    def fetch(self, blocks: int) -> float:
        """Seconds from the order until all blocks have landed. Raises BenchError."""
        started = time.perf_counter()
        self.order(blocks)
        self.finish()
        return time.perf_counter() - started

    def fetch_in_a_row(self, blocks: int, count: int, ahead: int) -> float:
        """Seconds that ``count`` fetches take of which ``ahead`` are under way at a time. Raises BenchError."""
        started = time.perf_counter()
        ordered = 0
        while ordered < count or self._open:
            while ordered < count and self._open < ahead:
                self.order(blocks)
                ordered += 1
            self._wait()
        return time.perf_counter() - started

    def finish(self) -> None:
        """Wait for all that is under way. Raises BenchError."""
        self.turn()
        while self._open:
            self._wait()

    def _wait(self) -> None:
        """For news. Raises BenchError."""
        if not self._woken.wait(_DEADLINE_S):
            raise BenchError(f"no fetch landed for {_DEADLINE_S:g} s")
        self.turn()
