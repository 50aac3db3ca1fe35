"""Tests which UCX a process loads, in processes of their own, and that a mixture of two is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.compiled_library import BuildError
from pdserve.errors import TransferError
from pdserve_kvtransfer.ucx.compiled_poster import recipe
from pdserve_kvtransfer.ucx.ucx_library import PREFER_SYSTEM, loaded_ucx, one_folder

PACKAGE = Path("/site-packages/libucx/lib")
_PROGRAM = """
from pdserve_kvtransfer.ucx.ucx_library import loaded_ucx
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
UcxTransport("tcp,self", "lo")
loaded = loaded_ucx()
print(loaded.packaged, loaded.folder, loaded.prefix, loaded.label, loaded.no_verbs, sep="\\n")
"""
_NAMES = ("libucs", "libucs_signal", "libucm", "libuct", "libucp")


def maps(folder: Path, names: Sequence[str] = _NAMES) -> list[str]:
    return [f"7f00-7f01 r-xp 00000000 00:21 77      {folder}/{name}.so.0.0.0" for name in names]


def test_one_library_is_found_among_all_that_is_mapped() -> None:
    others = ["7f00-7f01 rw-p 00000000 00:00 0", "7f00-7f01 r-xp 0 00:21 7   /opt/ucx/lib/ucx/libuct_ib.so.0.0.0"]
    assert one_folder([*others, *maps(Path("/opt/u c x/lib"))], PACKAGE, prefers_system=True) == Path("/opt/u c x/lib")
    deleted = [f"{line} (deleted)" for line in maps(PACKAGE)]
    assert one_folder(deleted, PACKAGE, prefers_system=False) == PACKAGE


def test_a_mixture_is_refused_by_the_names_of_both() -> None:
    mixed = maps(Path("/opt/ucx/lib"), _NAMES[:3]) + maps(PACKAGE, _NAMES[3:])
    with pytest.raises(TransferError, match=r"two UCX .*libucm.*/opt/ucx/lib; libucp.so, libuct.so of /site-packages"):
        one_folder(mixed, PACKAGE, prefers_system=True)


def test_the_package_is_refused_where_the_system_was_to_be_taken() -> None:
    with pytest.raises(TransferError, match=f"{PREFER_SYSTEM} is set, but"):
        one_folder(maps(PACKAGE), PACKAGE, prefers_system=True)
    with pytest.raises(TransferError, match="no UCX library"):
        one_folder([], PACKAGE, prefers_system=False)


def test_calls_are_compiled_with_the_headers_of_the_loaded_library(tmp_path: Path) -> None:
    loaded = loaded_ucx()
    assert f"-I{loaded.prefix}/include" in recipe(loaded).compile_flags
    assert recipe(loaded).link_flags[0] == f"-L{loaded.folder}"
    assert recipe(replace(loaded, version="9.9.9")) != recipe(loaded), "another version is another library"
    with pytest.raises(BuildError, match="headers"):
        recipe(replace(loaded, folder=tmp_path / "lib"))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the prefix of a UCX that the system's loader can find, a copy of the loaded one."""
    prefix, loaded = tmp_path_factory.mktemp("ucx"), loaded_ucx()
    shutil.copytree(loaded.include or Path(), prefix / "include")
    (prefix / "lib").mkdir()
    for name in _NAMES:
        shutil.copy2(loaded.folder / f"{name}.so.0", prefix / "lib" / f"{name}.so.0")
        (prefix / "lib" / f"{name}.so").symlink_to(f"{name}.so.0")
    (prefix / "lib" / "ucx").mkdir()
    # As where libibverbs is missing, UCX leaves out without a word what cannot be loaded.
    (prefix / "lib" / "ucx" / "libuct_ib.so").write_text("no library")
    return prefix


def run(library: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, PREFER_SYSTEM: "true", "LD_LIBRARY_PATH": str(library)}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.integration
def test_the_systems_library_is_loaded_where_it_is_asked_for(system: Path) -> None:
    done = run(system / "lib")
    label = f"{loaded_ucx().version} system"
    no_verbs = f"libuct_ib.so cannot be loaded: see ldd {system}/lib/ucx/libuct_ib.so"
    assert done.stdout.splitlines() == ["False", str(system / "lib"), str(system), label, no_verbs], done.stderr


@pytest.mark.integration
def test_a_system_without_one_of_the_names_is_refused(system: Path, tmp_path: Path) -> None:
    shutil.copytree(system / "lib", tmp_path / "lib", symlinks=True)
    (tmp_path / "lib" / "libuct.so").unlink()
    done = run(tmp_path / "lib")
    assert done.returncode and "two UCX libraries are loaded" in done.stderr, done.stderr
    done = run(tmp_path)
    assert done.returncode and f"{PREFER_SYSTEM} is set, but" in done.stderr, done.stderr
