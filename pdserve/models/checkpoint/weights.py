"""Reads a model's weights by tensor name, from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from pdserve.errors import ModelError
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.gguf_file import is_gguf
from pdserve.models.checkpoint.model_files import INTEGER_FORMATS, PLAIN_FORMATS, weight_files
from pdserve_kernels.contract import BlockWeight, UnreadWeight

Rows = slice | tuple[int, ...]
"""The rows of a tensor: some that follow each other, or their numbers."""
ALL = slice(None)
ROTARY_FREQUENCIES = "rotary_emb.inv_freq"
"""The last part of the names of tables in older exports, which the configuration's settings give, too."""


class TensorFiles(Protocol):
    """Named tensors on disk."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one of ``names()``. Raises ModelError if it cannot be read."""

    def check_formats(self) -> None:
        """Raises ModelError, before any is read, if the numbers of a tensor are in a format that cannot be read."""

    def read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """Returns a part of one of ``names()``. Raises ModelError if it cannot be read."""

    def read_blocks(self, name: str, rows: slice, columns: slice) -> BlockWeight | None:
        """Returns a part of one of ``names()`` in blocks, or None if that part does not consist of blocks."""


class SafetensorsFiles:
    """The tensors of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the folder has no readable safetensors files."""
        try:
            self._files: dict[Path, Any] = {path: safe_open(path, "pt") for path in weight_files(folder)}
        except (OSError, SafetensorError) as exc:
            raise ModelError(f"weights in {folder} cannot be read: {exc}") from exc
        self._where = {name: path for path, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118  # not a dict

    def names(self) -> Iterable[str]:
        return self._where

    def shape(self, name: str) -> tuple[int, ...]:
        with self._reading(name) as opened:
            return tuple(opened.get_slice(name).get_shape())

    def check_formats(self) -> None:
        """Refuses numbers of which nobody has said how they were quantised. Masks and counters are no weights."""
        for name in self._where:
            with self._reading(name) as opened:
                form: str = opened.get_slice(name).get_dtype()
            if form in PLAIN_FORMATS or (form in INTEGER_FORMATS and not name.endswith("weight")):
                continue
            stem = name.removesuffix("weight")
            scales = (other for other in self._where if other.startswith(stem) and "scale" in other[len(stem) :])
            scale = next(scales, "")
            raise ModelError(
                f"the weights in {self._where[name].parent} are quantised, and nothing says how to read them: "
                f"tensor {name!r} is in {form}{f', with the scale {scale!r}' if scale else ''}. "
                f"Weights in safetensors files have to be in {', '.join(sorted(PLAIN_FORMATS))}"
            )

    def read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        with self._reading(name) as opened:
            stored = opened.get_slice(name)
            if not stored.get_shape():
                number: torch.Tensor = opened.get_tensor(name)
                return number.to(dtype)
            tensor: torch.Tensor = stored[rows] if columns == ALL else stored[rows, columns]
        return tensor.to(dtype)

    def read_blocks(self, name: str, rows: slice, columns: slice) -> BlockWeight | None:
        return None

    @contextmanager
    def _reading(self, name: str) -> Iterator[Any]:
        path = self._where[name]
        try:
            yield self._files[path]
        except SafetensorError as exc:
            raise ModelError(f"tensor {name!r} of {path} cannot be read: {exc}") from exc


def _tell_nobody(share: float) -> None:
    pass


class Checkpoint:
    """The tensors of a model folder or GGUF file, each taken exactly once so that nothing is forgotten."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device = CPU,
        progress: Callable[[float], None] = _tell_nobody,
    ) -> None:
        """``progress`` is called with the share of the tensors that have been read, from 0 to 1.

        Raises ModelError if there are no readable weights at ``path``.
        """
        self.device = device
        self.path = path
        self.dtype = dtype
        self._files = _tensor_files(path)
        self._left = {name: name for name in self._files.names() if not name.endswith(ROTARY_FREQUENCIES)}
        """What is left to take, and the names that the files know it by."""
        self._progress = progress
        self._tensors = len(self._left)
        self._read = 0

    def check_formats(self) -> None:
        """Raises ModelError, before any is read, if the numbers of a tensor are in a format that cannot be read."""
        self._files.check_formats()

    def unread(self) -> Checkpoint:
        """Returns a checkpoint of the tensors that are left, which gives tensors without memory and reads nothing."""
        unread = copy.copy(self)
        unread.device = torch.device("meta")
        unread._left = dict(self._left)
        return unread

    def take(self, name: str, shape: tuple[int, ...], rows: Rows = ALL, columns: slice = ALL) -> torch.Tensor:
        """Returns a tensor, or a part of it, in the dtype and on the device of this checkpoint. Only that part is read.

        ``shape`` is what the configuration says of the complete tensor. ``columns`` is for tensors of two dimensions.
        Raises ModelError if the tensor is missing, was taken before, or has another shape.
        """
        tensor = self.take_optional(name, shape, rows, columns)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {name!r}")
        return tensor

    def take_optional(
        self, name: str, shape: tuple[int, ...], rows: Rows = ALL, columns: slice = ALL
    ) -> torch.Tensor | None:
        """Does what ``take`` does, and returns None for a tensor that is missing or was taken before."""
        stored = self._left.get(name)
        if stored is None:
            return None
        self._check_shape(name, stored, shape)
        del self._left[name]
        return self._loaded(stored, rows, columns)

    def take_unread(self, name: str, shape: tuple[int, int], rows: Rows = ALL, columns: slice = ALL) -> UnreadWeight:
        """Does what ``take`` does for a tensor of two dimensions, which is read later."""
        stored = self._left.get(name)
        if stored is None:
            raise ModelError(f"{self.path} has no tensor {name!r}")
        self._check_shape(name, stored, shape)
        del self._left[name]
        found = (_count(rows, shape[0]), _count(columns, shape[1]))

        def read() -> torch.Tensor:
            return self._loaded(stored, rows, columns)

        return UnreadWeight(_key(stored, rows, columns), found, self.dtype, read)

    def take_transposed(
        self, name: str, shape: tuple[int, int], rows: Rows = ALL, columns: slice = ALL
    ) -> UnreadWeight:
        """Does what ``take_unread`` does for a weight of ``shape`` that is stored as ``[in, out]``."""
        stored = self.take_unread(name, shape[::-1])
        found = (_count(rows, shape[0]), _count(columns, shape[1]))

        def read() -> torch.Tensor:
            turned = stored.read().t()
            return _picked(turned[_span(rows)], rows)[:, columns].contiguous()

        return UnreadWeight(_key(stored.key, rows, columns), found, self.dtype, read)

    def take_blocks(
        self, name: str, shape: tuple[int, ...], rows: Rows = ALL, columns: slice = ALL
    ) -> BlockWeight | None:
        """Returns a tensor, or a part of it, as blocks.

        Returns None if it is not there or that part does not consist of blocks; it may then be taken as ``take`` does.
        Raises ModelError if it has another shape.
        """
        stored = self._left.get(name)
        if stored is None:
            return None
        self._check_shape(name, stored, shape)
        weight = self._files.read_blocks(stored, _span(rows), columns)
        if weight is None:
            return None
        del self._left[name]
        return replace(weight, blocks=_picked(weight.blocks, rows), key=_key(stored, rows, columns))

    def _loaded(self, stored: str, rows: Rows, columns: slice) -> torch.Tensor:
        if self.device.type == "meta":
            return _part_without_memory(self._files.shape(stored), rows, columns, self.dtype)
        tensor = _picked(self._files.read(stored, _span(rows), columns, self.dtype), rows).to(self.device)
        self._read += 1
        self._progress(min(1.0, self._read / self._tensors))
        return tensor

    def _check_shape(self, name: str, stored: str, shape: tuple[int, ...]) -> None:
        found = self._files.shape(stored)
        # A part of a larger tensor would be read without an error, and the model would answer nonsense.
        if found != shape:
            raise ModelError(
                f"tensor {name!r} of {self.path} has the shape {list(found)}; with this configuration it needs to be "
                f"{list(shape)}"
            )

    def unwrap(self, prefix: str, outside: tuple[str, ...], ends: tuple[str, ...] = ()) -> None:
        """Takes ``prefix`` off the names of a model within another one.

        Tensors whose names begin with one of ``outside``, or end with one of ``ends``, are left unread.
        """
        found = self._left.items()
        kept = {name: stored for name, stored in found if not (name.startswith(outside) or name.endswith(ends))}
        self._left = {name.removeprefix(prefix): stored for name, stored in kept.items()}

    def check_all_taken(self) -> None:
        """Raises ModelError if the checkpoint holds tensors that the model did not ask for."""
        if self._left:
            raise ModelError(unknown_tensors(self.path, self._left))


def unknown_tensors(path: Path, names: Iterable[str]) -> str:
    """Says that a checkpoint has tensors that would stay unread."""
    found = sorted(names)
    some = ", ".join(found[:2]) + (", …" if len(found) > 2 else "")
    count = "one tensor" if len(found) == 1 else f"{len(found)} tensors"
    return f"{path} has {count} that this architecture lacks and nothing would read: {some}"


def _part_without_memory(shape: tuple[int, ...], rows: Rows, columns: slice, dtype: torch.dtype) -> torch.Tensor:
    found = (_count(rows, shape[0]), *shape[1:]) if shape else shape
    whole = torch.empty(found, dtype=dtype, device="meta")
    return whole if columns == ALL else whole[:, columns]


def _span(rows: Rows) -> slice:
    """Returns rows that follow each other, among which ``rows`` are."""
    return rows if isinstance(rows, slice) else slice(min(rows), max(rows) + 1)


def _picked(span: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns ``rows`` of what was read of their span."""
    return span if isinstance(rows, slice) else span[torch.tensor(rows) - min(rows)]


def _count(rows: Rows, of: int) -> int:
    return len(range(*rows.indices(of))) if isinstance(rows, slice) else len(rows)


def _key(name: str, rows: Rows, columns: slice) -> str:
    if isinstance(rows, slice):
        return f"{name}[{rows.start}:{rows.stop},{columns.start}:{columns.stop}]"
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()
    return f"{name}[{digest},{columns.start}:{columns.stop}]"


def parameters(path: Path) -> int:
    """Returns how many numbers the tensors of a folder or GGUF file hold. Raises ModelError if they cannot be read."""
    files = _tensor_files(path)
    return sum(math.prod(files.shape(name)) for name in files.names())


def _tensor_files(path: Path) -> TensorFiles:
    if not is_gguf(path):
        return SafetensorsFiles(path)
    from pdserve.models.checkpoint.gguf_tensors import GgufTensors

    return GgufTensors(path)
