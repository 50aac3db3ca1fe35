"""Tests a whole model through the Triton kernels: its logits are the CPU's, with single and with captured steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

from pdserve.config import Dtype, KvCacheDtype
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.layer_groups import layer_groups
from pdserve.models.parts.projections import Building
from pdserve.models.runner import ComputedRows, CudaGraphs, DraftRow, ModelRunner, StepRow
from pdserve_kernels.contract import BlockFormat, BlockWeight
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.kernels.triton.device import DEVICE, NEEDS_FP8
from tests.models import test_composites
from tests.models.converted_gguf import save_converted
from tests.models.grouped_runner import GroupedRunner
from tests.models.quantisers import quantised_folders
from tests.models.rerun_graph import RerunGraphs
from tests.models.tiny_drafting import save_tiny_drafting
from tests.models.tiny_families import CASES, save_tiny
from tests.models.unsummed import Unsummed
from tests.nightly import nightly
from tests.tiny_models import VOCAB_SIZE, save_tiny_model

IN_BLOCKS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
IN_BLOCKS |= {"num_key_value_heads": 2, "head_dim": 16}
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 64, 128
KERNELS = TritonKernels(processors=4)


def make_runners(folder: Path) -> tuple[ModelRunner, ModelRunner]:
    config = read_decoder_config(folder)
    shape = (folder, config, Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
    return GroupedRunner(*shape, KERNELS, device=DEVICE), GroupedRunner(*shape, TorchKernels())


def save(family: str, folder: Path) -> Path:
    if family in test_composites.CASES.keys() - CASES.keys():
        return test_composites.save(family, folder)
    return save_tiny(family, folder) if family in CASES else save_tiny_model(family, folder)


def check(rows: list[StepRow], runner: ModelRunner, peer: ModelRunner) -> None:
    got, wanted = runner.run(rows), peer.run(rows)
    assert got.device.type == DEVICE.type
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(runner.kv_cache.cpu(), peer.kv_cache, rtol=1e-4, atol=1e-4)


def packed_experts(folder: Path) -> Path:
    shape = IN_BLOCKS | {"moe_intermediate_size": 32, "mlp_only_layers": [], "num_hidden_layers": 1}
    made = save_tiny_model("qwen3-moe", folder / "made", **shape)
    return save_converted(made, folder / "tiny.gguf", "qwen3moe", quantized=GGMLQuantizationType.Q5_0)


def packed_products(folder: Path) -> Path:
    made = save_tiny_model("llama", folder / "made", **IN_BLOCKS, num_hidden_layers=1)
    return quantised_folders(made, "gptq", folder)[0]


@pytest.mark.parametrize(("save_quantised", "plain"), [(packed_experts, (8, 64)), (packed_products, (VOCAB_SIZE, 64))])
def test_quantised_weights_stay_packed(
    save_quantised: Callable[[Path], Path], plain: tuple[int, int], tmp_path: Path
) -> None:
    """In fp32, in which an engine would widen them, their numbers are exactly those that the file means.

    ``plain`` is the shape of what is not packed: a router, or the head of a folder.
    """
    path, (_, prompt, _), (_, table, _) = save_quantised(tmp_path), *prompts_and_tables()
    shape = (path, read_decoder_config(path), Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
    with patch.object(KERNELS, "linear", side_effect=KERNELS.linear) as linear:
        runner = GroupedRunner(*shape, KERNELS, device=DEVICE, block_kernels=KERNELS)
    assert {tuple(call.args[0].shape) for call in linear.call_args_list} == {plain}
    peer = GroupedRunner(*shape, TorchKernels())
    check([StepRow(prompt[:2], 0, table, True)], runner, peer)
    runner.capture_decode(KERNELS, 1, CudaGraphs() if DEVICE.type == "cuda" else RerunGraphs())
    check([StepRow(prompt[2:3], 2, table, True)], runner, peer)


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("size", "kind"), [(1, BlockFormat.FP8_SHORT), (2, BlockFormat.FP8_SHORT), (3, BlockFormat.FP8), (8, None)]
)
def test_ranks_have_their_share_packed(size: int, kind: BlockFormat | None, tmp_path: Path) -> None:
    """The 384 or 192 inputs of a rank are whole blocks of 128 or of 32 numbers, or are cut and dequantised."""
    inner = 384 if size == 3 else 192
    shape = IN_BLOCKS | {"hidden_size": 128, "intermediate_size": inner, "head_dim": 32}
    narrow, wide = quantised_folders(save_tiny_model("llama", tmp_path / "made", **shape), "fp8-blocks", tmp_path)
    x, each = torch.randn(3, inner), inner // size
    total = torch.zeros(3, 128)
    for rank in range(size):
        mine = slice(rank * each, (rank + 1) * each)
        checkpoint = Checkpoint(narrow, torch.float32, DEVICE, quantisation=read_family_config(narrow).quantisation)
        building = Building(checkpoint, KERNELS, Unsummed(rank, size), KERNELS)
        weight = building.weight(DOWN, (128, inner), columns=mine)
        assert (weight.format if isinstance(weight, BlockWeight) else None) is kind
        total += building.linear(weight)(x[:, mine].to(DEVICE).contiguous()).cpu()
    wanted = x @ load_file(wide / "model.safetensors")[DOWN].T
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


@NEEDS_FP8
def test_products_in_fp8(tmp_path: Path) -> None:
    """Each product of a layer rounds its inputs, which all steps round alike."""
    shape = IN_BLOCKS | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 1}
    narrow, wide = quantised_folders(save_tiny_model("llama", tmp_path / "made", **shape), "fp8-blocks", tmp_path)
    kernels, (_, _, prompt), (_, _, table) = TritonKernels(4, fp8=True), *prompts_and_tables()

    def runner(folder: Path, blocks: TritonKernels | None) -> ModelRunner:
        own = (folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
        return GroupedRunner(*own, kernels if blocks else KERNELS, device=DEVICE, block_kernels=blocks)

    rounding, exact = runner(narrow, kernels), runner(wide, None)
    rows = [StepRow(prompt, 0, table, True)]
    wanted, found = exact.run(rows), rounding.run(rows).clone()
    assert kernels.name == "triton fp8"
    assert 0.003 < (found - wanted).norm() / wanted.norm() < 0.1
    kept = rounding.kv_cache.clone()
    rounding.kv_cache.zero_()
    rounding.capture_decode(kernels, 1, CudaGraphs() if DEVICE.type == "cuda" else RerunGraphs())
    for at, token in enumerate(prompt):
        alone = rounding.run([StepRow([token], at, table, True)])
    # Attention of one token and of several differ in last bits, of which rounding may make more.
    assert (alone - found).norm() / found.norm() < 0.003
    torch.testing.assert_close(rounding.kv_cache, kept, rtol=1e-5, atol=1e-5)


def prompts_and_tables() -> tuple[list[list[int]], list[list[int]]]:
    choose = random.Random(3)
    order = choose.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    # Longer than a window, a chunk of attention and a few blocks. Each token more is a tenth of a second of each model.
    prompts = [choose.choices(range(3, VOCAB_SIZE), k=length) for length in (18, 5, 3)]
    return prompts, [order[:20], order[20:24], order[24:28]]


WHOLE = ("nemotron-h",)
"""Attention, states and experts. Other tests here compute layers of other kinds."""
MORE = (
    "deepseek-v32",
    "deepseek-v4",
    "glm-moe-dsa",
    "glm5-next",
    "gpt-oss",
    "hy4",
    "kimi-linear",
    "qwen4-exp",
    "llama",
    "llama4",
    "mimo",
    "minimax-m3",
    "mistral-large4",
    "qwen3",
    "qwen3-5",
    "phimoe",
    "gemma3",
    "gemma3n",
    "gemma4-shared",
    "qwen3-next",
)
CAPTURED = (
    "deepseek-v32",
    "glm-moe-dsa",
    "hy4",
    "llama",
    "gemma3",
    "gemma3n",
    "gemma4-shared",
    "mistral-large4",
    "qwen3-5",
    "qwen3-moe",
)
"""In every run, other tests here capture a Llama, and latents and experts."""
DRAFTING = ("deepseek-v3",)
"""Experts, and a layer that drafts with latents."""
MORE_DRAFTING = ("glm4-moe", "qwen3-next")
"""Layers that draft with keys and values."""


def with_more(every: tuple[str, ...], more: tuple[str, ...]) -> list[object]:
    """Returns parameters: what is computed in every run, and what is only computed at night."""
    return [*every, *map(nightly, more)]


@pytest.mark.parametrize("family", with_more(WHOLE, MORE))
def test_chunks_mixed_steps_and_decode_steps(family: str, tmp_path: Path) -> None:
    runner, peer = make_runners(save(family, tmp_path))
    (long, short, other), tables = prompts_and_tables()
    check([StepRow(long[:12], 0, tables[0], False), StepRow(short, 0, tables[1], True)], runner, peer)
    check([StepRow([7], 5, tables[1], True), StepRow(long[12:], 12, tables[0], True)], runner, peer)
    check([StepRow([8], 6, tables[1], True), StepRow([9], 18, tables[0], True)], runner, peer)
    check([StepRow(other, 0, tables[2], True)], runner, peer)


@pytest.mark.parametrize("captured", [nightly(False), True])
def test_latents_in_fp8(captured: bool, tmp_path: Path) -> None:
    config = read_decoder_config(save("glm-moe-dsa", tmp_path))
    shape = (tmp_path, config, Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
    fp8, plain = KvCacheDtype.FP8, KvCacheDtype.AUTO
    runner = ModelRunner(*shape, KERNELS, device=DEVICE, kv_dtype=fp8)
    peers = [ModelRunner(*shape, TorchKernels(), kv_dtype=kv_dtype) for kv_dtype in (fp8, plain)]
    (prompt, other, _), tables = prompts_and_tables()
    if captured:
        runner.capture_decode(KERNELS, 2, CudaGraphs() if DEVICE.type == "cuda" else RerunGraphs())
    for tokens, start in (([prompt[:12], other], 0), ([prompt[12:], [7]], 12), ([[8], [9]], 18)):
        starts = (start, 0 if start == 0 else len(other) + start // 18)
        rows = [StepRow(*row, True) for row in zip(tokens, starts, tables[:2], strict=True)]
        order = sorted(rows, key=lambda row: len(row.token_ids) > 1)
        got, in_fp8, in_fp32 = (each.run(order).cpu() for each in (runner, *peers))
        # Few numbers are so closely between two of e4m3 that the sets round them apart.
        assert (got - in_fp8).norm() < 0.02 * in_fp8.norm()
        assert 0.001 * in_fp32.norm() < (got - in_fp32).norm() < 0.5 * in_fp32.norm()
    assert (runner.kv_cache.cpu() != peers[0].kv_cache).float().mean() < 0.01


@pytest.mark.parametrize("captured", [nightly(False), True])
def test_tokens_replayed_in_one_step(captured: bool, tmp_path: Path) -> None:
    runner, peer = make_runners(save_tiny_model("llama", tmp_path))
    (_, other, prompt), tables = prompts_and_tables()
    check([StepRow(prompt, 0, tables[0], False), StepRow(other, 0, tables[1], True)], runner, peer)
    if captured:
        runner.capture_decode(KERNELS, 8, CudaGraphs() if DEVICE.type == "cuda" else RerunGraphs())
    answer = [7, 9, 11, 13, 15]
    for token in answer[:-1]:
        peer.run([StepRow([token], len(prompt) + token // 2 - 3, tables[0], False)])
    decoding = StepRow([8], 5, tables[1], True)
    replayed = [StepRow([t], len(prompt) + i, tables[0], t == answer[-1]) for i, t in enumerate(answer)]
    got, wanted = runner.run([decoding, *replayed]), peer.run([decoding, replayed[-1]])
    torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(runner.kv_cache.cpu(), peer.kv_cache, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("family", CAPTURED)
def test_captured_decode_steps(family: str, tmp_path: Path) -> None:
    runner, peer = make_runners(save(family, tmp_path))
    prompts, tables = prompts_and_tables()
    check([StepRow(prompt, 0, table, True) for prompt, table in zip(prompts, tables, strict=True)], runner, peer)
    rerun = RerunGraphs()
    runner.capture_decode(KERNELS, 4, CudaGraphs() if DEVICE.type == "cuda" else rerun)
    # Capturing stores nothing, which ``check`` sees in the cache. Three rows in a bucket of four leave one row of
    # padding.
    for i in range(2):
        rows = [
            StepRow([5 + i], len(prompt) + i, table, wants)
            for prompt, table, wants in zip(prompts, tables, (True, i == 0, True), strict=True)
        ]
        check(rows, runner, peer)
    check([StepRow([3], len(prompts[0]) + 2, tables[0], True)], runner, peer)
    if DEVICE.type == "cpu":
        assert [graph.replays for graph in rerun.made] == [2, 0, 1]


@pytest.mark.parametrize("family", with_more(("qwen3-5",), ("nemotron-h", "lfm2")))
def test_captured_steps_with_drafts_of_states(family: str, tmp_path: Path) -> None:
    """The state after each row of a request stays, and the next step goes on with the one after an accepted draft."""
    folder, ((_, *prompts), (_, *tables)) = save(family, tmp_path), prompts_and_tables()
    config = read_decoder_config(folder)
    shape = (folder, config, Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
    bounded = [12] * (len(layer_groups(config).groups) - 1)
    runner = ModelRunner(*shape, KERNELS, device=DEVICE, bounded=bounded)
    peer = ModelRunner(*shape, TorchKernels(), bounded=bounded)
    groups = runner.cache.groups[1:]

    def row(tokens: list[int], start: int, request: int, source: int, destination: int) -> StepRow:
        states = [(group.first + source if source >= 0 else -1, group.first + destination) for group in groups]
        return StepRow(tokens, start, tables[request], True, others=states)

    def check_all(rows: list[StepRow]) -> None:
        check(rows, runner, peer)
        memory = [each.cache.memory.cpu().view(torch.float32) for each in (runner, peer)]
        torch.testing.assert_close(*memory, rtol=1e-4, atol=1e-4)

    check_all([row(prompt, 0, request, -1, 5 * request) for request, prompt in enumerate(prompts)])
    rerun = RerunGraphs()
    runner.capture_decode(KERNELS, 4, CudaGraphs() if DEVICE.type == "cuda" else rerun, linked=True)
    first, second = (len(prompt) for prompt in prompts)
    drafts = [row([7 + at], first + at, 0, at, at + 1) for at in range(3)]
    check_all([row([9], second, 1, 5, 5), *drafts])
    # One of two drafts was right, so that the state after the second row is the present one.
    check_all([row([3], first + 2, 0, 2, 6), row([4], first + 3, 0, 6, 7), row([5], second + 1, 1, 5, 5)])
    check_all([row([6], first + 4, 0, 7, 7)])
    if DEVICE.type == "cpu":
        assert sum(graph.replays for graph in rerun.made) == 3


@pytest.mark.parametrize("family", with_more(DRAFTING, MORE_DRAFTING))
def test_drafts_follow_captured_steps(family: str, tmp_path: Path) -> None:
    folder, (_, *prompts), (_, *tables) = save_tiny_drafting(family, tmp_path), *prompts_and_tables()
    shape = (folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
    runner = GroupedRunner(*shape, KERNELS, device=DEVICE, drafts=True)
    peer = GroupedRunner(*shape, TorchKernels(), drafts=True)
    runner.capture_decode(KERNELS, 4, CudaGraphs() if DEVICE.type == "cuda" else RerunGraphs())
    for at in range(2):
        rows = [
            StepRow(prompt if at == 0 else [7], len(prompt) * at, table, True)
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        # The prompts are no recorded step, and their next tokens are.
        known = [DraftRow(i, [*row.token_ids[1:], 7 + at], i != 1) for i, row in enumerate(rows)]
        torch.testing.assert_close(runner.run(rows).cpu(), peer.run(rows), rtol=1e-4, atol=1e-3)
        assert runner.draft(known, 3) == peer.draft(known, 3)


@pytest.mark.parametrize("family", with_more(DRAFTING, MORE_DRAFTING))
def test_captured_steps_are_completed_ahead_and_behind_the_next_ones(family: str, tmp_path: Path) -> None:
    """A step writes over the hidden states of the one before, which is completed first, or has kept them."""
    folder, (_, *prompts), (_, *tables) = save_tiny_drafting(family, tmp_path), *prompts_and_tables()
    shape = (folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN)
    runner = GroupedRunner(*shape, KERNELS, device=DEVICE, drafts=True)
    peer = GroupedRunner(*shape, TorchKernels(), drafts=True)
    runner.capture_decode(KERNELS, 2, CudaGraphs() if DEVICE.type == "cuda" else RerunGraphs())
    late: list[tuple[DraftRow, ComputedRows]] = []
    for at in range(3):
        rows = [
            StepRow(prompt if at == 0 else [6 + at], len(prompt) + at - 1 if at else 0, table, True)
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        known = [DraftRow(i, [*row.token_ids[1:], 7 + at], at == 2) for i, row in enumerate(rows)]
        runner.run(rows)
        for row, kept in late:
            runner.complete([row], of=kept)
        peer.run(rows)
        if at < 2:
            *ahead, last = known
            late = [(last, runner.kept())]
            unknown = [DraftRow(row.row, [*row.next_tokens[:-1], 0], False) for row in ahead]
            runner.complete(unknown, torch.full((len(ahead),), 7 + at, device=DEVICE))
            peer.draft(known, 0)
    assert runner.draft(known, 3) == peer.draft(known, 3)


def test_a_model_whose_steps_differ_is_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, peer = make_runners(save_tiny_model("llama", tmp_path))
    decoder: Any = runner._decoder
    monkeypatch.setattr(decoder, "capturable", False, raising=False)
    rerun = RerunGraphs()
    runner.capture_decode(KERNELS, 4, rerun)
    check([StepRow([5], 0, [3], True)], runner, peer)
    assert rerun.made == []
