"""``python -m tests.gpu.compiled FILE``: what can be shown of the GPU kernels without a GPU, as a report.

The kernels of an 8B model are compiled to machine code for each kind of GPU. The compiler says how many registers and
how much shared memory a program takes, so how many programs a processor runs at once. The roofline says how long steps
take at least by what the chips' data sheets promise.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from benchmarks.random_llama import LLAMA_8B
from pdserve.bench.report import Better, Figure, Report, Row, Unit, this_machine, to_json
from pdserve_kernels.contract import BlockFormat
from pdserve_kernels.triton import paged_attention
from tests.gpu.verdict import COMPILED, LEAST, OCCUPANCY, REGISTERS, SHARED, SPILLED
from tests.kernels.test_triton_compiler import (
    SHARED_MEMORY,
    Launch,
    block_linear,
    launch_8b_model,
)

NO_CHIP = "torch finds no GPU here: nothing was run, and no target was measured"
_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
"""The most warps that a processor runs at once, by compute capability (CUDA's programming guide)."""
_REGISTERS, _REGISTERS_AT_ONCE = 65_536, 256
_RESERVED_KIB = 1
"""The shared memory that the system takes for each program."""
CHIPS = {"A100 80 GB": (2.04, 0.312), "H100 SXM": (3.35, 0.989), "H200": (4.8, 0.989), "B200": (8.0, 2.25)}
"""TB/s of memory and PFLOP/s of dense products in bf16, by the data sheets."""
_ROWS = 16
"""So many rows are multiplied with packed weights."""


def launches_on(capability: int) -> list[Launch]:
    """Returns the launches of an 8B model on such a GPU, with the tiles that fit its shared memory."""
    made: list[Launch] = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found = Launch(self, dict(zip(self.arg_names, args, strict=True)), options)
        needed, limit = found.shared_memory(capability), SHARED_MEMORY[capability] * 1024
        if needed > limit:
            raise OutOfResources(needed, limit, "shared memory")
        if all((known.kernel, known.constants) != (found.kernel, found.constants) for known in made):
            made.append(found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", launch)
        patch.setattr(paged_attention, "_fitting", {})
        launch_8b_model()
        for kind in (BlockFormat.Q4_K, BlockFormat.FP8):
            multiply(kind, capability)
    return made


def multiply(kind: BlockFormat, capability: int) -> None:
    """Launches a product of some rows with packed weights."""

    linear = block_linear(kind, capability=capability)
    linear(torch.empty(_ROWS, LLAMA_8B.hidden_size, dtype=torch.bfloat16))


def compiled_row(launch: Launch, name: str, capability: int) -> Row:
    """Compiles a kernel, and returns what a program of it takes."""
    kernel = launch.build(capability)
    (registers, spilled), warps = registers_of(kernel.asm["ptx"], capability), kernel.metadata.num_warps
    shared_kib = kernel.metadata.shared / 1024
    at_once = programs_at_once(capability, registers, shared_kib, warps)
    return Row(
        COMPILED,
        {"kernel": name, "sm": capability},
        (
            Figure(REGISTERS, registers, Unit.COUNT),
            Figure(SPILLED, spilled, Unit.COUNT, Better.LOWER),
            Figure(SHARED, shared_kib, Unit.KIB),
            Figure("programs of a processor", at_once, Unit.COUNT),
            Figure(OCCUPANCY, at_once * warps / _WARPS[capability], Unit.RATIO, Better.NEITHER),
        ),
    )


def registers_of(ptx: str, capability: int) -> tuple[int, int]:
    """Returns the registers that a thread takes, and the bytes that did not fit into them, as the assembler says."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target}", source.name, "-o", os.devnull]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers, spilled = (
        re.findall(pattern, said) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return max(map(int, registers)), max(map(int, spilled))


def programs_at_once(capability: int, registers: int, shared_kib: float, warps: int) -> int:
    """Returns how many programs a processor runs at once, by each of its resources."""
    of_warp = -(-registers * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    shared_of_all = SHARED_MEMORY[capability] + _RESERVED_KIB
    return min(
        _REGISTERS // of_warp // warps,
        int(shared_of_all / (shared_kib + _RESERVED_KIB)),
        _WARPS[capability] // warps,
        32,
    )


def least_rows() -> list[Row]:
    """Returns how long steps take at least on each chip: to read weights and contexts, or to multiply."""
    shape = LLAMA_8B
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_attention_heads + shape.num_key_value_heads)
    layers = shape.num_hidden_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    weights = layers + shape.vocab_size * shape.hidden_size
    token_bytes = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    rows = []
    for chip, (terabytes, petaflops) in CHIPS.items():
        for requests in (1, 64):
            nbytes = 2 * weights + requests * 1024 * token_bytes
            rows.append(_least(chip, f"decode, {requests} of 1,024 tokens", nbytes / terabytes / 1e12))
        rows.append(_least(chip, "prefill of 8,192 tokens", 2 * layers * 8192 / petaflops / 1e15))
    return rows


def _least(chip: str, step: str, seconds: float) -> Row:
    return Row(LEAST, {"chip": chip, "step": step}, (Figure("least", seconds * 1e3, Unit.MS, Better.NEITHER),))


def compiled_report() -> Report:
    """Compiles all kernels for all kinds of GPUs, which takes some minutes. Raises if one of them does not compile."""
    rows = []
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        for capability in SHARED_MEMORY:
            print(f"compiling for sm_{capability}", file=sys.stderr, flush=True)
            times = Counter[str]()
            for launch in launches_on(capability):
                name = launch.kernel.__name__.strip("_")
                times[name] += 1
                rows.append(compiled_row(launch, f"{name} {times[name]}" if times[name] > 1 else name, capability))
    notes = (
        NO_CHIP,
        "every kernel of an 8B model in bf16, and products of 16 rows with weights in Q4_K and FP8, were compiled to "
        "machine code; registers and shared memory are those that the compiler says",
        "the least time reads weights and contexts once, or multiplies, at the rates of the data sheets",
    )
    return Report("gpu", this_machine(), {}, notes, (*rows, *least_rows()))


def main() -> None:
    Path(sys.argv[1]).write_bytes(to_json(compiled_report()))


if __name__ == "__main__":
    main()
