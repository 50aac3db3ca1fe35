"""Tests a real engine on a clock that only its steps move: prompts hold up streams for as long as the target says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype
from pdserve.engine import step_loop
from pdserve.engine.placement.latency_targets import LEAST_PROMPT_TOKENS
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner, Score, StepRow
from pdserve.wire.discovery import Role
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.placements import make_placement
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, engine
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.integration

NUM_BLOCKS = 256
BATCH_S = 0.004
ROW_S = 0.001
TOKEN_S = 0.0005


@dataclass(frozen=True)
class Step:
    rows: int
    prompt_tokens: int

    @property
    def decoding_s(self) -> float:
        return BATCH_S + self.rows * ROW_S if self.rows else 0.0

    @property
    def seconds(self) -> float:
        return self.decoding_s + self.prompt_tokens * TOKEN_S


@dataclass
class Clock:
    """Stands in for ``time`` in the step loop."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class SlowRunner:
    """A model whose steps take their time on the clock, and none of it on the machine."""

    runner: ModelRunner
    clock: Clock
    steps: list[Step] = field(default_factory=list)

    def run(self, rows: Sequence[StepRow], *, score: Score | None = None) -> torch.Tensor:
        sizes = [len(row.token_ids) for row in rows]
        step = Step(sizes.count(1), sum(size for size in sizes if size > 1))
        self.steps.append(step)
        self.clock.now += step.seconds
        return self.runner.run(rows, score=score)

    def clear(self, blocks: Sequence[int]) -> None:
        self.runner.clear(blocks)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self.runner.copy_blocks(sources, destinations)

    @property
    def shared(self) -> list[Step]:
        """The steps that computed prompts beside requests that decode."""
        return [step for step in self.steps if step.rows and step.prompt_tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def traffic(seed: int) -> list[tuple[list[int], SamplingParams, Sequence[int]]]:
    """Returns long answers to short prompts, and short answers to long prompts."""
    chance = random.Random(seed)

    def asked(length: int, max_tokens: int) -> tuple[list[int], SamplingParams, Sequence[int]]:
        tokens = chance.choices(range(3, VOCAB_SIZE), k=length)
        return tokens, SamplingParams(max_tokens=max_tokens, seed=chance.randrange(99), ignore_eos=True), ()

    return [asked(5, 90), asked(7, 90), *(asked(length, 3) for length in (90, 33, 34, 64, 100))]


def served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target_itl_ms: float, role: Role
) -> tuple[list[list[int]], list[Step]]:
    """Returns all answers, and the steps with prompts beside streams once the engine knows its steps."""
    clock = Clock()
    monkeypatch.setattr(step_loop, "time", clock)
    model = ModelRunner(
        folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, TorchKernels()
    )
    runner = SlowRunner(model, clock)
    placement = make_placement(BLOCK_SIZE, target_itl_ms=target_itl_ms, role=role)
    with engine(
        folder, False, NUM_BLOCKS, several_ranks=runner, own_runner=model, prefix_cache=False, placement=placement
    ) as client:
        first = client.together(traffic(1))
        runner.steps.clear()
        second = client.together(traffic(2))
    return [answer.tokens for answer in (*first.values(), *second.values())], runner.shared


@pytest.fixture(scope="module")
def unbounded(folder: Path) -> tuple[list[list[int]], list[Step]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return served(folder, monkeypatch, 0.0, Role.PREFILL)


def test_a_prefill_node_without_a_target_takes_prompts_in_chunks_of_full_length(
    unbounded: tuple[list[list[int]], list[Step]],
) -> None:
    _, shared = unbounded
    # The test's engine computes 16 tokens a step.
    assert max(step.rows + step.prompt_tokens for step in shared) == 16


@pytest.mark.parametrize("role", [Role.MIXED, Role.DECODE])
def test_steps_beside_streams_keep_the_target_and_give_the_same_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, role: Role, unbounded: tuple[list[list[int]], list[Step]]
) -> None:
    target_s = 0.011
    answers, shared = served(folder, monkeypatch, target_s * 1000, role)
    assert answers == unbounded[0]
    assert len(shared) > 20
    # The first of them after other steps are no better than what was known of them.
    for step in shared[8:]:
        assert step.prompt_tokens <= LEAST_PROMPT_TOKENS or step.seconds <= target_s * 1.15, shared
    assert max(step.prompt_tokens for step in shared) > LEAST_PROMPT_TOKENS, "no more is computed than has to be"


def test_a_decode_node_keeps_a_target_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unbounded: tuple[list[list[int]], list[Step]]
) -> None:
    answers, shared = served(folder, monkeypatch, 0.0, Role.DECODE)
    assert answers == unbounded[0]
    assert len(shared) > 20
    for step in shared[8:]:
        assert step.prompt_tokens <= LEAST_PROMPT_TOKENS or step.seconds <= 2.4 * step.decoding_s
    assert max(step.prompt_tokens for step in shared) > LEAST_PROMPT_TOKENS, "no more is computed than has to be"
