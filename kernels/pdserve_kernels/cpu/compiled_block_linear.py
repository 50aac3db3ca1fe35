"""Multiplies from weights in blocks, as a GGUF file has them, with one compiled call."""

from __future__ import annotations

import torch

from pdserve_kernels.contract import BlockWeight
from pdserve_kernels.cpu.library import Library
from pdserve_kernels.cpu.weight_memory import FilledMemory


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
