"""Estimates in seconds what a prompt would cost on this node and on a prefill node, from measurements alone.

On this node, its tokens wait for the prompts that are being computed, and then every stream of this node waits for
them: disaggregation is there to avoid this stall. So the stall counts, once for each stream, times ``stall_weight``:
how many seconds of one client's wait for a first token a second of another client's stalled stream is worth.

On a prefill node, its tokens wait for that node's queue, and its KV blocks have to come to this node, those of a chunk
while the next chunk computes. If that node is a mixed one, its own streams stall, and count in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The sizes of one prompt at the head of this node's queue, and of what it competes with."""

    missing_tokens: int
    """The tokens that this node's prefix cache does not have."""
    cached_tokens: int
    """The tokens that this node's prefix cache has."""
    queued_tokens: int
    """The tokens of other prompts that this node is about to compute."""
    streams: int
    """The requests that have a place in this node's batch: each decodes, or will once its prompt is computed."""


@dataclass(frozen=True, slots=True)
class LocalMeasures:
    """What was measured of this node."""

    tokens_per_s: float
    decode_step_s: float
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class RemoteMeasures:
    """What this node has measured of a prefill node."""

    tokens_per_s: float
    queued_tokens: float
    late_s: float
    """The time by which the node is later than was expected."""
    overhead_s: float
    """The time that a first token takes besides queue and computing."""
    cached_share: float
    """The share of the tokens in this node's prefix cache that the prefill node has in its own."""
    bytes_per_token: float
    """The size of the KV cache of a token."""
    bytes_per_s: float
    held_share: float = 0.0
    """The share of the tokens missing in this node's prefix cache that the prefill node has in its own."""
    streams: int = 0
    """The requests of its own clients that have a place in the prefill node's batch."""

    def computed_s(self, prompt: PromptSize) -> float:
        """Returns how long the prefill node computes the part of a prompt that it does not have."""
        tokens = (1 - self.held_share) * prompt.missing_tokens + (1 - self.cached_share) * prompt.cached_tokens
        return tokens / self.tokens_per_s


def local_cost(prompt: PromptSize, local: LocalMeasures, stall_weight: float) -> float:
    """Returns the time until the first token, plus what the streams of this node lose meanwhile."""
    compute_s = prompt.missing_tokens / local.tokens_per_s
    ahead = prompt.queued_tokens + prompt.missing_tokens
    decode_s = local.decode_step_s * ahead / local.max_step_tokens if prompt.streams else 0.0
    return ahead / local.tokens_per_s + decode_s + stall_weight * prompt.streams * compute_s


def remote_time(prompt: PromptSize, remote: RemoteMeasures, chunk_tokens: int) -> float:
    """Returns the time until the first token has come, and the blocks without which there is no second token."""
    wait_s = remote.queued_tokens / remote.tokens_per_s + remote.late_s + remote.overhead_s
    move_s = prompt.missing_tokens * remote.bytes_per_token / remote.bytes_per_s
    last_s = min(prompt.missing_tokens, chunk_tokens) * remote.bytes_per_token / remote.bytes_per_s
    return wait_s + max(remote.computed_s(prompt) + last_s, move_s)


def remote_cost(prompt: PromptSize, remote: RemoteMeasures, chunk_tokens: int, stall_weight: float) -> float:
    """Returns ``remote_time``, plus what the streams of the prefill node lose meanwhile."""
    return remote_time(prompt, remote, chunk_tokens) + stall_weight * remote.streams * remote.computed_s(prompt)
