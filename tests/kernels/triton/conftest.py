"""These tests need a GPU or Triton's interpreter, which must be chosen before triton is first imported.

``tests/kernels/test_triton_interpreter.py`` runs this folder in a process of its own with ``TRITON_INTERPRET=1``. Where
there is a GPU, pytest also collects these tests and runs them there.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch


def find_builtins_once() -> None:
    """Has the interpreter look once for the functions that it replaces in each module.

    It looks for them in every launch and in every call of one kernel's function by another, which is a quarter of its
    time.
    """

    @cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name in dir(package) if core.is_builtin(getattr(package, name, None))]

    def patch(package: Any, *others: Any) -> None:
        for name in builtins_of(package):
            member = getattr(package, name)
            if core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *others)

    interpreter._patch_builtin = patch


def patch_once_a_launch() -> None:
    """Has a kernel's function replace nothing that the launch around it has replaced already."""

    @cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is language or value is core]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Triton's range is a class, and the interpreter's is a function.
        if any(isinstance(found.range, type) for found in languages(self.fn)):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def describe_types_once() -> None:
    """Has the interpreter work out once what it says of each type and shape, in place of once for each number.

    That is a third of its time.
    """
    numpy_dtype, validated = interpreter._get_np_dtype, core.validate_block_shape
    numpy_dtypes: dict[str, Any] = {}
    shapes: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}

    def known_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(of)
        return numpy_dtypes[name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if not self.shape:
            raise TypeError("a block has one dimension at least")
        key = (element_ty.name, self.shape)
        if key not in shapes:
            shapes[key] = validated(self.shape), f"<{self.shape}, {element_ty}>"
        self.numel, self.name = shapes[key]

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(type.shape if type.is_block() else ())

    interpreter._get_np_dtype = known_dtype
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def pytest_configure(config: pytest.Config) -> None:
    """Has only the run of all tests look whether integers overflow, which is a quarter of the interpreter's time."""
    if os.environ.get("TRITON_INTERPRET") == "1" and config.getoption("markexpr"):
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    find_builtins_once()
    patch_once_a_launch()
    describe_types_once()
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
