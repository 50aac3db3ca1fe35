"""What ``pdserve bench load`` sends: sessions, whose turns come one after the other, and when each begins."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from pdserve.bench.load import Job, uniform_jobs
from pdserve.bench_config import LoadConfig

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    job: Job
    think_s: float = 0.0
    """The turn comes so long after the end of the answer before."""
    at_s: float = 0.0
    """The turn does not come before this time, in seconds from the beginning of the run."""
    continues: bool = False
    """Whether the job's messages are new ones, which follow those of the turns before and the answers to them."""

    def after(self, said: tuple[Message, ...]) -> Job:
        """Returns the request of this turn, where ``said`` are the messages and answers so far."""
        return replace(self.job, messages=(*said, *self.job.messages)) if self.continues else self.job


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of which each waits for the answer to the one before. Most have one turn."""

    turns: Iterable[Turn]
    at_s: float = field(default=0.0)
    """When its first turn comes, in seconds from the beginning; 0 where the load decides it."""


def random_sessions(load: LoadConfig, count: int, seed: str) -> Iterator[Session]:
    """Yields ``count`` requests of random prompts, which are made one by one."""
    for number in range(count):
        (job,) = uniform_jobs(1, load.prompt_tokens, load.output_tokens, load.vocab_size, f"{seed}:{number}")
        yield Session((Turn(job),))


def at_rate(sessions: Iterable[Session], rate: float, burstiness: float, seed: str) -> Iterator[Session]:
    """Yields ``sessions`` with new times: ``rate`` begin in a second, in the mean.

    The times between two are drawn from a gamma distribution of the shape ``burstiness``, as in vLLM's benchmark: 1 is
    a Poisson process, less brings requests in bursts, and more brings them evenly.
    """
    source = random.Random(seed)  # noqa: S311  # the times must be repeatable, not secret
    at_s = 0.0
    for session in sessions:
        yield replace(session, at_s=at_s)
        at_s += source.gammavariate(burstiness, 1 / (rate * burstiness))
