"""One test for each cell of the table of faults, some of them with models of windows, of states and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.fault_matrix.models import LLAMA, MODELS, saved
from lab.fault_matrix.stages import Stages
from lab.fault_matrix.table import TESTED, Cell
from tests.hosts.conftest import possible

__all__ = ["possible"]

WITH_DRAFTS = ("killed-decode_node-decode", "out_of_memory-decode_node-decode", "corrupt_block-prefill_node-transfer")


def cells(model: str) -> Sequence[object]:
    """Returns the cells of a model. Those of models with cache groups are nightly.

    In every run, ``tests/cluster/test_group_return.py`` kills a decode node of a model with states, and
    ``tests/cluster/test_fp8_cache.py`` one of a model with windows.
    """
    found = []
    for cell in TESTED:
        marks = [pytest.mark.nightly] if cell.nightly or model != LLAMA.name else []
        found.append(pytest.param(model, cell, id=f"{model}-{cell.name}", marks=marks))
    return found


@pytest.fixture(scope="module")
def stages_of(
    possible: None, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Stages]]:
    """Yields a function that returns the stages of a model. The cells of a model share them.

    A parameter of this fixture would be made anew for each cell, because the cells are parameters of single tests.
    """
    with ExitStack() as opened:
        made: dict[str, Stages] = {}

        def stages(name: str) -> Stages:
            if name not in made:
                opened.close()
                made.clear()
                model = saved(MODELS[name], demo_model, tmp_path_factory.mktemp("tiny"))
                made[name] = opened.enter_context(Stages(model, lambda: tmp_path_factory.mktemp("stage")))
            return made[name]

        yield stages


@pytest.mark.parametrize(("model", "cell"), [*cells(LLAMA.name), *cells("hybrid"), *cells("windowed")])
def test_cell(stages_of: Callable[[str], Stages], model: str, cell: Cell) -> None:
    stages_of(model).play(cell)


@pytest.mark.nightly
@pytest.mark.parametrize("cell", [cell for cell in TESTED if cell.name in WITH_DRAFTS], ids=lambda cell: cell.name)
def test_cell_with_drafts(stages_of: Callable[[str], Stages], cell: Cell) -> None:
    stages = stages_of("drafting")
    stages.play(cell)
    assert stages.accepted_drafts()
