"""Tests that P/D clusters serve families of unlike parts with the tokens of transformers, in fp32."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.cluster.nodes import served
from tests.models.tiny_families import save_tiny
from tests.tiny_models import VOCAB_SIZE, Reference

NEW_TOKENS = 8
PROMPTS = [random.Random(length).choices(range(3, VOCAB_SIZE), k=length) for length in (5, 37, 100)]
SETTINGS = {"kv_cache_mib": 8, "max_num_batched_tokens": 32, "max_num_seqs": 8}
CASES = ("glm4-moe", "gpt2", "cohere2", "olmo3")
"""Norms before, beside and behind the parts; fused, transposed and permuted weights; experts; learned positions."""


@pytest.mark.parametrize("case", [*CASES[:2], *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES[2:])])
def test_a_pair_gives_the_tokens_of_transformers(demo_model: Path, tmp_path: Path, case: str) -> None:
    model = save_tiny(case, tmp_path)
    for path in (*demo_model.glob("*token*.json"), *demo_model.glob("chat_template*")):
        shutil.copy(path, model)
    reference = Reference(model, NEW_TOKENS)
    wanted = [reference.answer(prompt) for prompt in PROMPTS]
    with served(model, dtype="fp32", **SETTINGS) as pair:
        assert [pair.complete(prompt, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS] == wanted
        (decode,) = pair.decode
        # On a machine with other work a prefill node may be late, and the decode node then computes a prompt itself.
        assert decode.metric("prefills_total", source="remote") > 0
