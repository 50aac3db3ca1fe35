"""How the CPU kernels are compiled."""

from __future__ import annotations

from pathlib import Path

from pdserve.compiled_library import Recipe

CPU_KERNELS = Recipe(
    name="cpu-kernels",
    sources=Path(__file__).parent / "csrc",
    compile_flags=(
        "-std=c++17",
        "-O3",
        "-march=native",
        # Neither changes a result; both stand in the way of vector code.
        "-fno-math-errno",
        "-fno-trapping-math",
        # Tensors are memory without a C++ type.
        "-fno-strict-aliasing",
        # For compiling only: torch has loaded an OpenMP, and linking a second would keep a second pool of threads.
        "-fopenmp",
        "-fPIC",
    ),
)
