"""Every Triton kernel builds for a data-centre GPU, with no GPU in the machine: down to its machine code."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve_kernels.triton.block_copy import CHUNK, _gather_kernel, _scatter_kernel
from pdserve_kernels.triton.decode_attention import TILE, _combine_kernel, _decode_kernel
from pdserve_kernels.triton.gated_activation import BLOCK, _gelu_and_mul_kernel, _silu_and_mul_kernel
from pdserve_kernels.triton.kv_write import _kv_write_kernel
from pdserve_kernels.triton.prefill_attention import _prefill_kernel
from pdserve_kernels.triton.projection import BLOCK_HEADS, _projection_kernel
from pdserve_kernels.triton.rms_norm import _add_rms_norm_kernel, _rms_norm_kernel
from pdserve_kernels.triton.rotary import _rotary_kernel
from pdserve_kernels.triton.sampling import BLOCK as SAMPLING_BLOCK
from pdserve_kernels.triton.sampling import _sample_kernel

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
"""Bytes that one program may have on that target."""

# The shape of Llama 3 8B: 32 heads over 8 KV heads of 128, 32 layers, blocks of 16 tokens.
TILES = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "HEAD_STRIDE": 32 * 2 * 16 * 128, "BLOCK_STRIDE": 8 * 32 * 2 * 16 * 128}
HEADS = {"KV_HEADS": 8, "GROUP": 4, "BLOCK_DIM": 128}
INT32 = ("context_lens", "block_starts", "blocks", "slots", "tile_rows", "tile_tokens", "query_starts", "tokens")
FP32 = ("partial", "partial_lse", "logits", "temperatures", "min_ps")
SCALARS = {"scale_log2": "fp32", "eps": "fp32", "inner": "i32", "vocab": "i32"}


@dataclass(frozen=True)
class Build:
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    products: bool = False


BUILDS = {
    "decode attention": Build(
        _decode_kernel,
        {**TILES, **HEADS, "WINDOW": 0, "SPLITS": 16, "BLOCK_M": 16, "TILE": TILE},
        {"num_warps": 4, "num_stages": 3},
        products=True,
    ),
    "decode attention in one part, with a window": Build(
        _decode_kernel,
        {**TILES, **HEADS, "WINDOW": 1024, "SPLITS": 1, "BLOCK_M": 16, "TILE": TILE},
        {"num_warps": 4, "num_stages": 3},
        products=True,
    ),
    "combine": Build(_combine_kernel, {"HEAD_DIM": 128, "SPLITS": 128, "BLOCK_DIM": 128}),
    "prefill attention": Build(
        _prefill_kernel,
        {**TILES, **HEADS, "WINDOW": 0, "BLOCK_Q": 32, "BLOCK_M": 128, "TILE": TILE},
        {"num_warps": 8, "num_stages": 2},
        products=True,
    ),
    "prefill attention with a window": Build(
        _prefill_kernel,
        {**TILES, **HEADS, "WINDOW": 1024, "BLOCK_Q": 32, "BLOCK_M": 128, "TILE": TILE},
        {"num_warps": 8, "num_stages": 2},
        products=True,
    ),
    "projection": Build(
        _projection_kernel,
        {
            "HEADS": 32,
            "KV_HEADS": 8,
            "HALF": 64,
            "NORMS": True,
            "BLOCK_SIZE": 16,
            "HEAD_STRIDE": TILES["HEAD_STRIDE"],
            "BLOCK_STRIDE": TILES["BLOCK_STRIDE"],
            "BLOCK_HEADS": BLOCK_HEADS,
            "BLOCK_HALF": 64,
        },
    ),
    "kv write": Build(_kv_write_kernel, {**TILES, "KV_HEADS": 8, "BLOCK_HEADS": 8, "BLOCK_DIM": 128}),
    "gather": Build(_gather_kernel, {"ELEMENTS": TILES["BLOCK_STRIDE"], "CHUNK": CHUNK}),
    "scatter": Build(_scatter_kernel, {"ELEMENTS": TILES["BLOCK_STRIDE"], "CHUNK": CHUNK}),
    "rms norm": Build(_rms_norm_kernel, {"WIDTH": 4096, "BLOCK": 4096}, {"num_warps": 16}),
    "rms norm with residual": Build(_add_rms_norm_kernel, {"WIDTH": 4096, "BLOCK": 4096}, {"num_warps": 16}),
    "rotary": Build(_rotary_kernel, {"HEADS": 40, "HALF": 64, "BLOCK_HEADS": 32, "BLOCK_HALF": 64}),
    "silu": Build(_silu_and_mul_kernel, {"WIDTH": 14336, "BLOCK": BLOCK}),
    "gelu": Build(_gelu_and_mul_kernel, {"WIDTH": 14336, "BLOCK": BLOCK}),
    "sampling": Build(_sample_kernel, {"GREEDY_BELOW": 1e-5, "BLOCK": SAMPLING_BLOCK}, {"num_warps": 8}),
}


def kind(name: str) -> str:
    """The type that an argument of this name has in a bf16 model."""
    if name.endswith("stride") or name in SCALARS:
        return SCALARS.get(name, "i32")
    if name in INT32:
        return "*i32"
    if name == "uniforms":
        return "*fp64"
    return "*fp32" if name in FP32 else "*bf16"


@pytest.mark.parametrize("name", BUILDS)
def test_builds_for_hopper(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build = BUILDS[name]
    arguments = build.kernel.arg_names
    signature = {arg: "constexpr" if arg in build.constants else kind(arg) for arg in arguments}
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(arguments) if signature[arg].startswith("*")}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constants, attrs=aligned)
    options = {**build.options, "enable_fp_fusion": True}
    built = triton.compile(source, target=HOPPER, options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= SHARED_MEMORY
    assert ("mma" in built.asm["ptx"]) == build.products
