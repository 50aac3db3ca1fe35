"""Estimates when a prompt's first token comes, from this node and from a prefill node, by measurements alone.

On this node, its tokens wait for the prompts that are being computed. Beside streams, prompts are computed in chunks
that keep a step within the ITL target, each of which takes the time of a decode step besides.

On a prefill node, its tokens wait for that node's queue, and its KV blocks have to come to this node, those of a chunk
while the next chunk computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.placement.latency_targets import NONE_OWN, OwnItl


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The sizes of one prompt that waits on this node, and of what it competes with."""

    missing_tokens: int
    """The tokens that this node's prefix cache does not have."""
    cached_tokens: int
    """The tokens that this node's prefix cache has."""
    queued_tokens: int
    """The tokens of other prompts that this node computes before."""
    streams: int
    """The requests that have a place in this node's batch: each decodes, or will once its prompt is computed."""
    rows: int = 0
    """The requests that decode now."""
    context_tokens: int = 0
    """The tokens of their contexts."""
    own_itl: OwnItl = NONE_OWN
    """The ITL targets that they have of their own."""
    own_ttft_ms: float | None = None
    """How soon its client wants the first token; None if the client does not say."""
    own_itl_ms: float | None = None
    """How far apart its client wants the other tokens; None if the client does not say."""
    leaving_tokens: int = 0
    """The tokens of prompts that go to the prefill node before this one, and have not left this node."""
    waited_s: float = 0.0
    """The time since the request came to this node."""
    may_wait: bool = False
    """Whether this node has a step to compute in any case, after which the prompt can be placed again."""


@dataclass(frozen=True, slots=True)
class LocalMeasures:
    """What was measured of this node."""

    tokens_per_s: float
    decode_step_s: float
    chunk_tokens: int
    """The prompt tokens that a step computes beside streams."""
    chunk_s: float = 0.0
    """The time of a step that computes a single token of a prompt and nothing else; 0 if it is not known."""
    token_s: float = 0.0
    """The time that each further token adds to such a step."""

    def alone_s(self, tokens: int) -> float:
        """Returns how long so many tokens of prompts take in steps of their own. A short step has a time of its own."""
        return max(tokens / self.tokens_per_s, self.chunk_s + max(0, tokens - 1) * self.token_s)


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

    def queue_s(self, prompt: PromptSize) -> float:
        """Returns how long a prompt that leaves now waits there for others, also for those that leave before it."""
        return (self.queued_tokens + prompt.leaving_tokens) / self.tokens_per_s + self.late_s


def local_time(prompt: PromptSize, here: LocalMeasures) -> float:
    """Returns the time until this node has computed the first token."""
    ahead = prompt.queued_tokens + prompt.missing_tokens
    decode_s = here.decode_step_s * ahead / here.chunk_tokens if prompt.streams else 0.0
    return here.alone_s(ahead) + decode_s


def remote_time(prompt: PromptSize, there: RemoteMeasures, chunk_tokens: int) -> float:
    """Returns the time until the first token has come, and the blocks without which there is no second token."""
    move_s = prompt.missing_tokens * there.bytes_per_token / there.bytes_per_s
    last_s = min(prompt.missing_tokens, chunk_tokens) * there.bytes_per_token / there.bytes_per_s
    return there.queue_s(prompt) + there.overhead_s + max(there.computed_s(prompt) + last_s, move_s)
