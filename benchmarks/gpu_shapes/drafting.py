"""Steps with drafts, of which a fake drafter says how many are right."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.bench.engine.benchmark import Bench
from pdserve.bench.engine.parts import seconds_of
from pdserve.bench.engine.subject import Steps, Subject
from pdserve.bench.report import Better, Figure, Row, Unit
from pdserve.models.runner import StepRow

_GROWS = 64
"""The context of a request grows by so many tokens, and more than one step gives, before it begins again."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The steps with drafts that are timed."""

    requests: Sequence[int]
    rows: Sequence[int]
    """The numbers of rows of each request: one of them is for no draft."""
    context: int
    acceptances: Sequence[float]
    """The shares of right drafts among those behind right ones."""

    @property
    def longest(self) -> int:
        """The most tokens of a request, with its drafts."""
        return self.context + max(self.rows) + _GROWS

    def beside(self, steps: Steps) -> Steps:
        """Returns steps for the largest of which, and of these, there is room where there is for ``steps``."""
        return Steps(
            (*steps.batches, *self.requests),
            (*steps.contexts, self.longest),
            steps.chunks,
            max(self.requests) * max(self.rows),
        )


class FakeDrafter:
    """Drafts for requests, and says how many of a request's drafts are right, whatever the model's tokens are.

    A request begins again at the first context once its blocks are full, so that contexts stay about as long.
    """

    def __init__(self, subject: Subject, requests: int, rows: int, drafting: Drafting, acceptance: float) -> None:
        """Each request has ``rows`` in a step, all but one for drafts, right with the chance ``acceptance`` each."""
        self._subject, self._rows, self._acceptance = subject, rows, acceptance
        self._first, self._longest = drafting.context - 1, drafting.longest
        self._starts = [self._first] * requests
        self._chance = random.Random(requests * rows)  # noqa: S311  # no secret

    def step(self) -> list[StepRow]:
        """Returns the rows of the next step, those of a request one after the other."""
        return self._subject.draft_rows(self._starts, self._rows, self._longest)

    def accept(self) -> int:
        """Returns how many tokens the step gives. Each request goes on behind its own."""
        given = 0
        for request, start in enumerate(self._starts):
            tokens = 1
            while tokens < self._rows and self._chance.random() < self._acceptance:
                tokens += 1
            given += tokens
            start += tokens
            self._starts[request] = start if start + self._rows <= self._longest else self._first
        return given


def draft_rows(bench: Bench, drafting: Drafting) -> Iterator[Row]:
    """Yields a row for each number of requests, of rows and each acceptance, beside steps without drafts."""
    subject, budget_s = bench.subject, bench.budget_s
    for requests in drafting.requests:
        plain_s, _ = _measured(FakeDrafter(subject, requests, 1, drafting, 0.0), subject, budget_s)
        # All rows of a request read the same keys and values.
        kv_bytes = requests * subject.kv_bytes(drafting.context)
        for rows in drafting.rows:
            least_s = (bench.weight_bytes(requests * rows) + kv_bytes) / bench.hardware.copy_bytes_per_s
            for acceptance in drafting.acceptances:
                drafter = FakeDrafter(subject, requests, rows, drafting, acceptance)
                step_s, given = _measured(drafter, subject, budget_s)
                figures = (
                    Figure("step", step_s * 1e3, Unit.MS, Better.LOWER),
                    Figure("step : least", step_s / least_s, Unit.RATIO, Better.LOWER),
                    Figure("step : without drafts", step_s / plain_s, Unit.RATIO, Better.LOWER),
                    Figure("tokens a step", given / requests, Unit.RATIO, Better.HIGHER),
                    Figure("TPOT : without drafts", step_s / plain_s * requests / given, Unit.RATIO, Better.LOWER),
                )
                at: dict[str, int | str] = {
                    "model": subject.name,
                    "requests": requests,
                    "rows of each": rows,
                    "context": drafting.context,
                    "accepted": f"{acceptance:g}",
                }
                yield Row("step with drafts", at, figures)


def _measured(drafter: FakeDrafter, subject: Subject, budget_s: float) -> tuple[float, float]:
    """Returns the median time of a step with the choice of its tokens, and the mean number of tokens that it gives."""
    given: list[int] = []

    def step() -> None:
        # The list is there when the device has done all of the step.
        subject.runner.run(drafter.step()).argmax(dim=-1).tolist()
        given.append(drafter.accept())

    seconds = seconds_of(step, subject.device, budget_s)
    return seconds, statistics.mean(given)
