"""Tests the runner's logits against transformers, in fp32, for every family and however a prompt is cut into steps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.runner import DraftRow, ModelRunner, StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import ExpertsForm, ExpertWeights
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels, CompiledLinear
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.grouped_runner import GroupedRunner
from tests.models.tiny_drafting import save_tiny_drafting
from tests.models.tiny_families import save_case
from tests.tiny_models import (
    FAMILIES,
    VOCAB_SIZE,
    random_prompt,
    reference_last_logits,
    reference_logits,
    save_tiny_model,
)

BLOCK_SIZE = 4


KERNELS = ["torch", "compiled"]
MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module", params=KERNELS)
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    """Returns a function that makes runners with one of the CPU kernel sets."""
    kernels = TorchKernels() if request.param == "torch" else CompiledKernels(cache_folder(os.environ))

    def make(folder: Path, dtype: Dtype = Dtype.FP32, num_blocks: int = 64) -> ModelRunner:
        return GroupedRunner(folder, read_decoder_config(folder), dtype, BLOCK_SIZE, num_blocks, 256, kernels)

    return make


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))


PROMPT = random_prompt(37)


@pytest.fixture(scope="module")
def wanted_logits(folder: Path) -> torch.Tensor:
    return reference_logits(folder, PROMPT)


@pytest.mark.parametrize("cuts", [[37], [1, 36], [4, 4, 29], [5, 6, 7, 1, 18], [36, 1]])
def test_prompt_in_any_chunks_gives_the_reference_logits(
    make_runner: MakeRunner, folder: Path, wanted_logits: torch.Tensor, cuts: list[int]
) -> None:
    runner = make_runner(folder)
    blocks = random.Random(1).sample(range(64), 10)
    start = 0
    for length in cuts:
        logits = runner.run([StepRow(PROMPT[start : start + length], start, blocks, True)])
        start += length
        torch.testing.assert_close(logits[0], wanted_logits[start - 1], rtol=1e-4, atol=1e-3)


def test_requests_in_one_step_do_not_see_each_other(make_runner: MakeRunner, folder: Path) -> None:
    prompts = [random_prompt(length, seed=length) for length in (9, 16, 1, 30)]
    wanted = reference_last_logits(folder, prompts)
    runner = make_runner(folder)
    order = random.Random(2).sample(range(64), 64)
    tables = [order[i * 16 : i * 16 + 16] for i in range(4)]
    for prompt, table in zip(prompts[:2], tables[:2], strict=True):
        runner.run([StepRow(prompt[:-1], 0, table, False)])
    rows = [
        StepRow(prompts[0][-1:], 8, tables[0], True),
        StepRow(prompts[1][-1:], 15, tables[1], True),
        StepRow(prompts[2], 0, tables[2], True),
        StepRow(prompts[3], 0, tables[3], True),
    ]
    logits = runner.run(rows)
    for row, reference in zip(logits, wanted, strict=True):
        torch.testing.assert_close(row, reference, rtol=1e-4, atol=1e-3)


def test_the_text_part_of_a_model_that_takes_images(make_runner: MakeRunner, tmp_path: Path) -> None:
    folder = save_tiny_model("gemma3-images", tmp_path)
    logits = make_runner(folder).run([StepRow(PROMPT, 0, range(10), True)])
    torch.testing.assert_close(logits, reference_logits(folder, PROMPT)[-1:], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", Dtype)
def test_tokens_replayed_in_one_step_are_those_of_one_step_each(
    make_runner: MakeRunner, folder: Path, dtype: Dtype
) -> None:
    replaying, decoding = make_runner(folder, dtype), make_runner(folder, dtype)
    blocks, answer = random.Random(1).sample(range(64), 20), random_prompt(31, seed=4)
    for runner in (replaying, decoding):
        runner.run([StepRow(PROMPT, 0, blocks, False)])
    steps = [StepRow([token], len(PROMPT) + i, blocks, i == 30) for i, token in enumerate(answer)]
    got, wanted = replaying.run(steps).clone(), [decoding.run([step]).clone() for step in steps][-1]
    if isinstance(replaying._kernels.linear(torch.zeros(2, 2)), CompiledLinear):
        assert torch.equal(replaying.kv_cache, decoding.kv_cache)
        assert torch.equal(got, wanted)
    rtol, atol = (1e-4, 1e-3) if dtype is Dtype.FP32 else (0.1, 0.5)
    torch.testing.assert_close(replaying.kv_cache, decoding.kv_cache, rtol=rtol, atol=atol)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", Dtype)
def test_small_chunks_beside_rows_that_decode_store_what_one_large_chunk_does(
    make_runner: MakeRunner, folder: Path, dtype: Dtype
) -> None:
    whole, cut = make_runner(folder, dtype), make_runner(folder, dtype)
    order = random.Random(3).sample(range(64), 30)
    blocks, others = order[:20], [order[20:24], order[24:28]]
    wanted = whole.run([StepRow(PROMPT, 0, blocks, True)]).clone()
    for table in others:
        cut.run([StepRow(PROMPT[:9], 0, table, False)])
    start = 0
    for length in (8, 3, 2, 8, 5, 9, 2):
        end = start + length
        decoding = [StepRow([7], 9, table, False) for table in others[: length % 3]]
        got = cut.run([*decoding, StepRow(PROMPT[start:end], start, blocks, end == len(PROMPT))])
        start = end
    if isinstance(cut._kernels.linear(torch.zeros(2, 2)), CompiledLinear):
        assert torch.equal(cut.kv_cache[blocks[:10]], whole.kv_cache[blocks[:10]])
        assert torch.equal(got, wanted)
    rtol, atol = (1e-4, 1e-3) if dtype is Dtype.FP32 else (0.1, 0.5)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def test_only_rows_that_want_logits_give_them(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(save_tiny_model("llama", tmp_path))
    rows = [StepRow([5], 0, [0], False), StepRow([6, 7], 0, [1], True)]
    assert runner.run(rows).shape == (1, VOCAB_SIZE)
    assert runner.run([StepRow([5], 0, [0], False)]).shape == (0, VOCAB_SIZE)


def test_bf16_stays_near_fp32(make_runner: MakeRunner, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    prompt = random_prompt(40)
    wanted = reference_logits(folder, prompt)[-1]
    runner = make_runner(folder, Dtype.BF16)
    got = runner.run([StepRow(prompt, 0, range(10), True)])[0]
    assert torch.cosine_similarity(got, wanted, dim=0) > 0.99


def test_unordered_rows_are_refused(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(save_tiny_model("llama", tmp_path))
    with pytest.raises(ValueError, match="one token must come before"):
        runner.run([StepRow([5, 6], 0, [0], True), StepRow([7], 0, [1], True)])


def test_contexts_of_very_different_lengths_in_one_step(make_runner: MakeRunner, tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (3, 200, 70, 5)]
    wanted = reference_last_logits(folder, prompts)
    runner = make_runner(folder, num_blocks=256)
    tables = [list(range(60 * i, 60 * i + 60)) for i in range(4)]
    for prompt, table in zip(prompts, tables, strict=True):
        runner.run([StepRow(prompt[:-1], 0, table, False)])
    rows = [StepRow(prompt[-1:], len(prompt) - 1, table, True) for prompt, table in zip(prompts, tables, strict=True)]
    for row, reference in zip(runner.run(rows), wanted, strict=True):
        torch.testing.assert_close(row, reference, rtol=1e-4, atol=1e-3)


def test_a_request_that_is_not_finite_does_not_spoil_its_neighbours(make_runner: MakeRunner, tmp_path: Path) -> None:
    runner = make_runner(save_tiny_model("llama", tmp_path))
    runner.kv_cache[0] = float("nan")
    poisoned, healthy, long = [0], [1], list(range(2, 12))
    runner.run([StepRow(random_prompt(30), 0, long, False)])
    rows = [StepRow([5], 1, poisoned, True), StepRow([5], 1, healthy, True), StepRow([5], 30, long, True)]
    finite = runner.run(rows).isfinite().all(-1).tolist()
    assert finite == [False, True, True]
    runner.clear(poisoned)
    assert bool(runner.run(rows).isfinite().all())


class NoValues(TorchKernels):
    """Kernels of a device whose numbers nobody can read. There, experts and states are one operation, as on a GPU."""

    @staticmethod
    def causal_conv(x: torch.Tensor, *others: Any, silu: bool) -> torch.Tensor:
        return torch.empty_like(x)

    @staticmethod
    def gated_delta_rule(qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, *others: Any) -> torch.Tensor:
        return qkv.new_empty((*beta.shape, others[0].shape[-1]))

    def experts(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> Any:
        list(weights)
        return lambda x, logits, beside: torch.empty_like(x)


@pytest.mark.parametrize("case", ["llama", "deepseek-v4", "qwen4-exp"])
def test_a_step_asks_its_device_for_nothing(tmp_path: Path, case: str) -> None:
    """A wait for the device is one for the other ranks, which only the group can end. A meta tensor has no numbers."""
    folder = save_case(case, tmp_path)
    config, meta = read_family_config(folder), torch.device("meta")
    runner = GroupedRunner(folder, config, Dtype.FP32, BLOCK_SIZE, 64, 256, NoValues(), device=meta)
    long = StepRow([1, 2, 3], 13, [3, 4, 6, 7], True, range(2))
    rows = [StepRow([5], 0, [0], False), StepRow([7], 6, [1, 2], True), long]
    pieces: list[torch.Tensor] = []
    logits = runner.run(rows, score=pieces.append)
    assert [tuple(computed.shape) for computed in (logits, *pieces)] == [(2, VOCAB_SIZE), (2, VOCAB_SIZE)]
    runner.copy_blocks([1, 2], [3, 4])
    runner.clear([5])


@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3"])
def test_the_layer_that_drafts_sees_tokens_that_only_the_device_knows(tmp_path: Path, case: str) -> None:
    """Otherwise a step would wait for the one before it."""
    folder, meta = save_tiny_drafting(case, tmp_path), torch.device("meta")
    config = read_family_config(folder)
    runner = GroupedRunner(folder, config, Dtype.FP32, BLOCK_SIZE, 64, 64, NoValues(), device=meta, drafts=True)
    runner.run([StepRow([5], 0, [0], True), StepRow([7], 6, [1, 2], True), StepRow([1, 2, 3], 3, [3, 4], True)])
    kept = runner.kept()
    known = [DraftRow(2, [2, 3, 0], False), DraftRow(0, [0], False), DraftRow(1, [8], False)]
    runner.complete(known, torch.empty(2, dtype=torch.int64, device=meta))
    runner.run([StepRow([0], 1, [0], True)], torch.empty(1, dtype=torch.int64, device=meta))
    runner.complete([DraftRow(1, [9], False)], of=kept)
