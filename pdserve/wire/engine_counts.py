"""What an engine counts, each number with the metric that shows it.

A new count is one line here, and the line that counts: who counts adds to the struct's field, and the API process shows
all fields that have a metric (``api.node.node_metrics``).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class ShownAs:
    """The metric that shows a field, without the prefix ``pdserve_``."""

    kind: MetricKind
    name: str
    help: str
    label: str = ""
    """The name of its label; empty if it has none."""
    value: str = ""
    """The value of the label; empty for a field that has a number for each value."""


def counter(name: str, help: str, label: str = "", value: str = "") -> ShownAs:
    return ShownAs(MetricKind.COUNTER, name, help, label, value)


def gauge(name: str, help: str, label: str = "", value: str = "") -> ShownAs:
    return ShownAs(MetricKind.GAUGE, name, help, label, value)


class Counts(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Numbers that one thread changes while it counts, and that others copy."""

    @classmethod
    def copied(cls: type[T], counted: T) -> T:
        """Returns these numbers as they are now. ``counted`` may have more fields."""
        return cls(**{name: getattr(counted, name) for name in cls.__struct_fields__})


class QueueStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The requests that an engine has now."""

    running: Annotated[int, gauge("num_requests_running", "in the running batch")] = 0
    waiting: Annotated[int, gauge("num_requests_waiting", "queued in the engine")] = 0
    """The submitted requests without a place in the batch, including answers that wait for their prompt."""
    waiting_for_remote: Annotated[int, gauge("num_requests_waiting_for_remote_kvs", "prompt computed elsewhere")] = 0
    pushing: Annotated[int, gauge("num_prompts_pushing", "of other nodes, whose KV blocks are not all sent")] = 0
    queue_s: Annotated[float, gauge("prompt_queue_seconds", "that a prompt waits which comes now, estimated")] = 0.0
    """The time that a prompt which came now would wait: estimated, or how long the oldest one waits already."""


class CacheStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The blocks of an engine's KV cache now."""

    total_blocks: int = 0
    free_blocks: int = 0
    """The blocks that can be taken now, idle ones of the prefix cache among them."""
    quarantined_blocks: Annotated[int, gauge("quarantined_blocks", "KV blocks held until a receive completes")] = 0
    cached_blocks: Annotated[int, gauge("cached_blocks", "KV blocks in the prefix cache, in use or idle")] = 0
    group_blocks: Annotated[
        dict[str, int], gauge("cache_group_blocks", "blocks of a cache group that is no whole contexts", "group")
    ] = msgspec.field(default_factory=dict)
    """The blocks of each window's and state's group, by its name. What stands above is of whole contexts."""
    group_free_blocks: Annotated[
        dict[str, int], gauge("cache_group_free_blocks", "those of them that can be taken", "group")
    ] = msgspec.field(default_factory=dict)

    @property
    def used(self) -> float:
        """The share of its blocks that is in use in the group which has least left."""
        groups = [(self.free_blocks, self.total_blocks)]
        groups += [(self.group_free_blocks[name], total) for name, total in self.group_blocks.items()]
        return max((1 - free / total for free, total in groups if total), default=0.0)


class SchedulerCounts(Counts):
    """What the scheduler has counted since the engine's start."""

    prompt_tokens: Annotated[int, counter("prompt_tokens", "tokens of prompts that are answered here")] = 0
    """The tokens of prompts to which this engine's own clients get answers, counted with the first token."""
    cached_prompt_tokens: int = 0
    """Those of them that were in the prefix cache."""
    transferred_prompt_tokens: int = 0
    """Those of them whose KV cache came from a prefill node."""
    generated_tokens: Annotated[int, counter("generation_tokens", "tokens generated")] = 0
    drafts: Annotated[int, counter("spec_decode_num_draft_tokens", "guessed tokens that steps have checked")] = 0
    preemptions: Annotated[int, counter("num_preemptions", "requests set back for lack of blocks")] = 0
    moves_wanted: Annotated[int, counter("num_moves_wanted", "requests that should leave before blocks run out")] = 0
    """The client requests that were to go on at a node with more free blocks (``MoveWanted``)."""
    prefix_cache_queries: Annotated[
        int, counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache")
    ] = 0
    """The tokens of all admitted prompts."""
    prefix_cache_hits: Annotated[int, counter("prefix_cache_hits", "prompt tokens found in the prefix cache")] = 0
    resume_blocks_wanted: Annotated[
        int, counter("resume_blocks_wanted", "full KV blocks of resumed answers and their prompts")
    ] = 0
    resume_blocks_reused: Annotated[
        int, counter("resume_blocks_reused", "those of them that were here or came from a holder")
    ] = 0


class TransferCounts(Counts):
    """What the transfer thread has counted since the engine's start."""

    transfers_sent: Annotated[int, counter("kv_transfers", "KV caches moved", "direction", "sent")] = 0
    transfers_received: Annotated[int, counter("kv_transfers", "KV caches moved", "direction", "received")] = 0
    bytes_sent: Annotated[int, counter("kv_transfer_bytes", "KV cache moved", "direction", "sent")] = 0
    bytes_received: Annotated[int, counter("kv_transfer_bytes", "KV cache moved", "direction", "received")] = 0
    transfer_seconds: Annotated[float, counter("kv_transfer_seconds", "time of completed transfers")] = 0.0
    """The seconds from order to landing, summed over the received transfers."""
    handshakes: Annotated[int, counter("kv_transfer_handshakes", "greetings of other engines that were completed")] = 0
    """The greetings that were completed, as the engine that asked or the one that was asked."""
    leases_expired_sending: Annotated[
        int, counter("leases_expired", "peers that stopped answering", "direction", "sent")
    ] = 0
    """The engines that this one sent blocks to, and that fell silent."""
    leases_expired_receiving: Annotated[
        int, counter("leases_expired", "peers that stopped answering", "direction", "received")
    ] = 0
    """The engines that this one received blocks from, and that fell silent."""
    stale_blocks_dropped: Annotated[int, counter("stale_blocks_dropped", "blocks of dead transfers refused")] = 0
    """Blocks that arrived for no live transfer, out of range, twice, or with the wrong size."""
    frames_dropped: Annotated[int, counter("kv_transfer_frames_dropped", "control frames that were not acceptable")] = 0
    """The frames of other engines that were malformed, not authentic, or too old."""


class ReturnCounts(Counts):
    """What has become of offers of blocks since the engine's start."""

    blocks_returned: Annotated[
        int, counter("kv_blocks_returned", "KV blocks of answers that decode nodes returned")
    ] = 0
    """The blocks that this engine has fetched because decode nodes have offered them."""
    offers_dropped: Annotated[int, counter("kv_offers_dropped", "offers of KV blocks without room for them")] = 0
    """The offers for which there were no free blocks, or too many others."""


class CoreStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The cores of sleeping engines that compute for this one."""

    borrowed: Annotated[int, gauge("borrowed_cores", "of sleeping engines, which compute for this one")] = 0
    borrowed_s: Annotated[float, counter("borrowed_core_seconds", "for which such cores were borrowed")] = 0.0
