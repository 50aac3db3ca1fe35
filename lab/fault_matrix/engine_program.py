"""A real engine whose steps a test can hold, and which some requests end: ``python -m … FOLDER NAME [DRAFTS]``.

A prompt with ``HOLD`` in it holds the engine in the step that computes this token, as long as the folder has a file
``closed``, and so does every decode step at one of ``HELD_POSITIONS``. A file ``held-NAME`` says that the engine is
held. A prompt with ``POISON`` ends the engine in the step that computes this token, and so does every decode step at
the position ``POISONED_POSITION``: one that few contexts reach. With a third argument it drafts as much as it may.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.engine.process import main

if TYPE_CHECKING:
    # An engine imports torch late, and without a part of it.
    import torch

    from pdserve.engine.launched_step import StepRunner
    from pdserve.models.runner import Score, StepRow

HOLD, POISON = 5, 6
POISONED_POSITION = 1010
HELD_POSITIONS = (909, 1000)
"""Some tokens behind the prompts whose answers the tests hold."""
CLOSED = "closed"
HELD_AT_MOST_S = 60.0
DECODE_STEP_S = 0.008


class GovernedRunner:
    """A ``StepRunner`` around the model's."""

    def __init__(self, runner: StepRunner, folder: Path, name: str) -> None:
        self._runner = runner
        self._folder = folder
        self._held = folder / f"held-{name}"

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        if any(_is_held(row) for row in rows):
            self._wait()
        if any(_is_poisoned(row) for row in rows):
            os.kill(_victim(), signal.SIGKILL)
        if all(len(row.token_ids) == 1 for row in rows):
            time.sleep(DECODE_STEP_S)
        return self._runner.run(rows, score=score)

    def clear(self, blocks: Sequence[int]) -> None:
        self._runner.clear(blocks)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._runner.copy_blocks(sources, destinations)

    def _wait(self) -> None:
        closed, until = self._folder / CLOSED, time.monotonic() + HELD_AT_MOST_S
        while closed.exists() and time.monotonic() < until:
            self._held.touch()
            time.sleep(0.002)


def _is_held(row: StepRow) -> bool:
    decoding = len(row.token_ids) == 1
    return HOLD in row.token_ids or (decoding and row.start in HELD_POSITIONS)


def _is_poisoned(row: StepRow) -> bool:
    decoding = len(row.token_ids) == 1
    return row.start == POISONED_POSITION if decoding else POISON in row.token_ids


def _victim() -> int:
    """Returns the process that the poison ends: the other rank of the two, or else the engine itself."""
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    if not children:
        return os.getpid()
    (rank,) = children
    return rank


if __name__ == "__main__":
    folder, name, *drafts = sys.argv[1:]

    def governed(runner: StepRunner) -> StepRunner:
        if drafts:
            from tests.cluster.drafting_node import drafting_always

            runner = drafting_always(runner)
        return GovernedRunner(runner, Path(folder), name)

    sys.exit(main(governed))
