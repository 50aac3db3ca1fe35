"""The kernel set of a GPU, in Triton. Products with weights that are not packed are the vendor's library's.

The attention of one layer takes one launch that stores, one for the single tokens, and one for the longer rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from pdserve_kernels import reference
from pdserve_kernels.contract import (
    Attention,
    AttentionRow,
    BlockFormat,
    BlockWeight,
    DecodeTables,
    ExpertsForm,
    ExpertWeights,
    HeadLinear,
    HeadNorms,
    Linear,
    SparseForm,
    check_window,
    widest_window,
)
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.kv_layout import KvLayout
from pdserve_kernels.triton.attention_plan import SpanTables, plan_step
from pdserve_kernels.triton.block_ops import TritonBlockLinear
from pdserve_kernels.triton.cache_ops import kv_write, store_projected
from pdserve_kernels.triton.expert_ops import TritonExperts
from pdserve_kernels.triton.fp8_products import TritonFp8Linear, multiplies_fp8
from pdserve_kernels.triton.paged_attention import (
    decode_attention,
    decode_splits,
    lines_per_program,
    prefill_attention,
    programs_of_heads,
)
from pdserve_kernels.triton.sparse_attention import TritonSparseAttention, plan_tokens
from pdserve_kernels.triton.state_ops import causal_conv, gated_delta_rule, mamba2_scan, mamba_scan
from pdserve_kernels.triton.token_ops import add_rms_norm, gelu_and_mul, rms_norm, rotary, silu_and_mul


class TritonAttention:
    """Attention of single-token rows and then of longer rows. Either kind may be missing.

    Nothing is kept between calls, and tensors are read anew in each, so a captured call follows their contents.
    """

    def __init__(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        singles: DecodeTables,
        spans: SpanTables | None,
        scale: float,
        cap: float | None,
        splits: int,
        widest: int | None = None,
    ) -> None:
        """Plans a step. ``slots`` has every new token. The context of a single token is cut into ``splits`` parts.

        ``widest`` is ``widest_window`` of the rows.
        """
        self._widest = widest
        self._layout, self._cache, self._slots = layout, cache, slots
        self._singles, self._spans = singles, spans
        self._scale, self._cap, self._splits = scale, cap, splits

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key_value: torch.Tensor | None,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        if key_value is not None:
            kv_write(self._cache, self._layout, layer, self._slots, key_value[0], key_value[-1])
        return self._attend(layer, query, window, chunked, sinks)

    def from_projection(
        self,
        layer: int,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norms: HeadNorms | None = None,
        window: int | None = None,
        *,
        chunked: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``contract.Attention``."""
        query = store_projected(qkv, cos, sin, norms, self._cache, self._layout, layer, self._slots)
        return self._attend(layer, query, window, chunked, sinks)

    def _attend(
        self, layer: int, query: torch.Tensor, window: int | None, chunked: bool, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        check_window(window, self._widest)
        out = torch.empty(*query.shape[:2], self._layout.value_dim, dtype=query.dtype, device=query.device)
        count = len(self._singles.context_lens)
        decode_attention(
            query[:count],
            self._cache,
            self._layout,
            layer,
            self._singles,
            self._scale,
            self._cap,
            window,
            chunked,
            sinks,
            self._splits,
            out[:count],
        )
        if self._spans is not None:
            prefill_attention(
                query[count:],
                self._cache,
                self._layout,
                layer,
                self._spans,
                self._scale,
                self._cap,
                window,
                chunked,
                sinks,
                out[count:],
            )
        return out


class TritonKernels:
    """Satisfies ``contract.GraphKernels`` and ``contract.BlockKernels``."""

    on_gpu = True
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rotary = staticmethod(rotary)
    causal_conv = staticmethod(causal_conv)
    gated_delta_rule = staticmethod(gated_delta_rule)
    mamba2_scan = staticmethod(mamba2_scan)
    mamba_scan = staticmethod(mamba_scan)

    @staticmethod
    def activated(inner: torch.Tensor, activation: Activation, *, gated: bool) -> torch.Tensor:
        known = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_and_mul}.get(activation)
        if known is None or not gated:
            return reference.activated(inner, activation, gated=gated)
        return known(inner.flatten(0, -2)).view(*inner.shape[:-1], -1)

    def __init__(self, processors: int, *, fp8: bool = False) -> None:
        """Makes the set for a GPU with ``processors`` streaming multiprocessors, which a launch should fill.

        ``fp8`` says that its tensor cores multiply FP8.
        """
        self._processors, self._fp8, self._rounds = processors, fp8, False

    @classmethod
    def of(cls, device: torch.device) -> TritonKernels:
        """Returns the set for a GPU."""
        return cls(torch.cuda.get_device_properties(device).multi_processor_count, fp8=multiplies_fp8(device))

    @property
    def name(self) -> str:
        """See ``contract.Kernels``. Where inputs are rounded to FP8 for a weight, it says so."""
        return "triton fp8" if self._rounds else "triton"

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return functools.partial(F.linear, weight=weight, bias=bias)

    def block_linear(self, weight: BlockWeight, bias: torch.Tensor | None = None) -> TritonBlockLinear:
        if self._fp8 and weight.format is BlockFormat.FP8:
            self._rounds = True
            return TritonFp8Linear(weight, bias, self._processors)
        return TritonBlockLinear(weight, bias, self._processors)

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        return reference.HeadLinear(weight)

    def experts(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> TritonExperts:
        found = TritonExperts(form, weights, fp8=self._fp8)
        self._rounds |= found.rounds
        return found

    def plan_attention(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None = None,
    ) -> Attention:
        programs, group = programs_of_heads(layout, heads)
        tile_size = lines_per_program(group, layout) // group
        plan = plan_step(rows, layout.block_size, tile_size, cache.device)
        longest = max((row.context_len for row in rows[: plan.singles]), default=1)
        splits = decode_splits(plan.singles, programs, longest, self._processors)
        widest = widest_window(rows, layout.block_size)
        return TritonAttention(layout, cache, plan.slots, plan.decode, plan.spans, scale, cap, splits, widest)

    def plan_decode(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        heads: int,
        scale: float,
        max_context: int,
        cap: float | None = None,
    ) -> Attention:
        splits = decode_splits(len(slots), programs_of_heads(layout, heads)[0], max_context, self._processors)
        return TritonAttention(layout, cache, slots, tables, None, scale, cap, splits)

    def plan_sparse(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        form: SparseForm,
    ) -> TritonSparseAttention:
        slots, tables, longest = plan_tokens(rows, layout.block_size, cache.device)
        return self.plan_sparse_decode(layout, cache, slots, tables, heads, scale, longest, form)

    def plan_sparse_decode(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        slots: torch.Tensor,
        tables: DecodeTables,
        heads: int,
        scale: float,
        max_context: int,
        form: SparseForm,
    ) -> TritonSparseAttention:
        return TritonSparseAttention(layout, cache, slots, tables, heads, scale, max_context, form, self._processors)
