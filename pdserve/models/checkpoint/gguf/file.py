"""Reads the headers of GGUF files: the model's metadata, and where each tensor's bytes lie.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The ``gguf``
package has a reader, too, but that one takes seconds for a vocabulary of 262,144 entries.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pdserve.errors import ModelError

Value = int | float | bool | str | list["Value"]

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = frozenset({2, 3})
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The format character of ``struct`` for each type number of a scalar."""
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The names of files that hold a part of a model each."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of a tensor.

    ``shape`` has the outermost dimension first, and ``kind`` is ggml's number for the number format.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    part: int = 0
    """Which of the files of the model has it, from 0 on."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a model's GGUF file, or of all of them."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]
    parts: tuple[Path, ...]
    """The files, of which the first has the metadata."""

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    def key(self, name: str) -> str:
        """Returns the key of a setting of the file's architecture."""
        return f"{self.architecture}.{name}"

    def own(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Returns a setting of the file's architecture, and raises, as ``get`` does."""
        return self.get(self.key(name), kind, default)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns a value of the metadata.

        Raises ModelError if it has another type, or is missing and has no default.
        """
        value = self.metadata.get(key, default)
        if isinstance(value, int) and kind is float:
            value = float(value)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {str(value)[:80]!r}"
            raise ModelError(f"{key} of {self.path} {found}; {kind.__name__} is needed")
        return value


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """Returns the files of the model that ``path`` is a part of, by its name: that file alone, or all its parts."""
    found = PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    return tuple(path.with_name(f"{found['stem']}-{i:05}-of-{count:05}{SUFFIX}") for i in range(1, count + 1))


def gguf_stem(path: Path) -> str:
    """Returns the name of a model's file or files, without what numbers a part."""
    found = PART.fullmatch(path.name)
    return path.stem if found is None else found["stem"]


def read_gguf(path: Path) -> GgufFile:
    """Returns the header of a model's file, or of all its files if ``path`` is one of several.

    Raises ModelError if these are not complete GGUF files that hold a complete model. The last header stays until
    ``forget_gguf``: several parts of a process need it, and reading it takes 0.1 s.
    """
    parts = gguf_parts(path)
    if missing := [part.name for part in parts if not part.is_file()] if len(parts) > 1 else []:
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelError(f"{path} is one of {len(parts)} parts of a model, and {some} of {path.parent} cannot be found")
    try:
        states = [part.stat() for part in parts]
    except OSError as exc:
        raise ModelError(f"{path} is not a readable GGUF file: {exc}") from exc
    return _read_once(parts, tuple((each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in states))


def read_gguf_start(path: Path) -> GgufFile | None:
    """Returns the header of a file that may end early, or None if the header is not complete."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (OSError, ValueError, struct.error):
        return None


def forget_gguf() -> None:
    """Frees the header that ``read_gguf`` keeps, which has all tokens and merges of a tokenizer."""
    _read_once.cache_clear()


@lru_cache(maxsize=1)
def _read_once(parts: tuple[Path, ...], _: tuple[tuple[int, ...], ...]) -> GgufFile:
    """Reads the headers of the files that have these identities now."""
    headers = [_read_whole(part) for part in parts]
    first, count = headers[0], headers[0].get("split.count", int, 1)
    if max(count, 1) != len(parts):
        raise ModelError(
            f"{first.path} is one part of several, whose names have to end with -00001-of-{count:05}{SUFFIX} and so on"
        )
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        if header.get("split.no", int, 0) != number:
            raise ModelError(f"{header.path} is not part {number + 1} of {len(parts)}, as its name says")
        tensors |= {name: replace(tensor, part=number) for name, tensor in header.tensors.items()}
    if (wanted := first.get("split.tensors.count", int, len(tensors))) != len(tensors):
        raise ModelError(f"{first.path} and its other parts have {len(tensors)} tensors, not {wanted}")
    return GgufFile(first.path, first.metadata, tensors, parts)


def _read_whole(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as exc:
        raise ModelError(f"{path} is not a readable GGUF file: {exc}") from exc


def _read(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.data[:4] != MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    (version,) = cursor.unpack("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not among {sorted(VERSIONS)}")
    tensor_count, value_count = cursor.unpack("QQ")
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.string()
        (kind,) = cursor.unpack("I")
        metadata[key] = cursor.value(kind)
    placed: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        (dimensions,) = cursor.unpack("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = cursor.unpack(f"{dimensions}Q")
        if 0 in shape:
            raise ValueError(f"tensor {name!r} is empty")
        kind, offset = cursor.unpack("IQ")
        placed[name] = GgufTensor(tuple(reversed(shape)), kind, offset)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: GgufTensor(tensor.shape, tensor.kind, start + tensor.offset) for name, tensor in placed.items()}
    return GgufFile(path, metadata, tensors, (path,))


class _Cursor:
    """Reads values one after another. A false length raises an exception, before any large allocation."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def unpack(self, kinds: str) -> tuple[int, ...]:
        kinds = "<" + kinds
        values = struct.unpack_from(kinds, self.data, self.at)
        self.at += struct.calcsize(kinds)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.at + length
        if end > len(self.data):
            raise ValueError("it is cut short")
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind in SCALARS:
            return self.unpack(SCALARS[kind])[0]
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 3:
            raise ValueError(f"value type {kind} is unknown")
        element, count = self.unpack("IQ")
        if count > len(self.data):
            raise ValueError("it is cut short")
        if element in SCALARS:
            return list(self.unpack(f"{count}{SCALARS[element]}"))
        return [self.value(element, depth + 1) for _ in range(count)]
