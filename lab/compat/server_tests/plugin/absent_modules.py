"""Modules of another project that is not installed, for its tests.

Most names that tests of a server import are needed by tests of the project's insides alone. Such a name is an
``Absent`` class, and a test that uses it is skipped at that point.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import NoReturn

import pytest


class _Absence(type):
    """The type of absent classes: whatever is done with such a class skips the test that does it."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        pytest.skip(f"needs {cls.__name__}, which is not here", allow_module_level=True)

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __getitem__(cls, key: object) -> type:
        return cls


class Absent(Exception, metaclass=_Absence):
    """A name that has no meaning for a server. It is an exception so that tests can name it in ``raises``."""


def absent(name: str) -> type:
    return _Absence(name, (Absent,), {})


class AbsentModule(ModuleType):
    """A module whose every name is absent, apart from those that were set."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(name)


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the absent packages. All names are absent in those that ``given`` does not name.

    The modules in ``files`` are there, and are loaded from their files.
    """

    def __init__(
        self,
        packages: Sequence[str],
        given: Mapping[str, Mapping[str, object]],
        files: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        self._packages = packages
        self._given = given
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        if fullname in self._files:
            return importlib.util.spec_from_file_location(fullname, self._files[fullname])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))
