"""Tests layers that keep a state in place of keys and values: chunks, single tokens and replays give the same logits.

The part is a decaying sum, of which each token adds its own input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.layer_groups import Place, layer_groups
from pdserve.models.parts import mixers
from pdserve.models.parts.projections import Building
from pdserve.models.rank_cache import StateGroup, group_specs, state_runs
from pdserve.models.recipe import LayerRecipe
from pdserve.models.runner import StepRow
from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep
from pdserve_kernels.contract import StateRuns
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.grouped_runner import GroupedRunner
from tests.tiny_models import save_tiny_model

PROMPT = [(7 * i * i + 11 * i) % 509 + 3 for i in range(33)]


@dataclass(frozen=True, slots=True)
class SumRecipe:
    heads: int
    numbers: int

    @property
    def token_numbers(self) -> int:
        return self.heads * self.numbers


class Sum:
    def __init__(self, config: FamilyConfig, building: Building, recipe: SumRecipe, prefix: str, index: int) -> None:
        self._shape, self._factor = (recipe.heads, recipe.numbers), 0.5 + 0.1 * index

    def __call__(self, x: torch.Tensor, state: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        out = torch.empty_like(x)
        starts = runs.starts.tolist()
        for run, (source, destination) in enumerate(
            zip(runs.sources.tolist(), runs.destinations.tolist(), strict=True)
        ):
            present = torch.zeros(self._shape) if source < 0 else state[source].clone()
            for token in range(starts[run], starts[run + 1]):
                present = present * self._factor + x[token].view(self._shape)
                out[token] = present.flatten()
            state[destination] = present
        return out


@pytest.fixture(params=["in place of attention", "beside it", "one part a layer", "states only"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FamilyConfig:
    monkeypatch.setitem(mixers.MIXERS, SumRecipe, Sum)
    plain = read_family_config(save_tiny_model("llama", tmp_path))
    recipe = SumRecipe(5, plain.hidden_size // 5)
    attention = plain.recipe.layers[0]
    mixing = replace(attention, attention=None, mixer=recipe)
    alone = replace(mixing, feed_forward=None, norms=attention.norms[:1])
    kinds: dict[str, list[LayerRecipe]] = {
        "in place of attention": [mixing, attention, mixing],
        "beside it": [replace(attention, mixer=recipe), attention, mixing],
        "one part a layer": [alone, attention, replace(attention, attention=None, norms=attention.norms[1:])],
        "states only": [mixing, alone, mixing],
    }
    layers = tuple(kinds[request.param])
    parts = (("attention", "self_attn"), ("feed_forward", "mlp"))
    unused = [
        f"model.layers.{i}.{name}."
        for i, layer in enumerate(layers)
        for name in (
            *(name for part, name in parts if getattr(layer, part) is None),
            *(name for name in attention.norms if name not in layer.norms),
        )
    ]
    return replace(plain, recipe=replace(plain.recipe, layers=layers, unused=tuple(unused)))


def logits(config: FamilyConfig, folder: Path, cuts: list[int], block_size: int = 4) -> torch.Tensor:
    """Returns the logits after each token of the prompt, computed in steps of these sizes beside another request."""
    runner = GroupedRunner(folder, config, Dtype.FP32, block_size, 32, 128, TorchKernels())
    pieces: list[torch.Tensor] = []
    start = 0
    for step, size in enumerate(cuts):
        other = StepRow([9 + step], step, range(16, 32), False)
        rows = [StepRow(PROMPT[start : start + size], start, range(16), True, range(size))]
        runner.run([other, *rows], score=pieces.append)
        start += size
    return torch.cat(pieces)


@pytest.mark.parametrize("cuts", [[17, 3, 13], [1] * 33, [4, 28, 1]])
def test_steps_of_any_size_give_the_logits_of_one_step(config: FamilyConfig, tmp_path: Path, cuts: list[int]) -> None:
    torch.testing.assert_close(logits(config, tmp_path, cuts), logits(config, tmp_path, [33]), rtol=0, atol=1e-4)


def test_tokens_replayed_in_one_step_are_those_of_one_step_each(config: FamilyConfig, tmp_path: Path) -> None:
    runner = GroupedRunner(tmp_path, config, Dtype.FP32, 4, 32, 128, TorchKernels())
    runner.run([StepRow(PROMPT[:10], 0, range(16), False)])
    steps = [StepRow([token], 10 + i, range(16), True) for i, token in enumerate(PROMPT[10:])]
    replayed = runner.run(steps)
    torch.testing.assert_close(replayed, logits(config, tmp_path, [33])[10:], rtol=0, atol=1e-4)


def test_the_groups_of_a_hybrid(config: FamilyConfig) -> None:
    found = layer_groups(config)
    whole, state = found.groups
    having = [layer.mixer is not None for layer in config.recipe.layers]
    assert (whole.keep, whole.layers) == (Keep.ALL, len(config.recipe.attention))
    assert (state.name, state.keep, state.layers) == ("state", Keep.LATEST, sum(having))
    assert [place is not None for place in found.states] == having
    assert found.attention.count(Place(0, 0)) == (1 if whole.layers else 0)
    spec = group_specs(config, Dtype.BF16, 16)[1]
    assert spec.head_bytes == state.layers * config.hidden_size // 5 * 4
    assert (spec.heads, spec.dtype) == (5, "fp32")


STATES = StateGroup(1, GroupBlocks(GroupSpec("state", Keep.LATEST, 1, 1, 4, "fp32"), 10, 8, 0, 4), ())


def test_rows_of_one_request_are_one_run() -> None:
    runs = state_runs([1, 1, 1, 1, 5], [(-1, 12), (12, 12), (12, 12), (10, 13), (15, 16)], STATES, CPU)
    assert runs.starts.tolist() == [0, 3, 4, 9]
    assert runs.sources.tolist() == [-1, 0, 5]
    assert runs.destinations.tolist() == [2, 3, 6]
    assert not runs.single
    assert state_runs([1, 1], [(10, 12), (-1, 13)], STATES, CPU).single


def test_a_row_that_writes_another_block_than_the_one_before_it_leaves_that_state() -> None:
    runs = state_runs([1, 1, 1, 1, 1], [(10, 12), (12, 13), (13, 14), (15, 16), (17, 11)], STATES, CPU)
    assert runs.starts.tolist() == [0, 3, 4, 5]
    assert (runs.sources.tolist(), runs.destinations.tolist()) == ([0, 5, 7], [4, 6, 1])
    assert runs.kept is not None
    assert runs.kept.tolist() == [2, 3, -1, -1, -1]
    assert not runs.single
    replayed_first = state_runs([1, 1, 2], [(-1, 12), (12, 12), (12, 13)], STATES, CPU)
    assert replayed_first.kept is not None
    assert replayed_first.kept.tolist() == [-1, 2, -1, -1]
    assert state_runs([1, 1], [(10, 12), (12, 12)], STATES, CPU).kept is None


@pytest.mark.parametrize(
    "tables", [[(12, 12), (12, 13)], [(10, 12), (12, 13), (13, 12)], [(9, 12)], [(10, 18)], [(10, -1)]]
)
def test_rows_whose_states_cannot_be_are_errors(tables: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="state"):
        state_runs([1] * len(tables), tables, STATES, CPU)
