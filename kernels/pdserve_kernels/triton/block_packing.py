"""Puts weights in blocks into the order in which the programs of a GPU read them, number for number.

A block has its scale beside its codes, so that neighbouring programs would read with gaps. Here, codes and scales lie
apart, and those of all outputs for the same inputs lie behind each other:

    codes    [K, outputs, 32]   bytes. With up to 6 bits, a byte has the lower 4 bits of input j of one piece of 32
                                in its lower half, and those of input j of the next piece in its upper half
    upper    [K, outputs, 32]   the bits above the lower 4, of 4 or 8 pieces that follow each other
    scales   [K, outputs]       and in the same way the offsets
    wide     [K, outputs]       what the scales, or the offsets, of 256 inputs are multiplied by

Inputs are filled up to whole bytes with codes of 0 and scales of 0. Experts are a dimension in front of all these.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pdserve_kernels.contract import BlockFormat, BlockWeight

PIECE = 32
"""The inputs whose codes lie side by side."""
AT_ONCE = 2**24
"""The most numbers that are taken out of their blocks at once: each one is a byte meanwhile."""


class Numbers(enum.IntEnum):
    """What codes mean before they are scaled."""

    LINEAR = 0
    """The code, less the zero of the form."""
    E2M1 = 1
    IQ4 = 2
    """A place in the table of IQ4_NL and IQ4_XS."""
    E4M3 = 3


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How the numbers of a format are packed."""

    bits: int
    """4, 5, 6 or 8."""
    scale: torch.dtype
    """The numbers of the scales. Bytes for 16 inputs are in e4m3, and those without a wide scale exponents of 2."""
    numbers: Numbers = Numbers.LINEAR
    zero: int = 0
    group: int = 32
    """The inputs that have a scale."""
    wide: int = 0
    """The inputs that have a wide scale; 0 if there is none."""
    wide_scale: torch.dtype = torch.float16
    offset: bool = False

    @property
    def tile(self) -> int:
        """The inputs of a row of 32 bytes of codes, or of upper bits: a loop takes a multiple of it in each turn."""
        return {4: 64, 5: 256, 6: 128, 8: 32}[self.bits]

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Returns the bytes of a weight."""
        bits = -(-inputs // self.tile) * self.tile * self.bits
        scaling = inputs // self.group * self.scale.itemsize
        if self.wide:
            scaling += -(-inputs // self.wide) * self.wide_scale.itemsize
        return outputs * (bits // 8 + scaling * (2 if self.offset else 1))


_HALF, _FLOAT, _ROW = torch.float16, torch.float32, 2**30
PACKED_FORMS: Mapping[BlockFormat, PackedForm] = {
    BlockFormat.Q4_0: PackedForm(4, _HALF, zero=8),
    BlockFormat.Q4_1: PackedForm(4, _HALF, offset=True),
    BlockFormat.Q5_0: PackedForm(5, _HALF, zero=16),
    BlockFormat.Q5_1: PackedForm(5, _HALF, offset=True),
    BlockFormat.Q8_0: PackedForm(8, _HALF, zero=128),
    BlockFormat.Q4_K: PackedForm(4, torch.uint8, wide=256, offset=True),
    BlockFormat.Q5_K: PackedForm(5, torch.uint8, wide=256, offset=True),
    BlockFormat.Q6_K: PackedForm(6, torch.int8, zero=32, group=16, wide=256),
    BlockFormat.IQ4_NL: PackedForm(4, _HALF, Numbers.IQ4),
    BlockFormat.IQ4_XS: PackedForm(4, torch.int8, Numbers.IQ4, wide=256),
    BlockFormat.MXFP4: PackedForm(4, torch.uint8, Numbers.E2M1),
    BlockFormat.FP8: PackedForm(8, _FLOAT, Numbers.E4M3, group=128),
    BlockFormat.FP8_SHORT: PackedForm(8, _FLOAT, Numbers.E4M3),
    BlockFormat.NVFP4: PackedForm(4, torch.uint8, Numbers.E2M1, group=16, wide=_ROW, wide_scale=_FLOAT),
    BlockFormat.Q8_OFFSET: PackedForm(8, _FLOAT, offset=True),
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[outputs, inputs]``, or one for each expert, as this module's page of tensors has it."""

    form: PackedForm
    outputs: int
    inputs: int
    codes: torch.Tensor
    upper: torch.Tensor | None
    scales: torch.Tensor
    offsets: torch.Tensor | None
    wide: torch.Tensor | None
    wide_offsets: torch.Tensor | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors in the order in which kernels take them."""
        return (self.codes, self.upper, self.scales, self.offsets, self.wide, self.wide_offsets)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors if each is not None)

    def expert(self, number: int) -> PackedWeight:
        """Returns the weight of one expert, in the same memory."""
        own = [None if each is None else each[number] for each in self.tensors]
        codes, upper, scales, offsets, wide, wide_offsets = own
        assert codes is not None
        assert scales is not None
        return PackedWeight(
            self.form, self.outputs, self.inputs, codes, upper, scales, offsets, wide, wide_offsets
        )  # fmt: skip


def empty_packed(
    kind: BlockFormat, outputs: int, inputs: int, device: torch.device, experts: int | None = None
) -> PackedWeight:
    """Returns the memory of a weight, or of one for each of the ``experts``."""
    form = PACKED_FORMS[kind]
    turns = -(-inputs // form.tile)
    pieces = turns * form.tile // PIECE
    ahead = () if experts is None else (experts,)

    def made(count: int, dtype: torch.dtype, *more: int) -> torch.Tensor:
        return torch.empty((*ahead, count, outputs, *more), dtype=dtype, device=device)

    scales = inputs // form.group
    wides = -(-inputs // form.wide) if form.wide else 0
    return PackedWeight(
        form,
        outputs,
        inputs,
        made(pieces if form.bits == 8 else pieces // 2, torch.uint8, PIECE),
        made(turns, torch.uint8, PIECE) if form.bits in (5, 6) else None,
        made(scales, form.scale),
        made(scales, form.scale) if form.offset else None,
        made(wides, form.wide_scale) if wides else None,
        made(wides, form.wide_scale) if wides and form.offset else None,
    )


def packed(weight: BlockWeight) -> PackedWeight:
    """Returns a weight in this order, on the device of its blocks."""
    outputs = weight.blocks.shape[0]
    found = empty_packed(weight.format, outputs, weight.inputs, weight.blocks.device)
    fill(found, [weight])
    return found


def fill(to: PackedWeight, weights: list[BlockWeight]) -> None:
    """Writes weights of the same inputs and format, whose outputs are ``to.outputs`` together."""
    at, each = 0, max(1, AT_ONCE // to.inputs)
    for weight in weights:
        for first in range(0, len(weight.blocks), each):
            _fill_rows(to, weight.format, weight.blocks[first : first + each], at + first)
        at += len(weight.blocks)


def _fill_rows(to: PackedWeight, kind: BlockFormat, rows: torch.Tensor, first: int) -> None:
    """Writes some rows of blocks, of which ``first`` is the number of the first one."""
    form, count = to.form, len(rows)
    blocks = rows.contiguous().view(count, -1, kind.block_bytes)
    own = slice(first, first + count)
    codes = _codes(kind, blocks).view(count, to.inputs)
    spare = -to.inputs % form.tile
    if spare:
        codes = torch.nn.functional.pad(codes, (0, spare))
    if form.bits == 8:
        to.codes[:, own] = codes.view(count, -1, PIECE).transpose(0, 1)
    else:
        pairs = (codes & 15).view(count, -1, 2, PIECE)
        to.codes[:, own] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).transpose(0, 1)
    if to.upper is not None:
        parts = (codes >> 4).view(count, -1, form.tile // PIECE, PIECE)
        upper = parts[:, :, 0].clone()
        for place in range(1, parts.shape[2]):
            upper |= parts[:, :, place] << (form.bits - 4) * place
        to.upper[:, own] = upper.transpose(0, 1)
    for stored, found in zip(to.tensors[2:], _scaling(kind, blocks), strict=True):
        if stored is not None:
            assert found is not None
            stored[:, own] = found.reshape(count, -1).t()


def _codes(kind: BlockFormat, blocks: torch.Tensor) -> torch.Tensor:
    """Returns the codes of blocks ``[rows, blocks, bytes]``, as bytes of 0 and more, in the order of the inputs."""
    match kind:
        case BlockFormat.Q4_0 | BlockFormat.IQ4_NL:
            return _halves(blocks[..., 2:])
        case BlockFormat.Q4_1:
            return _halves(blocks[..., 4:])
        case BlockFormat.Q5_0:
            return _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6])
        case BlockFormat.Q5_1:
            return _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8])
        case BlockFormat.Q8_0:
            return blocks[..., 2:] ^ 128
        case BlockFormat.MXFP4:
            return _halves(blocks[..., 1:])
        case BlockFormat.NVFP4:
            return _halves(blocks[..., 6:])
        case BlockFormat.FP8 | BlockFormat.FP8_SHORT:
            return blocks[..., 4:].contiguous()
        case BlockFormat.Q8_OFFSET:
            return blocks[..., 8:].contiguous()
        case BlockFormat.IQ4_XS:
            return _halves(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(2)
        case BlockFormat.Q4_K:
            return _halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(2)
        case BlockFormat.Q5_K:
            lower = _halves(blocks[..., 48:].unflatten(-1, (4, 32)))
            return lower.flatten(2) | (_shifted(blocks[..., None, 16:48], 1) & 1).flatten(2) << 4
        case BlockFormat.Q6_K:
            lower = _halves(blocks[..., :128].unflatten(-1, (2, 64)))
            upper = _shifted(blocks[..., 128:192].unflatten(-1, (2, 1, 32)), 2) & 3
            return lower.flatten(2) | upper.flatten(2) << 4


Scaling = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Scales, offsets, wide scales and wide offsets."""


def _scaling(kind: BlockFormat, blocks: torch.Tensor) -> Scaling:
    """Returns what the codes of blocks are scaled with, ``[rows, blocks, …]``."""
    match kind:
        case BlockFormat.Q4_0 | BlockFormat.Q5_0 | BlockFormat.Q8_0 | BlockFormat.IQ4_NL:
            return _half(blocks, 0), None, None, None
        case BlockFormat.Q4_1 | BlockFormat.Q5_1:
            return _half(blocks, 0), _half(blocks, 2), None, None
        case BlockFormat.MXFP4:
            return blocks[..., 0], None, None, None
        case BlockFormat.NVFP4:
            return blocks[..., 4:6], None, _number(blocks[:, :1], 0, _FLOAT), None
        case BlockFormat.FP8 | BlockFormat.FP8_SHORT:
            return _number(blocks, 0, _FLOAT), None, None, None
        case BlockFormat.Q8_OFFSET:
            return _number(blocks, 0, _FLOAT), _number(blocks, 4, _FLOAT), None, None
        case BlockFormat.Q6_K:
            return blocks[..., 192:208].contiguous().view(torch.int8), None, _half(blocks, 208), None
        case BlockFormat.IQ4_XS:
            lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(2)
            upper = (_shifted(blocks[..., 2:4].unsqueeze(-1), 2, -1) & 3).flatten(2)
            return (lower | upper << 4).view(torch.int8) - 32, None, _half(blocks, 0), None
        case BlockFormat.Q4_K | BlockFormat.Q5_K:
            first, second, both = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(2)
            scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), -1)
            offsets = torch.cat((second & 63, both >> 4 | second >> 2 & 48), -1)
            return scales, offsets, _half(blocks, 0), -_half(blocks, 2)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return _number(blocks, at, _HALF)


def _number(blocks: torch.Tensor, at: int, dtype: torch.dtype) -> torch.Tensor:
    return blocks[..., at : at + dtype.itemsize].contiguous().view(dtype)


def _halves(found: torch.Tensor) -> torch.Tensor:
    """Returns the lower halves of bytes and then the upper ones, in the last dimension."""
    return torch.cat((found & 15, found >> 4), -1)


def _bits(found: torch.Tensor) -> torch.Tensor:
    """Returns each bit of bytes, from the lowest on, as the number 16."""
    return (_shifted(found.unsqueeze(-1), 1, -1) & 1).flatten(-2) << 4


def _shifted(found: torch.Tensor, by: int, dim: int = -2) -> torch.Tensor:
    """Returns bytes without and with their lower bits, in the dimension ``dim``, which is 1."""
    shifts = torch.arange(0, 8, by, dtype=torch.uint8, device=found.device)
    return found >> (shifts if dim == -1 else shifts.unsqueeze(-1))
