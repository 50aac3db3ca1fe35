"""Tests that engines compute the same with weights from the machine's file as with weights of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType

from pdserve.bench.engine.subject import bounded_counts, other_tables
from pdserve.config import CpuConfig, CpuKernels, Dtype, EngineConfig, ModelConfig
from pdserve.engine import runner_loading
from pdserve.engine.runner_loading import kept_block_kernels, load_runner, packed_weights
from pdserve.models.backend import CPU, Backend
from pdserve.models.checkpoint import weight_file
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FallbackConfig
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.runner import StepRow
from pdserve.models.tp.shares import ALONE, TpGroup
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.engine.started_ranks import engine_config
from tests.models.unsummed import Ungathered
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model

PROMPT = list(range(20, 31))


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_loading, "SMALLEST", 0)


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files may be in memory here."""
    monkeypatch.setattr(weight_file, "_UNFIT_FILE_SYSTEMS", {})


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the names of the tensors that are read from folders."""
    names: list[str] = []
    of_file = SafetensorsFiles.read

    def note(files: SafetensorsFiles, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        names.append(name)
        return of_file(files, name, rows, columns, dtype)

    monkeypatch.setattr(SafetensorsFiles, "read", note)
    yield names


def settings(model: Path, cache_dir: Path, dtype: Dtype, packed_weights_mib: int = 1024) -> EngineConfig:
    cpu = CpuConfig(kernels=CpuKernels.COMPILED, packed_weights_mib=packed_weights_mib)
    own = engine_config(model)
    return replace(own, cache_dir=str(cache_dir), model=ModelConfig(dtype=dtype, device=own.model.device), cpu=cpu)


def logits(config: EngineConfig, group: TpGroup = ALONE) -> torch.Tensor:
    """Returns what a newly loaded engine computes of a prompt."""
    kernels = CompiledKernels(cache_folder(os.environ))
    backend = Backend(CPU, kernels, None, kernels)
    decoder = read_decoder_config(Path(config.model_dir))
    blocks = kept_block_kernels(config, backend)
    counts = (16, *bounded_counts(decoder, 16, 1))
    runner = load_runner(config, decoder, counts, 64, group, backend, block_kernels=blocks)
    others = other_tables(runner.cache.groups[1:], range(4), 0)
    found = runner.run([StepRow(PROMPT, 0, range(4), True, others=others)]).clone()
    return torch.cat([found, runner.run([StepRow([7], len(PROMPT), range(4), True, others=others)])])


def packs() -> bool:
    """Returns whether this CPU's kernels pack weights that are not in blocks."""
    return CompiledKernels(cache_folder(os.environ)).packs_linear


def files(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob("packed-weights/*.weights"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3-pattern", "qwen3-moe"])
@pytest.mark.parametrize("dtype", list(Dtype))
def test_of_a_folder(family: str, dtype: Dtype, read: list[str], tmp_path: Path) -> None:
    model = save_tiny_model(family, tmp_path / "model")
    wanted = logits(settings(model, tmp_path, dtype, packed_weights_mib=0))
    assert files(tmp_path) == []
    config = settings(model, tmp_path, dtype)
    assert torch.equal(logits(config), wanted)
    kept = files(tmp_path)
    assert len(kept) == packs()
    read.clear()
    assert torch.equal(logits(config), wanted)
    assert files(tmp_path) == kept
    if packs():
        assert not [name for name in read if "_proj.weight" in name or "embed" in name], "they are in the file"


def test_of_a_file_in_blocks(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = save_tiny_model("llama", tmp_path / "model", head_dim=16, **shape)
    model = save_tiny_gguf(folder, tmp_path / "q.gguf", quantized=GGMLQuantizationType.Q8_0, widths=(64, 96))
    wanted = [logits(settings(model, tmp_path, dtype, packed_weights_mib=0)) for dtype in Dtype]
    for _ in range(2):
        assert all(
            torch.equal(logits(settings(model, tmp_path, dtype)), own) for dtype, own in zip(Dtype, wanted, strict=True)
        )
        assert len(files(tmp_path)) == 1 + packs(), "one of the blocks, and one of the dequantised weights"


def test_each_rank_has_a_file(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    groups = [Ungathered(rank, 2) for rank in range(2)]
    wanted = [logits(settings(model, tmp_path, Dtype.FP32, packed_weights_mib=0), group) for group in groups]
    for _ in range(2):
        for group, own in zip(groups, wanted, strict=True):
            assert torch.equal(logits(settings(model, tmp_path, Dtype.FP32), group), own)
    assert len(files(tmp_path)) == 2 * packs()


def test_another_fine_tune_of_the_same_shape_has_its_own(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    config = settings(model, tmp_path, Dtype.FP32)
    before = logits(config)
    weights = model / "model.safetensors"
    times, changed = weights.stat(), bytearray(weights.read_bytes())
    half = len(changed) - 4000
    changed[half:] = changed[half - 4000 : half]
    weights.write_bytes(changed)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as in the layers of images
    after = logits(config)
    assert len(files(tmp_path)) == 2 * packs()
    assert not torch.equal(before, after)
    assert torch.equal(logits(settings(model, tmp_path, Dtype.FP32, packed_weights_mib=0)), after)


@pytest.mark.parametrize("reason", ["transformers computes", "the CPU packs nothing"])
def test_who_packs_nothing_waits_for_nobody(reason: str, tmp_path: Path) -> None:
    config = settings(save_tiny_model("llama", tmp_path / "model"), tmp_path, Dtype.FP32)
    kernels, decoder = CompiledKernels(cache_folder(os.environ)), read_decoder_config(Path(config.model_dir))
    kernels.packs_linear = reason == "transformers computes"
    if kernels.packs_linear:
        known = {field.name: getattr(decoder, field.name) for field in fields(DecoderConfig)}
        decoder = FallbackConfig(**known, hf=transformers.PretrainedConfig())
    own = kernels.memory
    with packed_weights(config, decoder, ALONE, kernels, in_blocks=False):
        assert kernels.memory is own
    assert not (tmp_path / "packed-weights").exists()
