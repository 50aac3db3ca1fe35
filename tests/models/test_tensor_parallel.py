"""Tests that a model on several ranks gives the tokens that it gives on one rank and with transformers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import TpBackend
from pdserve.errors import ModelError
from pdserve.models.tp.shares import TpGroup, kv_share, share, vocab_part, vocab_share
from tests.models.rank_program import Case, Result
from tests.models.unsummed import Ungathered
from tests.processes import lean_torch_command
from tests.tiny_models import Reference, random_prompt, save_tiny_model

pytestmark = pytest.mark.integration

FAMILIES = ("llama", "qwen2", "qwen3", "llama-scaled", "gemma3", "qwen3-moe", "mistral-window")
NEW_TOKENS = 6
PROMPTS = [random_prompt(length, seed=length) for length in (6, 17, 40)]


def everyone(size: int) -> list[TpGroup]:
    return [Ungathered(rank, size) for rank in range(size)]


@given(st.integers(1, 16), st.integers(1, 50))
def test_equal_shares_are_all_of_it(size: int, each: int) -> None:
    parts = [share(rank, size * each, "things") for rank in everyone(size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size * each))
    assert {part.stop - part.start for part in parts} == {each}


@given(st.integers(1, 16), st.integers(1, 300))
def test_a_vocabulary_of_any_size_is_split(size: int, vocab_size: int) -> None:
    parts = [vocab_share(rank, vocab_size) for rank in everyone(size)]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(vocab_size))
    largest = vocab_part(Ungathered(0, size), vocab_size)
    assert all(0 <= part.stop - part.start <= largest for part in parts)


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_each_rank_holds_the_kv_heads_of_its_query_heads(size: int, kv_heads: int, group: int) -> None:
    heads = kv_heads * group
    for rank in everyone(size):
        if heads % size or (kv_heads % size and size % kv_heads):
            with pytest.raises(ModelError, match=f"--tensor-parallel-size {size} "):
                kv_share(rank, heads, kv_heads)
            continue
        mine, held = share(rank, heads, "heads"), kv_share(rank, heads, kv_heads)
        assert {head // group for head in range(mine.start, mine.stop)} == set(range(held.start, held.stop))
        assert held.stop - held.start == max(kv_heads // size, 1)


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(
        ModelError, match=r"--tensor-parallel-size 4 does not divide the model's 6 attention heads; .*\[1, 2, 3, 6\]"
    ):
        share(Ungathered(0, 4), 6, "attention heads")
    with pytest.raises(
        ModelError, match="--tensor-parallel-size 3 neither divides the model's 2 KV heads nor is a multiple of them"
    ):
        kv_share(Ungathered(0, 3), 6, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {family: save_tiny_model(family, root / family) for family in FAMILIES}
    # This model has three KV heads, and neither 2 nor 3 nor 6 divides its vocabulary.
    made["llama-3"] = save_tiny_model("llama", root / "llama-3", num_key_value_heads=3, vocab_size=511)
    return made


def reference(folder: Path) -> list[list[int]]:
    model = Reference(folder, NEW_TOKENS)
    return [model.answer([token % 511 for token in prompt]) for prompt in PROMPTS]


def computed(cases: list[Case]) -> list[Result]:
    out = subprocess.run(
        lean_torch_command("tests.models.rank_program"),
        input=msgspec.json.encode(cases),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    return msgspec.json.decode(out.stdout, type=list[Result])


def test_tokens_are_those_of_one_rank_and_of_transformers(folders: dict[str, Path]) -> None:
    prompts = [[token % 511 for token in prompt] for prompt in PROMPTS]
    plan = [
        *((family, size) for family in FAMILIES[:3] for size in (1, 2, 6)),
        *((family, 2) for family in FAMILIES[3:]),
        *(("llama-3", size) for size in (1, 3, 6)),
    ]
    cases = [Case(str(folders[family]), size, prompts, NEW_TOKENS) for family, size in plan]
    cases += [Case(str(folders["llama-3"]), 3, prompts, NEW_TOKENS, TpBackend.GLOO)]
    families = [family for family, _ in plan] + ["llama-3"]
    wanted = {family: reference(folder) for family, folder in folders.items()}
    for family, case, result in zip(families, cases, computed(cases), strict=True):
        assert result == Result(wanted[family]), (family, case.tp, case.backend)
