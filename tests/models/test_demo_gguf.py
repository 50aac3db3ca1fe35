"""Tests a real GGUF file, SmolLM2's in Q4_1, and the folder made of it, against what transformers reads of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.config import Dtype
from pdserve.models.checkpoint.decoder_config import read_decoder_config
from pdserve.models.checkpoint.demo import packaged_gguf
from pdserve.models.checkpoint.weights import Checkpoint, SafetensorsFiles
from tests.models.greedy import greedy_tokens, small_runner

pytestmark = pytest.mark.integration

PROMPT = [1, 9690, 198, 2683, 359, 260, 3575, 282, 4649, 47]


def test_every_weight_is_bit_for_bit_that_of_transformers(demo_model: Path) -> None:
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


def test_tokens_are_those_of_the_folder(demo_model: Path) -> None:
    found = []
    for path in (packaged_gguf(), demo_model):
        found.append(greedy_tokens(small_runner(path, Dtype.BF16, block_size=16), PROMPT, 24))
        assert read_decoder_config(path).eos_token_ids == {2}
    assert found[0] == found[1]
