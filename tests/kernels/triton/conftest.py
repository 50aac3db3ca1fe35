"""These tests need a GPU or Triton's interpreter, which must be chosen before triton is first imported.

``tests/kernels/test_triton_interpreter.py`` runs this folder in a process of its own with ``TRITON_INTERPRET=1``. Where
there is a GPU, pytest also collects these tests and runs them there.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch


def find_builtins_once() -> None:
    """Has the interpreter look once for the functions that it replaces in each module.

    It looks for them in every launch and in every call of one kernel's function by another, which is a quarter of its
    time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name in dir(package) if core.is_builtin(getattr(package, name, None))]

    def patch(package: Any, *others: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *others)

    interpreter._patch_builtin = patch


if os.environ.get("TRITON_INTERPRET") == "1":
    find_builtins_once()
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
