"""Compiles the C++ kernels once and keeps them in the user's cache.

They are plain functions over memory, called through ctypes: neither torch's nor Python's headers nor ninja are needed,
a build takes a few seconds, and a library fits any version of torch.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

SOURCES = Path(__file__).parent / "csrc"
COMPILER = "g++"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    # Neither changes a result; both stand in the way of vector code.
    "-fno-math-errno",
    "-fno-trapping-math",
    # Tensors are memory without a C++ type.
    "-fno-strict-aliasing",
    "-fopenmp",
    "-fPIC",
)
COMPILE_TIMEOUT_S = 180.0
LOCK_TIMEOUT_S = 200.0


class BuildError(Exception):
    """There is no compiler, or it failed, or what it made cannot be kept."""


def built_library(cache_dir: Path, search_path: str | None = None) -> Path:
    """The kernels for this CPU as a shared library below ``cache_dir``; compiled now if they are not there.

    Several processes may ask at the same time: one compiles, the others wait. ``search_path`` is where the compiler is
    looked for, ``PATH`` by default. Raises BuildError, after ``LOCK_TIMEOUT_S`` at the latest.
    """
    compiler = shutil.which(COMPILER, path=search_path)
    if compiler is None:
        raise BuildError(f"there is no {COMPILER}")
    try:
        target = cache_dir / f"cpu-kernels-{_key(compiler)}.so"
        if target.is_file():
            return target
        cache_dir.mkdir(parents=True, exist_ok=True)
        # The kernel frees it with the process: a killed builder blocks nobody.
        with FileLock(target.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            if not target.is_file():
                _compile(compiler, target)
    except Timeout as exc:
        raise BuildError(f"another process has been compiling the CPU kernels for long: {exc.lock_file}") from exc
    except (OSError, subprocess.SubprocessError) as exc:
        raise BuildError(f"the CPU kernels cannot be compiled: {exc}") from exc
    return target


def _key(compiler: str) -> str:
    """Names everything that a library depends on, so that one made for another CPU is never loaded on this one."""
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=10)
    digest.update(version.stdout)
    digest.update("\0".join((*FLAGS, platform.machine(), _cpu())).encode())
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _cpu() -> str:
    """What ``-march=native`` looks at: the model of the first processor and the instructions that it knows."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in wanted)


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}.", dir=target.parent) as draft:
        made = Path(draft, target.name)
        _run([compiler, *FLAGS, "-c", *(str(path) for path in _sources() if path.suffix == ".cpp")], draft)
        # Without an OpenMP of its own: torch has loaded one, and a second would keep a second pool of threads.
        _run([compiler, "-shared", "-o", str(made), *(path.name for path in sorted(Path(draft).glob("*.o")))], draft)
        os.rename(made, target)


def _run(command: list[str], folder: str) -> None:
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as exc:
        raise BuildError(f"{command[0]} failed: {exc.stderr.strip()[-2000:]}") from exc
