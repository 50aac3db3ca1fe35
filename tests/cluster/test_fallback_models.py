"""Tests that P/D clusters serve models that only transformers computes, with the tokens of transformers, in fp32.

In every run, ``tests/models/test_hf_decoder.py`` computes them without a cluster.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.nodes import served
from tests.tiny_models import FALLBACK, Reference, random_prompt, save_tiny_chat_model

NEW_TOKENS = 8
PROMPTS = [random_prompt(length, seed=length) for length in (5, 37, 100)]
SETTINGS = {"kv_cache_mib": 8, "max_num_batched_tokens": 32, "max_num_seqs": 8}


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FALLBACK))
def test_a_pair_gives_the_tokens_of_transformers(demo_model: Path, tmp_path: Path, family: str) -> None:
    model = save_tiny_chat_model(demo_model, tmp_path, family)
    reference = Reference(model, NEW_TOKENS)
    wanted = [reference.answer(prompt) for prompt in PROMPTS]
    with served(model, dtype="fp32", **SETTINGS) as pair:
        assert [pair.complete(prompt, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS] == wanted
        (decode,) = pair.decode
        # On a machine with other work a prefill node may be late, and the decode node then computes a prompt itself.
        assert decode.metric("prefills_total", source="remote") > 0
