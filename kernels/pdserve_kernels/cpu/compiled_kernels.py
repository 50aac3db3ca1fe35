"""The kernel set of a CPU with a C++ compiler.

On a CPU with AVX2 or AVX-512 a weight is packed for its products (``CompiledLinear``, and ``CompiledBlockLinear`` for a
weight in the blocks of a GGUF file). All other products are those of the set of plain torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from pdserve.compiled_library import built_library
from pdserve_kernels import reference
from pdserve_kernels.contract import (
    AttentionRow,
    BlockLinear,
    BlockWeight,
    Experts,
    ExpertsForm,
    ExpertWeights,
    HeadLinear,
    Linear,
    SparseForm,
    UnreadWeight,
)
from pdserve_kernels.cpu import compiled_states
from pdserve_kernels.cpu.compiled_attention import CompiledAttention, CompiledChoice
from pdserve_kernels.cpu.compiled_experts import ACTIVATIONS, CompiledExperts, computes
from pdserve_kernels.cpu.library import CPU_KERNELS, LentCores, Library, forget_engine
from pdserve_kernels.cpu.sparse_attention import GatheredAttention
from pdserve_kernels.cpu.torch_kernels import LoopedExperts, PackedLinear
from pdserve_kernels.cpu.weight_memory import FilledMemory, WeightMemory
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.kv_layout import KvLayout


class CompiledLinear:
    """Computes ``x @ weight.T + bias`` in bf16 or fp32. A row's result does not depend on the other rows.

    On one core, a SmolLM2-135M step was measured to take 7.0 ms at batch 1, 12.6 ms at batch 16, and 117 ms for 256
    prompt tokens; with oneDNN and packed weights it takes 9.7 ms, 17.8 ms and 122 ms.
    """

    def __init__(self, library: Library, memory: FilledMemory, weight: UnreadWeight, bias: torch.Tensor | None) -> None:
        """Packs ``weight``, for which ``fits`` returns True, unless ``memory`` has it."""
        self._run = library.linear
        self._outer, self._inner = weight.shape
        self._odd = self._inner % 2
        """An odd number of inputs has one more, which is 0: the kernel multiplies pairs."""
        inner = self._inner + self._odd

        of_output = inner * weight.dtype.itemsize

        def pack(panels: torch.Tensor) -> None:
            first = 0
            for part in _of_whole_panels(weight, library.linear_columns):
                read = F.pad(part.read(), (0, 1)) if self._odd else part.read().contiguous()
                library.pack_linear(
                    _bf16(read), read.data_ptr(), panels.data_ptr() + first * of_output, inner, part.shape[0]
                )
                first += part.shape[0]

        columns = -(-self._outer // library.linear_columns) * library.linear_columns
        self._panels = memory.filled(weight.key, columns * of_output, pack)
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        self._dtype = weight.dtype
        self._panels_at = self._panels.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not self._dtype or x.dim() != 2 or x.shape[1] != self._inner:
            own = f"{self._inner} {self._dtype} inputs"
            raise ValueError(f"a linear layer of {own} was given {x.dtype} {tuple(x.shape)}")
        x = F.pad(x, (0, 1)) if self._odd else x.contiguous()
        rows, inner = x.shape
        out = torch.empty((rows, self._outer), dtype=x.dtype)
        self._run(_bf16(x), x.data_ptr(), self._panels_at, self._bias_at, out.data_ptr(), rows, inner, self._outer)
        return out


@dataclass(frozen=True, slots=True)
class CompiledHeadLinear:
    """Satisfies ``contract.HeadLinear``. A token's result does not depend on the other tokens."""

    heads: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([linear(x[:, head]) for head, linear in enumerate(self.heads)], 1)

    def of_one(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        return torch.stack([linear(x) for linear in self.heads[heads]], 1)


def _of_whole_panels(weight: UnreadWeight, columns: int) -> tuple[UnreadWeight, ...]:
    """Returns what a weight consists of, if each but the last fills its panels; otherwise the weight as a whole.

    What is packed by itself is not copied first, to lie behind the one before it.
    """
    whole = all(part.shape[0] % columns == 0 for part in weight.parts[:-1])
    return weight.parts if weight.parts and whole else (weight,)


def fits(library: Library, weight: torch.Tensor | UnreadWeight) -> bool:
    """Returns whether the compiled kernel computes with this weight on this CPU."""
    return library.linear_columns > 0 and weight.dtype in (torch.bfloat16, torch.float32)


class CompiledBlockLinear:
    """Satisfies ``contract.BlockLinear``. A row's result does not depend on the other rows.

    Each 32 inputs of a row are rounded to bytes with a scale of their own, so that bytes are multiplied by bytes. This
    adds about as much error to a product as the format Q8_0 has itself.
    """

    def __init__(self, library: Library, memory: FilledMemory, weight: BlockWeight, bias: torch.Tensor | None) -> None:
        self._library, self._format = library, int(weight.format)
        self._inner, self._outer = weight.inputs, weight.blocks.shape[0]

        def pack(panels: torch.Tensor) -> None:
            blocks = weight.blocks.contiguous()
            library.pack_blocks(self._format, blocks.data_ptr(), panels.data_ptr(), self._inner, self._outer)

        nbytes = library.block_panels_bytes(self._format, self._inner, self._outer)
        self._panels = memory.filled(weight.key, nbytes, pack)
        self._panels_at = self._panels.data_ptr()
        self._bias = None if bias is None else bias.to(torch.bfloat16).contiguous()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16 or x.dim() != 2 or x.shape[1] != self._inner:
            raise ValueError(f"a linear layer of {self._inner} bf16 inputs was given {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        out = torch.empty((x.shape[0], self._outer), dtype=torch.bfloat16)
        self._library.block_linear(
            self._format,
            x.data_ptr(),
            self._panels_at,
            self._bias_at,
            out.data_ptr(),
            x.shape[0],
            self._inner,
            self._outer,
        )
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``contract.BlockLinear``. Raises IndexError for a number that the weight has not."""
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._outer:
            raise IndexError(f"a weight of {self._outer} rows was asked for rows {int(ids.min())} to {int(ids.max())}")
        out = torch.empty((ids.numel(), self._inner), dtype=torch.bfloat16)
        self._library.block_rows(
            self._format, self._panels_at, ids.data_ptr(), ids.numel(), self._inner, self._outer, out.data_ptr()
        )
        return out


class CompiledKernels:
    """Satisfies ``contract.Kernels`` and ``contract.UnreadKernels``, and ``contract.BlockKernels`` for bf16.

    ``memory`` is where the weights lie that are packed from now on.
    """

    rotary = staticmethod(reference.rotary)
    on_gpu = False

    def __init__(self, cache_dir: Path) -> None:
        """Compiles the library below ``cache_dir`` if it is not there, in a few seconds. Raises BuildError."""
        path = built_library(CPU_KERNELS, cache_dir)
        self._library = Library(path)
        self.name = f"compiled {self._library.instructions}"
        self.packing = f"{path.stem} {_packers_digest()}"
        """The name of the form in which weights are packed: another one for other kernels or another CPU."""
        self.packs_linear = self._library.linear_columns > 0
        """Whether weights that are not in blocks are packed on this CPU."""
        self.memory: FilledMemory = WeightMemory(self._library)
        self.causal_conv = partial(compiled_states.causal_conv, self._library)
        self.gated_delta_rule = partial(compiled_states.gated_delta_rule, self._library)
        self.mamba2_scan = partial(compiled_states.mamba2_scan, self._library)
        self.mamba_scan = partial(compiled_states.mamba_scan, self._library)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        outer, inner = weight.shape
        return self.unread_linear(UnreadWeight("", (outer, inner), weight.dtype, lambda: weight), bias)

    def unread_linear(self, weight: UnreadWeight, bias: torch.Tensor | None = None) -> Linear:
        if fits(self._library, weight):
            return CompiledLinear(self._library, self.memory, weight, bias)
        return PackedLinear(weight.read(), bias)

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        return CompiledHeadLinear(tuple(self.linear(each) for each in weight))

    def unread_table(self, weight: UnreadWeight) -> torch.Tensor:
        def copy(to: torch.Tensor) -> None:
            rows, first = to.view(weight.dtype).view(weight.shape), 0
            # One part at a time is there twice.
            for part in weight.parts or (weight,):
                rows[first : first + part.shape[0]] = part.read()
                first += part.shape[0]

        outer, inner = weight.shape
        key = f"{weight.key} as it is" if weight.key else ""
        memory = self.memory.filled(key, outer * inner * weight.dtype.itemsize, copy)
        return memory.view(weight.dtype).view(weight.shape)

    def block_linear(self, weight: BlockWeight, bias: torch.Tensor | None = None) -> BlockLinear:
        return CompiledBlockLinear(self._library, self.memory, weight, bias)

    def experts(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> Experts:
        if computes(self._library, form):
            return CompiledExperts(self._library, self.memory, form, weights)

        def linear(weight: UnreadWeight | BlockWeight, bias: torch.Tensor | None) -> Linear:
            if isinstance(weight, BlockWeight):
                return self.block_linear(weight, bias)
            return self.unread_linear(weight, bias)

        return LoopedExperts(form, weights, linear)

    def lent_cores(self, words: memoryview, engine: int, own: Sequence[int]) -> LentCores:
        """Lends this engine's cores ``own`` from now on, and computes on those that others lend. See ``LentCores``."""
        return LentCores(self._library, words, engine, own)

    def forget_engine(self, words: memoryview, engine: int) -> None:
        """Gives back what an engine had that has died. The caller keeps others from taking that number meanwhile."""
        forget_engine(self._library, words, engine)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, width = x.contiguous(), _width(x, weight)
        out = torch.empty_like(x)
        self._library.rms_norm(
            _bf16(x), x.data_ptr(), None, weight.data_ptr(), eps, x.numel() // width, width, out.data_ptr(), None
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, width = x.contiguous(), residual.contiguous(), _width(x, weight)
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            raise ValueError(f"{tuple(x.shape)} {x.dtype} cannot be added to {tuple(residual.shape)} {residual.dtype}")
        out, total = torch.empty_like(x), torch.empty_like(x)
        self._library.rms_norm(
            _bf16(x),
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // width,
            width,
            out.data_ptr(),
            total.data_ptr(),
        )
        return out, total

    def activated(self, inner: torch.Tensor, activation: Activation, *, gated: bool) -> torch.Tensor:
        """Computes ``reference.activated``. A number's result does not depend on where it stands, as torch's does."""
        inner = inner.contiguous()
        width = inner.shape[-1] // 2 if gated else inner.shape[-1]
        out = inner.new_empty((*inner.shape[:-1], width))
        number, rows = ACTIVATIONS[activation], out.numel() // max(1, width)
        self._library.activate(_bf16(inner), number, gated, inner.data_ptr(), rows, width, out.data_ptr())
        return out

    def plan_attention(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        cap: float | None = None,
    ) -> CompiledAttention:
        return CompiledAttention(self._library, layout, cache, rows, heads, scale, cap)

    def plan_sparse(
        self,
        layout: KvLayout,
        cache: torch.Tensor,
        rows: Sequence[AttentionRow],
        heads: int,
        scale: float,
        form: SparseForm,
    ) -> GatheredAttention:
        choose = CompiledChoice(self._library)
        return GatheredAttention(layout, cache, rows, heads, scale, form, self.plan_attention, choose)


def _packers_digest() -> str:
    """Returns a digest of the Python code that packs. The library's name stands for the C++."""
    digest = hashlib.sha256()
    for name in ("compiled_kernels.py", "compiled_experts.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _bf16(x: torch.Tensor) -> int:
    if x.dtype is torch.bfloat16:
        return 1
    if x.dtype is torch.float32:
        return 0
    raise TypeError(f"the compiled kernels compute in bf16 and fp32, not in {x.dtype}")


def _width(x: torch.Tensor, weight: torch.Tensor) -> int:
    width = x.shape[-1]
    if weight.shape != (width,) or weight.dtype is not x.dtype or not weight.is_contiguous():
        raise ValueError(f"a norm of {tuple(weight.shape)} {weight.dtype} was given {tuple(x.shape)} {x.dtype}")
    return width
