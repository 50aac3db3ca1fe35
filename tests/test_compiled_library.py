"""Tests compiling at run time: once, even if several processes ask together, and harmless where it is impossible."""

from __future__ import annotations

import ctypes
import multiprocessing
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from pdserve import compiled_library
from pdserve.compiled_library import (
    COMPILER,
    BuildError,
    CompilerWatch,
    Compiling,
    Recipe,
    built_library,
    needs_compiling,
)

SOURCES = {"one.cpp": 'extern "C" int one() { return 1; }\n', "two.cpp": 'extern "C" int two() { return 2; }\n'}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Returns the recipe of a library that compiles almost instantly."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    return Recipe("small-numbers", folder, ("-fPIC",))


def fake_compiler(folder: Path, script: str) -> str:
    """Returns a folder in which a search for a compiler finds this script."""
    folder.mkdir()
    program = folder / COMPILER
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def counting_compiler(folder: Path, count: Path) -> str:
    real = shutil.which(COMPILER)
    return fake_compiler(folder, f'case "$*" in *" -c "*) echo x >> {count};; esac\nexec {real} "$@"')


@pytest.mark.integration
def test_processes_that_ask_at_the_same_time_compile_once(recipe: Recipe, tmp_path: Path) -> None:
    count = tmp_path / "count"
    path = counting_compiler(tmp_path / "bin", count)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        made = pool.starmap(built_library, [(recipe, tmp_path / "cache", path)] * 3)
    assert len(set(made)) == 1
    assert count.read_text() == "x\n" * len(SOURCES), "each source once"
    assert [entry.name for entry in made[0].parent.iterdir() if entry.name.startswith(".")] == []
    library = ctypes.CDLL(str(made[0]))
    assert (library.one(), library.two()) == (1, 2)


def test_what_a_killed_compiler_has_left_goes_with_the_next_build(recipe: Recipe, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    target = built_library(recipe, cache)
    target.unlink()
    left, other = cache / f".{target.stem}.dead", cache / ".another-library-0.alive"
    for folder in (left, other):
        folder.mkdir()
        (folder / "one.o").touch()
    watch = CompilerWatch(recipe, cache)
    assert watch.look() == Compiling(1, 2)
    assert built_library(recipe, cache) == target
    assert watch.look() is None
    assert (left.exists(), other.exists()) == (False, True)


def test_nobody_compiles_where_nobody_has_begun(recipe: Recipe, tmp_path: Path) -> None:
    assert CompilerWatch(recipe, tmp_path / "cache").look() is None


def test_a_library_is_named_for_all_that_it_depends_on(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    assert needs_compiling(recipe, cache)
    first = built_library(recipe, cache)
    assert not needs_compiling(recipe, cache)
    assert built_library(recipe, cache) == first
    (recipe.sources / "one.cpp").write_text('extern "C" int one() { return 11; }\n')
    assert needs_compiling(recipe, cache)
    edited = built_library(recipe, cache)
    assert not needs_compiling(recipe, cache)
    faster = built_library(replace(recipe, compile_flags=("-fPIC", "-O2")), cache)
    linked = built_library(replace(recipe, link_flags=("-s",)), cache)
    monkeypatch.setattr(compiled_library, "_cpu", lambda: "another CPU")
    elsewhere = built_library(recipe, cache)
    assert len({first, edited, faster, linked, elsewhere}) == 5


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "cannot be compiled"),
        ('case "$*" in --version) echo 1;; *) echo no such flag >&2; exit 1;; esac', "no such flag"),
        ('case "$*" in --version) echo 1;; *) exec sleep 60;; esac', "timed out"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing_behind(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    monkeypatch.setattr(compiled_library, "COMPILE_TIMEOUT_S", 0.5)
    cache = tmp_path / "cache"
    with pytest.raises(BuildError, match=message):
        built_library(recipe, cache, fake_compiler(tmp_path / "bin", script))
    assert not list(cache.glob("*.so"))
    assert not list(cache.glob(".*/"))


def test_a_cache_that_cannot_be_written_is_no_catastrophe(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(BuildError, match="cannot be compiled"):
        built_library(recipe, tmp_path / "cache")


@pytest.mark.integration
def test_a_builder_that_hangs_is_not_waited_for_forever(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_library, "LOCK_TIMEOUT_S", 0.2)
    target = built_library(recipe, tmp_path)
    target.unlink()
    with FileLock(target.with_suffix(".lock")), pytest.raises(BuildError, match="another process"):
        built_library(recipe, tmp_path)
