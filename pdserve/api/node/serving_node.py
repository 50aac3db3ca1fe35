"""What the routes of one node share: engine, tokenizer, limits, tickets, metrics and the phase of the node's life.

``TicketGate`` checks the proxy's ticket on a request, which makes a node that belongs to a proxy serve it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pdserve.api.generation.engine_client import EngineClient, EngineState
from pdserve.api.message.formats import NO_FORMATS, MessageFormats
from pdserve.api.node.node_metrics import NodeMetrics
from pdserve.api.replay.replayable_answers import ReplayableAnswers, ReplayLimits
from pdserve.api.requests.grammar_check import GrammarCheck
from pdserve.api.requests.preparing import Preparer
from pdserve.api.requests.prompts import ModelLimits
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.config import StreamConfig, Switch
from pdserve.control.frame import Opener, Purpose, Secrets, from_header
from pdserve.errors import Unauthorized, Unavailable, WireError
from pdserve.tracing.tracing import Tracing
from pdserve.wire.discovery import NodeSizes, Role
from pdserve.wire.engine import Ready
from pdserve.wire.terms import Ticket
from pdserve.wire.timeline import TimelinePart

log = logging.getLogger(__name__)

MAX_CLIENTS = 1024
"""So many clients are remembered, those that had such fields last."""
MAX_FIELDS = 32
"""So many fields of one client are logged: a client may make up names without an end."""


class IgnoredFields:
    """The fields that were logged, by client."""

    def __init__(self) -> None:
        self._logged: OrderedDict[bytes, set[str]] = OrderedDict()

    def note(self, client: bytes, names: Sequence[str], request_id: str) -> None:
        """Logs those of ``names``, which are safe to print, that no request of ``client`` has had before."""
        if not names:
            return
        logged = self._logged.setdefault(client, set())
        self._logged.move_to_end(client)
        if len(self._logged) > MAX_CLIENTS:
            self._logged.popitem(last=False)
        new = [name for name in dict.fromkeys(names) if name not in logged][: MAX_FIELDS - len(logged)]
        if new:
            logged.update(new)
            log.warning(
                "request_id=%s has fields that have no effect here: %s. Later requests of this client with them are "
                "not logged",
                request_id,
                ", ".join(new),
            )


MAX_TICKET_CHARS = 16_384


class TicketGate:
    """Checks the tickets of one node's requests.

    A ticket is good once, and until its request's deadline, however long the request queued.
    """

    def __init__(self, secret: bytes | Secrets, boot_id: bytes, clock: Callable[[], float] = time.time) -> None:
        self._opener = Opener(
            secret, Purpose.TICKET, Ticket, ordered=False, lifetime_s=lambda t: t.terms.deadline_s, clock=clock
        )
        self._boot_id = boot_id

    def admit(self, header: str | None) -> Ticket:
        """Returns the ticket in a request's header. Raises Unauthorized, which says what is wrong about the ticket."""
        if header is None:
            raise Unauthorized(
                "this node takes requests from its proxy only: clients talk to the proxy", code="no_ticket"
            )
        try:
            ticket = self._opener.open(from_header(header, MAX_TICKET_CHARS))
        except WireError as exc:
            raise Unauthorized(f"the proxy's ticket is not acceptable: {exc}", code="bad_ticket") from exc
        if ticket.node != self._boot_id:
            raise Unauthorized("the proxy's ticket is for another start of this node", code="wrong_node")
        if ticket.terms.resume is not None and ticket.terms.answer is None:
            raise Unauthorized("the proxy's ticket resumes an answer without naming it", code="bad_ticket")
        return ticket


DRAIN_RETRY_AFTER_S = 1


class NodePhase(enum.Enum):
    """``SERVING`` → ``DRAINING``, once."""

    SERVING = "serving"
    DRAINING = "draining"


@dataclass(slots=True)
class ServingNode:
    """A node whose engine is ready, as its routes see it. Only ``phase`` and ``role`` change."""

    name: str
    role: Role
    """The present role. It says only what proxies route here: the node serves every request that has a ticket."""
    model: str
    engine: EngineClient
    ready: Ready
    sizes: NodeSizes
    tokenizer: Tokenizer
    tickets: TicketGate | None
    """The check of tickets. It is None if clients talk to this node directly."""
    metrics: NodeMetrics
    timeout_s: float
    """How many seconds a request without a ticket may take."""
    max_body_bytes: int
    stream: StreamConfig
    grammars: GrammarCheck
    formats: MessageFormats = NO_FORMATS
    """The forms in which the model writes reasoning and tool calls."""
    prefix_cache: Switch = Switch.ON
    unaccepted: Callable[[], str | None] = lambda: None
    """Returns why no proxy sends requests to this node, or None if one does, or if it belongs to none."""
    connecting: Callable[[], bool] = lambda: False
    """Returns whether it connects to other nodes before the first request."""
    replayable: ReplayableAnswers = field(default_factory=lambda: ReplayableAnswers(ReplayLimits(0, 0, 0.0)))
    """The answers that are stored for clients that may ask again."""
    preparer: Preparer = field(default_factory=Preparer)
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    started: int = field(default_factory=lambda: int(time.time()))
    """The time of the start, in seconds since 1970."""
    phase: NodePhase = NodePhase.SERVING
    tracing: Tracing = field(default_factory=Tracing)

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.ready.max_model_len, self.ready.vocab_size)

    @property
    def cached_block(self) -> int:
        """How many tokens each block has that the prefix cache keeps; 0 without a cache."""
        return self.ready.block_size if self.prefix_cache is Switch.ON else 0

    @property
    def alive(self) -> bool:
        return self.engine.state is EngineState.READY

    @property
    def unready(self) -> tuple[str, str] | None:
        """Why this node serves no requests now, as a word and a sentence. It is None if the node serves them."""
        if self.phase is NodePhase.DRAINING:
            return "draining", "this node is shutting down"
        if not self.alive:
            return "engine lost", "the engine is gone"
        if self.connecting():
            return "connecting", "this node connects to those that it fetches from"
        unaccepted = self.unaccepted()
        return None if unaccepted is None else ("unregistered", unaccepted)

    def keep_engine_part(self, part: TimelinePart) -> None:
        """Keeps what the engine, which does not know its node's name, remembers of a request."""
        self.tracing.parts.add(msgspec.structs.replace(part, node=self.name, model=self.model))

    def check_serving(self) -> None:
        """Raises Unavailable if the node takes no new requests."""
        if self.phase is NodePhase.DRAINING:
            raise Unavailable("this node is shutting down", code="draining", retry_after_s=DRAIN_RETRY_AFTER_S)
        if not self.alive:
            raise Unavailable("the engine is gone", code="engine_unavailable", retry_after_s=DRAIN_RETRY_AFTER_S)
