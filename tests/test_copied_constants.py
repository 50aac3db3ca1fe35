"""What a harness or ``pdserve plan`` knows of the product is imported: a copy stays behind when the product changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_packages import PACKAGES, ROOT

SIMULATORS = (ROOT / "lab", ROOT / "pdserve" / "plan")
UNLIKE = {("IDLE_S", 60.0), ("LINGER_S", 0.5), ("BLOCK_SIZE", 4), ("PAUSE_S", 0.1), ("LOOK_S", 0.1), ("LOOK_S", 1.0)}
"""Constants that have the same name and value, and mean unlike things."""


def constants(path: Path) -> Iterator[tuple[str, object]]:
    """Yields the names and values of a module's constants that are plain numbers, without a first underscore."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=value) | ast.AnnAssign(target=ast.Name(name), value=value):
                if name.isupper() and isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                    yield name.lstrip("_"), value.value


def test_no_simulator_copies_a_constant_of_the_product() -> None:
    simulated = {path for folder in SIMULATORS for path in folder.rglob("*.py")}
    product = {path for package, folder in PACKAGES.items() for path in (folder / package).rglob("*.py")} - simulated
    known: dict[tuple[str, object], Path] = {}
    for path in product:
        known |= dict.fromkeys(constants(path), path)
    copies = {
        f"{name} = {value} of {path.relative_to(ROOT)} is that of {known[name, value].relative_to(ROOT)}: import it"
        for path in simulated
        for name, value in constants(path)
        if (name, value) in known.keys() - UNLIKE
    }
    assert copies == set()
