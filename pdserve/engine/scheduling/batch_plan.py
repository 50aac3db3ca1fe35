"""Holds what one engine step does, and counts what all steps have done."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.engine.request import Request
from pdserve.wire.engine import PrefillSource


@dataclass(frozen=True, slots=True)
class Work:
    """The next ``num_tokens`` uncomputed tokens of one request."""

    request: Request
    num_tokens: int

    @property
    def wants_token(self) -> bool:
        """Whether the work reaches the last known token, so that the next one can be sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests whose next token is sampled from the logits after this work's last token.

        Usually this is the request itself; at the end of a prompt, its children without a token come after it.
        """
        request = self.request
        if not self.wants_token:
            return []
        requests = [] if request.ended else [request]
        if request.num_generated_tokens == 0:
            requests += [child for child in request.children if child.num_generated_tokens == 0]
        return requests


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one step does. Its ``copies`` are made before anything is computed."""

    work: list[Work] = field(default_factory=list)
    """The work of the step. Work of a single token comes first."""
    fetches: list[Request] = field(default_factory=list)
    """Requests whose prompts go to a prefill node."""
    copies: dict[int, int] = field(default_factory=dict)
    """KV blocks to be copied: the source of each destination."""

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of tokens of prompts, and of requests that are computed again."""
        return sum(work.num_tokens for work in self.work if work.num_tokens > 1)

    @property
    def num_decoding(self) -> int:
        """Returns the number of requests of which a single token is computed."""
        return sum(work.num_tokens == 1 for work in self.work)

    @property
    def sampled_requests(self) -> list[Request]:
        """Returns the requests that get a token from this step, in the order of their rows of logits."""
        return [request for work in self.work for request in work.sampled_requests]


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler has counted since the engine's start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    """The tokens of all admitted prompts."""
    prefix_cache_hits: int = 0
    """The tokens of admitted prompts that were in the prefix cache."""
    prefills: dict[PrefillSource, int] = field(default_factory=lambda: dict.fromkeys(PrefillSource, 0))
