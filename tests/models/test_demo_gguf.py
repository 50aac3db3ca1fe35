"""Tests a real GGUF file, SmolLM2's in Q4_1, and the folder made of it, against what transformers reads of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.config import Dtype
from pdserve.models.checkpoint.cached_tokenizer import gguf_tokenizer
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.model_files import packaged_gguf
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.weights import Checkpoint
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.models.greedy import greedy_tokens, small_runner

pytestmark = pytest.mark.integration

TEXT = (
    "A lighthouse keeper writes down the weather four times a day. In the morning the wind came from the west, and the "
    "sea was grey. At noon two ships passed; the larger one carried timber. In the evening he lit the lamp, wound the "
    "clock, and read until the rain began. Nobody had visited the rock for three weeks, but he did not mind: there was "
    "bread, there was oil, and in spring the boat would bring letters from his sister, who teaches mathematics in town."
)
PROMPT = [1, 9690, 198, 2683, 359, 260, 3575, 282, 4649, 47]


@pytest.fixture(scope="module")
def kernels() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


def test_every_weight_of_the_folder_is_bit_for_bit_that_of_the_file(demo_model: Path) -> None:
    direct, converted = (Checkpoint(path, torch.bfloat16) for path in (packaged_gguf(), demo_model))
    files = SafetensorsFiles(demo_model)
    for name in sorted(files.names()):
        shape = files.shape(name)
        assert torch.equal(direct.take(name, shape), converted.take(name, shape)), name
    direct.check_all_taken()


@pytest.mark.nightly
def test_every_weight_is_bit_for_bit_that_of_transformers(demo_model: Path) -> None:
    """In every run, ``test_gguf_tensors.py`` compares small tensors of each format."""
    gguf = packaged_gguf()
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    reference = model.state_dict()
    direct, converted = (Checkpoint(path, torch.bfloat16) for path in (gguf, demo_model))
    files = SafetensorsFiles(demo_model)
    assert set(files.names()) == reference.keys() - {"lm_head.weight"}
    for name in sorted(files.names()):
        shape = files.shape(name)
        assert torch.equal(direct.take(name, shape), reference[name]), name
        assert torch.equal(converted.take(name, shape), reference[name]), name
    direct.check_all_taken()


def test_the_folder_has_the_tokenizer_that_transformers_makes(demo_model: Path) -> None:
    gguf = packaged_gguf()
    reference = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    own = AutoTokenizer.from_pretrained(demo_model)
    assert own.backend_tokenizer.to_str() == reference.backend_tokenizer.to_str()
    assert own.chat_template == reference.chat_template
    assert own.special_tokens_map == reference.special_tokens_map


def test_blocks_say_of_a_text_what_the_weights_say(kernels: CompiledKernels) -> None:
    # Measured on 1,151 tokens of prose: a mean divergence (Kullback-Leibler) of 0.004, where bf16 weights have 0.001,
    # and a loss of 3.0037, where fp32 has 3.0035.
    path = packaged_gguf()
    ids: list[int] = gguf_tokenizer(path).encode(TEXT)
    exact = next_tokens(path, Dtype.FP32, ids, kernels, None)
    kept = next_tokens(path, Dtype.BF16, ids, kernels, kernels)
    assert (exact.exp() * (exact - kept)).sum(1).mean() < 0.015
    wanted = torch.tensor(ids[1:])[:, None]
    losses = [-found.gather(1, wanted).mean() for found in (exact, kept)]
    assert abs(losses[0] - losses[1]) / losses[0] < 0.02


def next_tokens(
    path: Path, dtype: Dtype, ids: list[int], kernels: CompiledKernels, block_kernels: CompiledKernels | None
) -> torch.Tensor:
    """Returns the log probabilities of the tokens after each of ``ids`` but the last."""
    blocks = -(-len(ids) // 16)
    config = read_decoder_config(path)
    runner = ModelRunner(path, config, dtype, 16, blocks, 16 * blocks, kernels, block_kernels=block_kernels)
    found: list[torch.Tensor] = []
    row = StepRow(ids, 0, range(blocks), True, range(len(ids) - 1))
    runner.run([row], score=lambda logits: found.append(logits.clone()))
    return torch.cat(found)[: len(ids) - 1].float().log_softmax(1)


def test_tokens_are_those_of_the_folder(demo_model: Path) -> None:
    found = []
    for path in (packaged_gguf(), demo_model):
        found.append(greedy_tokens(small_runner(path, Dtype.BF16, block_size=16), PROMPT, 8))
        assert read_decoder_config(path).eos_token_ids == {2}
    assert found[0] == found[1]
