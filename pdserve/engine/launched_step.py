"""Launches a step, whose tokens are read later, on one process's runner or on that of several.

One step may be launched *ahead*, before the tokens of the one before it are known: requests of that one decode on with
tokens that are on the device only. Meanwhile a request's state is that of the tokens that are known. A request that
turns out to have ended leaves a surplus row or chunk, whose token is dropped. What that stored is in blocks that the
prefix cache does not find, and that their next holder writes over later. The same holds of a request whose grammar
refuses the token with which it went on: the right token takes the place of what was stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch

from pdserve.engine.request import Request, Status
from pdserve.engine.sampling.logprobs import PendingScores, ScoredTokens
from pdserve.engine.sampling.pending_tokens import (
    KNOWN,
    DraftTokens,
    HostTokens,
    PendingTokens,
    can_sample_on_device,
    sample_later,
)
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.scheduling.batch_plan import BatchPlan, Work
from pdserve.models.drafting import Choose, likeliest
from pdserve.models.runner import ComputedRows, DraftRow, Score, StepRow
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken
from pdserve_kernels.host_copies import to_device


class StepRunner(Protocol):
    """What a step needs of a runner: a ``ModelRunner`` alone, or a ``TpRunner`` with the other ranks behind it."""

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        """Computes every row's tokens into the KV cache; single-token rows come first.

        ``score`` is given the logits after the rows' ``scored`` tokens, in their order and in pieces.

        Returns fp32 logits ``[number of rows with wants_logits, vocab_size]``, in the order of the rows.
        """

    def clear(self, blocks: Sequence[int]) -> None:
        """Zeroes these blocks."""

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copies whole blocks. All sources are read before any destination is written."""


class DraftRunner(Protocol):
    """What drafts need of a runner: a ``ModelRunner`` that has the layer for it, or a ``TpRunner`` with such ones."""

    def draft(self, rows: Sequence[DraftRow], count: int, choose: Choose = likeliest) -> list[list[int]]:
        """Drafts up to ``count`` tokens behind each row of the last step that wants some. Waits for a GPU."""


class AheadRunner(Protocol):
    """What a step launched ahead needs of a runner: it takes tokens that are on its device only.

    Only ``ModelRunner`` does, because other ranks get their tokens from the host.
    """

    def run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Computes rows as a ``StepRunner`` does, with ``tokens`` in place of those of the first rows.

        Does not wait for a GPU.
        """


class AheadDrafter(Protocol):
    """What drafts need of the runner of steps that are launched ahead, if the model drafts: a ``ModelRunner``."""

    def complete(
        self, rows: Sequence[DraftRow], tokens: torch.Tensor | None = None, of: ComputedRows | None = None
    ) -> None:
        """Has the layer that drafts see the next tokens of rows of the last step, or of one that was ``kept``.

        ``tokens`` take the place of the last next tokens of the first rows. Does not wait for a GPU.
        """

    def kept(self) -> ComputedRows:
        """Returns what ``complete`` needs of the last step once another one was computed."""


_UNKNOWN = 0
"""This id stands for a token that is on the device only."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tokens are not read yet."""

    plan: BatchPlan
    requests: Sequence[Request]
    """The plan's ``sampled_requests``."""
    rows: Sequence[int]
    """Their rows of ``pending``."""
    pending: PendingTokens
    scores: PendingScores | None = None
    """The log probabilities of prompts' tokens; None if the step computes none."""
    drafts: DraftTokens | None = None
    """The tokens after drafts; None if the step has none."""
    starts: Sequence[int] = ()
    """The position of the first token of each work of the plan."""
    firsts: Sequence[int] = ()
    """The first row of each work of the plan among those that the runner was given."""

    def scored(self) -> list[tuple[Request, PromptLogprobs]]:
        """Returns the log probabilities that the step gives of requests' prompts. Waits for a GPU."""
        if self.scores is None:
            return []
        requests = [work.request for work in self.plan.work if work.scored_tokens]
        return list(zip(requests, self.scores.read(), strict=True))

    def read(self) -> list[SampledToken | None]:
        """Returns what ``Scheduler.postprocess`` takes. Waits for a GPU."""
        if self.drafts is None:
            return self.pending.read(self.rows)
        sampled = self.pending.read()
        self.drafts.take(sampled[len(self.rows) :])
        return sampled[: len(self.rows)]


Tables: TypeAlias = Mapping[Request, Sequence[int]]
"""The blocks of requests."""


def tables_of_prompts(step: LaunchedStep) -> Tables:
    """Returns the blocks of the requests whose prompts end with a step that is computed.

    An answer may end with the step, too. The prefix cache can find its blocks then, which nobody holds or takes before
    the next step.
    """
    return {
        work.request: tuple(work.request.block_table)
        for work, start in zip(step.plan.work, step.starts, strict=True)
        if start + work.num_tokens == work.request.num_prompt_tokens
    }


def known_rows(step: LaunchedStep, wanting: Set[Request], tables: Tables) -> list[tuple[Request, DraftRow]]:
    """Returns the step's rows of which next tokens are known by now, in their order, each with its request.

    ``wanting`` are the requests for which the model is to draft more. ``tables`` has blocks of requests that may have
    ended since.
    """
    found = list[tuple[Request, DraftRow]]()
    for work, start, first in zip(step.plan.work, step.starts, step.firsts, strict=True):
        request, tokens = work.request, work.request.token_ids
        together = work.num_tokens if work.is_chunk else 1
        for row, at in enumerate(range(start, start + work.num_rows, together), first):
            known = tokens[at + 1 : at + 1 + together]
            # A request that has ended has blocks of its own only while its children wait for them.
            table = None if request.block_table or not request.ended else tables.get(request)
            if known and (request.block_table or table):
                wanted = request in wanting and at + len(known) == len(tokens) - 1
                found.append((request, DraftRow(row, known, wanted, table)))
    return found


def complete_ahead(runner: AheadDrafter, step: LaunchedStep, before: UnderWay) -> None:
    """Has the layer that drafts see the next tokens of a step, ``before``, whose tokens are on the device only.

    Those that are sampled when they are read, or that a grammar refuses, follow then (``complete_late``).
    """
    late, on_device = before.pending.late, list[tuple[Request, DraftRow]]()
    known = list[DraftRow]()
    # Beside replays and drafts, no step is launched ahead: each work is one row.
    for work, start, row in zip(step.plan.work, step.starts, step.firsts, strict=True):
        request, end = work.request, start + work.num_tokens
        tokens = request.token_ids[start + 1 : end + 1]
        if len(tokens) == work.num_tokens:
            known.append(DraftRow(row, tokens, wanted=False))
        elif request in before.rows and before.rows[request] not in late:
            on_device.append((request, DraftRow(row, [*tokens, _UNKNOWN], wanted=False)))
    if late or any(request.sampling.grammar is not None for request in before.rows):
        before.kept = runner.kept()
    runner.complete([*(row for _, row in on_device), *known], before.tokens([request for request, _ in on_device]))


def complete_late(runner: AheadDrafter, step: LaunchedStep, before: UnderWay, tables: Tables) -> None:
    """Does the same for tokens that another step was launched without, now that they are known.

    ``tables`` are those of ``known_rows``.
    """
    if before.kept is None:
        return
    rows = {*before.pending.late, *before.pending.refused}
    found = [row for request, row in known_rows(step, frozenset(), tables) if before.rows.get(request) in rows]
    if found:
        runner.complete(found, of=before.kept)


@dataclass(slots=True)
class UnderWay:
    """The tokens of a step, as far as the step after it can take them before they are known."""

    pending: PendingTokens
    rows: Mapping[Request, int]
    """The row of ``pending`` of each request that gets a token."""
    next_rows: dict[Request, SamplingRow] = field(default_factory=dict)
    """What the tokens after these are sampled by, of the requests that can follow."""
    kept: ComputedRows | None = None
    """The step, if it has to be completed once its tokens are known, for the layer that drafts."""

    @classmethod
    def of(cls, step: LaunchedStep) -> UnderWay:
        return cls(step.pending, dict(zip(step.requests, step.rows, strict=True)))

    def can_follow(self, request: Request) -> bool:
        """Returns whether a request that gets a token here can have its next one sampled before this one is known."""
        row, late = SamplingRow.after_unknown(request), self.pending.late
        if (late and self.rows[request] in late) or not can_sample_on_device(row):
            return False
        self.next_rows[request] = row
        return True

    def tokens(self, requests: Sequence[Request]) -> torch.Tensor | None:
        """Returns the tokens of requests that can follow, int64 ``[requests]`` on the device; None without any."""
        tokens = self.pending.tokens
        if tokens is None or not requests:
            return None
        places = self.pending.places([self.rows[request] for request in requests])
        if places == list(range(len(tokens))):
            return tokens
        (index,) = to_device([places], tokens.device)
        return tokens.index_select(0, index.long())


@dataclass(frozen=True, slots=True)
class StepAhead:
    """A step that was launched before the tokens of the one before it were known."""

    step: LaunchedStep
    before: UnderWay

    def joined(self) -> LaunchedStep:
        """Returns what is left of the step, once the tokens of the step before are known.

        A request that has ended is left out, and one that did not get the token with which it was launched. That one is
        in a later step, with the right token.
        """
        step, refused, rows_before = self.step, self.before.pending.refused, self.before.rows
        going = [
            number
            for number, work in enumerate(step.plan.work)
            if goes_on(work) and not (refused and rows_before.get(work.request) in refused)
        ]
        works = [step.plan.work[number] for number in going]
        plan = BatchPlan([Work(work.request, work.num_tokens) for work in works])
        if len(works) == len(step.plan.work) == step.plan.num_following:
            return replace(step, plan=plan)
        requests, row_of = plan.sampled_requests, dict(zip(step.requests, step.rows, strict=True))
        return replace(
            step,
            plan=plan,
            requests=requests,
            rows=[row_of[request] for request in requests],
            starts=[step.starts[number] for number in going],
            firsts=[step.firsts[number] for number in going],
        )


def goes_on(work: Work) -> bool:
    """Returns whether the request of work that was planned ahead is where the work begins, and has not ended."""
    request = work.request
    here = request.status is Status.RUNNING and (work.at is None or request.num_computed_tokens == work.at)
    return here and (not request.ended or bool(request.children))


def decodes_on(request: Request) -> bool:
    """Returns whether a request that was decoding has not ended."""
    return request.status is Status.RUNNING and not request.ended


def launch(runner: StepRunner, plan: BatchPlan, eos_token_ids: Set[int], on_device: bool) -> LaunchedStep:
    """Computes a plan's work and samples its tokens: ``on_device``, if that can be done, for a step launched ahead."""
    sampled = [work.sampled_requests for work in plan.work]
    steps = [row for work, requests in zip(plan.work, sampled, strict=True) for row in step_rows(work, bool(requests))]
    scores = _pending_scores(plan)
    computed = runner.run(steps) if scores is None else runner.run(steps, score=scores.add)
    # Children are sampled from the same logits as their parent. Those after drafts follow.
    counts = [1 + len(work.drafts) if requests else 0 for work, requests in zip(plan.work, sampled, strict=True)]
    places = list(accumulate(counts, initial=0))
    sources = [place for place, members in zip(places, sampled, strict=False) for _ in members]
    requests = [request for members in sampled for request in members]
    rows = [SamplingRow.of(request) for request in requests]
    drafted = {
        work.request: range(place + 1, place + 1 + len(work.drafts))
        for work, place in zip(plan.work, places, strict=False)
        if work.drafts
    }
    drafts = DraftTokens(computed, drafted, eos_token_ids, on_device=on_device) if drafted else None
    for request, after in drafts.at_once if drafts is not None else ():
        rows += [SamplingRow.after_unknown(request, number) for number in range(1, len(after) + 1)]
        sources += after
    sampling = sample_later if on_device else HostTokens
    pending = sampling(computed, rows, sources, eos_token_ids)
    starts = [work.request.num_computed_tokens for work in plan.work]
    firsts = list(accumulate((1 if work.is_chunk else work.num_rows for work in plan.work[:-1]), initial=0))
    return LaunchedStep(plan, requests, range(len(requests)), pending, scores, drafts, starts, firsts)


def launch_ahead(runner: AheadRunner, plan: BatchPlan, before: UnderWay, eos_token_ids: Set[int]) -> StepAhead:
    """Computes work that was planned ahead of the tokens of the step ``before``, and samples its tokens."""
    count = plan.num_following
    followed, others = [work.request for work in plan.work[:count]], plan.work[count:]
    sampled = [work.sampled_requests for work in others]
    steps = [
        StepRow([_UNKNOWN], len(request.token_ids), request.block_table, True, others=request.block_table.row_tables())
        for request in followed
    ]
    steps += [row for work, requests in zip(others, sampled, strict=True) for row in step_rows(work, bool(requests))]
    tokens = before.tokens(followed)
    before.pending.keep()
    computed = runner.run(steps, tokens)
    places = accumulate([bool(requests) for requests in sampled], initial=count)
    behind = [place for place, requests in zip(places, sampled, strict=False) for _ in requests]
    joining = [request for requests in sampled for request in requests]
    rows = [before.next_rows[request] for request in followed] + [SamplingRow.of(request) for request in joining]
    last = tokens
    if tokens is not None and joining:
        last = torch.cat([tokens, tokens.new_full((len(joining),), KNOWN)])
    pending = sample_later(computed, rows, [*range(count), *behind], eos_token_ids, last, certain=count)
    starts = [work.start for work in plan.work]
    step = LaunchedStep(
        plan, followed + joining, range(len(rows)), pending, starts=starts, firsts=range(len(plan.work))
    )
    return StepAhead(step, before)


def step_rows(work: Work, wants_logits: bool) -> list[StepRow]:
    """Returns the rows of one work: a row for each token that is replayed, and for each draft; otherwise one row."""
    request, start = work.request, work.start
    end, table = start + work.num_tokens, work.request.block_table
    if not work.replays and not work.drafts:
        scored = work.scored_tokens
        places = range(scored.start - 1 - start, scored.stop - 1 - start) if scored else scored
        return [StepRow(request.token_ids[start:end], start, table, wants_logits, places, table.row_tables())]
    tokens = [*request.token_ids[start:end], *work.drafts]
    return [
        StepRow([token], at, table, wants_logits and at >= end - 1, others=table.row_tables(at - start))
        for at, token in enumerate(tokens, start)
    ]


def _pending_scores(plan: BatchPlan) -> PendingScores | None:
    spans = [
        ScoredTokens(work.request.token_ids[tokens.start : tokens.stop], work.request.sampling.prompt_logprobs or 0)
        for work in plan.work
        if (tokens := work.scored_tokens)
    ]
    return PendingScores(spans) if spans else None
