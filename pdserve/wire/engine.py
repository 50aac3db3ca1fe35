"""API process ↔ engine process of one node, over a private ZMQ PAIR socket (ipc, in a folder only the user can enter).

One message a step carries the new tokens of all requests: the crossing is per step, not per token.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from pdserve.wire.discovery import NodeLoad
from pdserve.wire.ids import RequestId, RequestUuid
from pdserve.wire.sampling_params import SamplingParams, TokenLogprobs
from pdserve.wire.ticket import PrefillTarget

# ---------------------------------------------------------------- API → engine


class ChildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One more answer to the same prompt, which differs in nothing but its seed."""

    local_id: int
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="submit", kw_only=True):
    """Generate for one prompt. ``pdserve.wire.ids`` says what the identities are.

    No ``local_id`` is used twice within a boot.
    """

    local_id: int
    uuid: RequestUuid
    token_ids: list[int]
    sampling: SamplingParams
    deadline_s: float
    """Seconds from now; past it the request ends with ``FinishReason.DEADLINE``."""
    attempt: int = 0
    prefill: tuple[PrefillTarget, ...] = ()
    children: tuple[ChildRequest, ...] = ()
    """Further answers, which share the prompt's KV blocks; each is a request of its own to Abort and in outputs."""
    cache_salt: str = ""
    """Prompts share cached blocks only under the same salt."""
    group_id: int = 0
    """The same for all prompts of one client request, which take turns with others as one; 0: this one is alone."""
    request_id: RequestId = ""
    """The client's label, for log lines."""


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="abort"):
    """Forget these requests and free what they hold. No output follows; unknown ids are ignored."""

    local_ids: list[int]


class Renew(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="renew"):
    """The cluster secret has changed: what ``wire/frame.py`` makes ``Secrets`` of."""

    secret: bytes

    def __repr__(self) -> str:
        return "Renew(secret=...)"


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shutdown"):
    """Cancel everything, close all sockets, exit 0."""


ToEngine: TypeAlias = Submit | Abort | Renew | Shutdown

# ---------------------------------------------------------------- engine → API


class FinishReason(enum.Enum):
    """Why a request ended. Exactly one, exactly once."""

    STOP = "stop"
    """An end-of-sequence or stop token id (which is the last of ``new_token_ids``)."""
    LENGTH = "length"
    """``max_tokens`` or the context length."""
    DEADLINE = "deadline"
    ERROR = "error"

    @property
    def is_answer(self) -> bool:
        """Whether the tokens so far are the whole answer."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class PrefillSource(enum.Enum):
    """Who computed the prompt's KV cache."""

    LOCAL = "local"
    REMOTE = "remote"
    FALLBACK = "fallback"
    """A prefill node was asked and did not deliver; this node did it."""


class PrefillReason(enum.Enum):
    """Why a decode node that was named a prefill node went to it or not."""

    SHORT = "short"
    """No more than one block was missing."""
    CHEAPER = "cheaper"
    """By the estimate."""
    PROBE = "probe"
    """Nothing was known of the prefill node, or nothing new."""
    FAILED = "failed"
    """Its last prompt came to nothing."""
    UNFIT = "unfit"
    """The prefill node cannot take a prompt of that length."""
    SETTING = "setting"
    """``--disaggregation`` says so."""


class PrefillDecisions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    source: PrefillSource
    """``LOCAL`` or ``REMOTE``."""
    reason: PrefillReason
    count: int


class PrefillNodeStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One prefill node, as a decode node has measured it."""

    name: str
    tokens_per_s: float
    """0 before it has said."""
    queued_tokens: int
    overhead_s: float
    """What a first token takes beside queue and computing."""
    bytes_per_s: float
    """Of KV blocks that came after their first token."""


class PrefillStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the choice between local and remote prefill knows, and what it chose."""

    decisions: tuple[PrefillDecisions, ...] = ()
    """Counts since the start."""
    nodes: tuple[PrefillNodeStats, ...] = ()
    tokens_per_s: float = 0.0
    """Of prompts, on this node; 0 before there was one."""
    decode_step_s: float = 0.0
    last_local_s: float = 0.0
    """Costs of the prompt that was last compared."""
    last_remote_s: float = 0.0


class RequestReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the engine knows of a finished request, for the log line and the metrics. Times in seconds."""

    prefill_source: PrefillSource
    prefill_node: str
    """Name of the prefill node that delivered; empty if none did."""
    cached_tokens: int
    """Tokens of the prompt that were not computed for this request; 0 for children."""
    queue_s: float
    prefill_s: float
    """From the end of queueing to the first token."""
    transfer_s: float
    """From the first token to the last block's arrival; 0 for local prefill."""


class RequestOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one step adds to one request."""

    local_id: int
    new_token_ids: list[int]
    finish: FinishReason | None = None
    report: RequestReport | None = None
    """With ``finish``."""
    error: str | None = None
    """With ``FinishReason.ERROR``."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``new_token_ids``, if the request asked for them."""


class EngineStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Gauges as they are, and counters since the engine's start."""

    running: int = 0
    waiting: int = 0
    """All that were submitted and have no place in the batch: answers that wait for their prompt, too."""
    waiting_for_remote: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    """Idle blocks of the prefix cache are free."""
    quarantined_blocks: int = 0
    cached_blocks: int = 0
    """Blocks that the prefix cache can find, in use or idle."""
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens of admitted prompts."""
    prefix_cache_hits: int = 0
    """Those of them that were in the prefix cache."""
    prefills_local: int = 0
    prefills_remote: int = 0
    prefills_fallback: int = 0
    transfer_bytes_sent: int = 0
    transfer_bytes_received: int = 0
    transfers_sent: int = 0
    transfers_received: int = 0
    transfer_seconds: float = 0.0
    transfer_failures: dict[str, int] = {}
    """By reason."""
    leases_expired: int = 0
    stale_blocks_dropped: int = 0
    prefill: PrefillStats = PrefillStats()

    @property
    def load(self) -> NodeLoad:
        return NodeLoad(self.running, self.waiting + self.waiting_for_remote, self.free_blocks)


class Starting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="starting"):
    """Progress for people, while the engine comes up: ``loading weights``, ``warming up``."""

    stage: str


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ready", kw_only=True):
    """The engine takes requests."""

    control: str
    """``tcp://host:port`` of its transfer control channel; empty unless the role is prefill."""
    fingerprint: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_running: int
    vocab_size: int
    """Token ids are below it."""


class StepOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="step"):
    """All that one engine step produced."""

    outputs: list[RequestOutput]


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="stats"):
    """Sent when something changed, at most a few times a second, and once when the engine falls idle."""

    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="failed"):
    """The engine is about to exit, with why."""

    message: str


FromEngine: TypeAlias = Starting | Ready | StepOutput | Stats | EngineFailed
