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
    ANY_CPU,
    COMPILER,
    BuildError,
    CompilerWatch,
    Compiling,
    CpuLevel,
    Recipe,
    build_ahead,
    built_library,
    can_be_built,
    needs_compiling,
)
from tests.machine.test_file_system import give_away

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


def test_a_library_that_others_could_have_written_to_is_compiled_anew(recipe: Recipe, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    target = built_library(recipe, cache)
    assert cache.stat().st_mode & 0o777 == 0o755
    target.write_bytes(b"what somebody else has put there")
    target.chmod(0o775)
    assert needs_compiling(recipe, cache)
    assert built_library(recipe, cache) == target
    assert target.stat().st_mode & 0o777 == 0o755
    assert ctypes.CDLL(str(target)).one() == 1


def test_no_code_comes_from_another_users_folder(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    built_library(recipe, cache)
    give_away(cache, monkeypatch)
    with pytest.raises(BuildError, match="it belongs to another user"):
        built_library(recipe, cache)


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


LEVELS = (
    CpuLevel("both", ("-DLEVEL=2",), frozenset({"one", "two"})),
    CpuLevel("first", ("-DLEVEL=1",), frozenset({"one"})),
)
LEVEL_SOURCES = {"level.cpp": 'extern "C" int level() { return LEVEL; }\n'}


@pytest.fixture
def levelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Returns the recipe of a library for two levels of processors and for one's own, whose level it says."""
    monkeypatch.setattr(compiled_library, "AHEAD_DIR", tmp_path / "ahead")
    folder = tmp_path / "levelled"
    folder.mkdir()
    for name, text in LEVEL_SOURCES.items():
        (folder / name).write_text(text)
    return Recipe("level-number", folder, ("-fPIC",), native_flags=("-DLEVEL=9",), levels=LEVELS)


def processor(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(compiled_library, "_first_processor", lambda: [f"flags\t\t: {' '.join(features)}"])


def said_by(library: Path) -> int:
    level: int = ctypes.CDLL(str(library)).level()
    return level


def test_a_library_that_was_compiled_ahead_is_the_best_for_the_processor(
    levelled: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_ahead(levelled)
    cache = tmp_path / "cache"
    with monkeypatch.context() as without_compiler:
        without_compiler.setenv("PATH", str(tmp_path))
        for features, level in ((("two", "one", "three"), 2), (("one", "three"), 1)):
            processor(monkeypatch, *features)
            assert can_be_built(levelled)
            assert said_by(built_library(levelled, cache)) == level
        processor(monkeypatch, "two")
        assert not can_be_built(levelled)
        with pytest.raises(
            BuildError, match=r"there is no g\+\+, and what was compiled ahead is for other CPUs .*both"
        ):
            built_library(levelled, cache)
    assert not cache.exists()
    assert needs_compiling(levelled, cache)
    assert said_by(built_library(levelled, cache)) == 9


def test_what_was_compiled_ahead_from_other_sources_is_not_used_and_goes_with_the_next_build(
    levelled: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor(monkeypatch, "one", "two")
    old = build_ahead(levelled)
    (levelled.sources / "level.cpp").write_text('extern "C" int level() { return 10 * LEVEL; }\n')
    assert needs_compiling(levelled, tmp_path)
    assert said_by(built_library(levelled, tmp_path)) == 90
    new = build_ahead(levelled)
    assert said_by(built_library(levelled, tmp_path)) == 20
    assert sorted(compiled_library.AHEAD_DIR.glob("*.so")) == sorted(new)
    assert not set(old) & set(new)


def test_what_does_not_depend_on_the_processor_is_compiled_ahead_once(levelled: Recipe, tmp_path: Path) -> None:
    recipe = replace(levelled, compile_flags=("-fPIC", "-DLEVEL=5"), native_flags=(), levels=(ANY_CPU,))
    (target,) = build_ahead(recipe)
    assert built_library(recipe, tmp_path / "cache") == target
    assert said_by(target) == 5


def test_nothing_is_compiled_ahead_without_a_compiler(
    levelled: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="there is no g"):
        build_ahead(levelled)
