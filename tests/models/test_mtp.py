"""Tests the layers that draft tokens: drafts are those that the layer gives with the whole context."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config import CacheConfig, CpuKernels, Dtype, ModelConfig
from pdserve.doctor.peers import local_spec
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import DraftRow, StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kvtransfer.control.handshake import misfits
from tests.models.grouped_runner import GroupedRunner
from tests.models.quantisers import quantised_folders
from tests.models.rank_program import Case
from tests.models.test_tensor_parallel import computed
from tests.models.tiny_drafting import ReferenceDrafts, save_tiny_drafting
from tests.models.tiny_families import save_tiny

CASES = (
    *("deepseek-v3", "glm4-moe-lite", "glm4-moe", "qwen3-next", "qwen3-5", "qwen3-5-moe"),
    *(pytest.param(case, marks=pytest.mark.nightly) for case in ("deepseek-v32", "glm-moe-dsa")),
)
PROMPT = [(7 * i * i + 11 * i) % 509 + 3 for i in range(41)]
ANSWER = [(5 * i * i + 3 * i) % 509 + 3 for i in range(12)]
CHUNKS = (17, 3, 21)
TABLE, OTHER = range(16), range(16, 32)
COUNT = 3

Made: TypeAlias = Callable[[str], tuple[Path, ReferenceDrafts]]
"""Gives a model of a case, and what transformers drafts with it."""


@pytest.fixture(params=["torch", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return TorchKernels() if request.param == "torch" else CompiledKernels(cache_folder(os.environ))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Returns a function that makes the model of a case, once for all tests, which leave it as it is."""

    @cache
    def make(case: str) -> tuple[Path, ReferenceDrafts]:
        folder = save_tiny_drafting(case, tmp_path_factory.mktemp(case))
        return folder, ReferenceDrafts(case, folder)

    return make


def drafting_runner(folder: Path, kernels: Kernels, *, drafts: bool = True) -> GroupedRunner:
    """Returns a runner with room for two requests of 64 tokens."""
    return GroupedRunner(folder, read_decoder_config(folder), Dtype.FP32, 4, 32, 128, kernels, drafts=drafts)


def after_prompt(runner: GroupedRunner, chunks: Sequence[int] = CHUNKS, *, drafts: bool = True) -> list[int]:
    """Computes the prompt in chunks, each of which shares its step with another request, and returns the drafts."""
    start, found = 0, list[list[int]]([[]])
    for number, size in enumerate(chunks):
        end = start + size
        known = [*PROMPT, ANSWER[0]][start + 1 : end + 1]
        runner.run(
            [
                StepRow(ANSWER[number : number + 1], number, OTHER, True),
                StepRow(PROMPT[start:end], start, TABLE, end == len(PROMPT)),
            ]
        )
        if drafts:
            other = DraftRow(0, ANSWER[number + 1 : number + 2], True)
            found = runner.draft([other, DraftRow(1, known, end == len(PROMPT))], COUNT)
        start = end
    return found[-1]


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_the_whole_context(made: Made, case: str, kernels: Kernels) -> None:
    folder, reference = made(case)
    for chunks in (CHUNKS, (len(PROMPT),)):
        runner = drafting_runner(folder, kernels)
        wanted = reference.drafts([*PROMPT, ANSWER[0]], COUNT)
        assert after_prompt(runner, chunks) == wanted, chunks
        # Tokens of the answer one by one, which write over the places of the drafts before them.
        for at in range(4):
            runner.run([StepRow(ANSWER[at : at + 1], len(PROMPT) + at, TABLE, True)])
            found = runner.draft([DraftRow(0, ANSWER[at + 1 : at + 2], True)], COUNT)
            assert found == [reference.drafts([*PROMPT, *ANSWER[: at + 2]], COUNT)], (chunks, at)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_verify_drafts_see_each_other(made: Made, case: str, kernels: Kernels) -> None:
    folder, reference = made(case)
    runner = drafting_runner(folder, kernels)
    after_prompt(runner)
    # Three rows of one request, of which all tokens are accepted, and a row of another one.
    first = len(PROMPT)
    rows = [StepRow(ANSWER[i : i + 1], first + i, TABLE, True) for i in range(3)]
    runner.run([*rows, StepRow(ANSWER[3:4], 3, OTHER, True)])
    accepted = [DraftRow(i, ANSWER[i + 1 : i + 2], i == 2) for i in range(3)]
    found = runner.draft([*accepted, DraftRow(3, ANSWER[4:5], True)], COUNT)
    assert found == [reference.drafts([*PROMPT, *ANSWER[:4]], COUNT), reference.drafts(ANSWER[:5], COUNT)]
    # Of the next ones, the last one is refused, so that another token comes in its place.
    rows = [StepRow(ANSWER[i : i + 1], first + i, TABLE, True) for i in range(3, 5)]
    runner.run([*rows, StepRow([7], first + 5, TABLE, True)])
    found = runner.draft([DraftRow(0, ANSWER[4:5], False), DraftRow(1, ANSWER[5:6], True)], COUNT)
    assert found == [reference.drafts([*PROMPT, *ANSWER[:6]], COUNT)]
    if len(runner.cache.groups) > 1:
        return  # A state goes on only from what was accepted, which the engine sees to.
    runner.run([StepRow(ANSWER[5:6], first + 5, TABLE, True)])
    assert runner.draft([DraftRow(0, ANSWER[6:7], True)], 1) == [reference.drafts([*PROMPT, *ANSWER[:7]], 1)]


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_completed_by_tokens_on_the_device_or_behind_the_next_one(
    made: Made, case: str, kernels: Kernels
) -> None:
    folder, reference = made(case)
    runner = drafting_runner(folder, kernels)
    first, others = len(PROMPT), [7, *PROMPT[:3]]
    # A chunk, a prompt that ends, whose token is on the device, and a token whose next one comes late.
    rows = [StepRow([others[0]], 0, OTHER, True), StepRow(PROMPT[:17], 0, TABLE, False)]
    runner.run(rows)
    late = runner.kept()
    runner.complete([DraftRow(1, PROMPT[1:18], False)])
    runner.run([StepRow(PROMPT[17:], 17, TABLE, True)])
    runner.complete([DraftRow(0, [others[1]], False)], of=late)
    runner.complete([DraftRow(0, [*PROMPT[18:], 0], False)], torch.tensor([ANSWER[0]]))
    # Two tokens, in the other order, and a right one in the place of a wrong one.
    runner.run([StepRow([others[1]], 1, OTHER, True), StepRow(ANSWER[:1], first, TABLE, True)])
    refused = runner.kept()
    runner.complete([DraftRow(1, [0], False), DraftRow(0, [0], False)], torch.tensor([ANSWER[1], 9]))
    runner.run([StepRow(ANSWER[1:2], first + 1, TABLE, True)])
    runner.complete([DraftRow(0, [others[2]], False)], of=refused)
    assert runner.draft([DraftRow(0, ANSWER[2:3], True)], COUNT) == [reference.drafts([*PROMPT, *ANSWER[:3]], COUNT)]
    runner.run([StepRow([others[2]], 2, OTHER, True)])
    assert runner.draft([DraftRow(0, [others[3]], True)], COUNT) == [reference.drafts(others, COUNT)]


@pytest.mark.parametrize("case", CASES)
def test_drafts_go_on_from_blocks_that_were_moved(made: Made, case: str, kernels: Kernels) -> None:
    folder, reference = made(case)
    source, target = drafting_runner(folder, kernels), drafting_runner(folder, kernels)
    after_prompt(source)
    target.cache.memory.copy_(source.cache.memory)
    target.kv_cache[: len(TABLE)].fill_(0)
    target.kv_cache[len(TABLE) :] = source.kv_cache[: len(TABLE)]
    target._free = deepcopy(source._free)
    target._tables[OTHER[0]] = deepcopy(source._tables.get(TABLE[0], []))
    target.run([StepRow(ANSWER[:1], len(PROMPT), OTHER, True)])
    found = target.draft([DraftRow(0, ANSWER[1:2], True)], COUNT)
    assert found == [reference.drafts([*PROMPT, *ANSWER[:2]], COUNT)]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_same_bits_with_and_without_drafts(made: Made, case: str, kernels: Kernels) -> None:
    folder, _ = made(case)
    plain, drafting = (drafting_runner(folder, kernels, drafts=drafts) for drafts in (False, True))
    assert [group.block_bytes for group in plain.cache.groups] == [group.block_bytes for group in drafting.cache.groups]
    after_prompt(drafting)
    after_prompt(plain, drafts=False)
    for at in range(4):
        row = StepRow(ANSWER[at : at + 1], len(PROMPT) + at, TABLE, True)
        assert torch.equal(plain.run([row]), drafting.run([row]))
        drafting.draft([DraftRow(0, ANSWER[at + 1 : at + 2], True)], COUNT)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_without_the_weights_has_no_such_layer(made: Made, tmp_path: Path, case: str) -> None:
    (with_layer, _), without = made(case), save_tiny(case, tmp_path)
    for folder, expected in ((with_layer, True), (without, False)):
        config = read_decoder_config(folder)
        assert config.has_draft_layer == expected
        assert config.cached_layers == config.num_layers + expected
    with pytest.raises(ModelError, match="has no layer that drafts tokens"):
        drafting_runner(without, TorchKernels())


def test_nodes_fit_whatever_they_draft_with_if_both_folders_have_the_layer(made: Made, tmp_path: Path) -> None:
    """A specification knows no setting. The digest alone refuses the other folder, and the doctor says what differs."""
    with_layer, without = (
        local_spec(ModelConfig(path=str(folder)), CacheConfig(), CpuKernels.AUTO, tmp_path)
        for folder in (made("glm4-moe")[0], save_tiny("glm4-moe", tmp_path / "without"))
    )
    assert [refused.field for refused in misfits(with_layer, without)] == ["fingerprint", "num_layers"]
    assert (with_layer.num_layers, without.num_layers) == (4, 3)


@pytest.mark.integration
def test_ranks_draft_what_one_rank_drafts(made: Made) -> None:
    names = ("deepseek-v32", "glm4-moe", "qwen3-next")
    folders = {name: made(name)[0] for name in names}
    prompts = [PROMPT[:6], PROMPT[3:20]]
    sizes = (1, 2, 3)
    results = iter(computed([Case(str(folders[n]), size, prompts, 4, drafts=3) for n in names for size in sizes]))
    for name in names:
        alone, *split = [next(results) for _ in sizes]
        assert not alone.error
        assert len(alone.drafts) == 4 * len(prompts)
        for found in split:
            # A model whose heads three ranks cannot share is refused.
            assert found == alone or "--tensor-parallel-size 3" in found.error, name


def test_drafts_end_with_the_blocks_and_with_the_longest_context(made: Made) -> None:
    folder, reference = made("deepseek-v3")
    runner = drafting_runner(folder, TorchKernels())
    wanted = reference.drafts([*PROMPT[:6], ANSWER[0]], 3)
    runner.run([StepRow(PROMPT[:6], 0, range(2), True)])
    # Two places are left in the blocks.
    assert runner.draft([DraftRow(0, [*PROMPT[1:6], ANSWER[0]], True)], 8) == [wanted]
    runner = GroupedRunner(folder, read_decoder_config(folder), Dtype.FP32, 4, 32, 8, TorchKernels(), drafts=True)
    runner.run([StepRow(PROMPT[:6], 0, TABLE, True)])
    assert runner.draft([DraftRow(0, [*PROMPT[1:6], ANSWER[0]], True)], 8) == [wanted]


@pytest.mark.parametrize(
    ("case", "whole", "before", "after"),
    [
        ("qwen3-5", "qwen3_5", "model.", "model.language_model."),
        ("deepseek-v3", "kimi_k25", "", "language_model."),
    ],
)
def test_a_text_part_drafts_as_it_does_alone(tmp_path: Path, case: str, whole: str, before: str, after: str) -> None:
    folder = save_tiny_drafting(case, tmp_path)
    wanted = after_prompt(drafting_runner(folder, TorchKernels()))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": whole, "text_config": settings}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        after + name.removeprefix(before) if name.startswith(before) else name: tensors[name] for name in tensors
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    assert after_prompt(drafting_runner(folder, TorchKernels())) == wanted


def test_drafts_follow_from_quantised_weights(tmp_path: Path, kernels: Kernels) -> None:
    narrow, wide = quantised_folders(save_tiny_drafting("deepseek-v3", tmp_path / "tiny"), "fp8-blocks", tmp_path)
    assert after_prompt(drafting_runner(narrow, kernels)) == after_prompt(drafting_runner(wide, kernels))


def test_drafts_need_a_step_and_tokens_that_fit_it(made: Made) -> None:
    folder, _ = made("glm4-moe")
    runner = drafting_runner(folder, TorchKernels())
    with pytest.raises(ValueError, match="no step"):
        runner.draft([DraftRow(0, [5], True)], 1)
    runner.run([StepRow(PROMPT[:3], 0, TABLE, True)])
    for tokens in ([], PROMPT[:4]):
        with pytest.raises(ValueError, match=f"{len(tokens)} next tokens for a row of 3"):
            runner.draft([DraftRow(0, tokens, True)], 1)
    assert runner.draft([DraftRow(0, PROMPT[1:4], False)], 2) == []
