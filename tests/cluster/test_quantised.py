"""Tests a P/D cluster that serves a folder of quantised weights, which become blocks.

In every run, ``tests/cli/test_up.py`` serves blocks of a file, and ``tests/models`` computes such folders.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.config import Dtype
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.cluster.nodes import http, served
from tests.eventually import eventually
from tests.models.greedy import greedy_tokens
from tests.models.grouped_runner import GroupedRunner
from tests.models.quantisers import quantised_folders
from tests.tiny_models import save_tiny_chat_model

NEW_TOKENS = 12
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
PROMPTS = [list(range(first, first + 37)) for first in (20, 200)]


@pytest.mark.nightly
def test_tokens_are_those_of_one_engine(demo_model: Path, tmp_path: Path) -> None:
    model = save_tiny_chat_model(demo_model, tmp_path / "model", "qwen3", **SHAPE, head_dim=32)
    folder, _ = quantised_folders(model, "fp8-blocks", tmp_path)
    kernels = CompiledKernels(cache_folder(os.environ))
    with served(folder, dtype="bf16") as running:
        for prompt in PROMPTS:
            config = read_decoder_config(folder)
            runner = GroupedRunner(folder, config, Dtype.BF16, 16, 8, 128, kernels, block_kernels=kernels)
            assert running.complete(prompt, NEW_TOKENS, ignore_eos=True) == greedy_tokens(runner, prompt, NEW_TOKENS)
        (decode,) = running.decode
        eventually(
            lambda: decode.metric("prefills_total", source="remote") == len(PROMPTS), "every prompt came from the peer"
        )
        assert len(http(running.url + "/instances").json()) == 2
