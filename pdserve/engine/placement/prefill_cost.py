"""Estimates what a prompt would cost here and on a prefill node: seconds, by pure functions of measurements.

On this node, its tokens wait for the prompts that are being computed, and then every stream of this node waits for
them: the stall that disaggregation is there to avoid. So the stall counts, once for each stream, times
``stall_weight``: how many seconds of one client's wait for a first token a second of another one's stalled stream is
worth.

On a prefill node, its tokens wait for that node's queue, and its KV blocks have to come here, those of a chunk while
the next one computes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The question: one prompt at the head of this node's queue."""

    missing_tokens: int
    """Not in the prefix cache here."""
    cached_tokens: int
    """In the prefix cache here."""
    queued_tokens: int
    """Of other prompts that this node is about to compute."""
    streams: int
    """Requests that have a place in this node's batch: each decodes, or will when its prompt is there."""


@dataclass(frozen=True, slots=True)
class LocalMeasures:
    """This node, as measured."""

    tokens_per_s: float
    decode_step_s: float
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class RemoteMeasures:
    """A prefill node, as measured from here."""

    tokens_per_s: float
    queued_tokens: float
    late_s: float
    """By how much the node is behind what was expected of it."""
    overhead_s: float
    """What else a first token from there takes."""
    cached_share: float
    """Of the tokens in the prefix cache here, how many it has in its own."""
    bytes_per_token: float
    """Of KV cache."""
    bytes_per_s: float


def local_cost(prompt: PromptSize, here: LocalMeasures, stall_weight: float) -> float:
    """Until the first token, and what the streams of this node lose meanwhile."""
    compute_s = prompt.missing_tokens / here.tokens_per_s
    ahead = prompt.queued_tokens + prompt.missing_tokens
    decode_s = here.decode_step_s * ahead / here.max_step_tokens if prompt.streams else 0.0
    return ahead / here.tokens_per_s + decode_s + stall_weight * prompt.streams * compute_s


def remote_cost(prompt: PromptSize, there: RemoteMeasures, chunk_tokens: int) -> float:
    """Until the first token is here, and the blocks without which there is no second one."""
    tokens = prompt.missing_tokens + (1 - there.cached_share) * prompt.cached_tokens
    wait_s = there.queued_tokens / there.tokens_per_s + there.late_s + there.overhead_s
    move_s = prompt.missing_tokens * there.bytes_per_token / there.bytes_per_s
    last_s = min(prompt.missing_tokens, chunk_tokens) * there.bytes_per_token / there.bytes_per_s
    return wait_s + max(tokens / there.tokens_per_s + last_s, move_s)
