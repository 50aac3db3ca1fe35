"""Says what one engine step does, and counts what all steps have done."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.request import Request
from pdserve.wire.engine import PrefillSource


@dataclass(frozen=True, slots=True)
class Work:
    """The next ``num_tokens`` uncomputed tokens of one request."""

    request: Request
    num_tokens: int
    lookahead: int = 0
    """Blocks are reserved for so many guessed tokens after the last known one, too."""

    @property
    def wants_token(self) -> bool:
        """Whether it reaches the last known token, so that the next one can be chosen."""
        return self.num_tokens == self.request.num_pending_tokens

    @property
    def choosers(self) -> list[Request]:
        """The requests whose next token is chosen by the logits after this work's last token.

        Usually the request itself; at the end of a prompt also those of its children that have no token yet.
        """
        request = self.request
        if not self.wants_token:
            return []
        choosers = [] if request.ended else [request]
        if request.num_generated_tokens == 0:
            choosers += [child for child in request.children if child.num_generated_tokens == 0]
        return choosers


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step. ``copies`` come before everything else."""

    work: list[Work] = field(default_factory=list)
    """Single tokens first."""
    fetches: list[Request] = field(default_factory=list)
    """Requests whose prompts go to a prefill node."""
    copies: dict[int, int] = field(default_factory=dict)
    """KV blocks to be copied, from which by to which."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of prompts, and of requests that are computed again."""
        return sum(work.num_tokens for work in self.work if work.num_tokens > 1)

    @property
    def num_decoding(self) -> int:
        """Requests with a single token."""
        return sum(work.num_tokens == 1 for work in self.work)

    @property
    def choosers(self) -> list[Request]:
        """All of the work's, in order."""
        return [request for work in self.work for request in work.choosers]


@dataclass(slots=True)
class SchedulerCounters:
    """Since the engine's start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    """Tokens of admitted prompts."""
    prefix_cache_hits: int = 0
    """Those of them that were in the prefix cache."""
    prefills: dict[PrefillSource, int] = field(default_factory=lambda: dict.fromkeys(PrefillSource, 0))
