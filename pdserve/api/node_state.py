"""What the routes of one node share, and which phase of its life it is in."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.api.engine_client import EngineClient, EngineState
from pdserve.api.metrics import NodeMetrics
from pdserve.api.preparing import Preparer
from pdserve.api.prompts import ModelLimits
from pdserve.api.ticket import TicketGate
from pdserve.api.tokenizer import Tokenizer
from pdserve.config import StreamConfig
from pdserve.errors import Unavailable
from pdserve.wire.discovery import Role
from pdserve.wire.engine import Ready

DRAIN_RETRY_AFTER_S = 1


class Phase(enum.Enum):
    """``SERVING`` → ``DRAINING``, once."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(slots=True)
class NodeState:
    """Made when the engine is ready; only ``phase`` changes."""

    name: str
    role: Role
    model: str
    engine: EngineClient
    ready: Ready
    tokenizer: Tokenizer | None
    """None on a prefill node, which has no clients."""
    tickets: TicketGate | None
    """None where clients talk to this node directly."""
    metrics: NodeMetrics
    timeout_s: float
    """Of a request without a ticket."""
    max_body_bytes: int
    stream: StreamConfig
    unaccepted: Callable[[], str | None] = lambda: None
    """Why no proxy sends this node anything, if it belongs to one."""
    preparer: Preparer = field(default_factory=Preparer)
    started: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""
    phase: Phase = Phase.SERVING

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.ready.max_model_len, self.ready.vocab_size)

    @property
    def alive(self) -> bool:
        return self.engine.state is EngineState.READY

    @property
    def unready(self) -> tuple[str, str] | None:
        """Why no request comes to be served here, as a word and a sentence; None if one does."""
        if self.phase is Phase.DRAINING:
            return "draining", "this node is shutting down"
        if not self.alive:
            return "engine lost", "the engine is gone"
        unaccepted = self.unaccepted()
        return None if unaccepted is None else ("unregistered", unaccepted)

    def check_serving(self) -> None:
        """Raises Unavailable if new requests are not taken (any more)."""
        if self.phase is Phase.DRAINING:
            raise Unavailable("this node is shutting down", code="draining", retry_after_s=DRAIN_RETRY_AFTER_S)
        if not self.alive:
            raise Unavailable("the engine is gone", code="engine_unavailable", retry_after_s=DRAIN_RETRY_AFTER_S)
