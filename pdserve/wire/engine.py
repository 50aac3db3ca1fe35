"""API process ↔ engine process of one node, over a private ZMQ PAIR socket (ipc, in a folder only the user can enter).

One message carries the new tokens that a step has brought to all requests, so messages cost by the step, not by the
token.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias

import msgspec

from pdserve.wire.discovery import ComputeCores, GroupCapacity, LinkCounts, NodeLoad, Role
from pdserve.wire.engine_counts import (
    CacheStats,
    CoreStats,
    QueueStats,
    ReturnCounts,
    SchedulerCounts,
    TransferCounts,
    counter,
    gauge,
)
from pdserve.wire.ids import RequestUuid
from pdserve.wire.sampling_params import PromptLogprobs, SamplingParams, TokenLogprobs
from pdserve.wire.terms import PrefillTarget, Terms
from pdserve.wire.timeline import TimelinePart

# ---------------------------------------------------------------- API → engine


class ChildRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One more answer to the same prompt. Only its seed differs."""

    local_id: int
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    emitted: tuple[int, ...] = ()
    """The tokens of this answer that the client has."""


class Submit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="submit", kw_only=True):
    """Submits one prompt. ``pdserve.wire.ids`` explains the identities.

    No ``local_id`` is used twice within a boot.
    """

    local_id: int
    uuid: RequestUuid
    group_id: int = 0
    """The same number for all prompts of one client request, which take turns as one; 0 if this is the only one."""
    token_ids: list[int]
    """The prompt."""
    sampling: SamplingParams
    emitted: tuple[int, ...] = ()
    """The tokens of this answer that the client has, when another node resumes it: the engine goes on after them."""
    children: tuple[ChildRequest, ...] = ()
    """Further answers, which share the prompt's KV blocks. Abort and outputs take each as a request of its own."""
    terms: Terms
    """The request's terms. With ``gives_back`` it ends with ``FinishReason.PREFILL_LOST`` when a prefill node is lost
    with it, and with ``fetch_only`` it ends with ``FinishReason.LENGTH`` once it has fetched."""


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="abort"):
    """Ends these requests and frees what they hold. No output of them follows. Unknown ids are ignored."""

    local_ids: list[int]


class Renew(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="renew"):
    """Replaces the cluster secret, in the form that ``Secrets`` of ``frame`` takes."""

    secret: bytes

    def __repr__(self) -> str:
        return "Renew(secret=...)"


class Assign(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="assign"):
    """Gives the node another role. The engine serves whatever comes; only its own targets depend on the role."""

    role: Role


class Meet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="meet"):
    """Has the engine connect to these nodes before any prompt goes to them. It takes the place of the last ``Meet``."""

    number: int
    """The number of the message, from 1 on."""
    nodes: tuple[PrefillTarget, ...]


class AskStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ask_stats"):
    """Asks for the stats of now. The engine sends them once it has taken in all that has come, so not within a step."""

    number: int
    """The number of the question, from 1 on."""


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="shutdown"):
    """Ends the engine: it cancels all requests, closes all sockets, and exits with status 0."""


ToEngine: TypeAlias = Submit | Abort | Renew | Assign | Meet | AskStats | Shutdown

# ---------------------------------------------------------------- engine → API


class FinishReason(enum.Enum):
    """Why a request ended. Each request ends once, for one reason."""

    STOP = "stop"
    """The last of ``new_token_ids`` is an end-of-sequence id or a stop token id."""
    LENGTH = "length"
    """The answer has ``max_tokens``, or the context is full."""
    DEADLINE = "deadline"
    REFUSED = "refused"
    """The request's parameters leave no token that the answer could go on with, or cannot be followed at all."""
    PREFILL_LOST = "prefill_lost"
    """A prefill node was lost with the request, which may be what it died of."""
    ERROR = "error"

    @property
    def is_answer(self) -> bool:
        """Whether the tokens so far are the complete answer."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class PrefillSource(enum.Enum):
    """Which node computed the prompt's KV cache."""

    LOCAL = "local"
    REMOTE = "remote"
    FALLBACK = "fallback"
    """A prefill node was asked and did not deliver, so this node computed the prompt."""


class PrefillReason(enum.Enum):
    """Why a decode node asked the prefill node that the proxy had named, or asked none."""

    SHORT = "short"
    """At most one block of the prompt was missing."""
    TARGET = "target"
    """The prefill node meets the target for the first token, and this node has more streams to spare."""
    SOONER = "sooner"
    """The first token is estimated to come sooner from there."""
    LATE = "late"
    """The first token would come late from either node, and on the decode node the prompt's chunks would make its
    streams late."""
    PROBE = "probe"
    """Nothing was known of the prefill node, or nothing recent."""
    FAILED = "failed"
    """The prefill node did not deliver its last prompt."""
    UNFIT = "unfit"
    """The prefill node cannot take a prompt of that length."""
    SETTING = "setting"
    """The setting ``--disaggregation`` decides."""
    UNASSIGNED = "unassigned"
    """The proxy named no prefill node: it knew none that fits, or the one that it knew had failed with this prompt."""


class PrefillDecisions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    source: PrefillSource
    """Either ``LOCAL`` or ``REMOTE``."""
    reason: PrefillReason
    count: int


class PrefillNodeStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One prefill node, as a decode node has measured it."""

    name: str
    tokens_per_s: float
    """The rate that the prefill node has reported; 0 before it has reported one."""
    queued_tokens: int
    overhead_s: float
    """The time that a first token takes besides queue and computing."""
    bytes_per_s: float
    """The rate at which KV blocks came after their first token."""


class PrefillStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a decode node has measured for its choice between local and remote prefill, and what it chose."""

    decisions: tuple[PrefillDecisions, ...] = ()
    """The decisions since the engine's start."""
    nodes: tuple[PrefillNodeStats, ...] = ()
    tokens_per_s: Annotated[float, gauge("prefill_local_tokens_per_second", "rate of prompts on this node")] = 0.0
    """0 before its first prompt."""
    decode_step_s: Annotated[float, gauge("prefill_decode_step_seconds", "a step without prompts")] = 0.0
    last_local_s: Annotated[
        float, gauge("placement_last_local_seconds", "to the first token, of the prompt last compared")
    ] = 0.0
    last_remote_s: Annotated[float, gauge("placement_last_remote_seconds", "the same, by a prefill node")] = 0.0


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""The bounds by which steps are counted: those of vLLM, whose metric it is."""


class StepStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine's steps take, and how those that *share* prompts' tokens with requests that decode kept time."""

    shared: Annotated[int, counter("shared_steps", "with chunks of prompts beside requests that decode")] = 0
    shared_prompt_tokens: Annotated[int, counter("shared_steps_prompt_tokens", "in the chunks of those steps")] = 0
    shared_late: Annotated[int, counter("shared_steps_late", "of those, the ones that took longer than the target")] = 0
    num_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)
    """The number of steps by their tokens, of prompts and answers: one for each of the bounds, and one for above."""
    tokens: int = 0
    computed_prompt_tokens: Annotated[
        int, counter("prompt_tokens_computed", "tokens of prompts that were computed here, for this node or others")
    ] = 0
    itl_target_s: Annotated[float, gauge("itl_target_seconds", "of the steps that decode, 0 without a target")] = 0.0
    """The target in force when requests decoded last."""
    parts: Annotated[dict[str, float], gauge("step_part_seconds", "estimated, of each part of a step", "part")] = {}


class RequestReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the engine knows of a finished request, for the log line and the metrics. Times are in seconds."""

    prefill_source: PrefillSource
    prefill_node: str
    """The name of the prefill node that delivered; empty if none did."""
    placed: PrefillReason | None = None
    """Why the prompt was placed where it went last; None if there was nothing to choose."""
    cached_tokens: int
    """The tokens of the prompt that were not computed for this request; 0 for children."""
    reused_tokens: int = 0
    """The tokens of a resumed answer and its prompt whose blocks this engine had, or got from a holder."""
    queue_s: float
    prefill_s: float
    """The time from the end of queueing to the first token."""
    transfer_s: float
    """The time from the first token to the last block's arrival; 0 for local prefill."""


class RequestOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one step adds to one request."""

    local_id: int
    new_token_ids: list[int]
    finish: FinishReason | None = None
    report: RequestReport | None = None
    """The report of the request; it comes with ``finish``."""
    error: str | None = None
    """The message for the client; it comes with ``FinishReason.REFUSED`` and ``ERROR``."""
    logprobs: list[TokenLogprobs] | None = None
    """The log probabilities of each of ``new_token_ids``, if the request asked for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log probabilities of the prompt's tokens after the first, once, before any token of any answer to it."""


def _no_prefills() -> dict[str, int]:
    return {source.value: 0 for source in PrefillSource}


class EngineStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Present values of gauges, and counters since the engine's start."""

    queue: QueueStats = QueueStats()
    cache: CacheStats = CacheStats()
    cores: CoreStats = CoreStats()
    steps: Annotated[int, counter("engine_steps", "batches computed")] = 0
    steps_ahead: Annotated[
        int, counter("engine_steps_ahead", "batches launched before the tokens of the one before were known")
    ] = 0
    scheduler: SchedulerCounts = msgspec.field(default_factory=SchedulerCounts)
    accepted_drafts: Annotated[
        int, counter("spec_decode_num_accepted_tokens", "guessed tokens that were what plain decoding gives")
    ] = 0
    accepted_drafts_by_place: Annotated[
        dict[str, int],
        counter(
            "spec_decode_num_accepted_tokens_per_pos", "guessed tokens accepted, by place in their steps", "position"
        ),
    ] = {}
    """The accepted drafts by their places among the drafts of a request in one step, from 0."""
    prefills: Annotated[dict[str, int], counter("prefills", "prompts, by who computed them", "source")] = msgspec.field(
        default_factory=_no_prefills
    )
    """The prompts by the values of ``PrefillSource``."""
    prefills_failed: Annotated[
        dict[str, int], counter("prefills_failed", "prompts ordered from prefill nodes in vain, by why", "reason")
    ] = {}
    transfer: TransferCounts = msgspec.field(default_factory=TransferCounts)
    transfer_failures: Annotated[
        dict[str, int], counter("kv_transfer_failures", "transfers that failed", "reason")
    ] = {}
    returns: ReturnCounts = msgspec.field(default_factory=ReturnCounts)
    clock_skew_s: Annotated[float, gauge("kv_transfer_clock_skew_seconds", "that another engine's clock is behind")] = (
        0.0
    )
    """How far the clock of the engine whose clock differs most is behind this one's."""
    links: Annotated[
        LinkCounts,
        gauge("kv_links", "links to other engines that have moved KV blocks, by what carries them", "transport"),
    ] = LinkCounts()
    prefill: PrefillStats = PrefillStats()
    step: StepStats = StepStats()

    @property
    def load(self) -> NodeLoad:
        return NodeLoad(
            self.queue.running,
            self.queue.waiting + self.queue.waiting_for_remote,
            self.cache.free_blocks,
            self.queue.queue_s,
            self.prefill.decode_step_s if self.queue.running else 0.0,
            prompt_tokens=self.step.computed_prompt_tokens,
            generated_tokens=self.scheduler.generated_tokens,
            accepted_drafts=self.accepted_drafts,
            links=self.links,
            bounded_free_blocks=tuple(self.cache.group_free_blocks.values()),
        )


class Starting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="starting"):
    """Tells people which stage of its start the engine is at: ``loading weights``, ``warming up``."""

    stage: str


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ready", kw_only=True):
    """The engine takes requests."""

    control: str
    """The ``tcp://host:port`` of its transfer control channel; empty if the node belongs to no proxy."""
    fingerprint: str
    num_blocks: int
    block_size: int
    max_model_len: int
    max_running: int
    vocab_size: int
    """The number of token ids of the model: every id is below it."""
    kernels: str = ""
    """The kernels, and the number of ranks if there are several: what decides how results are rounded."""
    process_ids: dict[str, int] = {}
    """The engine's processes, by short names of which there are few."""
    ucx: str = ""
    """The UCX that is loaded, such as ``1.21.0 package`` or ``1.21.0 system verbs``; empty if none is."""
    compute: ComputeCores | None = None
    """Where it computes; None on a GPU."""
    device: str = ""
    """What computes, in words: ``CPU, 4 cores``, or a GPU's name."""
    step_tokens: int = 0
    """The most tokens of a step."""
    kv_bytes: int = 0
    """The size of the KV cache, all ranks together."""
    cache_groups: tuple[GroupCapacity, ...] = ()
    """What ``Capacity.groups`` is."""


class StepOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="step"):
    """The new tokens and endings of all requests after one engine step."""

    outputs: list[RequestOutput]


class MoveWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="move_wanted"):
    """Asks to have a client request go on at a node with more free blocks: those of this one will not last for all.

    It is a wish. Until somebody aborts the request, the engine goes on with it.
    """

    local_id: int
    """That of one of its answers. All of them move together."""
    tokens: int
    """Tokens for which the other node should have free blocks: those that they have, and will have soon."""


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="recorded"):
    """What the engine remembers of requests that have ended, those of other nodes among them."""

    parts: list[TimelinePart]


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="stats"):
    """The engine sends this after a change, at most a few times a second, once when it falls idle, and when asked."""

    stats: EngineStats
    asked: int = 0
    """The number of the last ``AskStats`` that has come."""


class Met(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="met"):
    """The engine is connected to all nodes of the ``Meet`` with this number but those that it cannot reach."""

    number: int


class EngineFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="failed"):
    """The engine is about to exit. ``message`` says why."""

    message: str


FromEngine: TypeAlias = Starting | Ready | StepOutput | MoveWanted | Recorded | Stats | Met | EngineFailed
