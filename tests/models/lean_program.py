"""A program that computes models and prints the tokens. ``processes.lean_torch_command`` runs it.

It first imports every module of an engine, in a fork, and notes those that cannot be imported. Standard input has an
``Order`` and standard output gets a ``Results``, as JSON.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import torch

import pdserve.engine
import pdserve.grammars
import pdserve.models
import pdserve_kernels

PACKAGES = (pdserve.models, pdserve.engine, pdserve.grammars, pdserve_kernels)


class Case(msgspec.Struct, frozen=True):
    path: str
    compiled: bool
    """Whether the compiled kernels compute it, in bf16 and from its file's blocks."""


class Order(msgspec.Struct, frozen=True):
    cases: list[Case]
    each_first: bool
    """Whether each module is imported before all others, in a fork of its own, which takes a second for ten of them.

    Otherwise one fork imports all of them in the order of their names.
    """


class Results(msgspec.Struct, frozen=True):
    unimportable: list[str]
    special_tokens: dict[str, str]
    tokens: list[list[int]]


def answer(case: Case, cache: Path) -> list[int]:
    """Returns the greedy tokens after a prompt of two chunks."""
    # Imported at the top of this file, these would be there before every other module of an engine.
    from pdserve.config import Dtype
    from pdserve.models.checkpoint.config_reading import read_decoder_config
    from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
    from tests.models.greedy import greedy_tokens, small_runner
    from tests.models.grouped_runner import GroupedRunner

    path = Path(case.path)
    if case.compiled:
        kernels = CompiledKernels(cache)
        config = read_decoder_config(path)
        runner = GroupedRunner(path, config, Dtype.BF16, 4, 32, 128, kernels, block_kernels=kernels)
    else:
        runner = small_runner(path)
    return greedy_tokens(runner, range(100, 137), 8, chunk=20)


def special_tokens() -> dict[str, str]:
    """Returns some of a tokenizer that transformers makes of a GGUF file, as it does for an engine's first grammar."""
    from pdserve.models.checkpoint.cached_tokenizer import read_tokenizer
    from pdserve.models.checkpoint.model_files import resolve_model

    return read_tokenizer(resolve_model("demo")).special_tokens


def unimportable(*, each_first: bool) -> list[str]:
    """Returns the modules that cannot be imported into an engine's torch, and why."""
    found = [
        found.name for package in PACKAGES for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    ]
    names = sorted(name for name in found if not name.endswith("__main__"))
    read, write = os.pipe()
    for turn in [[name] for name in names] if each_first else [names]:
        child = os.fork()
        if child == 0:
            for name in turn:
                try:
                    import_module(name)
                except Exception as exc:
                    os.write(write, f"{name}: {exc}\n".encode())
            os._exit(0)
        os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as told:
        return told.read().splitlines()


def main(cache: str) -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    failing = unimportable(each_first=order.each_first)
    torch.set_num_threads(1)
    results = Results(failing, special_tokens(), [answer(case, Path(cache)) for case in order.cases])
    sys.stdout.buffer.write(msgspec.json.encode(results))
