"""Tests the packages as a whole: every module is used, and no module profiles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "pdserve": ROOT,
    "pdserve_proxy": ROOT / "proxy",
    "pdserve_kvtransfer": ROOT / "kvtransfer",
    "pdserve_kernels": ROOT / "kernels",
}
PROFILERS = {"cProfile", "profile", "tracemalloc", "pyinstrument", "yappi", "torch.profiler", "torch.autograd.profiler"}


def mentioned(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that a module imports, and those that it starts as programs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "profile":
            # `pdserve plan profile` is no profiler.
            yield node.value


@cache
def mentions() -> dict[str, set[str]]:
    """Returns what each module mentions, by its full name."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): set(mentioned(ast.parse(path.read_text())))
        for package, folder in PACKAGES.items()
        for path in (folder / package).rglob("*.py")
    }


def test_every_module_is_used() -> None:
    """Another module uses it or it is a program, so no second implementation lies beside the one that runs."""
    used = {name for module, names in mentions().items() for name in names if name != module}
    unused = {name for name in mentions() if name not in used and not name.endswith(("__init__", "__main__"))}
    assert unused == set()


def test_nothing_profiles() -> None:
    assert {(module, name) for module, names in mentions().items() for name in names & PROFILERS} == set()
