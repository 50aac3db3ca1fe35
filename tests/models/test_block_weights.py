"""Tests models whose quantised weights stay in the blocks of their file."""

from __future__ import annotations

import math
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from gguf import GGMLQuantizationType

from pdserve.config import Dtype, ModelConfig, Weights
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.fingerprint import fingerprint
from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.gguf.tensors import GgufTensors
from pdserve.models.checkpoint.weight_form import GPU_BITS, gpu_weight_bytes
from pdserve.models.checkpoint.weights import ALL, Checkpoint, joined_columns, stays_in_blocks
from pdserve.models.decoder import build_decoder
from pdserve.models.parts.projections import Building, Projection, SideBySide, column_parallel
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.triton.block_packing import PACKED_FORMS
from tests.models.grouped_runner import GroupedRunner
from tests.models.unsummed import Unsummed
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model

Q8_0, Q4_1, BF16 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.BF16
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PROMPT = list(range(100, 137))


@pytest.fixture(scope="module")
def kernels() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


def runner(path: Path, kernels: CompiledKernels, *, blocks: bool) -> ModelRunner:
    config = read_decoder_config(path)
    return GroupedRunner(path, config, Dtype.BF16, 4, 32, 128, kernels, block_kernels=kernels if blocks else None)


def logits(runner: ModelRunner, chunk: int) -> torch.Tensor:
    parts = [PROMPT[start : start + chunk] for start in range(0, len(PROMPT), chunk)]
    return torch.cat([runner.run([StepRow(p, i * chunk, range(16), True)]).clone() for i, p in enumerate(parts)])


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "gemma3-pattern"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of which every matrix is in Q8_0."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(request.param, folder / "model", **SHAPE)
    return save_tiny_gguf(model, folder / "tiny.gguf", quantized=Q8_0, widths=(64, 96))


def test_logits_are_those_of_the_dequantised_weights(quantised: Path, kernels: CompiledKernels) -> None:
    kept, plain = (logits(runner(quantised, kernels, blocks=blocks), 1) for blocks in (True, False))
    assert not torch.equal(kept, plain)
    # Inputs are rounded to bytes, which adds half a percent in each product, and random layers let it grow. Logits of
    # other weights would differ by more than their own size.
    assert (kept - plain).norm() / plain.norm() < 0.15


def test_a_request_computes_the_same_in_any_batch(quantised: Path, kernels: CompiledKernels) -> None:
    own = runner(quantised, kernels, blocks=True)
    alone = own.run([StepRow([7], 0, range(8), True)]).clone()
    others = [StepRow([token], 0, range(8 + token, 9 + token), True) for token in range(1, 12)]
    together = own.run([*others, StepRow([7], 0, range(8), True)])
    assert torch.equal(together[-1:], alone)


def test_every_weight_stays_in_blocks(tmp_path: Path, kernels: CompiledKernels) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=Q8_0, widths=(64, 96))
    building = Building(Checkpoint(path, torch.bfloat16), kernels, Unsummed(0, 1), kernels)
    with patch.object(CompiledKernels, "linear") as dequantised:
        build_decoder(read_decoder_config(path), building, 64, torch.bfloat16)
    assert not dequantised.called


def test_projections_of_several_formats_lie_side_by_side(tmp_path: Path, kernels: CompiledKernels) -> None:
    folder = save_tiny_model("qwen2", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(
        folder, tmp_path / "tiny.gguf", quantized=Q8_0, widths=(64, 96), others={"v_proj": Q4_1, "up_proj": BF16}
    )
    checkpoint = Checkpoint(path, torch.bfloat16)
    building = Building(checkpoint, kernels, Unsummed(0, 1), kernels)
    prefix = "model.layers.0.self_attn"
    parts = [
        Projection(f"{prefix}.{name}_proj", out, ALL, biased=True) for name, out in (("q", 64), ("k", 32), ("v", 32))
    ]
    joined = column_parallel(building, 64, parts)
    assert isinstance(joined, SideBySide)
    assert len(joined.linears) == 2
    x = torch.randn(3, 64).bfloat16()
    plain = GgufTensors(path)
    weight = torch.cat([plain.read(f"{part.name}.weight", ALL, ALL, torch.float32) for part in parts])
    bias = torch.cat([plain.read(f"{part.name}.bias", ALL, ALL, torch.float32) for part in parts])
    wanted = x.float() @ weight.T + bias
    assert (joined(x) - wanted).norm() / wanted.norm() < 0.02
    kept, whole = (logits(runner(path, kernels, blocks=blocks), 5) for blocks in (True, False))
    assert (kept - whole).norm() / whole.norm() < 0.15


def test_parts_of_whole_blocks_are_read_and_others_are_not(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=Q8_0, widths=(64, 96))
    files = GgufTensors(path)
    name = "model.layers.1.mlp.down_proj.weight"
    part = files.read_blocks(name, slice(3, 20), slice(32, 96))
    assert isinstance(part, BlockWeight)
    assert (part.format, part.inputs, tuple(part.blocks.shape)) == (BlockFormat.Q8_0, 64, (17, 2 * 34))
    whole = files.read_blocks(name, ALL, ALL)
    assert whole is not None
    assert torch.equal(part.blocks, whole.blocks[3:20, 34:])
    assert files.read_blocks(name, ALL, slice(0, 48)) is None
    assert files.read_blocks("model.norm.weight", ALL, ALL) is None
    assert files.read_blocks("model.embed_tokens.weight", slice(512, 512), ALL) is None


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_take_blocks_where_these_divide(tmp_path: Path, kernels: CompiledKernels, size: int) -> None:
    """Three ranks get 32 of 96 columns of the MLP each; two get 48, which is a block and a half."""
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=Q8_0, widths=(64, 96))
    x = torch.randn(4, 96).bfloat16()
    each = 96 // size
    total = torch.zeros(4, 64)
    for rank in range(size):
        mine = slice(rank * each, (rank + 1) * each)
        building = Building(Checkpoint(path, torch.bfloat16), kernels, Unsummed(rank, size), kernels)
        weight = building.weight("model.layers.0.mlp.down_proj.weight", (64, 96), columns=mine)
        assert isinstance(weight, BlockWeight) == (each % 32 == 0)
        total += building.linear(weight)(x[:, mine].contiguous()).float()
    wanted = x.float() @ GgufTensors(path).read("model.layers.0.mlp.down_proj.weight", ALL, ALL, torch.float32).T
    assert (total - wanted).norm() / wanted.norm() < 0.02


def test_columns_of_several_parts_are_beside_each_other(tmp_path: Path, kernels: CompiledKernels) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "tiny.gguf", quantized=Q8_0, widths=(64, 96))
    name, shape, rows = "model.layers.0.mlp.down_proj.weight", (64, 96), (5, 9, 8)
    whole = GgufTensors(path).read(name, ALL, ALL, torch.float32)
    parts, odd = (slice(64, 96), slice(0, 32)), (slice(50, 60), slice(0, 7))
    weight = Building(Checkpoint(path, torch.bfloat16), kernels, Unsummed(0, 1), kernels).weight(
        name, shape, columns=parts
    )
    assert isinstance(weight, BlockWeight)
    x = torch.randn(4, 64).bfloat16()
    wanted = x.float() @ torch.cat([whole[:, part] for part in parts], 1).T
    assert (kernels.block_linear(weight)(x) - wanted).norm() / wanted.norm() < 0.02
    assert Checkpoint(path, torch.bfloat16).take_blocks(name, shape, columns=odd) is None
    checkpoint = Checkpoint(path, torch.float32)
    without_memory = checkpoint.unread().take(name, shape, rows=rows, columns=odd)
    found = checkpoint.take(name, shape, rows=rows, columns=odd)
    assert without_memory.shape == found.shape
    assert torch.equal(found, torch.cat([whole[list(rows), part] for part in odd], 1))
    assert joined_columns([slice(0, 4), slice(4, 9)]) == slice(0, 9)


def test_when_blocks_are_kept(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "q.gguf", quantized=Q8_0, widths=(64,))
    plain = save_tiny_gguf(folder, tmp_path / "plain.gguf")
    usual = ModelConfig()
    assert stays_in_blocks(path, usual, kernels=True)
    assert not stays_in_blocks(path, usual, kernels=False)
    assert not stays_in_blocks(path, ModelConfig(dtype=Dtype.FP32), kernels=True)
    assert not stays_in_blocks(path, ModelConfig(weights=Weights.DEQUANTISE), kernels=True)
    assert not stays_in_blocks(plain, usual, kernels=True)
    assert not stays_in_blocks(folder, usual, kernels=True)


def test_memory_on_a_gpu_is_that_of_what_stays_packed(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "q.gguf", quantized=Q4_1, widths=(64,))
    tensors = read_gguf(path).tensors.values()
    in_blocks = sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind == Q4_1)
    others = sum(math.prod(tensor.shape) for tensor in tensors) - in_blocks
    assert gpu_weight_bytes(path, ModelConfig()) == in_blocks * 5 / 8 + 2 * others
    assert gpu_weight_bytes(path, ModelConfig(weights=Weights.DEQUANTISE)) == 2 * (in_blocks + others)
    # As a row of 1024 inputs has it, which is a whole number of turns of each loop.
    for kind, bits in GPU_BITS.items():
        assert PACKED_FORMS[BlockFormat(kind)].nbytes(1, 1024) == 1024 * bits / 8
    assert GPU_BITS.keys() == BLOCK_FORMATS


def test_the_fingerprint_names_the_form(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    path = save_tiny_gguf(folder, tmp_path / "q.gguf", quantized=Q8_0, widths=(64,))
    assert fingerprint(path, in_blocks=True) == "blocks-" + fingerprint(path)
    assert fingerprint(path, in_blocks=True, long_contexts=True) == "long-blocks-" + fingerprint(path)
