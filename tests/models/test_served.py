"""Tests the table of what is served."""

from __future__ import annotations

from functools import cache

from pdserve.models.checkpoint.gguf.architectures import ARCHITECTURES
from pdserve.models.served import NOT_YET, ServedFamily, not_yet, served_families
from pdserve.models.table import FAMILIES


@cache
def rows_by_type() -> dict[str, ServedFamily]:
    return {row.model_type: row for row in served_families()}


def family(model_type: str) -> ServedFamily:
    return rows_by_type()[model_type]


def test_every_family_has_a_row_and_names_models_of_its_own() -> None:
    rows = served_families()
    parts = {"glm5_next", "hy_v4_vl", "minimax_m3_vl", "mistral_large4", "mllama", "muse_glimmer", "step3p7"}
    assert [row.model_type for row in rows] == sorted(FAMILIES.keys() | parts)
    assert all(all(row.parts) for row in rows)
    assert len({row.models for row in rows}) == len(rows)


def test_rows_say_what_families_are_made_of() -> None:
    assert family("llama").parts == ("as Llama", "SiLU with a gate", "RMS before each part", "rotary")
    assert family("gpt2").positions == "learned"
    assert "corrected sigmoid" in family("glm4_moe").feed_forward
    assert family("cohere2").attention.startswith("windows in 30 of 40 layers")
    assert family("phi").positions == "rotary, 50% of each head"
    assert "without weights" in family("olmo").norms
    assert family("kimi_linear").attention.startswith("gated delta nets with a decay for each channel in 21 of 27")
    assert family("kimi_linear").positions == "none"
    entries = "entries for 4 tokens, of which an indexer chooses some, in 20 of 43 layers, entries for 128 tokens in 23"
    assert entries in family("deepseek_v4").attention
    assert family("deepseek_v4").norms.endswith("4 residuals")
    assert family("hy_v4").attention == "latents, of which an indexer chooses some, gated heads, sinks"
    assert family("hy_v4").norms.endswith("4 residuals")
    assert family("gemma3n_text").norms.endswith("4 residuals")
    assert family("minimax_m3_vl").models == "MiniMax M3, its text part"
    assert family("deepseek_v32").attention == "latents, of which an indexer chooses some"


def test_every_architecture_of_gguf_files_is_in_a_row() -> None:
    named = {form for row in served_families() for form in row.formats if form.startswith("GGUF ")}
    assert named == {f"GGUF {arch}" for arch in ARCHITECTURES}


def test_what_is_not_yet_served_has_no_recipe() -> None:
    assert not NOT_YET.keys() & FAMILIES.keys()
    assert not_yet("minimax_m3_vl_text") == "a text part in a folder of its own is not served yet"
    assert not_yet("rwkv") == "states are not served yet"
    assert not_yet("llama") == ""
