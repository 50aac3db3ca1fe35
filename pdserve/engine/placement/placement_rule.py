"""The rule by which a prompt is placed: a function of estimates and of the target for the first token.

Streams lose least where a prefill node computes the prompts, so a prompt goes there as long as its first token comes
within the target. Once the node's queue is too long for that, a prompt goes where its first token comes sooner: this
node takes prompts into its own steps, as far as those stay within the ITL target. Where even the shortest chunk would
break that, a prompt whose first token would be late from this node, too, is left to the prefill node, unless it would
come very late from there.

Orders leave while the prefill node has no more than one target's work, or two full steps' if that is more. The other
prompts wait on this node, where the one that has a turn goes to whichever node is free for it first. So nothing has to
be forecast for longer than that, and old news of a queue does little harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.placement.latency_targets import TtftAim
from pdserve.engine.placement.prefill_time import LocalMeasures, PromptSize, RemoteMeasures, local_time, remote_time
from pdserve.wire.engine import PrefillReason, PrefillSource

VERY_LATE = 3.0
"""A prompt is not left to the prefill node for the sake of streams if its first token would come later than so many
times its target from there, and sooner from here."""


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
