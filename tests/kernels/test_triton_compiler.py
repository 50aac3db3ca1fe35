"""Tests that the kernels for real models build for a data-centre GPU, down to machine code, without a GPU.

The launches are recorded instead of made, and the recorded launches are compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from pdserve_kernels.contract import (
    AttentionRow,
    BlockFormat,
    BlockWeight,
    ExpertsForm,
    ExpertWeights,
    HeadNorms,
    IndexQueries,
    SparseForm,
    StateRuns,
    UnreadWeight,
)
from pdserve_kernels.feed_forward import Activation, Routing, Scoring
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton import paged_attention
from pdserve_kernels.triton.block_ops import TritonBlockLinear
from pdserve_kernels.triton.block_packing import PACKED_FORMS
from pdserve_kernels.triton.cache_ops import gather_blocks, scatter_blocks
from pdserve_kernels.triton.fp8_products import TritonFp8Linear
from pdserve_kernels.triton.triton_kernels import TritonKernels
from tests.nightly import nightly

pytestmark = pytest.mark.integration

SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""The KiB of shared memory that one program may have, by the GPU's compute capability (CUDA's programming guide)."""
HOPPER = 90
PROCESSORS = 132
OFTEN = (BlockFormat.Q4_K,)
"""The formats of weights that are compiled in every run: with offsets and two levels of scales."""

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
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
        """What the kernel is compiled for: Triton takes None for a constant, too."""
        found = {param.name: self.arguments[param.name] for param in self.kernel.params if param.is_constexpr}
        return found | {name: None for name, value in self.arguments.items() if value is None}

    def build(self, capability: int = HOPPER) -> Any:
        """Compiles the kernel to machine code."""
        options = {**self.options, "enable_fp_fusion": True}
        return triton.compile(self._source(), target=_target(capability), options=options)

    def shared_memory(self, capability: int) -> int:
        """Returns the bytes that a program needs. What takes most of the time is left out: LLVM's work, and ptxas's."""
        source, target, metadata = self._source(), _target(capability), dict[str, Any]()
        backend = make_backend(target)
        options = backend.parse_options({**self.options, **source.parse_options(), "enable_fp_fusion": True})
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(target, options, functions, modules, context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        with patch.object(llvm, "optimize_module", lambda *_, **__: None):
            for stage in ("ttir", "ttgir", "llir"):
                module = stages[stage](module, metadata)
        return int(metadata["shared"])

    def _source(self) -> Any:
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
                if isinstance(value, int) and value % 16 == 0:
                    aligned[(at,)] = [["tt.divisibility", 16]]
        return ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=aligned)


def _target(capability: int) -> GPUTarget:
    return GPUTarget("cuda", capability, 32)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Launch]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(paged_attention, "_fitting", {})
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
        assert kernel.metadata.shared <= SHARED_MEMORY[HOPPER] * 1024
        built[launch.kernel.__name__] = kernel
    return built


MIXED = [AttentionRow(1, 200, range(13)), AttentionRow(3, 200, range(13))]
"""The rows of a step, of every kind."""


def attend(
    rows: list[AttentionRow],
    layout: KvLayout,
    heads: int,
    window: int | None,
    norms: bool = False,
    cap: float | None = None,
    chunked: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    cache = layout.allocate(13, torch.device("cpu"))
    tokens = sum(row.new_tokens for row in rows)
    qkv = torch.empty(tokens, heads + 2 * layout.kv_heads, layout.head_dim, dtype=layout.dtype)
    angles = torch.empty(tokens, layout.head_dim // 2, dtype=layout.dtype)
    weight = torch.empty(layout.head_dim, dtype=layout.dtype)
    planned = TritonKernels(PROCESSORS).plan_attention(layout, cache, rows, heads, 0.1, cap)
    head_norms = HeadNorms(weight, weight, 1e-6) if norms else None
    planned.from_projection(1, qkv, angles, angles, head_norms, window, chunked=chunked, sinks=sinks)


def launch_8b_model() -> None:
    """Launches every op of an 8B model in bf16."""
    layout, kernels = KvLayout(8, 32, 16, 128, torch.bfloat16), TritonKernels(PROCESSORS)
    # With rows of every kind, and in a batch that needs no parts.
    for rows in (MIXED, [AttentionRow(1, 1, [0])]):
        attend(rows, layout, 32, window=None)
    x, weight = torch.empty(3, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    kernels.rms_norm(x, weight, 1e-5)
    kernels.add_rms_norm(x, x, weight, 1e-5)
    kernels.rotary(x.view(3, 32, 128), x[:, :64], x[:, :64])
    gate_up = torch.empty(3, 2 * 14336, dtype=torch.bfloat16)
    for activation in (Activation.SILU, Activation.GELU_TANH):
        kernels.activated(gate_up, activation, gated=True)
    cache, blocks = torch.empty(4, 8, 32, 2, 16, 128, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
    planned = kernels.plan_attention(layout, cache, [AttentionRow(1, 1, [0])], 32, 0.1)
    planned(0, x.view(3, 32, 128)[:1], torch.empty(2, 1, 8, 128, dtype=torch.bfloat16))
    gather_blocks(cache, blocks, cache)
    scatter_blocks(cache, blocks, cache)


def test_every_op_of_an_8b_model(launches: list[Launch]) -> None:
    launch_8b_model()
    built = check(launches)
    assert len(built) == 12
    # The products limit the speed of long prompts, so they must run on the kind of tensor core that this GPU has.
    assert "wgmma" in built["_prefill_kernel"].asm["ptx"]
    assert "mma" in built["_decode_kernel"].asm["ptx"]
    assert "cp.async" in built["_decode_kernel"].asm["ptx"]


@pytest.mark.parametrize(
    ("layout", "heads", "window", "norms", "cap"),
    [
        pytest.param(KvLayout(3, 30, 16, 64, torch.bfloat16), 9, None, False, None, marks=pytest.mark.nightly),
        pytest.param(KvLayout(1, 18, 16, 256, torch.bfloat16), 4, 512, True, None, marks=pytest.mark.nightly),
        pytest.param(KvLayout(4, 26, 16, 256, torch.bfloat16), 8, 4096, True, 50.0, marks=pytest.mark.nightly),
        (KvLayout(2, 28, 64, 80, torch.bfloat16), 14, 4096, True, 50.0),
        pytest.param(KvLayout(3, 30, 16, 64, torch.float32), 9, None, True, None, marks=pytest.mark.nightly),
    ],
    ids=["SmolLM2 135M", "Gemma 3 270M", "Gemma 2 2B", "padded heads in groups of 7", "SmolLM2 135M in fp32"],
)
def test_attention_of_other_shapes(
    launches: list[Launch], layout: KvLayout, heads: int, window: int | None, norms: bool, cap: float | None
) -> None:
    attend(MIXED, layout, heads, window, norms, cap)
    assert {"_decode_kernel", "_combine_kernel", "_prefill_kernel", "_projection_kernel"} == check(launches).keys()


@pytest.mark.parametrize(
    ("layout", "heads", "window", "chunked", "sunk"),
    [
        (KvLayout(8, 12, 16, 64, torch.bfloat16), 64, 128, True, True),
        nightly(KvLayout(1, 36, 16, 128, torch.bfloat16), 5, 96, True, False),
        nightly(KvLayout(8, 12, 16, 64, torch.bfloat16), 64, 128, False, True),
    ],
    ids=["chunks and sinks", "chunks", "sinks"],
)
def test_attention_in_chunks_and_with_sinks(
    launches: list[Launch], layout: KvLayout, heads: int, window: int, chunked: bool, sunk: bool
) -> None:
    attend(MIXED, layout, heads, window, chunked=chunked, sinks=torch.empty(heads) if sunk else None)
    assert {"_decode_kernel", "_combine_kernel", "_prefill_kernel", "_projection_kernel"} == check(launches).keys()


def test_attention_to_a_cache_in_fp8(launches: list[Launch]) -> None:
    layout = KvLayout(8, 32, 16, 128, torch.bfloat16, fp8=True)
    attend(MIXED, layout, 32, window=None)
    planned = TritonKernels(PROCESSORS).plan_attention(
        layout, layout.allocate(4, torch.device("cpu")), [AttentionRow(1, 1, [0])], 32, 0.1
    )
    query, key_value = torch.empty(1, 32, 128, dtype=torch.bfloat16), torch.empty(2, 1, 8, 128, dtype=torch.bfloat16)
    planned(0, query, key_value)
    built = check(launches)
    names = {"_decode_kernel", "_combine_kernel", "_prefill_kernel", "_projection_kernel", "_kv_write_kernel"}
    assert names == built.keys()
    assert "mma" in built["_decode_kernel"].asm["ptx"]


@pytest.mark.parametrize(("heads", "fp8"), [(128, False), nightly(128, True), nightly(20, False)])
def test_latent_attention(launches: list[Launch], heads: int, fp8: bool) -> None:
    layout = KvLayout(1, 61, 16, 576, torch.bfloat16, 512, fp8)
    attend_to_latents(MIXED, layout, heads)
    built = check(launches)
    assert {"_decode_kernel", "_combine_kernel", "_prefill_kernel", "_kv_write_kernel"} == built.keys()
    assert "mma" in built["_decode_kernel"].asm["ptx"]


def attend_to_latents(rows: list[AttentionRow], layout: KvLayout, heads: int) -> None:
    cache, tokens = layout.allocate(13, torch.device("cpu")), sum(row.new_tokens for row in rows)
    query, key = (torch.empty(tokens, count, layout.head_dim, dtype=layout.dtype) for count in (heads, 1))
    TritonKernels(PROCESSORS).plan_attention(layout, cache, rows, heads, 0.1)(1, query, key[None])


@pytest.mark.parametrize("by_channel", [nightly(False), True])
def test_delta_rules(launches: list[Launch], by_channel: bool) -> None:
    starts, one = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
    heads, group = (32, 1) if by_channel else (16, 2)
    beta, state = torch.empty(3, heads, group), torch.empty(1, heads, group, 128, 128)
    decay = torch.empty(3, heads, group, 128) if by_channel else beta
    qkv = torch.empty(3, heads, 256 + group * 128, dtype=torch.bfloat16)
    TritonKernels(PROCESSORS).gated_delta_rule(qkv, decay, beta, state, StateRuns(starts, one, one, single=False))
    assert check(launches).keys() == {"_gated_delta_rule_kernel"}


@pytest.mark.parametrize(("fp8", "pool"), [nightly(False, 1), (True, 1), nightly(False, 16)])
def test_attention_to_chosen_tokens(launches: list[Launch], fp8: bool, pool: int) -> None:
    layout, rows = KvLayout(1, 2, 16, 704, torch.bfloat16, 512, fp8), [AttentionRow(1, 3000, range(188))]
    cache = layout.allocate(188, torch.device("cpu"))
    attend = TritonKernels(PROCESSORS).plan_sparse(layout, cache, rows, 128, 0.1, SparseForm(2048, 576, pool))
    query, key, chosen_by = (
        torch.empty(1, *shape, dtype=layout.dtype) for shape in ((128, 576), (1, 1, 704), (64, 128))
    )
    attend(1, query, key, IndexQueries(chosen_by, torch.empty(1, 64)))
    built = check(launches)
    assert {"_kv_write_kernel", "_score_kernel", "_choose_kernel", "_decode_kernel", "_combine_kernel"} == built.keys()
    assert "mma" in built["_score_kernel"].asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "prefill_keys", "decode_keys"),
    [
        (86, 256, torch.bfloat16, 16, 64),
        pytest.param(80, 256, torch.bfloat16, 64, 64, marks=pytest.mark.nightly),
        pytest.param(89, 128, torch.bfloat16, 64, 64, marks=pytest.mark.nightly),
        pytest.param(89, 256, torch.bfloat16, 16, 64, marks=pytest.mark.nightly),
        pytest.param(90, 256, torch.bfloat16, 64, 64, marks=pytest.mark.nightly),
        pytest.param(100, 256, torch.bfloat16, 64, 64, marks=pytest.mark.nightly),
        pytest.param(120, 256, torch.bfloat16, 16, 64, marks=pytest.mark.nightly),
        pytest.param(86, 256, torch.float32, 16, 32, marks=pytest.mark.nightly),
        pytest.param(89, 128, torch.float32, 32, 64, marks=pytest.mark.nightly),
    ],
)
def test_programs_fit_the_shared_memory_of_each_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: int,
    head_dim: int,
    dtype: torch.dtype,
    prefill_keys: int,
    decode_keys: int,
) -> None:
    """The launches are refused as Triton refuses them on such a GPU. The largest tiles that fit are those of before."""
    limit, needs = SHARED_MEMORY[capability] * 1024, dict[str, tuple[int, int]]()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made = Launch(self, dict(zip(self.arg_names, args, strict=True)), options)
        needed = made.shared_memory(capability)
        if needed > limit:
            raise OutOfResources(needed, limit, "shared memory")
        needs[self.__name__] = needed, made.arguments.get("TILE", 0)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(paged_attention, "_fitting", {})
    layout = KvLayout(1, 2, 16, head_dim, dtype)
    attend(MIXED, layout, 4, 512, norms=True)
    assert {name: keys for name, (_, keys) in needs.items()} == {
        "_projection_kernel": 0,
        "_decode_kernel": decode_keys,
        "_combine_kernel": 0,
        "_prefill_kernel": prefill_keys,
    }
    width = torch.empty(3, 8192, dtype=dtype)
    kernels = TritonKernels(PROCESSORS)
    kernels.add_rms_norm(width, width, width[0], 1e-5)
    kernels.rms_norm(width, width[0], 1e-5)
    kernels.rotary(width.view(3, -1, head_dim), width[:, : head_dim // 2], width[:, : head_dim // 2])
    kernels.activated(width, Activation.SILU, gated=True)
    assert len(needs) == 8


def launch_experts(
    form: ExpertsForm, rows: int, *, biased: bool, kind: BlockFormat | None = None, capability: int = HOPPER
) -> None:
    """Launches what a step does with experts. No numbers of these tensors can be read, so nothing waits for them."""
    meta = torch.device("meta")

    def weight(outer: int, inner: int) -> UnreadWeight | BlockWeight:
        if kind is not None:
            row = inner // kind.elements * kind.block_bytes
            return BlockWeight(kind, torch.empty(outer, row, dtype=torch.uint8, device=meta))
        made = torch.empty(outer, inner, dtype=form.dtype, device=meta)
        return UnreadWeight("", (outer, inner), form.dtype, lambda: made)

    inner = (2 if form.gated else 1) * form.channels
    bias = torch.empty(inner, dtype=form.dtype, device=meta) if biased else None
    own = ExpertWeights((weight(inner, form.hidden),), weight(form.hidden, form.channels), bias)
    x = torch.empty(rows, form.hidden, dtype=form.dtype, device=meta)
    logits = torch.empty(rows, form.count, dtype=torch.float32, device=meta)
    kernels_of(capability).experts(form, [own] * form.count)(x, logits, None if biased else x)


MOE_30B = ExpertsForm(128, 2048, 768, torch.bfloat16, Routing(8, normalised=True), Activation.SILU, gated=True)
GPT_OSS = replace(MOE_30B, count=32, hidden=2880, channels=2880, activation=Activation.CLAMPED_SILU)
GPT_OSS = replace(GPT_OSS, routing=Routing(4, Scoring.SOFTMAX_OF_CHOSEN))
V3 = Routing(8, Scoring.SIGMOID, normalised=True, smallest_sum=1e-20, scale=2.5, groups=8, chosen_groups=4)
DEEPSEEK = replace(MOE_30B, count=256, hidden=7168, channels=2048, routing=V3)
DEEPSEEK = replace(DEEPSEEK, correction=torch.empty(256, device="meta"))
NEMOTRON = replace(MOE_30B, activation=Activation.RELU_SQUARED, gated=False)


@pytest.mark.parametrize(
    ("form", "rows", "biased"),
    [
        pytest.param(MOE_30B, 1, False, marks=pytest.mark.nightly),
        pytest.param(GPT_OSS, 64, True, marks=pytest.mark.nightly),
        (DEEPSEEK, 4096, False),
        pytest.param(NEMOTRON, 64, False, marks=pytest.mark.nightly),
        pytest.param(replace(MOE_30B, dtype=torch.float32), 4096, False, marks=pytest.mark.nightly),
    ],
    ids=["Qwen3 30B", "gpt-oss", "DeepSeek-V3", "Nemotron-H", "Qwen3 30B in fp32"],
)
def test_experts(launches: list[Launch], form: ExpertsForm, rows: int, biased: bool) -> None:
    launch_experts(form, rows, biased=biased)
    built = check(launches)
    assert built.keys() == {
        "_route_kernel",
        "_count_kernel",
        "_place_kernel",
        "_inner_kernel",
        "_outer_kernel",
        "_sum_kernel",
    }
    if form.dtype is torch.bfloat16:
        assert all("mma" in built[name].asm["ptx"] for name in ("_inner_kernel", "_outer_kernel"))


@pytest.mark.parametrize(
    ("form", "rows", "kind"),
    [
        (GPT_OSS, 64, BlockFormat.MXFP4),
        pytest.param(MOE_30B, 1, BlockFormat.Q4_K, marks=pytest.mark.nightly),
        pytest.param(DEEPSEEK, 4096, BlockFormat.Q8_0, marks=pytest.mark.nightly),
    ],
    ids=["gpt-oss", "Qwen3 30B", "DeepSeek-V3"],
)
def test_experts_that_stay_packed(launches: list[Launch], form: ExpertsForm, rows: int, kind: BlockFormat) -> None:
    launch_experts(form, rows, biased=form is GPT_OSS, kind=kind)
    built = check(launches)
    for name in ("_packed_inner_kernel", "_packed_outer_kernel"):
        assert "mma" in built[name].asm["ptx"]
        assert "cp.async" in built[name].asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        pytest.param(80, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(86, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(89, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(90, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(100, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(120, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(86, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_experts_fit_the_shared_memory_of_each_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: int, dtype: torch.dtype
) -> None:
    limit, fitting = SHARED_MEMORY[capability] * 1024, set[str]()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        needed = Launch(self, dict(zip(self.arg_names, args, strict=True)), options).shared_memory(capability)
        if needed > limit:
            raise OutOfResources(needed, limit, "shared memory")
        fitting.add(self.__name__)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(paged_attention, "_fitting", {})
    launch_experts(replace(MOE_30B, dtype=dtype), 4096, biased=False)
    assert {"_inner_kernel", "_outer_kernel"} <= fitting
    if dtype is torch.bfloat16:
        launch_experts(MOE_30B, 4096, biased=False, kind=BlockFormat.Q4_0)
        assert {"_packed_inner_kernel", "_packed_outer_kernel"} <= fitting


def kernels_of(capability: int) -> TritonKernels:
    """Returns the set that a GPU of this compute capability gets."""
    found = SimpleNamespace(multi_processor_count=PROCESSORS, major=capability // 10, minor=capability % 10)
    with patch.object(torch.cuda, "get_device_properties", lambda _: found):
        return TritonKernels.of(torch.device("cuda"))


def block_linear(
    kind: BlockFormat, outputs: int = 4096, inputs: int = 4096, capability: int = HOPPER
) -> TritonBlockLinear:
    """Returns a product whose weight has no memory."""
    row = inputs // kind.elements * kind.block_bytes
    blocks = torch.empty(outputs, row, dtype=torch.uint8, device="meta")
    return kernels_of(capability).block_linear(BlockWeight(kind, blocks))


def test_a_gpu_of_amd_is_not_taken_for_one_that_multiplies_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(block_linear(BlockFormat.FP8, capability=94)) is TritonFp8Linear
    monkeypatch.setattr(torch.version, "hip", "6.4")  # an MI300 says that its capability is 9.4
    assert type(block_linear(BlockFormat.FP8, capability=94)) is TritonBlockLinear


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=() if kind in OFTEN else (pytest.mark.nightly,))
        for kind in sorted(PACKED_FORMS)
    ],
)
def test_products_with_packed_weights(launches: list[Launch], kind: BlockFormat) -> None:
    linear = block_linear(kind, capability=86)  # Newer GPUs multiply FP8 by another kernel.
    linear(torch.empty(1, 4096, dtype=torch.bfloat16, device="meta"))
    linear.rows(torch.empty(3, dtype=torch.int32, device="meta"))
    built = check(launches)
    assert built.keys() == {"_block_product_kernel", "_sum_parts_kernel", "_widen_kernel"}
    product = built["_block_product_kernel"].asm["ptx"]
    assert "mma" in product
    assert "cp.async" in product


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        pytest.param(80, BlockFormat.Q6_K, marks=pytest.mark.nightly),
        pytest.param(86, BlockFormat.Q5_K, marks=pytest.mark.nightly),
        pytest.param(89, BlockFormat.Q4_K, marks=pytest.mark.nightly),
        pytest.param(90, BlockFormat.Q5_K, marks=pytest.mark.nightly),
        pytest.param(100, BlockFormat.Q4_1, marks=pytest.mark.nightly),
        pytest.param(120, BlockFormat.Q8_0, marks=pytest.mark.nightly),
    ],
)
def test_packed_products_fit_the_shared_memory_of_each_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: int, kind: BlockFormat
) -> None:
    limit, fitting = SHARED_MEMORY[capability] * 1024, set[str]()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        needed = Launch(self, dict(zip(self.arg_names, args, strict=True)), options).shared_memory(capability)
        if needed > limit:
            raise OutOfResources(needed, limit, "shared memory")
        fitting.add(self.__name__)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(paged_attention, "_fitting", {})
    linear = block_linear(kind)
    for rows in (1, 200):
        linear(torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"))
    assert fitting == {"_block_product_kernel", "_sum_parts_kernel"}


FP8_INSTRUCTIONS = {
    89: r"mma\.sync\.aligned\.m16n8k32\S*\.f32\.e4m3\.e4m3",
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
    120: r"mma\.sync\.aligned\.m16n8k32\S*\.f32\.e4m3\.e4m3",
}
"""The instructions that multiply FP8, by the compute capability."""
MOST_STACK = 192
"""The bytes of numbers that a thread may keep out of its registers."""


def in_fp8(launches: list[Launch], capability: int) -> set[str]:
    """Builds the launches for a GPU, which has to have room for them, and returns those that multiply FP8 there."""
    found = set()
    for launch in launches:
        kernel = launch.build(capability)
        assert kernel.metadata.shared <= SHARED_MEMORY[capability] * 1024
        assert stack_bytes(kernel) <= MOST_STACK
        if re.search(FP8_INSTRUCTIONS[capability], kernel.asm["ptx"]):
            found.add(launch.kernel.__name__)
    return found


def stack_bytes(kernel: Any) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(tool, capture_output=True, text=True, check=True)
    return max(int(size) for size in re.findall(r"STACK:(\d+)", said.stdout + said.stderr))


@pytest.mark.parametrize(
    ("capability", "rows"),
    [
        (HOPPER, 1000),
        *(
            pytest.param(capability, rows, marks=pytest.mark.nightly)
            for capability in FP8_INSTRUCTIONS
            for rows in (1, 64, 1000)
            if (capability, rows) != (HOPPER, 1000)
        ),
    ],
)
def test_products_in_fp8(launches: list[Launch], capability: int, rows: int) -> None:
    linear = block_linear(BlockFormat.FP8, capability=capability)
    linear(torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"))
    assert in_fp8(launches, capability) == {"_fp8_product_kernel"}
    rest = {"_round_kernel"} if rows > 16 else set()
    rest |= {"_sum_parts_kernel"} if rows <= 64 else set()
    assert {launch.kernel.__name__ for launch in launches} == {"_fp8_product_kernel"} | rest


@pytest.mark.parametrize(
    ("capability", "rows"),
    [
        (120, 4096),
        *(pytest.param(capability, 1, marks=pytest.mark.nightly) for capability in FP8_INSTRUCTIONS),
        *(pytest.param(capability, 4096, marks=pytest.mark.nightly) for capability in (89, 90, 100)),
    ],
)
def test_experts_in_fp8(launches: list[Launch], capability: int, rows: int) -> None:
    launch_experts(DEEPSEEK, rows, biased=False, kind=BlockFormat.FP8, capability=capability)
    assert in_fp8(launches, capability) == {"_packed_inner_kernel", "_packed_outer_kernel"}


def test_a_gpu_without_cores_for_fp8_multiplies_weights_in_fp8_with_rows_as_they_are(launches: list[Launch]) -> None:
    linear = block_linear(BlockFormat.FP8, capability=80)
    linear(torch.empty(64, 4096, dtype=torch.bfloat16, device="meta"))
    assert {launch.kernel.__name__ for launch in launches} == {"_block_product_kernel", "_sum_parts_kernel"}


def test_a_launch_that_fits_nowhere_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if "TILE" in self.arg_names:
            tried.append((args[-1], options["num_stages"]))
            raise OutOfResources(2, 1, "shared memory")

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(paged_attention, "_fitting", {})
    with pytest.raises(OutOfResources):
        attend([AttentionRow(1, 200, range(13))], KvLayout(1, 2, 16, 64, torch.bfloat16), 4, None)
    assert tried == list(paged_attention.tiles_to_try(64, 3))
