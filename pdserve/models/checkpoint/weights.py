"""Reads a model's weights by tensor name, from a Hugging Face folder or a GGUF file, and says which stay in blocks."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from pdserve.config import Dtype, ModelConfig, Weights
from pdserve.errors import ModelError
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.config_reading import quantisation_of
from pdserve.models.checkpoint.gguf.file import is_gguf, read_gguf
from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.checkpoint.safetensors.quantisation import Quantisation
from pdserve.models.recipe import own_name
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight, UnreadWeight

if TYPE_CHECKING:
    from pdserve.models.checkpoint.gguf.tensors import GgufTensors

Rows = slice | tuple[int, ...]
"""The rows of a tensor: some that follow each other, or their numbers."""
Columns = slice | tuple[slice, ...]
"""The columns of a tensor: some that follow each other, or several such parts."""
ALL = slice(None)
ROTARY_FREQUENCIES = "rotary_emb.inv_freq"
"""The last part of the names of tables in older exports, which the configuration's settings give, too."""


class TensorFiles(Protocol):
    """Named tensors on disk."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one of ``names()``. Raises ModelError if it cannot be read."""

    def nbytes(self, name: str) -> int:
        """Returns how many bytes of the files one of ``names()`` takes."""

    def check_formats(self) -> None:
        """Raises ModelError, before any is read, if the numbers of a tensor are in a format that cannot be read."""

    def unstack(self, name: str, names: Iterable[str]) -> None:
        """Gives each part of a tensor's first dimension a name of its own, from the first part on."""

    def read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """Returns a part of one of ``names()``. Raises ModelError if it cannot be read."""

    def read_blocks(
        self, name: str, rows: slice, columns: slice, *, turned: bool = False, on_gpu: bool = False
    ) -> BlockWeight | None:
        """Returns a part of one of ``names()`` in blocks, or None if that part does not consist of blocks.

        ``turned`` says that the tensor counts as ``[in, out]``. ``rows`` are those of ``[out, in]`` all the same.
        ``on_gpu`` says that the blocks may be those that only a GPU multiplies.
        """

    def drop(self) -> None:
        """Takes what has been read out of this process's memory. What is used again is read again."""


def _tell_nobody(share: float) -> None:
    pass


DROPPED_AT = 64 * 2**20
"""After so many bytes, what has been read leaves the memory: all of it at once would be the weights a second time."""


@dataclass(slots=True)
class _Reading:
    """How many bytes of the files a checkpoint and those made of it have read."""

    tell: Callable[[float], None]
    expected: int = 0
    """How many bytes will be read; 0 if nobody has counted them."""
    done: int = 0
    held: int = 0
    """Those that may still be in memory."""

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.held += nbytes
        if self.expected:
            self.tell(min(1.0, self.done / self.expected))


class Checkpoint:
    """The tensors of a model folder or GGUF file, each taken exactly once so that nothing is forgotten."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device = CPU,
        progress: Callable[[float], None] = _tell_nobody,
        quantisation: Quantisation | None = None,
    ) -> None:
        """``quantisation`` is how the weights of a folder are quantised (``FamilyConfig``).

        ``progress`` is called with the share of the bytes that have been read, from 0 to 1, if ``unread`` counted.

        Raises ModelError if there are no readable weights at ``path``, or they do not fit what is said of them.
        """
        self.device = device
        self.path = path
        self.dtype = dtype
        self._files = _tensor_files(path, quantisation)
        self._left = {name: name for name in self._files.names() if not name.endswith(ROTARY_FREQUENCIES)}
        """What is left to take, and the names that the files know it by."""
        self._reading = _Reading(progress)

    def check_formats(self) -> None:
        """Raises ModelError, before any is read, if the numbers of a tensor are in a format that cannot be read."""
        self._files.check_formats()

    def unread(self) -> Checkpoint:
        """Returns a checkpoint of the tensors that are left, which gives tensors without memory and reads nothing.

        It counts what this one will read if the same is taken of it.
        """
        self._reading.expected = 0
        unread = copy.copy(self)
        unread.device = torch.device("meta")
        unread._left = dict(self._left)
        return unread

    def has(self, name: str) -> bool:
        """Returns whether a tensor is left."""
        return name in self._left

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is left. Raises ModelError if it is missing."""
        return self._files.shape(self._stored(name))

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Rows = ALL,
        columns: Columns = ALL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Returns a tensor, or a part of it, on the device of this checkpoint. Only that part is read.

        ``shape`` is what the configuration says of the complete tensor. ``columns`` is for tensors of two dimensions.
        ``dtype`` is that of this checkpoint if not said: a few numbers, such as the rates at which a state decays, may
        be stored more precisely than the model computes, and must not be rounded.
        Raises ModelError if the tensor is missing, was taken before, or has another shape.
        """
        return self._loaded(self._claim(name, shape), rows, columns, dtype)

    def take_optional(
        self, name: str, shape: tuple[int, ...], rows: Rows = ALL, columns: slice = ALL
    ) -> torch.Tensor | None:
        """Does what ``take`` does, and returns None for a tensor that is missing or was taken before."""
        return self.take(name, shape, rows, columns) if name in self._left else None

    def take_unread(self, name: str, shape: tuple[int, int], rows: Rows = ALL, columns: Columns = ALL) -> UnreadWeight:
        """Does what ``take`` does for a tensor of two dimensions, which is read later."""
        stored = self._claim(name, shape)
        found = (_count(rows, shape[0]), _columns_count(columns, shape[1]))

        def read() -> torch.Tensor:
            return self._loaded(stored, rows, columns)

        return UnreadWeight(_key(stored, rows, columns), found, self.dtype, read)

    def take_transposed(
        self, name: str, shape: tuple[int, int], rows: Rows = ALL, columns: slice = ALL
    ) -> UnreadWeight:
        """Does what ``take_unread`` does for a weight of ``shape`` that is stored as ``[in, out]``."""
        stored = self._claim(name, shape[::-1])
        found = (_count(rows, shape[0]), _count(columns, shape[1]))

        def read() -> torch.Tensor:
            parts = [self._loaded(stored, columns, span) for span in _spans(rows)]
            turned = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            return _picked(turned.t(), rows).contiguous()

        return UnreadWeight(_key(stored, rows, columns), found, self.dtype, read)

    def take_blocks(
        self,
        name: str,
        shape: tuple[int, int],
        rows: Rows = ALL,
        columns: Columns = ALL,
        *,
        transposed: bool = False,
        on_gpu: bool = False,
    ) -> BlockWeight | None:
        """Returns a tensor, or a part of it, as blocks on the device of this checkpoint.

        ``transposed`` says that it is stored as ``[in, out]``, and ``on_gpu`` that the blocks may be a GPU's own.
        Returns None if it is not there or that part does not consist of blocks; it may then be taken as ``take`` does.
        Raises ModelError if it has another shape.
        """
        stored = self._left.get(name)
        if stored is None:
            return None
        self._check_shape(name, stored, shape[::-1] if transposed else shape)
        self._make_room()
        spans, widths = _spans(rows), _widths(columns)
        found: list[BlockWeight] = []
        for span, width in product(spans, widths):
            part = self._files.read_blocks(stored, span, width, turned=transposed, on_gpu=on_gpu)
            if part is None or (found and part.format is not found[0].format):
                return None
            found.append(replace(part, blocks=part.blocks.to(self.device)))
        del self._left[name]
        self._reading.add(self._files.nbytes(stored) * _part_of(shape, rows, columns) // math.prod(shape))
        blocks = _picked(_joined_by([part.blocks for part in found], len(widths)), rows)
        return replace(found[0], blocks=blocks, key=_key(stored, rows, columns), dtype=self.dtype)

    def leave(self, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> None:
        """Leaves a tensor, of which another rank reads all, unread. It is checked as ``take`` does."""
        self._claim(name, shape[::-1] if transposed else shape)

    def unstack(self, name: str, pattern: str, count: int) -> None:
        """Gives each part of the first dimension of a tensor a name: ``pattern`` with its number in place of ``{}``.

        A checkpoint that has tensors of these names stays as it is. Raises ModelError if the tensor is missing, or has
        not ``count`` parts.
        """
        names = [pattern.replace("{}", str(index)) for index in range(count)]
        if name not in self._left and names[0] in self._left:
            return
        stored = self._stored(name)
        shape = self._files.shape(stored)
        if len(shape) < 2 or shape[0] != count:
            raise ModelError(
                f"tensor {name!r} of {self.path} has the shape {list(shape)}; with this configuration its first number "
                f"needs to be {count}"
            )
        del self._left[name]
        self._files.unstack(stored, parts := [f"{stored}[{index}]" for index in range(count)])
        self._left |= dict(zip(names, parts, strict=True))

    def _loaded(self, stored: str, rows: Rows, columns: Columns, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns a part of a tensor, which is only counted if it is to have no memory."""
        dtype = dtype or self.dtype
        whole = self._files.shape(stored)
        nbytes = self._files.nbytes(stored) * _part_of(whole, rows, columns) // max(1, math.prod(whole))
        if self.device.type == "meta":
            self._reading.expected += nbytes
            return _part_without_memory(whole, rows, columns, dtype)
        self._make_room()
        spans, widths = _spans(rows), _widths(columns)
        parts = [self._files.read(stored, span, each, dtype).to(self.device) for span in spans for each in widths]
        self._reading.add(nbytes)
        return _picked(_joined_by(parts, len(widths)), rows)

    def _make_room(self) -> None:
        if self._reading.held >= DROPPED_AT:
            self._files.drop()
            self._reading.held = 0

    def _stored(self, name: str) -> str:
        """Returns the name in the files of a tensor that is left. Raises ModelError if it is missing."""
        stored = self._left.get(name)
        if stored is None:
            raise ModelError(f"{self.path} has no tensor {name!r}")
        return stored

    def _claim(self, name: str, shape: tuple[int, ...]) -> str:
        """Returns the name in the files of a tensor, which is not left afterwards.

        Raises ModelError if the tensor is missing or has another shape.
        """
        stored = self._stored(name)
        self._check_shape(name, stored, shape)
        del self._left[name]
        return stored

    def _check_shape(self, name: str, stored: str, shape: tuple[int, ...]) -> None:
        found = self._files.shape(stored)
        # A part of a larger tensor would be read without an error, and the model would answer nonsense.
        if found != shape:
            raise ModelError(
                f"tensor {name!r} of {self.path} has the shape {list(found)}; with this configuration it needs to be "
                f"{list(shape)}"
            )

    def unwrap(self, renamed: Sequence[tuple[str, str]], outside: tuple[str, ...], ends: tuple[str, ...] = ()) -> None:
        """Gives tensors of a model within another one the names that they have in a model of their own.

        Each pair of ``renamed`` applies in turn: what a name begins with, and what it begins with afterwards. Tensors
        whose names then begin with one of ``outside``, or end with one of ``ends``, are left unread. Raises ModelError
        if two tensors get the same name.
        """
        found: dict[str, str] = {}
        for given, stored in self._left.items():
            name = own_name(given, renamed)
            if name.startswith(outside) or name.endswith(ends):
                continue
            if name in found:
                raise ModelError(f"{self.path} has tensor {name!r} twice, as {found[name]!r} and as {stored!r}")
            found[name] = stored
        self._left = found

    def check_all_taken(self) -> None:
        """Raises ModelError if the checkpoint holds tensors that the model did not ask for."""
        if self._left:
            raise ModelError(unknown_tensors(self.path, self._left))
        if self.device.type != "meta":
            self._files.drop()


def unknown_tensors(path: Path, names: Iterable[str]) -> str:
    """Says that a checkpoint has tensors that would stay unread."""
    found = sorted(names)
    some = ", ".join(found[:2]) + (", …" if len(found) > 2 else "")
    count = "one tensor" if len(found) == 1 else f"{len(found)} tensors"
    return f"{path} has {count} that this architecture lacks and nothing would read: {some}"


def joined_columns(parts: Iterable[slice]) -> Columns:
    """Returns columns that consist of these parts, in this order; one part if each begins where the one before ends."""
    found: list[slice] = []
    for part in parts:
        if found and found[-1].stop == part.start:
            found[-1] = slice(found[-1].start, part.stop)
        else:
            found.append(part)
    return found[0] if len(found) == 1 else tuple(found)


def _part_without_memory(shape: tuple[int, ...], rows: Rows, columns: Columns, dtype: torch.dtype) -> torch.Tensor:
    found = (_count(rows, shape[0]), *shape[1:]) if shape else shape
    if columns != ALL:
        found = (found[0], _columns_count(columns, shape[1]))
    return torch.empty(found, dtype=dtype, device="meta")


def _spans(rows: Rows) -> list[slice]:
    """Returns spans of rows that follow each other, in ascending order, which together are ``rows``."""
    if isinstance(rows, slice):
        return [rows]
    ordered = sorted(set(rows))
    ends = [i for i in range(1, len(ordered)) if ordered[i] != ordered[i - 1] + 1]
    return [slice(ordered[i], ordered[j - 1] + 1) for i, j in pairwise([0, *ends, len(ordered)])]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined_by(parts: list[torch.Tensor], widths: int) -> torch.Tensor:
    """Returns the tensor that consists of these parts, of which ``widths`` at a time have the same rows."""
    return _joined([_beside(parts[i : i + widths]) for i in range(0, len(parts), widths)])


def _beside(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _picked(spans: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns ``rows`` of what was read of their spans, in the order of ``rows``."""
    if isinstance(rows, slice):
        return spans
    place = {row: i for i, row in enumerate(sorted(set(rows)))}
    order = [place[row] for row in rows]
    return spans if order == list(range(len(spans))) else spans[torch.tensor(order, device=spans.device)]


def _part_of(shape: tuple[int, ...], rows: Rows, columns: Columns) -> int:
    """Returns how many numbers of a tensor of ``shape`` are in some rows and columns."""
    if not shape:
        return 1
    return _count(rows, shape[0]) * (math.prod(shape[1:]) if columns == ALL else _columns_count(columns, shape[1]))


def _widths(columns: Columns) -> tuple[slice, ...]:
    return (columns,) if isinstance(columns, slice) else columns


def _columns_count(columns: Columns, of: int) -> int:
    return sum(_count(width, of) for width in _widths(columns))


def _count(rows: Rows, of: int) -> int:
    return len(range(*rows.indices(of))) if isinstance(rows, slice) else len(rows)


def _key(name: str, rows: Rows, columns: Columns) -> str:
    widths = "+".join(f"{width.start}:{width.stop}" for width in _widths(columns))
    if isinstance(rows, slice):
        return f"{name}[{rows.start}:{rows.stop},{widths}]"
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()
    return f"{name}[{digest},{widths}]"


def _tensor_files(path: Path, quantisation: Quantisation | None) -> TensorFiles:
    if not is_gguf(path):
        return SafetensorsFiles(path, quantisation)
    return _gguf_tensors(path)


def _gguf_tensors(path: Path) -> GgufTensors:
    # The import is here because it loads the package gguf, which takes longer than a small model.
    from pdserve.models.checkpoint.gguf.tensors import GgufTensors

    return GgufTensors(path)


def stays_in_blocks(path: Path, model: ModelConfig, *, kernels: bool, on_gpu: bool = False) -> bool:
    """Returns whether the model at ``path`` is computed from blocks, and not from dequantised weights.

    ``kernels`` says whether there are kernels for that, and ``on_gpu`` whether they are a GPU's. Models in bf16 use
    them; in fp32, all of a token's numbers are to be those of the dequantised weights. Raises ModelError if the file
    cannot be read.
    """
    if not kernels or model.weights is not Weights.AUTO or model.dtype is not Dtype.BF16:
        return False
    if not is_gguf(path):
        return bool(block_formats(path, on_gpu=on_gpu))
    return any(tensor.kind in BLOCK_FORMATS and len(tensor.shape) > 1 for tensor in read_gguf(path).tensors.values())


def block_formats(path: Path, *, on_gpu: bool = False) -> Mapping[str, BlockFormat]:
    """Returns the format of each tensor that is read as blocks, by transformers' names. Raises ModelError."""
    if is_gguf(path):
        return _gguf_tensors(path).block_formats()
    quantisation = quantisation_of(path)
    return {} if quantisation is None else SafetensorsFiles(path, quantisation).block_formats(on_gpu=on_gpu)
