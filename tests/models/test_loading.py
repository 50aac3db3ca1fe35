"""Tests what a load takes: memory, in a process of its own, and the bytes that it tells of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.tiny_families import save_tiny
from tests.models.unsummed import Unsummed
from tests.tiny_models import save_tiny_model

LOAD = """
import sys
from pathlib import Path
from pdserve.models.lean_torch import import_torch
import_torch()
from pdserve.config import Dtype
from pdserve.machine.memory import give_large_blocks_back
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.unsummed import Unsummed

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
give_large_blocks_back()
decoder = read_decoder_config(folder)
Path("/proc/self/clear_refs").write_text("5")
before = peak()
runner = ModelRunner(folder, decoder, Dtype.FP32, 16, 4, 64, TorchKernels(), tp=Unsummed(rank, ranks))
print(peak() - before)
"""
HIDDEN, INNER, LAYERS, VOCAB = 1024, 4096, 6, 4096
FILES = 4


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a model with about 200 MiB of bf16 weights in several files."""
    folder = tmp_path_factory.mktemp("large")
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for index in range(LAYERS):
        at = f"model.layers.{index}"
        shapes |= {f"{at}.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{at}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (HIDDEN, INNER)}
        shapes |= {f"{at}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    names = sorted(shapes)
    placed: dict[str, str] = {}
    for number in range(FILES):
        file = f"model-{number}.safetensors"
        part = {f"{name}.weight": torch.ones(shapes[name], dtype=torch.bfloat16) for name in names[number::FILES]}
        save_file(part, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    settings = {"model_type": "llama", "num_attention_heads": 16, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(settings | sizes))
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_takes_the_weights_and_one_file_more(large_model: Path, ranks: int) -> None:
    """The process has the files mapped: if they stayed in its memory, it would have them beside the weights."""
    sizes = [path.stat().st_size for path in large_model.glob("*.safetensors")]
    command = [sys.executable, "-c", LOAD, str(large_model), str(ranks - 1), str(ranks)]
    found = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    weights = 2 * sum(sizes) // ranks  # In fp32, each number takes twice what it takes in the files.
    # What was read leaves the memory after every 64 MiB.
    assert found < weights + max(sizes) + 64 * 2**20


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["gpt2", "phi3", "qwen2-moe", "glm4", "llama"])
def test_progress_counts_the_bytes_that_are_read(tmp_path: Path, case: str, ranks: int) -> None:
    """Fused, transposed and permuted weights, and experts: each rank counts its own part of them."""
    folder = save_tiny_model(case, tmp_path) if case == "llama" else save_tiny(case, tmp_path)
    for rank in range(ranks):
        told: list[float] = []
        decoder = read_decoder_config(folder)
        tp = Unsummed(rank, ranks)
        ModelRunner(folder, decoder, Dtype.FP32, 4, 8, 32, TorchKernels(), tp=tp, progress=told.append)
        # More bytes than were counted would tell 1.0 twice.
        assert sorted(set(told)) == told
        assert told[-1] == 1.0
