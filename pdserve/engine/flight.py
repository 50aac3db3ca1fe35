"""A step that was launched and whose tokens were not read yet.

One may be launched *ahead*, before the tokens of the one before it are known: it decodes on with the requests of that
one, whose tokens it takes on the device. Meanwhile a request's state is that of the tokens that are known. A request
that turns out to have ended leaves a surplus row: what it stored is in a block that is not full, which nobody finds,
and whoever gets that block writes to it later; its token is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from pdserve.engine.choice import Choice, DeviceChoice, HostChoice, on_device
from pdserve.engine.plan import Plan, Work
from pdserve.engine.request import Request, Status
from pdserve.engine.sampling_row import SamplingRow
from pdserve.engine.step_runner import AheadRunner, StepRunner
from pdserve.models.step_batch import StepRow
from pdserve.wire.sampling import SampledToken
from pdserve_kernels.staging import stage

_UNKNOWN = 0
"""Stands for a token that is on the device only."""


@dataclass(frozen=True, slots=True)
class Flight:
    """``places`` are the rows of ``choice`` that are for the plan's choosers."""

    plan: Plan
    places: Sequence[int]
    choice: Choice

    def read(self) -> list[tuple[SampledToken] | None]:
        """What ``Scheduler.advance`` takes. Waits for a GPU."""
        tokens = self.choice.read()
        chosen = (tokens[place] for place in self.places)
        return [None if token is None else (token,) for token in chosen]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A flight launched ahead; ``requests`` has one for each row."""

    requests: Sequence[Request]
    choice: Choice

    def joined(self) -> Flight:
        """The flight, once the tokens of the one before are known: without the requests that have ended."""
        places = [place for place, request in enumerate(self.requests) if decodes_on(request)]
        return Flight(Plan([Work(self.requests[place], 1) for place in places]), places, self.choice)


def decodes_on(request: Request) -> bool:
    """Whether a request that was decoding has not ended."""
    return request.status is Status.RUNNING and not request.ended


def launch(runner: StepRunner, plan: Plan, eos_token_ids: Set[int], to_be_followed: bool) -> Flight:
    """Compute a plan's work and choose its tokens: on the device if they are ``to_be_followed`` there and can be."""
    rows = []
    for work in plan.work:
        request, start = work.request, work.request.num_computed_tokens
        new = request.token_ids[start : start + work.num_tokens]
        rows.append(StepRow(new, start, request.block_table, work.wants_token))
    logits = _logits_of_choosers(runner.run(rows), plan)
    choosers = [SamplingRow.of(request) for request in plan.choosers]
    choice: Choice
    if to_be_followed and all(on_device(row) for row in choosers):
        choice = DeviceChoice(logits, choosers)
    else:
        choice = HostChoice(logits, choosers, eos_token_ids)
    return Flight(plan, range(len(choosers)), choice)


def launch_ahead(runner: AheadRunner, flight: Flight, requests: Sequence[Request]) -> Ahead | None:
    """Decode on with ``requests``, of those in ``flight``, whose tokens are not known yet.

    None if their tokens are not on the device, or if one of them cannot be sampled before its last token is known.
    """
    tokens, rows = flight.choice.tokens, [SamplingRow.after_unknown(request) for request in requests]
    if tokens is None or not all(on_device(row) for row in rows):
        return None
    steps = [StepRow([_UNKNOWN], len(request.token_ids), request.block_table, True) for request in requests]
    place_of = dict(zip(flight.plan.choosers, flight.places, strict=True))
    places = [place_of[request] for request in requests]
    if places != list(range(len(tokens))):
        tokens = tokens.index_select(0, stage([places], tokens.device)[0].long())
    return Ahead(requests, DeviceChoice(runner.run(steps, tokens), rows))


def _logits_of_choosers(logits: torch.Tensor, plan: Plan) -> torch.Tensor:
    """A row for each chooser, from one for each work that wants a token: siblings choose by the same logits."""
    wanting = [work for work in plan.work if work.wants_token]
    rows = [row for row, work in enumerate(wanting) for _ in work.choosers]
    # Nearly always it is so already, and a copy of all logits takes milliseconds.
    return logits if rows == list(range(len(logits))) else logits[rows]
