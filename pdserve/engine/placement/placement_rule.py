"""The rule by which a prompt is placed: a function of estimates and of the target for the first token.

Streams lose least where a prefill node computes the prompts, so a prompt goes there as long as its first token comes
within the target. Once the node's queue is too long for that, a prompt goes where its first token comes sooner: this
node takes prompts into its own steps, as far as those stay within the ITL target. Where even the shortest chunk would
break that, a prompt whose first token would be late from this node, too, is left to the prefill node, unless it would
come very late from there.

Orders leave while the prefill node has no more than one target's work, or two full steps' if that is more. The other
prompts wait on this node, where the one that has a turn goes to whichever node is free for it first. So nothing has to
be forecast for longer than that, and old news of a queue does little harm.

The times of the first tokens are estimated by measurements alone. On this node, a prompt's tokens wait for the prompts
that are being computed. Beside streams, prompts are computed in chunks that keep a step within the ITL target, each of
which takes the time of a decode step besides. On a prefill node, its tokens wait for that node's queue, and its KV
blocks have to come to this node, those of a chunk while the next chunk computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.placement.latency_targets import NONE_OWN, OwnItl, TtftAim
from pdserve.wire.engine import PrefillReason, PrefillSource

VERY_LATE = 3.0
"""A prompt is not left to the prefill node for the sake of streams if its first token would come later than so many
times its target from there, and sooner from here."""


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
    bytes_per_prompt: float = 0.0
    """What moves with each prompt beside that: the end of its windows, and its state."""
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
    move_s = (prompt.missing_tokens * there.bytes_per_token + there.bytes_per_prompt) / there.bytes_per_s
    last_bytes = min(prompt.missing_tokens, chunk_tokens) * there.bytes_per_token + there.bytes_per_prompt
    last_s = last_bytes / there.bytes_per_s
    return there.queue_s(prompt) + there.overhead_s + max(there.computed_s(prompt) + last_s, move_s)


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Where a prompt is computed, and why."""

    source: PrefillSource | None
    """None if the prompt waits, to be placed again after the next step."""
    reason: PrefillReason

    @property
    def remote(self) -> bool:
        return self.source is PrefillSource.REMOTE

    @property
    def waits(self) -> bool:
        return self.source is None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The times that are compared, in seconds from now."""

    local_s: float
    remote_s: float
    queue_s: float
    """The part of ``remote_s`` that passes before the prefill node begins."""


def estimate(prompt: PromptSize, here: LocalMeasures, there: RemoteMeasures, chunk_tokens: int) -> Estimate:
    """Returns when the first token would come from either node. Blocks move in chunks of ``chunk_tokens``."""
    return Estimate(local_time(prompt, here), remote_time(prompt, there, chunk_tokens), there.queue_s(prompt))


def place(
    prompt: PromptSize, times: Estimate, ttft: TtftAim, most_queued_s: float, remote_streams: int
) -> PlacementDecision:
    """Decides where a prompt is computed whose first token should come as soon as ``ttft`` says.

    While the prefill node's queue is longer than ``most_queued_s``, no order leaves: one that may take long waits here,
    and keeps out none that may not.
    ``remote_streams`` is the number of streams that the prefill node has itself, if it is a mixed one: a node does not
    spare its streams by slowing as many elsewhere.
    """
    may_wait = prompt.may_wait and times.queue_s > most_queued_s
    in_time = prompt.waited_s + times.remote_s <= ttft.there_s
    spares_streams = remote_streams < prompt.streams
    if in_time and spares_streams:
        return PlacementDecision(None if may_wait else PrefillSource.REMOTE, PrefillReason.TARGET)
    reason = PrefillReason.SOONER
    # Where both are as fast, no transfer is better.
    if times.local_s <= times.remote_s:
        very_late = prompt.waited_s + times.remote_s > VERY_LATE * ttft.here_s
        if very_late or not spares_streams or prompt.waited_s + times.local_s <= ttft.here_s:
            return PlacementDecision(PrefillSource.LOCAL, reason)
        reason = PrefillReason.LATE
    return PlacementDecision(None if may_wait else PrefillSource.REMOTE, reason)
