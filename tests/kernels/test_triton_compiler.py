"""Tests that the kernels for real models build for a data-centre GPU, down to machine code, without a GPU.

The launches are recorded instead of made, and the recorded launches are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pdserve_kernels.contract import AttentionRow, HeadNorms
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.cache_ops import gather_blocks, scatter_blocks
from pdserve_kernels.triton.triton_kernels import TritonKernels

pytestmark = pytest.mark.integration

HOPPER = GPUTarget("cuda", 90, 32)
PROCESSORS = 132
SHARED_MEMORY = 227 * 1024
"""The bytes of shared memory that one program may have on that GPU."""

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}
SCALARS = {int: "i32", float: "fp32"}


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments by name."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        return {param.name: self.arguments[param.name] for param in self.kernel.params if param.is_constexpr}

    def build(self) -> Any:
        signature, aligned = {}, {}
        for at, name in enumerate(self.kernel.arg_names):
            value = self.arguments[name]
            if name in self.constants:
                signature[name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                aligned[(at,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = SCALARS[type(value)]
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=aligned)
        return triton.compile(source, target=HOPPER, options={**self.options, "enable_fp_fusion": True})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Launch]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launch = Launch(self, dict(zip(self.arg_names, args, strict=True)), options)
        if all((known.kernel, known.constants) != (launch.kernel, launch.constants) for known in made):
            made.append(launch)

    monkeypatch.setattr(JITFunction, "run", record)
    return made


def check(launches: list[Launch]) -> dict[str, Any]:
    """Builds all launches and returns the built kernels by name."""
    built = {}
    for launch in launches:
        kernel = launch.build()
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_MEMORY
        built[launch.kernel.__name__] = kernel
    return built


def step(layout: KvLayout, heads: int, window: int | None, norms: bool = False) -> None:
    """Launches the attention of a step with rows of every kind, alone and in a batch that needs no parts."""
    cache = layout.allocate(13, torch.device("cpu"))
    for rows in ([AttentionRow(1, 200, range(13)), AttentionRow(3, 200, range(13))], [AttentionRow(1, 1, [0])]):
        tokens = sum(row.new_tokens for row in rows)
        qkv = torch.empty(tokens, heads + 2 * layout.kv_heads, layout.head_dim, dtype=layout.dtype)
        angles = torch.empty(tokens, layout.head_dim // 2, dtype=layout.dtype)
        weight = torch.empty(layout.head_dim, dtype=layout.dtype)
        attend = TritonKernels(PROCESSORS).plan_attention(layout, cache, rows, heads, 0.1)
        attend.from_projection(1, qkv, angles, angles, HeadNorms(weight, weight, 1e-6) if norms else None, window)


def test_every_op_of_an_8b_model(launches: list[Launch]) -> None:
    layout, kernels = KvLayout(8, 32, 16, 128, torch.bfloat16), TritonKernels(PROCESSORS)
    step(layout, 32, window=None)
    x, weight = torch.empty(3, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    kernels.rms_norm(x, weight, 1e-5)
    kernels.add_rms_norm(x, x, weight, 1e-5)
    kernels.rotary(x.view(3, 32, 128), x[:, :64], x[:, :64])
    gate_up = torch.empty(3, 2 * 14336, dtype=torch.bfloat16)
    kernels.silu_and_mul(gate_up)
    kernels.gelu_and_mul(gate_up)
    cache, blocks = torch.empty(4, 8, 32, 2, 16, 128, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
    attend = kernels.plan_attention(layout, cache, [AttentionRow(1, 1, [0])], 32, 0.1)
    attend(0, x.view(3, 32, 128)[:1], torch.empty(2, 1, 8, 128, dtype=torch.bfloat16))
    gather_blocks(cache, blocks, cache)
    scatter_blocks(cache, blocks, cache)
    built = check(launches)
    assert len(built) == 12
    # The products limit the speed of long prompts, so they must run on the kind of tensor core that this GPU has.
    assert "wgmma" in built["_prefill_kernel"].asm["ptx"]
    assert "mma" in built["_decode_kernel"].asm["ptx"]
    assert "cp.async" in built["_decode_kernel"].asm["ptx"]


@pytest.mark.parametrize(
    ("layout", "heads", "window", "norms"),
    [
        (KvLayout(3, 30, 16, 64, torch.bfloat16), 9, None, False),
        (KvLayout(1, 18, 16, 256, torch.bfloat16), 4, 512, True),
        (KvLayout(2, 28, 64, 80, torch.bfloat16), 14, None, False),
        (KvLayout(3, 30, 16, 64, torch.float32), 9, None, True),
    ],
    ids=["SmolLM2 135M", "Gemma 3 270M", "padded heads in groups of 7", "SmolLM2 135M in fp32"],
)
def test_attention_of_other_shapes(
    launches: list[Launch], layout: KvLayout, heads: int, window: int | None, norms: bool
) -> None:
    step(layout, heads, window, norms)
    assert {"_decode_kernel", "_combine_kernel", "_prefill_kernel", "_projection_kernel"} == check(launches).keys()
