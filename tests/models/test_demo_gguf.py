"""Tests a real GGUF file, SmolLM2's in Q4_1, against the folder that transformers converted it to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype
from pdserve.models.checkpoint.decoder_config import read_decoder_config
from pdserve.models.checkpoint.demo import packaged_gguf
from pdserve.models.checkpoint.weights import Checkpoint, SafetensorsFiles
from tests.models.greedy import greedy_tokens, small_runner

pytestmark = pytest.mark.integration

PROMPT = [1, 9690, 198, 2683, 359, 260, 3575, 282, 4649, 47]


def test_every_weight_is_bit_for_bit_that_of_the_folder(demo_model: Path) -> None:
    direct, converted = (Checkpoint(path, torch.bfloat16) for path in (packaged_gguf(), demo_model))
    files = SafetensorsFiles(demo_model)
    for name in sorted(files.names()):
        shape = files.shape(name)
        assert torch.equal(direct.take(name, shape), converted.take(name, shape)), name
    direct.check_all_taken()


def test_tokens_are_those_of_the_folder(demo_model: Path) -> None:
    found = []
    for path in (packaged_gguf(), demo_model):
        found.append(greedy_tokens(small_runner(path, Dtype.BF16, block_size=16), PROMPT, 24))
        assert read_decoder_config(path).eos_token_ids == {2}
    assert found[0] == found[1]
