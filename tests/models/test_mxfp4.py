"""Weights in MXFP4: each number is the one that transformers reads, and a model's logits are those of its numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.weights import ALL, Checkpoint
from pdserve.models.runner import StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.contract import BlockFormat, BlockWeight
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.models.converted_gguf import save_converted
from tests.models.greedy import small_runner
from tests.models.grouped_runner import GroupedRunner
from tests.models.tiny_families import CASES, save_tiny

PROMPT = list(range(20, 43))
WEIGHTS = ("gate_up_proj", "down_proj")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns fp32 ``[out, in]`` of blocks ``[out, blocks, 16]`` and scales ``[out, blocks]``."""
    return convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()


def packed(generator: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random blocks and scales of ``shape``, ``[..., out, blocks]``."""
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(119, 124, shape, generator=generator, dtype=torch.uint8)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Returns the same gpt-oss twice: with experts in MXFP4, and with their numbers in fp32."""
    family, settings = CASES["gpt-oss"]
    monkeypatch.setitem(CASES, "gpt-oss", (family, settings | SIZES))
    wide, narrow = save_tiny("gpt-oss", tmp_path / "wide"), save_tiny("gpt-oss", tmp_path / "narrow")
    plain, small = load_file(wide / "model.safetensors"), load_file(narrow / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in plain if name.endswith(WEIGHTS)]:
        experts, inputs, outputs = plain[name].shape
        blocks, scales = packed(generator, experts, outputs, inputs // 32)
        plain[name] = torch.stack([dequantised(*each).t() for each in zip(blocks, scales, strict=True)]).contiguous()
        del small[name]
        small[f"{name}_blocks"], small[f"{name}_scales"] = blocks, scales
    save_file(plain, wide / "model.safetensors", metadata={"format": "pt"})
    save_file(small, narrow / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((narrow / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (narrow / "config.json").write_text(json.dumps(config))
    return narrow, wide


def logits(folder: Path) -> torch.Tensor:
    return small_runner(folder).run([StepRow(PROMPT, 0, range(8), True)])


def test_each_number_is_the_one_that_transformers_reads(folders: tuple[Path, Path]) -> None:
    narrow, wide = folders
    files = SafetensorsFiles(narrow, read_family_config(narrow).quantisation)
    wanted = load_file(wide / "model.safetensors")
    assert set(files.names()) == wanted.keys()
    name = next(name for name in wanted if name.endswith(WEIGHTS))
    parts = [f"{name}.{index}" for index in range(len(wanted[name]))]
    files.unstack(name, parts)
    for part, numbers in zip(parts, wanted[name], strict=True):
        for rows, columns in ((ALL, ALL), (slice(8, 40), slice(3, 50))):
            assert torch.equal(files.read(part, rows, columns, torch.float32), numbers[rows, columns])


def test_experts_stay_in_the_blocks_of_their_file(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = folders
    kernels, taken = CompiledKernels(cache_folder(os.environ)), list[BlockFormat]()
    take = Checkpoint.take_blocks

    def noted(*args: Any, **others: Any) -> BlockWeight | None:
        weight = take(*args, **others)
        taken.extend([] if weight is None else [weight.format])
        return weight

    monkeypatch.setattr(Checkpoint, "take_blocks", noted)
    found = []
    for folder in (narrow, wide):
        config = read_family_config(folder)
        runner = GroupedRunner(folder, config, Dtype.BF16, 4, 32, 128, kernels, block_kernels=kernels)
        found.append(runner.run([StepRow(PROMPT, 0, range(8), True)]).clone())
    experts = config.experts
    assert experts is not None
    assert taken == [BlockFormat.MXFP4] * (2 * experts.count * config.num_layers)
    kept, plain = found
    assert (kept - plain).norm() / plain.norm() < 0.15


def test_a_model_in_mxfp4_has_the_logits_of_its_numbers(folders: tuple[Path, Path]) -> None:
    narrow, wide = folders
    torch.testing.assert_close(logits(narrow), logits(wide), rtol=1e-5, atol=1e-5)


def test_blocks_that_do_not_fit_their_scales_are_named(folders: tuple[Path, Path]) -> None:
    narrow, _ = folders
    tensors = load_file(narrow / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name] = tensors[name][..., :1].contiguous()
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"_blocks' of shape .* has scales of shape"):
        logits(narrow)


def test_another_quantisation_is_refused_by_its_name(folders: tuple[Path, Path]) -> None:
    narrow, _ = folders
    config = json.loads((narrow / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "hqq"}
    (narrow / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="hqq"):
        read_decoder_config(narrow)


def test_a_gguf_file_in_mxfp4_has_the_logits_of_its_numbers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    _, wide = folders
    # Each block of the experts is one of MXFP4 already, so that nothing is rounded.
    kind = GGMLQuantizationType.MXFP4
    file = save_converted(wide, tmp_path / "narrow.gguf", "gpt-oss", quantized=kind, which="_exps")
    assert {t.kind for name, t in read_gguf(file).tensors.items() if name.endswith("_exps.weight")} == {kind}
    torch.testing.assert_close(logits(file), logits(wide), rtol=1e-5, atol=1e-5)
