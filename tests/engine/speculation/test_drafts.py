"""Tests that drafts change no answer, whatever is asked for and however many of them are right."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import Dtype, SchedulerConfig, Speculate
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.engine.speculation import speculation
from pdserve.engine.speculation.guesses import OwnText
from pdserve.engine.speculation.speculation import Speculation
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.layer_groups import layer_groups
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.settings import cache_folder
from pdserve.wire.engine import EngineStats
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels, CompiledLinear
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.test_replay import FEATURES
from tests.engine.test_step_loop import BLOCK_SIZE, MAX_LEN, Answer, engine, prompt
from tests.models.tiny_families import save_tiny
from tests.nightly import nightly
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration  # for the seconds that it takes

OFF = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=96, speculation=Speculate.OFF)
ON = replace(OFF, speculation=Speculate.NGRAM, draft_tokens=5)
NUM_BLOCKS = 160
FEW_BLOCKS = 64

Asked = list[tuple[Sequence[int], SamplingParams, Sequence[int]]]


class Oracle(OwnText):
    """Guesses by what the right answers are, with mistakes."""

    right: Sequence[Sequence[int]] = ()
    mistakes = random.Random(0)
    share = 0.0

    def read(self, tokens: Sequence[int], num_prompt_tokens: int, most: int) -> int:
        self.matched = 16
        return 0

    def guesses(self, tokens: Sequence[int], count: int) -> list[int]:
        known = next((text for text in self.right if list(text[: len(tokens)]) == list(tokens)), tokens)
        guessed = list(known[len(tokens) : len(tokens) + count])
        return [token if self.mistakes.random() >= self.share else (token + 1) % 250 for token in guessed]


def as_many_as_there_are(
    self: Speculation, guessed: Sequence[speculation._Guessed], plan: BatchPlan, budget: object
) -> list[int]:
    return [len(each.chances) for each in guessed]


def force(monkeypatch: pytest.MonkeyPatch, right: Sequence[Sequence[int]], share: float) -> None:
    """Has each step check as many drafts as it may, of which a ``share`` is wrong."""
    monkeypatch.setattr(Oracle, "right", right)
    monkeypatch.setattr(Oracle, "share", share)
    monkeypatch.setattr(Oracle, "mistakes", random.Random(int(10 * share)))
    monkeypatch.setattr(speculation, "OwnText", Oracle)
    monkeypatch.setattr(Speculation, "_counts", as_many_as_there_are)


@pytest.fixture(
    scope="module",
    params=["llama", "ministral", "qwen3-5", "deepseek-v3", nightly("deepseek-v4"), nightly("qwen4-exp")],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of whole contexts, and ones with windows, states, latents, entries, and chosen blocks with n-grams."""
    into = tmp_path_factory.mktemp("model")
    return save_tiny_model("llama", into) if request.param == "llama" else save_tiny(request.param, into)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Answer]:
    """What the model answers to ``asked_together`` without drafts."""
    return answered(folder, asked_together(), OFF)[0]


def asked_together() -> Asked:
    """Requests with each feature, some of them with several answers."""
    return [
        (
            prompt(5 + 2 * number),
            SamplingParams(**{"max_tokens": 24, "seed": number} | more),
            range(90, 90 + number % 3),
        )
        for number, more in enumerate(FEATURES.values())
    ]


def texts(asked: Asked, answers: Sequence[Answer]) -> list[list[int]]:
    """Returns prompt and answer of each answer."""
    prompts = [tokens for tokens, _, seeds in asked for _ in range(1 + len(seeds))]
    return [[*tokens, *answer.tokens] for tokens, answer in zip(prompts, answers, strict=True)]


def answered(
    folder: Path,
    asked: Asked,
    scheduler: SchedulerConfig,
    overlap: bool = False,
    runner: ModelRunner | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> tuple[list[Answer], EngineStats]:
    with engine(folder, overlap, num_blocks, scheduler=scheduler, own_runner=runner) as client:
        answers = list(client.together(asked).values())
        return answers, client.stats_asked_for(1)


def check_same(got: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    for mine, plain in zip(got, wanted, strict=True):
        assert (mine.tokens, mine.end.finish, mine.end.error) == (plain.tokens, plain.end.finish, plain.end.error)
        assert len(mine.logprobs) == len(plain.logprobs)
        for one, other in zip(mine.logprobs, plain.logprobs, strict=True):
            # Sums of the torch set depend on the number of rows.
            assert one.chosen == pytest.approx(other.chosen, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("share", "overlap"),
    # In every run, ``test_a_wrong_draft_that_is_not_finite_leaves_nothing_behind`` has wrong drafts alone, and the test
    # of preempted answers has right and wrong ones in steps that are not launched ahead.
    [(0.0, True), (0.3, True), *(nightly(share, False) for share in (0.0, 0.3, 1.0)), nightly(1.0, True)],
)
def test_drafts_change_no_answer(
    folder: Path, plain: list[Answer], monkeypatch: pytest.MonkeyPatch, share: float, overlap: bool
) -> None:
    asked = asked_together()
    force(monkeypatch, texts(asked, plain), share)
    got, stats = answered(folder, asked, ON, overlap)
    check_same(got, plain)
    counts = stats.scheduler
    assert counts.drafts > 50
    assert sum(stats.accepted_drafts_by_place.values()) == stats.accepted_drafts <= counts.drafts
    load = stats.load
    assert (load.accepted_drafts, load.generated_tokens) == (stats.accepted_drafts, counts.generated_tokens)
    if share == 0.0:
        # Only what follows an ending is drafted in vain.
        assert stats.accepted_drafts > 0.8 * counts.drafts
    if share == 1.0:
        # Where two answers have begun alike, the mistake of one can be the other.
        assert stats.accepted_drafts < 0.05 * counts.drafts


def test_an_answer_that_begins_to_repeat_itself_has_drafts_though_steps_are_launched_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Speculation, "_counts", as_many_as_there_are)
    repeating = SamplingParams(max_tokens=40, seed=1, temperature=0.0, logit_bias=((7, 50.0),), ignore_eos=True)
    asked: Asked = [(prompt(20), repeating, ())]
    plain, _ = answered(folder, asked, OFF, overlap=True)
    got, stats = answered(folder, asked, ON, overlap=True)
    check_same(got, plain)
    assert stats.accepted_drafts > 10


@pytest.mark.parametrize("cuts_apart", [9, nightly(3)])
def test_drafts_change_no_answer_that_is_preempted_or_resumed_or_finds_a_prefix(
    folder: Path, plain: list[Answer], monkeypatch: pytest.MonkeyPatch, cuts_apart: int
) -> None:
    asked = asked_together()
    force(monkeypatch, texts(asked, plain), share=0.5)
    with engine(folder, overlap=False, num_blocks=FEW_BLOCKS, scheduler=ON) as client:
        check_same(list(client.together(asked).values()), plain)
        longest, wanted = asked[-1:], plain[-1 - len(asked[-1][2]) :]
        for _ in range(2):
            check_same(list(client.together(longest).values()), wanted)
        for known in range(1, 20, cuts_apart):
            got = client.together(longest, "", [[one.tokens[:known] for one in wanted]])
            assert [one.tokens for one in got.values()] == [one.tokens[known:] for one in wanted]
        stats = client.stats_asked_for(1)
    assert stats.scheduler.preemptions > 0
    assert stats.accepted_drafts > 50
    assert stats.scheduler.cached_prompt_tokens > 0


class Spoiling(ModelRunner):
    """A runner in which what is computed of a draft is not finite where ``spoils`` says so."""

    spoils = random.Random(0)
    spoiled = cleared = 0

    def clear(self, blocks: Sequence[int]) -> None:
        super().clear(blocks)
        self.cleared += len(blocks)

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow], *others: Any, **more: Any) -> torch.Tensor:
        logits = super().run(rows, *others, **more)
        wanting = [row for row in rows if row.wants_logits]
        for place, (before, row) in enumerate(pairwise(wanting), 1):
            if row.block_table is before.block_table and self.spoils.random() < 0.2:
                logits[place] = torch.nan
                self.spoiled += 1
        return logits


def test_a_wrong_draft_that_is_not_finite_leaves_nothing_behind(
    folder: Path, plain: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_together()
    force(monkeypatch, texts(asked, plain), share=1.0)
    config = read_decoder_config(folder)
    bounded = [NUM_BLOCKS] * (len(layer_groups(config).groups) - 1)
    runner = Spoiling(folder, config, Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, TorchKernels(), bounded=bounded)
    got, stats = answered(folder, asked, ON, runner=runner)
    check_same(got, plain)
    assert runner.spoiled
    assert runner.cleared
    assert stats.scheduler.preemptions > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", Dtype.FP32),
        nightly("llama", Dtype.BF16),
        ("lfm2", Dtype.FP32),
        ("qwen3-5", Dtype.BF16),
        ("falcon-h1", Dtype.BF16),
        ("jamba-dense", Dtype.BF16),
        nightly("lfm2", Dtype.BF16),
    ],
)
def test_with_the_compiled_kernels_the_answers_are_bitwise_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Dtype
) -> None:
    """Also where the states after a delta net, a Mamba of either kind or a short convolution are accepted.

    Around the kernels of the first three, torch computes the last numbers of a small tensor otherwise than the others.
    So in fp32 their last bits depend on the rows beside them, with drafts and without. Rounding to bf16 hides that.
    """
    compiled = CompiledKernels(cache_folder(os.environ))
    if not isinstance(compiled.linear(torch.zeros(32, 32)), CompiledLinear):
        pytest.skip("this CPU has no AVX2")
    folder = save_tiny_model(name, tmp_path) if name == "llama" else save_tiny(name, tmp_path)
    config, asked = read_decoder_config(folder), asked_together()
    bounded = [200] * (len(layer_groups(config).groups) - 1)
    runner = ModelRunner(folder, config, dtype, BLOCK_SIZE, 200, MAX_LEN, compiled, bounded=bounded)
    plain, _ = answered(folder, asked, OFF, runner=runner, num_blocks=200)
    force(monkeypatch, texts(asked, plain), share=0.2)
    got, stats = answered(folder, asked, ON, runner=runner, num_blocks=200)
    assert stats.accepted_drafts > 100
    for mine, other in zip(got, plain, strict=True):
        assert (mine.tokens, mine.logprobs) == (other.tokens, other.logprobs)
