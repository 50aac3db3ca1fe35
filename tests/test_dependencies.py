"""Tests that everything the packages import is declared, so that a fresh install works."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPAT = ROOT / "lab" / "compat"
PROGRAMS = COMPAT / "programs"
SHARED = {"checks", "commands"}
PLUGIN = "plugin"
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""What of a statement has statements in it."""
OURS = {"pdserve", "pdserve_proxy", "pdserve_kvtransfer", "pdserve_kernels", "benchmarks", "lab", "tests"}
# A dependency exposes these packages in its own interface, and so installs them.
BROUGHT = {
    "uvloop": "uvicorn",
    "tokenizers": "transformers",
    "werkzeug": "quart",
    "multidict": "aiohttp",
}


def declared(extras: list[str]) -> set[str]:
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return names_in(lines)


def names_in(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the packages that are required."""
    return {canonical(re.split(r"[\[<>=~!; ]", line, maxsplit=1)[0]) for line in requirements}


def undeclared(folders: Iterable[Path], known: set[str]) -> set[str]:
    """Returns the modules that are imported below ``folders`` and that no package with a ``known`` name has."""
    providers = distributions()
    return {
        module
        for folder in folders
        for module in imported(folder)
        if BROUGHT.get(module) not in known and not known & {canonical(name) for name in providers.get(module, [])}
    }


@cache
def distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(folder: Path) -> set[str]:
    return {name for path in folder.rglob("*.py") if not has_own_environment(path) for name in imports_of(path)}


def has_own_environment(path: Path) -> bool:
    return path.is_relative_to(PROGRAMS) or path.parent.name == PLUGIN


@cache
def imports_of(path: Path) -> frozenset[str]:
    names: set[str] = set()
    blocks: list[list[ast.AST]] = [list(ast.parse(path.read_text()).body)]
    while blocks:
        for node in blocks.pop():
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
            # An import is a statement, and expressions, which have none in them, are most of a module.
            blocks += [getattr(node, field) for field in BLOCKS if hasattr(node, field)]
    return frozenset(names - set(sys.stdlib_module_names) - OURS)


@pytest.mark.integration  # for the seconds that it takes
@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (["pdserve", "proxy", "kvtransfer", "kernels"], ["bench", "gpu", "otel"]),
        (["benchmarks", "tests", "lab", "examples"], ["bench", "otel", "tokenizers", "test"]),
    ],
    ids=["packages", "tests"],
)
def test_every_import_is_declared(folders: list[str], extras: list[str]) -> None:
    assert undeclared([ROOT / folder for folder in folders], declared(extras)) == set()


@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem not in SHARED))
def test_the_environment_of_a_program_has_what_it_imports(program: str) -> None:
    assert lacking(imports_of(PROGRAMS / f"{program}.py"), program) == set()


@pytest.mark.parametrize("project", ["vllm_tests", "sglang_tests"])
def test_the_environment_of_others_tests_has_what_their_plugin_imports(project: str) -> None:
    modules = [path for folder in (project, "server_tests") for path in (COMPAT / folder / PLUGIN).glob("*.py")]
    imports = {name for path in modules for name in imports_of(path)} - {path.stem for path in modules}
    assert lacking(imports, project) == set()


def lacking(imports: Collection[str], requirements: str) -> set[str]:
    """Returns the imports for which no package of a requirements file has a name that begins with theirs."""
    pinned = (COMPAT / "requirements" / f"{requirements}.txt").read_text().splitlines()
    names = [canonical(line.partition("==")[0]) for line in pinned]
    return {module for module in imports if not any(name.startswith(canonical(module)) for name in names)}
