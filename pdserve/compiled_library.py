"""Compiles C++ once, on the machine that runs it, and keeps the library in the user's cache.

A library has plain functions over memory, which are called through ctypes. So a build needs neither ninja nor the
headers of Python and torch, takes seconds, and fits any version of both.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

COMPILER = "g++"
COMPILE_TIMEOUT_S = 180.0
LOCK_TIMEOUT_S = 200.0


class BuildError(Exception):
    """There is no compiler, or it failed, or the library cannot be kept or loaded."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sources and flags of one library."""

    name: str
    """The name of the library's file. Errors use it, too, with spaces for hyphens."""
    sources: Path
    """The folder of the sources. Every ``.cpp`` in it is compiled, and every ``.h`` may be included."""
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"the {self.name.replace('-', ' ')}"


def built_library(recipe: Recipe, cache_dir: Path, search_path: str | None = None) -> Path:
    """Returns the shared library for this CPU below ``cache_dir``, and compiles it now if it is not there.

    Several processes may call this at the same time: one compiles, the others wait. The compiler is looked for in
    ``search_path``, by default in ``PATH``. Raises BuildError, after ``LOCK_TIMEOUT_S`` at the latest.
    """
    compiler = shutil.which(COMPILER, path=search_path)
    if compiler is None:
        raise BuildError(f"there is no {COMPILER}")
    try:
        target = _target(recipe, compiler, cache_dir)
        if target.is_file():
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        # The kernel frees the lock when the process ends: a builder that was killed blocks no other.
        with FileLock(target.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            if not target.is_file():
                _compile(recipe, compiler, target)
    except Timeout as exc:
        raise BuildError(f"another process has been compiling {recipe.title} for long: {exc.lock_file}") from exc
    except (OSError, subprocess.SubprocessError) as exc:
        raise BuildError(f"{recipe.title} cannot be compiled: {exc}") from exc
    return target


def needs_compiling(recipe: Recipe, cache_dir: Path) -> bool:
    """Returns whether ``built_library`` would compile now."""
    compiler = shutil.which(COMPILER)
    if compiler is None:
        return False
    try:
        return not _target(recipe, compiler, cache_dir).is_file()
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
        if self._target.is_file():
            return None
        counts = []
        for draft in _drafts(self._target):
            with suppress(OSError):  # It has just become the library.
                counts.append(sum(name.endswith(".o") for name in os.listdir(draft)))
        return Compiling(max(counts), self._sources) if counts else None


def _target(recipe: Recipe, compiler: str, cache_dir: Path) -> Path:
    return cache_dir / f"{recipe.name}-{_key(recipe, compiler)}.so"


def has_compiler() -> bool:
    """Returns whether ``built_library`` would find a compiler in ``PATH``."""
    return shutil.which(COMPILER) is not None


def _key(recipe: Recipe, compiler: str) -> str:
    """Returns a hash of all that a library depends on, so that one made for another CPU is never loaded on this one."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=10)
    digest.update(version.stdout)
    digest.update("\0".join((*recipe.compile_flags, *recipe.link_flags, platform.machine(), _cpu())).encode())
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
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in wanted)


def _compile(recipe: Recipe, compiler: str, target: Path) -> None:
    """Compiles into a draft and renames that. The caller holds the lock, so every other draft was left by the dead."""
    for left in _drafts(target):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_draft_prefix(target), dir=target.parent) as draft:
        made = Path(draft, target.name)
        sources = [str(path) for path in _units(recipe)]
        # Each source takes a compiler of its own, and the longest one takes a third of the time of all.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            units = [pool.submit(_run, [compiler, *recipe.compile_flags, "-c", source], draft) for source in sources]
            try:
                for unit in units:
                    unit.result()
            finally:
                pool.shutdown(cancel_futures=True)
        objects = [path.name for path in sorted(Path(draft).glob("*.o"))]
        _run([compiler, "-shared", "-o", str(made), *objects, *recipe.link_flags], draft)
        os.rename(made, target)


def _run(command: list[str], folder: str) -> None:
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as exc:
        raise BuildError(f"{command[0]} failed: {exc.stderr.strip()[-2000:]}") from exc
