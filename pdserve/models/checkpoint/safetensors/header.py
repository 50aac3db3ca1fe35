"""Reads the header of a safetensors file: the number format and shape of each tensor, and where its bytes lie.

The format is described at https://huggingface.co/docs/safetensors. Nothing here loads torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.model_files import indexed_tensors, weight_files

LARGEST_HEADER = 100 * 2**20
_LENGTH = struct.Struct("<Q")
_NAMES = {
    4: "F4 F4_E2M1",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
BITS = {name: bits for bits, names in _NAMES.items() for name in names.split()}
"""How many bits a number of each format has."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, from byte ``start`` of the file on."""

    form: str
    """The number format, as safetensors files name it."""
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def part(self, index: int) -> StoredTensor:
        """Returns part ``index`` of the first dimension, which lies in one piece."""
        each = self.nbytes // self.shape[0]
        return StoredTensor(self.form, self.shape[1:], self.start + index * each, each)


class _Entry(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by their names. Raises ModelError if it is not a complete safetensors file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size, LARGEST_HEADER):
                raise ValueError(f"its header of {length} bytes is too long")
            entries = msgspec.json.decode(file.read(length), type=dict[str, _Entry])
        entries.pop("__metadata__", None)
        first = _LENGTH.size + length
        return {name: _placed(name, entry, first, size) for name, entry in entries.items()}
    except (OSError, struct.error, ValueError) as exc:
        raise ModelError(f"weights in {path.parent} cannot be read: {path.name}: {exc}") from exc


def tensor_names(folder: Path) -> Iterable[str]:
    """Returns the names of a folder's tensors: those of its index, or those that its files have. Raises ModelError."""
    places = indexed_tensors(folder)
    return places if places is not None else [name for path in weight_files(folder) for name in read_header(path)]


def _placed(name: str, entry: _Entry, first: int, size: int) -> StoredTensor:
    start, end = entry.data_offsets
    if not 0 <= start <= end <= size - first:
        raise ValueError(f"tensor {name!r} lies outside of the file, which may be cut short")
    bits = BITS.get(entry.dtype)
    if any(each < 0 for each in entry.shape) or (
        bits is not None and -(-math.prod(entry.shape) * bits // 8) != end - start
    ):
        raise ValueError(f"tensor {name!r} of shape {list(entry.shape)} in {entry.dtype} has {end - start} bytes")
    return StoredTensor(entry.dtype, entry.shape, first + start, end - start)
