"""Reads weights in MXFP4 (Open Compute Project, 2023) as gpt-oss stores them: blocks of 32 numbers, and their scales.

A tensor ``NAME`` is two in the file. ``NAME_blocks`` is uint8 ``[..., out, blocks, 16]``: a byte has two numbers of 4
bits, the first one in its lower half. ``NAME_scales`` is uint8 ``[..., out, blocks]``, the exponents of powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.safetensors_header import StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
_BYTES = BLOCK // 2
_EXPONENT_OF_ONE = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of three bits; a fourth bit is the sign."""


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """A weight that is two tensors in a file. Its last two dimensions are ``[in, out]``."""

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        *others, outputs, blocks, _ = self.blocks.shape
        return (*others, blocks * BLOCK, outputs)

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    def part(self, index: int) -> Mxfp4Tensor:
        """Returns part ``index`` of the first dimension."""
        return Mxfp4Tensor(self.blocks.part(index), self.scales.part(index))


def mxfp4_pairs(tensors: dict[str, StoredTensor]) -> dict[str, Mxfp4Tensor]:
    """Returns the weights that are pairs of blocks and scales, by their names. Raises ModelError if two do not fit."""
    found: dict[str, Mxfp4Tensor] = {}
    for name in _names(tensors):
        blocks, scales = tensors[name + BLOCKS], tensors[name + SCALES]
        fits = blocks.form == scales.form == "U8" and blocks.shape == (*scales.shape, _BYTES) and len(scales.shape) > 1
        if not fits:
            raise ModelError(
                f"tensor {name + BLOCKS!r} of shape {list(blocks.shape)} in {blocks.form} has scales of shape "
                f"{list(scales.shape)} in {scales.form}; MXFP4 needs [..., {_BYTES}] and [...] in U8"
            )
        found[name] = Mxfp4Tensor(blocks, scales)
    return found


def _names(tensors: Iterable[str]) -> list[str]:
    known = set(tensors)
    stems = (name.removesuffix(BLOCKS) for name in known if name.endswith(BLOCKS))
    return sorted(stem for stem in stems if stem + SCALES in known)


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns fp32 ``[out, in]`` of blocks ``[out, blocks, 16]`` and scales ``[out, blocks]``."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), -1).long()
    numbers = values[pairs].flatten(-2)
    exponents = scales.to(torch.int32) - _EXPONENT_OF_ONE
    return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2)
