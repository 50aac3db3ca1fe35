"""The requests of ``benchmarks goodput``: their shapes, and the loads in which they come."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.settings import WorkloadConfig
from benchmarks.workload import Arrival, mixed_jobs
from pdserve.bench.load import Job, uniform_jobs

MIX = "mix"


class Loop(enum.Enum):
    """What decides when the next request comes."""

    CLOSED = "closed loop"
    """A client's next request comes when its last one is answered."""
    OPEN = "open loop"
    """Requests come at a rate, whatever the server does."""


class Tightness(enum.Enum):
    """How far from a step without other load the ITL target is."""

    TIGHT = "tight"
    LOOSE = "loose"


TOLD = "told"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load on requests of one shape."""

    shape: str
    loop: Loop
    amount: int
    """The number of clients, or the rate in percent of the first system's."""
    rate: float = float("nan")
    """The requests a second of an open loop."""
    told: Tightness | None = None
    """The targets that the requests name; None if the systems do not know by what they are measured."""

    @property
    def at(self) -> dict[str, int | str]:
        """The conditions of the point's rows."""
        load: dict[str, int | str] = {"clients" if self.loop is Loop.CLOSED else "rate %": self.amount}
        told: dict[str, int | str] = {} if self.told is None else {TOLD: self.told.value}
        return {"shape": self.shape, **load, **told}

    @property
    def measured_by(self) -> tuple[Tightness, ...]:
        """The targets that say which of the point's answers are good."""
        return tuple(Tightness) if self.told is None else (self.told,)


def shape_jobs(shape: str, workload: WorkloadConfig, count: int, seed: str) -> list[Job]:
    """Returns requests of ``shape``: ``PROMPT/ANSWER`` in tokens, or ``mix``, whose lengths ``workload`` bounds."""
    seed = f"goodput:{workload.seed}:{shape}:{seed}"
    if shape == MIX:
        return mixed_jobs(workload, count, seed)
    prompt_tokens, output_tokens = map(int, shape.split("/"))
    return uniform_jobs(count, prompt_tokens, output_tokens, workload.vocab_size, seed)


def jobs_until(
    shape: str, workload: WorkloadConfig, seconds: float, seed: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[Job]:
    """Yields requests of ``shape`` for so many seconds from the first one on."""
    end_s = clock() + seconds
    number = 0
    while number == 0 or clock() < end_s:
        yield from shape_jobs(shape, workload, 1, f"{seed}:{number}")
        number += 1


def poisson_arrivals(shape: str, workload: WorkloadConfig, rate: float, seconds: float, seed: str) -> list[Arrival]:
    """Returns requests that come independently of each other: a Poisson process, given how many it brings.

    The number is the one that ``rate`` has in the mean, so that two runs at one rate have the same load.
    """
    count = max(1, round(rate * seconds))
    source = random.Random(f"goodput:{workload.seed}:{seed}")  # noqa: S311  # the times must be repeatable, not secret
    times = sorted(source.uniform(0.0, seconds) for _ in range(count))
    return [Arrival(at_s, job) for at_s, job in zip(times, shape_jobs(shape, workload, count, seed), strict=True)]
