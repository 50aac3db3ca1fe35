"""Reads quantised weights of safetensors files: as numbers, or repacked into blocks from which products are computed.

``FORMS`` says which form becomes which blocks. Numbers of 4 bits keep their codes, and on a GPU others do, too: their
scales and offsets become those of blocks. A CPU rounds others to Q8_0, and dequantises them where that would add more
error than ``MOST_ADDED``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.errors import ModelError
from pdserve.models.checkpoint.safetensors.quantisation import BLOCK_INPUTS, FORMS, Form
from pdserve.models.checkpoint.safetensors.quantised_tensors import NVFP4_GROUP, Packing, QuantisedTensor
from pdserve_kernels.contract import BlockFormat, BlockWeight

Load = Callable[[str], torch.Tensor]
"""Returns a tensor of the files by its name, without reading it."""

AT_ONCE = 2**22
"""The most numbers that are dequantised to fp32 at once."""
MOST_ADDED = 0.01
"""The most that rounding to Q8_0 may add to a weight, as the ratio of root mean squares. FP8 itself has 0.026."""
LARGEST_SHIFT = 1 / 16
"""The most by which a number in a block may differ, in steps of its group. The format itself has half a step."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of three bits; a fourth bit is the sign."""
_SIGNED = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_PAIRS = torch.stack((_SIGNED.repeat(16), _SIGNED.repeat_interleave(16)), 1)
"""The two numbers of each byte."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ each of eight outputs lies."""
_EXPONENT_OF_ONE = 127


def read_plain(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
    """Returns rows and columns of the weight ``[out, in]``. Raises ModelError if its parts contradict each other."""
    parts = [_numbers(tensor, load, span, columns).to(dtype) for span in _row_spans(tensor, rows, columns)]
    if not parts:
        return torch.empty((0, len(range(*columns.indices(tensor.shape[1])))), dtype=dtype)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_blocks(
    tensor: QuantisedTensor, load: Load, rows: slice, columns: slice, *, on_gpu: bool = False
) -> BlockWeight | None:
    """Returns rows and columns of the weight ``[out, in]`` in blocks, ``on_gpu`` in those that only a GPU multiplies.

    Returns None if they are not whole blocks, or have no blocks that are near enough. Raises ModelError as
    ``read_plain`` does.
    """
    name = FORMS[tensor.form].on(gpu=on_gpu).blocks
    first, end, _ = columns.indices(tensor.shape[1])
    count = len(range(*rows.indices(tensor.shape[0])))
    if not name or first % BLOCK_INPUTS or end % BLOCK_INPUTS or end <= first or not count:
        return None
    kind = BlockFormat[name]
    if kind is BlockFormat.FP8 and not _long_blocks(tensor, first, end):
        kind = BlockFormat.FP8_SHORT
    blocks = torch.empty((count, (end - first) // kind.elements * kind.block_bytes), dtype=torch.uint8)
    at = 0
    for span in _row_spans(tensor, rows, columns):
        found = _blocks(tensor, load, span, slice(first, end), kind)
        if found is None:
            return None
        blocks[at : at + len(found)] = found
        at += len(found)
    return BlockWeight(kind, blocks)


def _row_spans(tensor: QuantisedTensor, rows: slice, columns: slice) -> list[slice]:
    first, end, _ = rows.indices(tensor.shape[0])
    each = max(1, AT_ONCE // max(1, len(range(*columns.indices(tensor.shape[1])))))
    # A packing in words along the outputs is read in whole words.
    each = max(32, each // 32 * 32)
    return [slice(at, min(end, at + each)) for at in range(first, end, each)]


def _numbers(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice) -> torch.Tensor:
    """Returns fp32 ``[rows, columns]``."""
    codes = _codes(tensor, load, rows, columns).float()
    groups, each = _groups(tensor, load, columns), _whole_groups(tensor, columns)

    def spread(values: torch.Tensor) -> torch.Tensor:
        """Returns the value of each number, or one for each group of them, by its ``[rows, groups]``."""
        return values[:, groups[::each]].unsqueeze(-1) if each else values[:, groups]

    shape = codes.shape
    numbers = codes.reshape(len(codes), -1, each) if each else codes
    if (zeros := _zeros(tensor, load, rows)) is not None:
        numbers = numbers - (spread(zeros) if isinstance(zeros, torch.Tensor) else zeros)
    numbers = numbers * spread(_scales(tensor, load, rows))
    if tensor.offsets:
        numbers += spread(_grid_rows(tensor, load(tensor.offsets), rows))
    return numbers.view(shape)


def _whole_groups(tensor: QuantisedTensor, columns: slice) -> int:
    """Returns how many columns of each group there are, if all groups have as many and follow each other, or 0."""
    first, end, _ = columns.indices(tensor.shape[1])
    size = tensor.grid[1]
    if tensor.order or end <= first:
        return 0
    if first // size == (end - 1) // size:
        return end - first
    return size if first % size == 0 and end % size == 0 else 0


def _long_blocks(tensor: QuantisedTensor, first: int, end: int) -> bool:
    """Returns whether these columns are whole blocks of FP8 with one scale each."""
    long, each = BlockFormat.FP8.elements, tensor.grid[1]
    return first % long == 0 and end % long == 0 and (each % long == 0 or each >= tensor.shape[1])


def _blocks(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice, kind: BlockFormat) -> torch.Tensor | None:
    """Returns the bytes of blocks ``[rows, bytes]``, or None if they would not be near enough."""
    if tensor.form is Form.MXFP4:
        return _mxfp4_blocks(tensor, load, rows, columns)
    if kind is BlockFormat.NVFP4:
        return _nvfp4_blocks(tensor, load, rows, columns)
    if kind in (BlockFormat.FP8, BlockFormat.FP8_SHORT):
        return _fp8_blocks(tensor, load, rows, columns, kind)
    if kind is BlockFormat.Q8_OFFSET:
        return _offset_blocks(tensor, load, rows, columns)
    if tensor.form in (Form.INT4, Form.INT4_OFFSET, Form.INT8):
        return _affine_blocks(tensor, load, rows, columns)
    return _rounded_blocks(_numbers(tensor, load, rows, columns))


def _affine_blocks(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice) -> torch.Tensor | None:
    """Returns blocks with the same codes. Each has the scale and the offset of the group that it is in."""
    groups = _groups(tensor, load, columns).view(-1, BLOCK_INPUTS)
    if bool((groups != groups[:, :1]).any()):
        return None
    scales = _scales(tensor, load, rows)[:, groups[:, 0]]
    codes = _codes(tensor, load, rows, columns).reshape(len(scales), -1, BLOCK_INPUTS)
    zeros = _zeros(tensor, load, rows)
    if isinstance(zeros, torch.Tensor):
        zeros = zeros[:, groups[:, 0]]
    # What rounding scales and offsets to 16 bits shifts the number by that is farthest from zero.
    stored, most = [scales.to(torch.float16)], 2 ** (tensor.bits - 1)
    shift = (stored[0].float() - scales).abs()
    if tensor.form is Form.INT4_OFFSET:
        offsets = _grid_rows(tensor, load(tensor.offsets), rows)[:, groups[:, 0]] if zeros is None else -zeros * scales
        stored.append(offsets.to(torch.float16))
        shift = shift * (2 * most - 1) + (stored[1].float() - offsets).abs()
    elif zeros is not None and bool((torch.as_tensor(zeros) != most).any()):
        return None
    else:
        shift = shift * most
    if not bool((shift <= LARGEST_SHIFT * scales.abs()).all()):
        return None
    heads = [half.unsqueeze(-1).view(torch.uint8) for half in stored]
    if tensor.bits == 4:
        return torch.cat((*heads, _in_halves(codes)), -1).flatten(1)
    # In two's complement, the sign is what differs from a number whose zero is in the middle.
    signed = codes.view(torch.uint8) if zeros is None else codes ^ 128
    return torch.cat((*heads, signed), -1).flatten(1)


def _rounded_blocks(numbers: torch.Tensor) -> torch.Tensor | None:
    """Returns blocks of Q8_0, or None if rounding adds more than ``MOST_ADDED``."""
    spans = numbers.view(len(numbers), -1, BLOCK_INPUTS)
    scales = (torch.linalg.vector_norm(spans, torch.inf, -1, keepdim=True) / 127).to(torch.float16)
    wide = scales.float()
    codes = (spans * torch.where(wide > 0, 1 / wide, 0)).round_().clamp_(-127, 127)
    added = torch.linalg.vector_norm((codes * wide).sub_(spans))
    if not bool(added <= MOST_ADDED * torch.linalg.vector_norm(numbers)):
        return None
    return torch.cat((scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)), -1).flatten(1)


def _mxfp4_blocks(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice) -> torch.Tensor:
    """Returns blocks as GGUF files have them: the scale, and the halves of 16 bytes belong to numbers 16 apart."""
    codes = _nibbles(_bytes_of(tensor, load, rows), columns).view(rows.stop - rows.start, -1, BLOCK_INPUTS)
    first, end, _ = columns.indices(tensor.shape[1])
    scales = load(tensor.scales).view(torch.uint8)[rows, first // BLOCK_INPUTS : end // BLOCK_INPUTS]
    return torch.cat((scales.unsqueeze(-1), _in_halves(codes)), -1).flatten(1)


def _nvfp4_blocks(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice) -> torch.Tensor | None:
    """Returns blocks of the factor, two scales and 32 numbers, or None if a scale is not a number."""
    codes = _nibbles(_bytes_of(tensor, load, rows), columns).view(rows.stop - rows.start, -1, BLOCK_INPUTS)
    first, end, _ = columns.indices(tensor.shape[1])
    scales = load(tensor.scales)[rows, first // NVFP4_GROUP : end // NVFP4_GROUP].contiguous().view(torch.uint8)
    if _has_nan(scales):
        return None
    factor = load(tensor.factor).float().reshape(1)
    stored = (1 / factor if tensor.divides else factor).view(torch.uint8).expand(*codes.shape[:2], 4)
    return torch.cat((stored, scales.view(*codes.shape[:2], 2), _in_halves(codes)), -1).flatten(1)


def _fp8_blocks(
    tensor: QuantisedTensor, load: Load, rows: slice, columns: slice, kind: BlockFormat
) -> torch.Tensor | None:
    """Returns blocks of a scale and its numbers, or None if a number is none or a block has several scales."""
    codes = _codes(tensor, load, rows, columns).contiguous().view(torch.uint8)
    groups = _groups(tensor, load, columns).view(-1, kind.elements)
    if _has_nan(codes) or bool((groups != groups[:, :1]).any()):
        return None
    scales = _scales(tensor, load, rows)[:, groups[:, 0]].unsqueeze(-1)
    return torch.cat((scales.view(torch.uint8), codes.view(len(codes), -1, kind.elements)), -1).flatten(1)


def _has_nan(codes: torch.Tensor) -> bool:
    """Returns whether a byte of e4m3 stands for no number."""
    return bool((codes & 127 == 127).any())


def _offset_blocks(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice) -> torch.Tensor | None:
    """Returns blocks of 8 bits with a scale and an offset, or None if a block has several of them."""
    groups = _groups(tensor, load, columns).view(-1, BLOCK_INPUTS)
    if bool((groups != groups[:, :1]).any()):
        return None
    scales, codes = _scales(tensor, load, rows)[:, groups[:, 0]], _codes(tensor, load, rows, columns)
    zeros = _zeros(tensor, load, rows)
    if isinstance(zeros, torch.Tensor):
        zeros = zeros[:, groups[:, 0]]
    signed = codes.dtype is torch.int8
    if tensor.offsets:
        offsets = _grid_rows(tensor, load(tensor.offsets), rows)[:, groups[:, 0]]
    else:
        # What is signed is counted from its least number on.
        offsets = -scales * ((0 if zeros is None else zeros) + (128 if signed else 0))
    unsigned = codes.contiguous().view(torch.uint8) ^ 128 if signed else codes
    heads = [each.contiguous().unsqueeze(-1).view(torch.uint8) for each in (scales, offsets)]
    return torch.cat((*heads, unsigned.reshape(*scales.shape, BLOCK_INPUTS)), -1).flatten(1)


def _in_halves(codes: torch.Tensor) -> torch.Tensor:
    """Returns bytes ``[..., 16]`` of codes ``[..., 32]``: the first 16 in the lower halves."""
    return codes[..., :16] | codes[..., 16:] << 4


def _codes(tensor: QuantisedTensor, load: Load, rows: slice, columns: slice) -> torch.Tensor:
    """Returns what is stored, ``[rows, columns]``, before zeros and scales."""
    stored = load(tensor.codes)
    first, end, _ = columns.indices(tensor.shape[1])
    match tensor.packing:
        case Packing.PLAIN:
            return stored[rows, columns]
        case Packing.WORDS | Packing.GPTQ:
            per = 32 // tensor.bits
            words = slice(first // per, -(-end // per))
            mine = stored[words, rows].t() if tensor.packing is Packing.GPTQ else stored[rows, words]
            found = _unpacked(mine, tensor.bits)
            return found[:, first - words.start * per : end - words.start * per]
        case Packing.AWQ:
            return _awq_outputs(stored[columns], rows).t()
        case Packing.HALVES:
            stored = _bytes_of(tensor, load, rows)[:, first // 2 : -(-end // 2)]
            pairs = _PAIRS.index_select(0, stored.reshape(-1).int()).view(len(stored), -1)
            return pairs[:, first % 2 : first % 2 + end - first]


def _zeros(tensor: QuantisedTensor, load: Load, rows: slice) -> torch.Tensor | float | None:
    """Returns the zeros of codes, fp32 ``[rows, groups]``, or one of all, or None if codes are signed or have none."""
    if not tensor.zeros:
        return 2.0 ** (tensor.bits - 1) if tensor.packing is Packing.WORDS and not tensor.offsets else None
    stored, per = load(tensor.zeros), 32 // tensor.bits
    match tensor.packing:
        case Packing.GPTQ:
            words = slice(rows.start // per, -(-rows.stop // per))
            # Exporters subtract from whole words: a zero of 0 has borrowed from the next one.
            ones = tensor.first_zero * sum(1 << tensor.bits * place for place in range(per))
            found = _unpacked(stored[:, words] + ones, tensor.bits)
            return found[:, rows.start - words.start * per : rows.stop - words.start * per].t().float()
        case Packing.AWQ:
            return _awq_outputs(stored, rows).t().float()
        case Packing.WORDS if stored.dtype is torch.int32:
            words = slice(rows.start // per, -(-rows.stop // per))
            found = _unpacked(stored[words].t(), tensor.bits)
            return found[:, rows.start - words.start * per : rows.stop - words.start * per].t().float()
        case Packing.WORDS:
            return stored[rows].float() + 2.0 ** (tensor.bits - 1)
    return _grid_rows(tensor, stored, rows)


def _scales(tensor: QuantisedTensor, load: Load, rows: slice) -> torch.Tensor:
    """Returns fp32 ``[rows, groups]``."""
    scales = load(tensor.scales)
    if tensor.form is Form.MXFP4:
        exponents = scales[rows].view(torch.uint8).to(torch.int32) - _EXPONENT_OF_ONE
        return torch.ldexp(torch.ones(exponents.shape), exponents)
    found = _grid_rows(tensor, scales, rows)
    if not tensor.factor:
        return found
    factor = load(tensor.factor).float()
    return found / factor if tensor.divides else found * factor


def _grid_rows(tensor: QuantisedTensor, stored: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns the scales or offsets of rows, fp32 ``[rows, groups]``."""
    if tensor.packing in (Packing.GPTQ, Packing.AWQ):
        return stored[:, rows].t().float()
    if tensor.grid[0] == 1:
        return stored[rows].float().view(rows.stop - rows.start, -1)
    whole = stored.float().view(-(-tensor.shape[0] // tensor.grid[0]), -1)
    return whole[torch.arange(rows.start, rows.stop) // tensor.grid[0]]


def _groups(tensor: QuantisedTensor, load: Load, columns: slice) -> torch.Tensor:
    """Returns the group of each column. Raises ModelError for a group that is not there."""
    usual = torch.arange(*columns.indices(tensor.shape[1])) // tensor.grid[1]
    if not tensor.order:
        return usual
    order, count = load(tensor.order), -(-tensor.shape[1] // tensor.grid[1])
    if bool((order == -1).all()):
        return usual  # Nothing was ordered.
    if not bool(((order >= 0) & (order < count)).all()):
        raise ModelError(f"tensor {tensor.order!r} names groups beyond the {count} that there are")
    return order[columns].long()


def _bytes_of(tensor: QuantisedTensor, load: Load, rows: slice) -> torch.Tensor:
    """Returns the bytes of rows of ``HALVES``, which gpt-oss has in blocks."""
    return load(tensor.codes)[rows].view(torch.uint8).flatten(1)


def _nibbles(stored: torch.Tensor, columns: slice) -> torch.Tensor:
    """Returns columns of numbers of 4 bits, of which each byte of ``[rows, bytes]`` has two."""
    first, end, _ = columns.indices(2 * stored.shape[1])
    found = stored[:, first // 2 : -(-end // 2)]
    return torch.stack((found & 15, found >> 4), -1).flatten(1)[:, first % 2 : first % 2 + end - first]


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the numbers of 32-bit words ``[rows, words]``, lowest bits first, as bytes."""
    # One row or column of several counts as contiguous, although its words do not lie side by side.
    found = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(1)


def _awq_outputs(stored: torch.Tensor, rows: slice) -> torch.Tensor:
    """Returns ``[..., rows]`` of words along the outputs."""
    words = slice(rows.start // 8, -(-rows.stop // 8))
    found = _unpacked(stored[:, words], 4).view(len(stored), -1, 8)[..., list(_AWQ_PLACES)].flatten(1)
    return found[:, rows.start - 8 * words.start : rows.stop - 8 * words.start]
