"""An engine whose steps wait instead of computing: ``python -m benchmarks.roles.paced_engine PACE``.

All else is the engine's own: scheduler, KV cache, transfers. So several engines on a few cores behave like engines with
a device each. Every token is the same, and no KV block has anything in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import msgspec
import torch

from benchmarks.roles.pace import Pace
from pdserve.engine.launched_step import StepRunner
from pdserve.engine.process import main
from pdserve.models.runner import Score, StepRow

_TOKEN_ID = 300
"""The token that every step generates: an ordinary one of every vocabulary that has so many."""


class PacedRunner:
    """A ``StepRunner`` around the model's, which it asks for the vocabulary's size and for nothing else."""

    def __init__(self, runner: StepRunner, pace: Pace) -> None:
        self._runner = runner
        self._pace = pace
        vocab_size = runner.run([StepRow([0], 0, [0], True)]).shape[-1]
        runner.clear([0])
        self._logits = torch.zeros(1, vocab_size)
        self._logits[0, min(_TOKEN_ID, vocab_size - 1)] = 100.0

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        decoding = sum(len(row.token_ids) == 1 for row in rows)
        prompt_tokens = sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1)
        time.sleep(self._pace.seconds(decoding, prompt_tokens))
        if score is not None:
            score(self._logits.expand(sum(len(row.scored) for row in rows), -1))
        return self._logits.expand(sum(row.wants_logits for row in rows), -1).clone()

    def clear(self, blocks: Sequence[int]) -> None:
        self._runner.clear(blocks)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._runner.copy_blocks(sources, destinations)


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Pace)
    sys.exit(main(lambda runner: PacedRunner(runner, given)))
