"""Tests the kernels at the size of an 8B model in bf16, and captured decode steps, on a real GPU."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import CudaGraphs, StepRow
from pdserve_kernels import reference
from pdserve_kernels.contract import AttentionRow, BlockFormat, BlockWeight, ExpertsForm, ExpertWeights
from pdserve_kernels.feed_forward import Activation, Routing
from pdserve_kernels.host_copies import to_device
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.cache_ops import gather_blocks, scatter_blocks
from pdserve_kernels.triton.fp8_products import TritonFp8Linear
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.kernels.random_blocks import HALVES, dequantised, random_blocks
from tests.kernels.triton.device import NEEDS_FP8
from tests.models.grouped_runner import GroupedRunner
from tests.tiny_models import random_prompt, save_tiny_model

CUDA = torch.device("cuda", 0)
LAYOUT = KvLayout(kv_heads=8, num_layers=2, block_size=16, head_dim=128, dtype=torch.bfloat16)
HEADS = 32
SCALE = 128**-0.5


def make_kernels() -> TritonKernels:
    return TritonKernels.of(CUDA)


@pytest.fixture(scope="module")
def cache() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn_like(LAYOUT.allocate(3000, CUDA))


def blocks_for(contexts: list[int]) -> list[list[int]]:
    order = random.Random(1).sample(range(3000), 3000)
    tables = []
    for context in contexts:
        count = -(-context // LAYOUT.block_size)
        tables.append(order[:count])
        order = order[count:]
    return tables


@pytest.mark.parametrize(("window", "cap"), [(None, None), (1024, None), (None, 1.5)])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 8192)],
        [(1, context) for context in (1, 16, 17, 4000, 33, 900, 8192, 64)],
        [(1, 500)] * 64,
        [(1, 700), (1, 5), (300, 8192), (17, 17), (512, 512), (2, 4001)],
    ],
    ids=["one long", "ragged", "full batch", "mixed"],
)
def test_attention_of_an_8b_model(
    cache: torch.Tensor, rows: list[tuple[int, int]], window: int | None, cap: float | None
) -> None:
    tables = blocks_for([context for _, context in rows])
    spans = [AttentionRow(new, context, table) for (new, context), table in zip(rows, tables, strict=True)]
    tokens = sum(new for new, _ in rows)
    query = torch.randn(tokens, HEADS, 128, device=CUDA, dtype=torch.bfloat16)
    key_value = torch.randn(2, tokens, 8, 128, device=CUDA, dtype=torch.bfloat16)
    mine = cache.clone()
    attend = make_kernels().plan_attention(LAYOUT, mine, spans, HEADS, SCALE, cap)
    got = attend(1, query, key_value, window).cpu()
    on_host, at = mine.cpu(), 0
    for span in spans:
        wanted = reference.paged_attention(
            query[at : at + span.new_tokens].cpu(),
            on_host,
            LAYOUT,
            1,
            list(span.blocks),
            span.context_len,
            SCALE,
            window,
            cap,
        )
        torch.testing.assert_close(got[at : at + span.new_tokens], wanted, rtol=2e-2, atol=2e-2)
        at += span.new_tokens


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4", "NVFP4", "FP8", "Q8_0"])
def test_products_of_an_8b_model_with_packed_weights(kind: str) -> None:
    """The rows are one, more than a program has, and many. The last product is recorded, so nothing may wait in it."""
    torch.manual_seed(0)
    outputs, inputs, form = 4096, 14_336, BlockFormat[kind]
    row = torch.from_numpy(usual_blocks(form, 64, inputs)).to(CUDA)
    weight = BlockWeight(form, row.repeat(outputs // 64, 1))
    linear = make_kernels().block_linear(weight)
    numbers = linear.rows(torch.arange(outputs, device=CUDA))
    wanted = dequantised(BlockWeight(form, weight.blocks[:64].cpu()))
    torch.testing.assert_close(numbers[:64].cpu().float(), wanted, rtol=8e-3, atol=1e-5)
    # Rounding inputs to FP8 adds 2.6 %.
    most = 0.035 if isinstance(linear, TritonFp8Linear) else 0.01
    for rows in (1, 16, 64, 200, 1000):
        x = torch.randn(rows, inputs, device=CUDA, dtype=torch.bfloat16)
        plain = x.float() @ numbers.float().t()
        assert (linear(x).float() - plain).norm() / plain.norm() < most
    x = torch.randn(16, inputs, device=CUDA, dtype=torch.bfloat16)
    linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, linear(x))


@NEEDS_FP8
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14_336), (28_672, 4096)])
def test_a_row_in_fp8_is_the_same_in_any_step(outputs: int, inputs: int) -> None:
    """Inputs are cut into parts, or are not; programs of all sizes have the row. The bits are the same."""
    torch.manual_seed(1)
    row = torch.from_numpy(usual_blocks(BlockFormat.FP8, 64, inputs)).to(CUDA)
    linear = make_kernels().block_linear(BlockWeight(BlockFormat.FP8, row.repeat(outputs // 64, 1)))
    x = torch.randn(1000, inputs, device=CUDA, dtype=torch.bfloat16)
    every = linear(x)
    for rows in (1, 16, 17, 33, 64, 65, 200):
        assert torch.equal(linear(x[:rows]), every[:rows]), rows


@NEEDS_FP8
def test_experts_in_fp8_are_recorded() -> None:
    """Nothing waits in a step, and its numbers are those of weights that are read as they are, but for rounding."""
    form = ExpertsForm(32, 2048, 768, torch.bfloat16, Routing(8, normalised=True), Activation.SILU, gated=True)
    blocks = [
        BlockWeight(BlockFormat.FP8, torch.from_numpy(usual_blocks(BlockFormat.FP8, *shape)).to(CUDA))
        for shape in ((2 * form.channels, form.hidden), (form.hidden, form.channels))
    ]
    weights = [ExpertWeights((blocks[0],), blocks[1])] * form.count
    experts, exact = (kernels.experts(form, weights) for kernels in (make_kernels(), TritonKernels(132)))
    for rows in (1, 64, 1000):
        x = torch.randn(rows, form.hidden, device=CUDA, dtype=torch.bfloat16)
        logits = torch.randn(rows, form.count, device=CUDA)
        wanted = exact(x, logits).float()
        assert 0.005 < (experts(x, logits).float() - wanted).norm() / wanted.norm() < 0.08
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, logits)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(out, experts(x, logits))


def usual_blocks(kind: BlockFormat, outputs: int, inputs: int) -> np.ndarray:
    """Returns random blocks whose scales are all alike."""
    blocks = random_blocks(kind, outputs, inputs, 0).blocks.numpy().reshape(outputs, -1, kind.block_bytes)
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    if kind is BlockFormat.MXFP4:
        blocks[..., 0] = 120
    if kind in (BlockFormat.FP8, BlockFormat.NVFP4):
        blocks[..., :4] = np.array([0.01], np.float32).view(np.uint8)
    return blocks.reshape(outputs, -1)


def test_blocks_survive_a_trip_through_page_locked_memory(cache: torch.Tensor) -> None:
    blocks = random.Random(2).sample(range(3000), 64)
    ids = torch.tensor(blocks, dtype=torch.int32, device=CUDA)
    staged = torch.empty(64, *cache.shape[1:], dtype=cache.dtype, device=CUDA)
    gather_blocks(cache, ids, staged)
    host = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=True)
    host.copy_(staged, non_blocking=True)
    staged.zero_()
    staged.copy_(host, non_blocking=True)
    landed = torch.zeros_like(cache)
    scatter_blocks(landed, ids, staged)
    assert torch.equal(landed[blocks], cache[blocks])
    assert int(landed.any(dim=(1, 2, 3, 4, 5)).sum()) == 64


def test_page_locked_numbers_are_not_overwritten_before_they_are_copied() -> None:
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # torch has no annotation
    moved = [to_device([np.full(100_000, i), [i]], CUDA) for i in range(50)]
    assert [(int(many.min()), int(many.max()), int(one)) for many, one in moved] == [(i, i, i) for i in range(50)]


def test_captured_decode_steps_give_the_tokens_of_steps_launched_one_by_one(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    config, kernels = read_decoder_config(folder), make_kernels()
    answers = []
    for captured in (False, True):
        runner = GroupedRunner(folder, config, Dtype.FP32, 4, 256, 128, kernels, device=CUDA)
        if captured:
            runner.capture_decode(kernels, 8, CudaGraphs())
        prompts = [random_prompt(5 + 7 * i, seed=i) for i in range(6)]
        tables = [list(range(32 * i, 32 * i + 32)) for i in range(6)]
        logits = runner.run([StepRow(prompt, 0, table, True) for prompt, table in zip(prompts, tables, strict=True)])
        for _ in range(40):
            for prompt, token in zip(prompts, logits.argmax(-1).tolist(), strict=True):
                prompt.append(token)
            logits = runner.run(
                [
                    StepRow(prompt[-1:], len(prompt) - 1, table, True)
                    for prompt, table in zip(prompts, tables, strict=True)
                ]
            )
        answers.append(prompts)
    assert answers[0] == answers[1]
