"""Tests what Qwen 4 Exp has alone: blocks of tokens that are chosen, and hashed n-grams that are added to residuals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config import Dtype, KvCacheDtype
from pdserve.errors import ConfigError, ModelError
from pdserve.models.block_plan import BlockStep
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.layer_groups import Place, check_kv_dtype, group_sizes, layer_groups
from pdserve.models.rank_cache import rank_layouts
from pdserve.models.runner import StepRow
from pdserve.models.tp.shares import ALONE
from pdserve.wire.cache_groups import Keep
from tests.models.greedy import assert_not_finite_stays_in_its_request, small_runner
from tests.models.test_families import PROMPT
from tests.models.tiny_families import FULL, save_tiny
from tests.nightly import nightly
from tests.tiny_models import reference_logits

CASE = "qwen4-exp"
CUTS = ((0, 17), (17, 18), (18, 41))


def logits(folder: Path, cuts: tuple[tuple[int, int], ...] = CUTS) -> torch.Tensor:
    """Returns the logits after each token of the prompt, computed in these parts beside another request."""
    runner, pieces = small_runner(folder), list[torch.Tensor]()
    for start, end in cuts:
        other = StepRow(PROMPT[5:6], 0, range(16, 20), False)
        part = StepRow(PROMPT[start:end], start, range(16), True, range(end - start))
        runner.run([other, part], score=pieces.append)
    return torch.cat(pieces)


def assert_like_transformers(folder: Path) -> None:
    wanted = reference_logits(folder, PROMPT)
    torch.testing.assert_close(logits(folder), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.nightly
def test_a_model_of_attention_alone_may_choose_single_tokens(tmp_path: Path) -> None:
    folder = save_tiny(CASE, tmp_path, layer_types=[FULL] * 3, ple_layer_ids=None, indexer_compress_ratio=1)
    assert [group.keep for group in layer_groups(read_family_config(folder)).groups] == [Keep.ALL]
    assert_like_transformers(folder)


def test_keys_and_values_may_be_gathered_for_each_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how a GPU computes."""
    monkeypatch.setattr(BlockStep, "gathers", property(lambda step: True))
    monkeypatch.setattr("pdserve.models.block_plan.GATHERED_NUMBERS", 1500)
    monkeypatch.setattr("pdserve.models.block_plan.SCORES_AT_ONCE", 900)
    assert_like_transformers(save_tiny(CASE, tmp_path))


@pytest.mark.parametrize("gathers", [nightly(False), True])
def test_what_is_not_finite_stays_in_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    monkeypatch.setattr(BlockStep, "gathers", property(lambda step: gathers))
    assert_not_finite_stays_in_its_request(save_tiny(CASE, tmp_path), PROMPT)


@pytest.mark.nightly
def test_of_blocks_with_equal_scores_the_earlier_ones_are_chosen(tmp_path: Path) -> None:
    """Whatever a context was cut into: a score is 0 if no head's product is above."""
    folder = save_tiny(CASE, tmp_path)
    change(folder, "index_qk_proj.weight", torch.Tensor.zero_)
    whole = logits(folder, ((0, 41),))
    for cuts in (CUTS, tuple((at, at + 1) for at in range(41))):
        torch.testing.assert_close(logits(folder, cuts), whole, rtol=1e-4, atol=1e-4)
    # The first three blocks of three tokens, and what stands behind the last whole block.
    wider = save_tiny(CASE, tmp_path / "wider", indexer_budget=99)
    change(wider, "index_qk_proj.weight", torch.Tensor.zero_)
    seen = logits(wider, ((0, 41),))
    torch.testing.assert_close(whole[:11], seen[:11], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole[11:], seen[11:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("end", [nightly(PROMPT[16]), [PROMPT[17], PROMPT[3]]])
def test_ngrams_do_not_reach_beyond_the_end_of_a_text(tmp_path: Path, end: int | list[int]) -> None:
    """An end stands before the first token of a chunk, or is it."""
    folder = save_tiny(CASE, tmp_path, eos_token_id=end)
    assert_like_transformers(folder)


@pytest.mark.nightly
def test_a_table_may_be_one_tensor_and_need_not_say_how_it_is_hashed(tmp_path: Path) -> None:
    folder = save_tiny(CASE, tmp_path, split_ngram_parts=12)
    wanted = logits(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    kept = {name: each for name, each in tensors.items() if "ple_embedding" not in name}
    for layer in (0, 2):
        table = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
        kept[f"{table}.weight"] = torch.cat([tensors[f"{table}.shard_{part}.weight"] for part in range(12)])
    save_file(kept, file, {"format": "pt"})
    torch.testing.assert_close(logits(folder), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["layer_multipliers", nightly("ngram_heads_vocab_sizes"), nightly("ngram_heads_offsets")]
)
def test_a_table_that_is_hashed_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    folder = save_tiny(CASE, tmp_path)
    change(folder, f"layers.2.ple.ple_embedding.{name}", lambda numbers: numbers[1].add_(2))
    with pytest.raises(ModelError, match=f"{name}' is not what follows from the settings"):
        small_runner(folder)


def test_a_table_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(CASE, tmp_path)
    file = folder / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if "shard_4" not in name}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="have 308 rows together, and 384 are needed"):
        small_runner(folder)


def test_groups_of_the_cache(tmp_path: Path) -> None:
    config = read_family_config(save_tiny(CASE, tmp_path))
    found = layer_groups(config)
    whole, nets, keys, ngrams = found.groups
    assert [(group.keep, group.layers, group.heads) for group in found.groups] == [
        (Keep.ALL, 1, 2),
        (Keep.LATEST, 2, 2),
        (Keep.LATEST, 1, 0),
        (Keep.LATEST, 2, 0),
    ]
    assert nets.numbers == 3 * (2 * 8 + 3 * 12) + 3 * 8 * 12
    assert keys.numbers == 2 * 8
    assert ngrams.numbers == 2 * 2 + 6 * 180
    assert found.entries == (None, Place(0, 0), None)
    assert found.states == (Place(1, 0), Place(2, 0), Place(1, 1))
    assert found.ngrams == (Place(3, 0), None, Place(3, 1))
    # A block of 16 has six keys of 8 channels at most, and a layer of 16 tokens has room for 320 numbers.
    assert [whole.stored_layers(size) for size in (1, 4, 16)] == [2, 2, 2]
    layouts = rank_layouts(config, Dtype.BF16, 16, ALONE)
    assert [size.block_bytes for size in group_sizes(config, 2, 16)] == [layout.block_bytes for layout in layouts]


def test_keys_of_blocks_are_not_kept_in_fp8(tmp_path: Path) -> None:
    folder = save_tiny(CASE, tmp_path, layer_types=[FULL] * 3, ple_layer_ids=None, indexer_compress_ratio=1)
    with pytest.raises(ConfigError, match="is not for models that attend to chosen blocks"):
        check_kv_dtype(read_family_config(folder), KvCacheDtype.FP8)


def change(folder: Path, end: str, how: object) -> None:
    """Changes those tensors in place whose names end so."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    found = [tensor for name, tensor in tensors.items() if name.endswith(end)]
    assert found and callable(how)
    for tensor in found:
        how(tensor)
    save_file(tensors, file, {"format": "pt"})
