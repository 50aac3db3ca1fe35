"""One test for each cell of the table of faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.fault_matrix.stages import Stages
from lab.fault_matrix.table import TESTED, Cell
from tests.hosts.cluster import tiny_model
from tests.hosts.conftest import possible

__all__ = ["possible"]


@pytest.fixture(scope="module")
def stages(possible: None, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    model = tiny_model(demo_model, tmp_path_factory.mktemp("tiny"))
    with Stages(model, lambda: tmp_path_factory.mktemp("stage")) as made:
        yield made


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=[pytest.mark.nightly] if cell.nightly else []) for cell in TESTED],
)
def test_cell(stages: Stages, cell: Cell) -> None:
    stages.play(cell)
