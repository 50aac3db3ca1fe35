"""Holds what one engine step does, and counts what all steps have done.

A prompt is computed in *chunks*, and a token of an answer as a row of its own. This holds for tokens that are computed
again, too, after a preemption or on another node: they are *replayed* as many rows of one step, each with its own
context length, over the same blocks. So they pass the same kernels as when they were generated, and the answer goes on
as if it had not been interrupted. A chunk would store keys and values that are rounded differently.

*Drafts* are guesses of an answer's next tokens. They are rows as well, behind that of the answer's last token: the
token after each of them is sampled as if it were right, and counts if it is.

A step may be planned *ahead*, while the step before it is under way. Its work then begins where that step ends, and the
token of a request that decodes on is not known yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from pdserve.engine.request import Request
from pdserve.wire.engine import PrefillSource
from pdserve.wire.engine_counts import SchedulerCounts

REPLAY_ROWS = 64
"""The replayed tokens of one step, at most: prompts find a place in it, too."""
REPLAY_CONTEXT = 2**15
"""The tokens that all replayed rows of one step read, at most, unless it has a single row. Each row reads its own whole
context, and requests that decode wait for the step."""


class Work(msgspec.Struct, frozen=True):
    """The next ``num_tokens`` uncomputed tokens of one request, either of its prompt or of its answer."""

    request: Request
    num_tokens: int
    replays: bool = False
    """Whether these are tokens of the answer that are computed again, each of which is a row of its own."""
    drafts: tuple[int, ...] = ()
    """The tokens that may follow the answer's last one, which is what the work computes otherwise."""
    at: int | None = None
    """The number of tokens before the work that the step under way computes, or has computed, in work planned ahead."""

    @property
    def start(self) -> int:
        """The number of the request's tokens before those of the work."""
        return self.request.num_computed_tokens if self.at is None else self.at

    @property
    def decodes(self) -> bool:
        """Whether the work is the last token of an answer, and not one before it that is replayed alone."""
        return self.num_tokens == 1 and not self.replays and self.start >= self.request.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """The number of tokens that the step computes, drafts included."""
        return self.num_tokens + len(self.drafts)

    @property
    def is_chunk(self) -> bool:
        """Whether the work is several tokens of a prompt, which are one row."""
        return self.num_tokens > 1 and not self.replays

    def num_final_tokens(self, *, keeps_states: bool) -> int:
        """Returns how many of the tokens are computed for good if a sampled request waits for its token.

        The last token is then computed once more, in the same way: a chunk again as a chunk. So are all of these tokens
        if the model ``keeps_states``: the state before them is there, and none in between.
        """
        return 0 if self.is_chunk or keeps_states else self.num_tokens - 1

    @property
    def scored_tokens(self) -> range:
        """The places of the prompt's tokens whose log probabilities this work gives. Each follows a token of the work.

        What an earlier step has given is left out.
        """
        request = self.request
        if request.sampling.prompt_logprobs is None or not request.needs_scores:
            return _NO_PLACES
        first, end = self.start + 1, self.start + self.num_tokens + 1
        return range(max(first, request.num_scored_tokens + 1), min(end, request.num_prompt_tokens))

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests whose next token is sampled from the logits after this work's last token.

        Usually this is the request itself, if that is its last known token; at the end of a prompt, its children
        without a token come after it.
        """
        request = self.request
        # Not by ``start``: a step asks this of each of its works several times.
        end = (request.num_computed_tokens if self.at is None else self.at) + self.num_tokens
        requests = [request] if end >= len(request.token_ids) and not request.ended else []
        if request.children and end == request.num_prompt_tokens:
            requests += [child for child in request.children if child.num_generated_tokens == 0]
        return requests


def chunk_tokens(left: int, budget: int) -> int:
    """Returns how many of the ``left`` tokens of a prompt a step computes that may compute ``budget``.

    A prompt is cut so that its last chunk has more than a single token, which would be a row of its own: a row's keys
    and values are rounded otherwise than a chunk's, and then the answer would depend on where the prompt was cut. Only
    a budget of less than three tokens leaves no choice.
    """
    return budget - 1 if left == budget + 1 > 3 else min(left, budget)


_NO_PLACES = range(0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """A request with the hashes of the blocks that its known tokens fill, those that are computed included."""

    request: Request
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What one step does. Its ``copies`` are made before anything is computed."""

    work: list[Work] = field(default_factory=list)
    """The work of the step. Chunks come last."""
    num_following: int = 0
    """So many works at the beginning have one token each, which the step under way gives."""
    fetches: list[Request] = field(default_factory=list)
    """Requests whose prompts go to a prefill node."""
    reuses: list[Reuse] = field(default_factory=list)
    """Requests whose missing blocks are asked of a holder."""
    fetched: list[Request] = field(default_factory=list)
    """Requests that were only to be fetched, and have what their holders had."""
    refused: list[Request] = field(default_factory=list)
    """Orders of other nodes that are not computed, because this node's fetches hold the blocks that they need."""
    copies: dict[int, int] = field(default_factory=dict)
    """KV blocks to be copied: the source of each destination."""
    chunk_end: Callable[[Request, int], int] = lambda _, tokens: tokens
    """Returns how many of the next tokens of a prompt are its next chunk, of a number that the step may compute."""

    def next_work(self, request: Request, budget: int, at: int | None = None) -> Work | None:
        """Returns the work that a request with uncomputed tokens has for this step, of at most ``budget`` tokens.

        ``at`` is how many of its tokens are computed once the step under way has ended, in a plan made ahead of that.
        Returns None if there is no budget, or the step replays as many tokens as it may already.
        """
        if not budget:
            return None
        computed = request.num_computed_tokens if at is None else at
        if computed < request.num_prompt_tokens:
            tokens = chunk_tokens(request.num_prompt_tokens - computed, budget)
            return Work(request, self.chunk_end(request, tokens), at=at)
        if computed + 1 == len(request.token_ids):
            return Work(request, 1, at=at)
        tokens = min(request.num_uncomputed_tokens, budget, self._replay_rows_left(len(request.token_ids)))
        return Work(request, tokens, replays=True) if tokens else None

    def _replay_rows_left(self, context: int) -> int:
        """Returns how many more tokens the step may replay, of a request of ``context`` tokens."""
        replays = [work for work in self.work if work.replays]
        if not replays:
            return max(1, min(REPLAY_ROWS, REPLAY_CONTEXT // context))
        rows = sum(work.num_tokens for work in replays)
        read = sum(work.num_tokens * len(work.request.token_ids) for work in replays)
        return max(0, min(REPLAY_ROWS - rows, (REPLAY_CONTEXT - read) // context))

    @property
    def chunks(self) -> list[Work]:
        """The chunks of prompts, the last one first."""
        return list(takewhile(lambda work: work.is_chunk, reversed(self.work)))

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of tokens in chunks of prompts."""
        return sum(work.num_tokens for work in self.chunks)

    @property
    def num_decoding(self) -> int:
        """Returns the number of rows of single tokens: of requests of which one is computed, and of their drafts."""
        return sum([1 + len(work.drafts) for work in self.work if work.num_tokens == 1])

    @property
    def context_tokens(self) -> int:
        """Returns the number of tokens that those rows' contexts have together."""
        works = [work for work in self.work if work.num_tokens == 1]
        return sum([(1 + len(work.drafts)) * (work.start + 1) for work in works])

    @property
    def prompt_context(self) -> float:
        """Returns the number of tokens of its prompt before a token's chunk, on average over the chunks' tokens."""
        chunks = [(work.num_tokens, work.start) for work in self.chunks]
        tokens = sum(tokens for tokens, _ in chunks)
        return sum(tokens * before for tokens, before in chunks) / tokens if tokens else 0.0

    @property
    def replays(self) -> bool:
        """Whether tokens of answers are replayed, so that the step's time is neither a prompt's nor a decode step's."""
        return True in [work.replays for work in self.work]

    @property
    def sampled_requests(self) -> list[Request]:
        """Returns the requests that get a token from this step, in the order of their rows of logits."""
        return [request for work in self.work for request in work.sampled_requests]


class SchedulerCounters(SchedulerCounts, kw_only=True):
    """What the scheduler counts, with its counts by source, by reason and by place."""

    prefills: dict[PrefillSource, int] = msgspec.field(default_factory=lambda: dict.fromkeys(PrefillSource, 0))
    prefills_failed: Counter[str] = msgspec.field(default_factory=Counter)
    """The prompts that were ordered from prefill nodes in vain, by why. Others may have computed them then."""
    accepted_drafts_by_place: Counter[int] = msgspec.field(default_factory=Counter)
    """The accepted drafts by their places among the drafts of a request in one step, from 0."""

    @property
    def accepted_drafts(self) -> int:
        return self.accepted_drafts_by_place.total()
