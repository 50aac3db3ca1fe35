"""Tests attention to one vector of a token and to entries: what is stored, and that no way of computing it shows."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.layer_groups import Place, group_sizes, layer_groups
from pdserve.models.parts.layer_ends import Connection
from pdserve.models.parts.projections import Building
from pdserve.models.rank_cache import RunNumbers, rank_layouts
from pdserve.models.recipe import Norm, StreamsRecipe
from pdserve.models.runner import StepRow
from pdserve.models.shared_plan import EntryMaking, SharedStep
from pdserve.models.table import settings_from_values
from pdserve.models.tp.shares import ALONE
from pdserve.settings import cache_folder
from pdserve.wire.cache_groups import Keep
from pdserve_kernels.contract import AttentionRow
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.greedy import assert_not_finite_stays_in_its_request, small_runner
from tests.models.quantisers import FORMATS, configure
from tests.models.test_families import PROMPT
from tests.models.tiny_families import save_tiny
from tests.tiny_models import reference_logits

CASE = "deepseek-v4"
KERNELS = CompiledKernels(cache_folder(os.environ))
"""A number's result does not depend on where it stands, as torch's does."""


def making(every: int, cuts: list[int], sources: list[int], kept: list[int] | None = None) -> EntryMaking:
    """Returns what makes the entries of one request, whose tokens ``cuts[0]`` to ``cuts[-1]`` are in several rows."""
    table = range(1, 99)
    rows = [AttentionRow(end - start, end, table) for start, end in pairwise(cuts)]
    starts = [0, cuts[-1] - cuts[0]]
    runs = RunNumbers(starts, sources, [0], kept or [], single=False)
    return EntryMaking(KERNELS, every, rows, 4, runs, torch.device("cpu"))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("every", [1, 3, 4, 7])
def test_entries_are_weighed_sums_wherever_a_context_is_cut(every: int, parts: int) -> None:
    torch.manual_seed(every)
    tokens, channels = 23, 5
    value, gate = torch.randn(tokens, parts, channels), 4 * torch.randn(tokens, parts, channels)
    bias = torch.randn(every, parts, channels)
    states = torch.full((9, 1, 2 * parts * channels), torch.nan)
    whole = making(every, [0, tokens], [-1])(value, gate, bias, states)
    for entry, found in enumerate(whole):
        own = slice(entry * every, (entry + 1) * every)
        weights, values = [gate[own, -1] + bias[:, -1]], [value[own, -1]]
        if parts == 2 and entry:
            before = slice(own.start - every, own.start)
            weights.append(gate[before, 0] + bias[:, 0])
            values.append(value[before, 0])
        wanted = (torch.cat(weights).softmax(0) * torch.cat(values)).sum(0)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert len(whole) == tokens // every
    last = states[0].clone()
    for cut in range(1, tokens):
        first = making(every, [0, cut], [-1])(value[:cut], gate[:cut], bias, states)
        second = making(every, [cut, tokens], [0])(value[cut:], gate[cut:], bias, states)
        assert torch.equal(torch.cat((first, second)), whole)
        assert torch.equal(states[0], last)


def test_states_within_a_run_stay() -> None:
    value, gate, bias = torch.randn(9, 2, 3), torch.randn(9, 2, 3), torch.randn(4, 2, 3)
    states = torch.zeros(9, 1, 12)
    kept = [-1, 5, -1, 6, -1, -1, 7, -1, -1]
    rows = making(4, [0, 2, 4, 7, 9], [-1], kept)
    rows(value, gate, bias, states)
    others = torch.zeros(9, 1, 12)
    for block, end in ((5, 2), (6, 4), (7, 7), (0, 9)):
        making(4, [0, end], [-1])(value[:end], gate[:end], bias, others)
        assert torch.equal(states[block], others[0])
    # Each entry is in the block of its last token.
    assert (rows.slots.blocks.tolist(), rows.slots.places.tolist()) == ([1, 2], [0, 0])
    assert rows.positions.tolist() == [0, 4]


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5, 7, 8, 11])
def test_blocks_have_room_for_the_entries_that_end_in_them(every: int) -> None:
    found = making(every, [0, 80], [-1]).slots
    places = list(zip(found.blocks.tolist(), found.places.tolist(), strict=True))
    assert len(set(places)) == len(places) == 80 // every
    assert max(found.places.tolist()) < -(-4 // every)
    assert [block for block, _ in places] == [1 + (entry * every + every - 1) // 4 for entry in range(80 // every)]


def test_vectors_may_be_gathered_for_each_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is how a GPU computes."""
    folder = save_tiny(CASE, tmp_path)
    wanted = reference_logits(folder, PROMPT)
    monkeypatch.setattr(SharedStep, "gathers", property(lambda step: True))
    monkeypatch.setattr("pdserve.models.shared_plan.GATHERED_NUMBERS", 700)
    monkeypatch.setattr("pdserve.models.shared_plan.SCORES_AT_ONCE", 900)
    runner = small_runner(folder)
    pieces: list[torch.Tensor] = []
    for start, size in ((0, 17), (17, 1), (18, 23)):
        other = StepRow(PROMPT[5:6], 0, range(16, 20), False)
        part = StepRow(PROMPT[start : start + size], start, range(16), True, range(size))
        runner.run([other, part], score=pieces.append)
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("gathers", [False, True])
def test_what_is_not_finite_stays_in_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathers: bool
) -> None:
    monkeypatch.setattr(SharedStep, "gathers", property(lambda step: gathers))
    assert_not_finite_stays_in_its_request(save_tiny(CASE, tmp_path), PROMPT)


def test_few_of_many_entries_are_copied(tmp_path: Path) -> None:
    """Those that a single token of a long context chooses. Rows of many tokens have all beside each other."""
    folder = save_tiny(CASE, tmp_path, index_topk=2)
    wanted = reference_logits(folder, PROMPT)
    runner = small_runner(folder)
    pieces: list[torch.Tensor] = []
    for start, size in ((0, 30), *((30 + at, 1) for at in range(11))):
        runner.run([StepRow(PROMPT[start : start + size], start, range(16), True, range(size))], score=pieces.append)
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


def test_groups_of_the_cache(tmp_path: Path) -> None:
    config = read_family_config(save_tiny(CASE, tmp_path))
    found = layer_groups(config)
    whole, window, of_few, of_some = found.groups
    assert [(group.keep, group.layers) for group in found.groups] == [
        (Keep.ALL, 1),
        (Keep.WINDOW, 4),
        (Keep.LATEST, 1),
        (Keep.LATEST, 2),
    ]
    assert [(each.every, each.channels) for each in whole.entries] == [(7, 20), (4, 32), (4, 32)]
    assert (window.stored, window.numbers, of_few.numbers, of_some.numbers) == (1, 20, 2 * 20, 2 * 2 * 32)
    assert found.entries == (None, Place(0, 0), Place(0, 1), Place(0, 2))
    assert found.states == (None, Place(2, 0), Place(3, 0), Place(3, 1))
    # Blocks of 16 have three of the entries for 7 tokens at most, and four of those for 4.
    assert whole.channels(16) * 16 >= 3 * 20 + 2 * 4 * 32 > (whole.channels(16) - 1) * 16
    layouts = rank_layouts(config, Dtype.BF16, 16, ALONE)
    assert [size.block_bytes for size in group_sizes(config, 2, 16)] == [layout.block_bytes for layout in layouts]


def test_a_model_of_windows_alone_has_no_entries(tmp_path: Path) -> None:
    folder = save_tiny(CASE, tmp_path, layer_types=["sliding_attention"] * 4)
    assert [group.keep for group in layer_groups(read_decoder_config(folder)).groups] == [Keep.ALL]
    wanted = reference_logits(folder, PROMPT)
    pieces: list[torch.Tensor] = []
    runner = small_runner(folder)
    for start, size in ((0, 17), (17, 1), (18, 23)):
        runner.run([StepRow(PROMPT[start : start + size], start, range(16), True, range(size))], score=pieces.append)
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("wrong", [8, -1])
def test_experts_of_tokens_have_to_be_there(tmp_path: Path, wrong: int) -> None:
    folder = save_tiny(CASE, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = next(tensor for name, tensor in tensors.items() if name.endswith("tid2eid"))
    table[9, 1] = wrong
    save_file(tensors, file)
    with pytest.raises(ModelError, match="tid2eid' needs 3 experts of 8 for each token"):
        small_runner(folder)


def test_a_token_has_no_expert_twice(tmp_path: Path) -> None:
    folder = save_tiny(CASE, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = next(tensor for name, tensor in tensors.items() if name.endswith("tid2eid"))
    table[9, 1] = table[9, 0]
    save_file(tensors, file)
    with pytest.raises(ModelError, match="needs 3 experts of 8"):
        small_runner(folder)


def test_released_names_and_settings(tmp_path: Path) -> None:
    """The released files have no ``model.`` before names, and a layer that drafts, which is not read."""
    folder = save_tiny(CASE, tmp_path)
    row = [StepRow(PROMPT, 0, range(16), True)]
    wanted = small_runner(folder).run(row).clone()
    file = folder / "model.safetensors"
    released = {
        name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_"): tensor
        for name, tensor in load_file(file).items()
    }
    released["mtp.0.enorm.weight"] = torch.ones(3)
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.attn_norm.weight"} <= released.keys()
    save_file(released, file)
    torch.testing.assert_close(small_runner(folder).run(row), wanted, rtol=0, atol=0)


def test_numbers_as_the_released_files_have_them(tmp_path: Path) -> None:
    """Experts are in MXFP4, most other products in FP8, and those that entries are made of in neither."""
    folder = save_tiny(CASE, tmp_path / "plain", hidden_size=64, moe_intermediate_size=32)
    narrow, wide = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        narrow[name] = wide[name] = tensor
        kept = ("wgate", "compressor.wkv", "weights_proj", "gate.weight", "head.weight", "embed")
        if tensor.dim() == 2 and name.endswith("weight") and not any(part in name for part in kept):
            form = "mxfp4-pairs" if ".experts." in name else "fp8-powers"
            parts, wide[name] = FORMATS[form].quantise(tensor)
            narrow |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
    assert {str(tensor.dtype) for tensor in narrow.values()} >= {"torch.float8_e4m3fn", "torch.int8", "torch.float32"}
    found: list[torch.Tensor] = []
    for tensors, settings in ((narrow, FORMATS["fp8-powers"].config), (wide, {})):
        own = tmp_path / str(len(found))
        shutil.copytree(folder, own)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, own / "model.safetensors")
        configure(own, {"expert_dtype": "fp4", **settings} if settings else {})
        found.append(small_runner(own).run([StepRow(PROMPT, 0, range(16), True)]).clone())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_settings_as_the_released_files_have_them() -> None:
    """``compress_ratios`` and ``qk_rope_head_dim`` in place of kinds of layers and shares of heads."""
    yarn: dict[str, object] = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    released: dict[str, object] = {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 128, 4, 128, 0],
        "num_hash_layers": 1,
        "qk_rope_head_dim": 64,
        "rope_scaling": yarn | {"type": "yarn"},
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
    }
    sliding, few, some = (f"{kind}_attention" for kind in ("sliding", "heavily_compressed", "compressed_sparse"))
    usual: dict[str, object] = {
        "num_hidden_layers": 4,
        "layer_types": [sliding, few, some, few],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "partial_rotary_factor": 0.125,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
            "compress": yarn
            | {"rope_type": "yarn", "rope_theta": 160000.0, "attention_factor": 1.0, "partial_rotary_factor": 0.125},
        },
    }
    named, ours = (settings_from_values("deepseek_v4", own) for own in (released, usual))
    named.check()
    ours.check()
    assert named.recipe() == ours.recipe()
    rotaries = [part.rotary for part in named.recipe().attention]
    assert [rotary and rotary.theta for rotary in rotaries] == [10_000.0, 160_000.0, 160_000.0, 160_000.0]


class Tensors:
    """Stands for a checkpoint of these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, shape: tuple[int, ...], **named: Any) -> torch.Tensor:
        assert self._tensors[name].shape == shape
        return self._tensors[name]


def test_mixing_keeps_the_sum_of_residuals() -> None:
    """Rows and columns of the matrix that mixes them have sums of one, after enough steps."""
    count, hidden = 3, 8
    recipe = StreamsRecipe(count, 50, 1e-9, Norm(1e-6))
    torch.manual_seed(2)
    numbers = count * (2 + count)
    checkpoint: Any = Tensors(
        {"x_fn": torch.randn(numbers, count * hidden) / 4, "x_base": torch.randn(numbers), "x_scale": torch.ones(3)}
    )
    connection = Connection(hidden, Building(checkpoint, TorchKernels(), ALONE), recipe, "x")
    streams = torch.randn(5, count, hidden)
    _, spread, mixed = connection.opened(streams)
    assert mixed is not None
    torch.testing.assert_close(mixed.sum(1), torch.ones(5, count), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed.sum(2), torch.ones(5, count), rtol=1e-4, atol=1e-4)
    nothing = connection.closed(streams, torch.zeros(5, hidden), spread, mixed)
    torch.testing.assert_close(nothing.sum(1), streams.sum(1), rtol=1e-4, atol=1e-4)
    output = torch.randn(5, hidden)
    added = connection.closed(streams, output, spread, mixed) - nothing
    torch.testing.assert_close(added, spread.unsqueeze(-1) * output.unsqueeze(1), rtol=1e-4, atol=1e-5)
