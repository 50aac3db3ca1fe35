"""A prefill engine that has computed every prompt already."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bench.transfer.engine import BLOCK_TOKENS, BenchEngine, CacheShape
from pdserve.bench.transfer.messages import Assignment, Serving
from pdserve.errors import BenchError
from pdserve.wire.discovery import Role
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling import SampledToken
from pdserve_kvtransfer.events import PushWanted, TransferThreadDied


@dataclass(slots=True)
class _Push:
    transfer_id: TransferId
    next: int
    end: int
    due: float


class PushingEngine:
    """``wake`` is called when ``turn`` has something to do. ``close`` has to be called."""

    def __init__(self, assignment: Assignment, wake: Callable[[], None]) -> None:
        self._assignment = assignment
        self._blocks = assignment.blocks
        self._pushes: deque[_Push] = deque()
        shape = CacheShape(assignment.block_bytes, assignment.blocks)
        self._engine = BenchEngine(Role.PREFILL, new_id(), shape, assignment.setup, wake)
        self.serving = Serving(self._engine.control, self._engine.boot_id, self._engine.thread.native_id)

    def turn(self) -> float | None:
        """Push what is due. Returns seconds until there is more to push; None if nothing is left."""
        for event in self._engine.thread.events():
            match event:
                case PushWanted(transfer_id, token_ids):
                    self._pushes.append(_Push(transfer_id, 0, -(-len(token_ids) // BLOCK_TOKENS), time.monotonic()))
                case TransferThreadDied(message):
                    raise BenchError(f"the prefill engine's transfer thread died: {message}")
        now = time.monotonic()
        for push in self._pushes:
            self._push(push, now)
        self._pushes = deque(push for push in self._pushes if push.next < push.end)
        return min((max(0.0, push.due - now) for push in self._pushes), default=None)

    def _push(self, push: _Push, now: float) -> None:
        if push.due > now:
            return
        count = min(self._assignment.chunk_blocks or push.end, push.end - push.next)
        blocks = tuple((push.next + i) % self._blocks for i in range(count))
        self._engine.thread.push(push.transfer_id, push.next, blocks)
        push.next += count
        push.due += self._assignment.chunk_s
        if push.next == push.end:
            self._engine.thread.first_token(push.transfer_id, (SampledToken(0),), 0)

    def close(self) -> None:
        self._engine.close()
