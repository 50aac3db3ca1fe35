"""Compiles C++ once, on the machine that runs it, and keeps the library in the user's cache.

A library has plain functions over memory, which are called through ctypes. So a build needs neither ninja nor the
headers of Python and torch, takes seconds, and fits any version of both.

An image has no compiler, and new containers have empty caches. So its build compiles ahead (``build_ahead``), for the
common levels of processors, and keeps the libraries in the environment's own folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pdserve.machine.file_system import is_own_file, make_own_folder

AHEAD_DIR = Path(sys.prefix, "lib", "pdserve")
"""Where this Python environment has the libraries that were compiled ahead."""

COMPILER = "g++"
COMPILE_TIMEOUT_S = 180.0
AHEAD_TIMEOUT_S = 1800.0
"""One source takes at most this long ahead, when no engine waits for it."""
LOCK_TIMEOUT_S = 200.0


class BuildError(Exception):
    """There is no compiler, or it failed, or the library cannot be stored or loaded."""


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """Processors that one library is for, on whatever machine it was compiled."""

    name: str
    compile_flags: tuple[str, ...]
    features: frozenset[str]
    """What such a processor has at least, as Linux lists it in the ``flags`` of /proc/cpuinfo."""


ANY_CPU = CpuLevel("any", (), frozenset())


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources and flags of one library."""

    name: str
    """The name of the library's file. Errors use it, too, with spaces for hyphens."""
    sources: Path
    """The folder of the sources. Every ``.cpp`` in it is compiled, and every ``.h`` may be included."""
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()
    native_flags: tuple[str, ...] = ()
    """Further flags, where the library is compiled for the processor that compiles it."""
    levels: tuple[CpuLevel, ...] = (ANY_CPU,)
    """What the library is compiled for ahead, the best level first."""

    @property
    def title(self) -> str:
        return f"the {self.name.replace('-', ' ')}"


def built_library(recipe: Recipe, cache_dir: Path, search_path: str | None = None) -> Path:
    """Returns the shared library for this CPU: the one that was compiled ahead, or the one below ``cache_dir``, which
    is compiled now if it is not there, or if another user could have written to it.

    Several processes may call this at the same time: one compiles, the others wait. The compiler is looked for in
    ``search_path``, by default in ``PATH``. Raises BuildError, after ``LOCK_TIMEOUT_S`` at the latest.
    """
    if (ahead := library_ahead(recipe)) is not None:
        return ahead
    compiler = shutil.which(COMPILER, path=search_path)
    if compiler is None:
        raise _no_compiler(recipe)
    try:
        target = _target(recipe, compiler, cache_dir)
        make_own_folder(cache_dir)
        if is_own_file(target):
            return target
        # The kernel frees the lock when the process ends: a builder that was killed blocks no other.
        with FileLock(target.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            if not is_own_file(target):
                _compile(recipe, _native_flags(recipe), compiler, target, COMPILE_TIMEOUT_S)
    except Timeout as exc:
        raise BuildError(f"another process has been compiling {recipe.title} for long: {exc.lock_file}") from exc
    except (OSError, subprocess.SubprocessError) as exc:
        raise BuildError(f"{recipe.title} cannot be compiled: {exc}") from exc
    return target


def build_ahead(recipe: Recipe) -> list[Path]:
    """Compiles the library for each of the recipe's levels, where this environment's engines look first.

    An older library of the same name is removed. Raises BuildError.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise BuildError(f"there is no {COMPILER}")
    targets = libraries_ahead(recipe)
    try:
        AHEAD_DIR.mkdir(parents=True, exist_ok=True)
        for level, target in zip(recipe.levels, targets, strict=True):
            flags = (*recipe.compile_flags, *level.compile_flags)
            _compile(recipe, flags, compiler, target, AHEAD_TIMEOUT_S)
        for old in set(_found_ahead(recipe)) - set(targets):
            old.unlink()
    except (OSError, subprocess.SubprocessError) as exc:
        raise BuildError(f"{recipe.title} cannot be compiled: {exc}") from exc
    return targets


def libraries_ahead(recipe: Recipe) -> list[Path]:
    """Returns where the libraries of the recipe's levels are, if they were compiled ahead from these sources."""
    return [_target_ahead(recipe, level) for level in recipe.levels]


def library_ahead(recipe: Recipe) -> Path | None:
    """Returns the library that was compiled ahead, from the same sources, for the best level of this CPU. None if
    there is none.
    """
    features = _cpu_features()
    fitting = (_target_ahead(recipe, level) for level in recipe.levels if level.features <= features)
    return next((path for path in fitting if path.is_file()), None)


def can_be_built(recipe: Recipe) -> bool:
    """Returns whether ``built_library`` has the library already or finds a compiler in ``PATH``."""
    return shutil.which(COMPILER) is not None or library_ahead(recipe) is not None


def needs_compiling(recipe: Recipe, cache_dir: Path) -> bool:
    """Returns whether ``built_library`` would compile now."""
    compiler = shutil.which(COMPILER)
    if compiler is None or library_ahead(recipe) is not None:
        return False
    try:
        return not is_own_file(_target(recipe, compiler, cache_dir))
    except (OSError, subprocess.SubprocessError):
        return False


@dataclass(frozen=True, slots=True)
class Compiling:
    """How far the compiler of one library has come."""

    done: int
    sources: int


class CompilerWatch:
    """Tells how far other processes have come that compile a library below ``cache_dir``."""

    def __init__(self, recipe: Recipe, cache_dir: Path) -> None:
        """Raises BuildError if nothing can be compiled here."""
        compiler = shutil.which(COMPILER)
        if compiler is None:
            raise BuildError(f"there is no {COMPILER}")
        try:
            self._target = _target(recipe, compiler, cache_dir)
            self._sources = len(_units(recipe))
        except (OSError, subprocess.SubprocessError) as exc:
            raise BuildError(f"{recipe.title} cannot be compiled: {exc}") from exc

    def look(self) -> Compiling | None:
        """Returns how far they are, or None if the library is there or nobody compiles it."""
        if is_own_file(self._target):
            return None
        counts = []
        for draft in _drafts(self._target):
            with suppress(OSError):  # It has just become the library.
                counts.append(sum(name.endswith(".o") for name in os.listdir(draft)))
        return Compiling(max(counts), self._sources) if counts else None


def _no_compiler(recipe: Recipe) -> BuildError:
    if names := sorted(path.name for path in _found_ahead(recipe)):
        return BuildError(
            f"there is no {COMPILER}, and what was compiled ahead is for other CPUs or sources: {', '.join(names)}"
        )
    return BuildError(f"there is no {COMPILER}")


def _target(recipe: Recipe, compiler: str, cache_dir: Path) -> Path:
    """Returns the name of the library for this very CPU: one that was made for another is never loaded on it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=10)
    key = _key(recipe, _native_flags(recipe), version.stdout, _cpu().encode())
    return cache_dir / f"{recipe.name}-{key}.so"


def _target_ahead(recipe: Recipe, level: CpuLevel) -> Path:
    """Returns the name of the library for a level. It does not depend on the compiler: who looks for it has none."""
    key = _key(recipe, (*recipe.compile_flags, *level.compile_flags))
    return AHEAD_DIR / f"{recipe.name}-{level.name}-{key}.so"


def _found_ahead(recipe: Recipe) -> list[Path]:
    return list(AHEAD_DIR.glob(f"{recipe.name}-*.so"))


def _native_flags(recipe: Recipe) -> tuple[str, ...]:
    return (*recipe.compile_flags, *recipe.native_flags)


def _key(recipe: Recipe, compile_flags: tuple[str, ...], *further: bytes) -> str:
    digest = hashlib.sha256()
    for part in further:
        digest.update(part)
    digest.update("\0".join((*compile_flags, *recipe.link_flags, platform.machine())).encode())
    for source in _sources(recipe):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _sources(recipe: Recipe) -> list[Path]:
    return sorted(path for path in recipe.sources.iterdir() if path.suffix in (".cpp", ".h"))


def _units(recipe: Recipe) -> list[Path]:
    """Returns the sources that are compiled each by itself."""
    return [path for path in _sources(recipe) if path.suffix == ".cpp"]


def _draft_prefix(target: Path) -> str:
    return f".{target.stem}."


def _drafts(target: Path) -> list[Path]:
    return [path for path in target.parent.glob(f"{_draft_prefix(target)}*") if path.is_dir()]


def _cpu() -> str:
    """Returns what ``-march=native`` depends on: the first processor's model and its instruction sets."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    lines = _first_processor()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in wanted) or platform.processor()


def _cpu_features() -> frozenset[str]:
    for line in _first_processor():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _first_processor() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return []


def _compile(recipe: Recipe, compile_flags: tuple[str, ...], compiler: str, target: Path, timeout_s: float) -> None:
    """Compiles into a draft and renames that. The caller holds the lock, so every other draft was left by the dead."""
    for left in _drafts(target):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_draft_prefix(target), dir=target.parent) as draft:
        made = Path(draft, target.name)
        sources = [str(path) for path in _units(recipe)]
        # Each source takes a compiler of its own, and the longest one takes a third of the time of all.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            units = [
                pool.submit(_run, [compiler, *compile_flags, "-c", source], draft, timeout_s) for source in sources
            ]
            try:
                for unit in units:
                    unit.result()
            finally:
                pool.shutdown(cancel_futures=True)
        objects = [path.name for path in sorted(Path(draft).glob("*.o"))]
        _run([compiler, "-shared", "-o", str(made), *objects, *recipe.link_flags], draft, timeout_s)
        made.chmod(0o755)  # whatever the umask is: a library that others may write to is not loaded
        os.rename(made, target)


def _run(command: list[str], folder: str, timeout_s: float) -> None:
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=timeout_s)
    except subprocess.CalledProcessError as exc:
        raise BuildError(f"{command[0]} failed: {exc.stderr.strip()[-2000:]}") from exc
