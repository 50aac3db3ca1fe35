"""Tests that what is compiled ahead computes right, for each level that this machine's processor has."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from pdserve import compiled_library
from pdserve.compiled_library import build_ahead
from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.library import CPU_KERNELS, LEVELS
from pdserve_kernels.feed_forward import Activation

LONGEST_S = 1_800
"""This is many times what all levels take to compile: only a compiler that hangs should end here."""
INSTRUCTIONS = {
    "x86-64-v4-vnni-bf16": "avx512_bf16",
    "x86-64-v4-vnni": "avx512",
    "x86-64-v4": "avx512",
    "x86-64-v3-vnni": "avx2",
    "x86-64-v3": "avx2",
}


def test_the_best_level_comes_first_and_each_asks_for_what_it_is_compiled_for() -> None:
    assert [level.name for level in LEVELS] == list(INSTRUCTIONS)
    for better, worse in itertools.pairwise(LEVELS):
        assert not better.features <= worse.features
    for level in LEVELS:
        for flag in level.compile_flags:
            if not flag.startswith("-march="):
                asked = {name.replace("_", "") for name in level.features}
                assert flag.removeprefix("-m") in asked


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S)
def test_each_level_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles them all, which takes a minute."""
    own = compiled_library._cpu_features()
    monkeypatch.setattr(compiled_library, "AHEAD_DIR", tmp_path / "ahead")
    build_ahead(CPU_KERNELS)
    monkeypatch.setenv("PATH", str(tmp_path))
    torch.manual_seed(0)
    x, weight = torch.randn(7, 96), torch.randn(40, 96)
    gate_up, scale = torch.randn(7, 128), torch.randn(96)
    seen = []
    for level in LEVELS:
        if level.features <= own:
            monkeypatch.setattr(compiled_library, "_cpu_features", lambda level=level: level.features)
            kernels = CompiledKernels(tmp_path / "cache")
            assert kernels.name == f"compiled {INSTRUCTIONS[level.name]}"
            for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.5)):
                product = kernels.linear(weight.to(dtype))(x.to(dtype)).float()
                torch.testing.assert_close(product, x @ weight.T, rtol=0, atol=tolerance)
            torch.testing.assert_close(kernels.rms_norm(x, scale, 1e-5), reference.rms_norm(x, scale, 1e-5))
            for activation in (Activation.SILU, Activation.SOFTPLUS):
                torch.testing.assert_close(
                    kernels.activated(gate_up, activation, gated=True),
                    reference.activated(gate_up, activation, gated=True),
                )
            seen.append(level.name)
    if "avx2" in own:
        assert "x86-64-v3" in seen
