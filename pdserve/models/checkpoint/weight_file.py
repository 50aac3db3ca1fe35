"""Keeps a model's packed weights in a file of the user's cache, which all engines of the machine map.

The first engine packs the weights straight into a draft of the file, and gives it its name when it is whole. Engines
that come later, and those that have waited for it, map the file: they neither read nor pack the model's own, and the
memory of the weights is there once, however many engines use it.

A file's name is a digest of all that its bytes depend on: the model's files, the kernels, the dtype and the rank. It
ends with an index and a digest of the bytes, so that a file which lost some of them in a crash is packed anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import torch
import xxhash
from filelock import FileLock, Timeout

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_file import is_gguf
from pdserve.models.checkpoint.weights import fingerprint, weight_files
from pdserve_kernels.cpu.weight_memory import LINE, PIECE, FilledMemory

log = logging.getLogger(__name__)

SMALLEST = 32 * 2**20
"""Weights of fewer bytes are packed by each engine: that takes no time, and a cache of many test models takes room."""
LOCK_TIMEOUT_S = 300.0
# This is part of each file's name. Raise it when the same keys begin to mean other bytes.
_FORM = 1
_SUFFIX = ".weights"
_DRAFT = ".draft"
_END = struct.Struct("<8sQQ16s")
"""What a file ends with: a mark, where the index begins and ends, and the digest of everything before this."""
_MARK = b"pdweight"
_PAGE = mmap.PAGESIZE
_MIB = 2**20

Index = dict[str, tuple[int, int]]
"""Where the bytes of each key begin, and how many they are."""


class WeightFile:
    """Satisfies ``FilledMemory`` with the bytes of a file. ``other`` has what the file has not."""

    def __init__(self, path: Path, other: FilledMemory) -> None:
        """Maps the file. Raises OSError if it is not there, and ValueError if it is not whole."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _END.size:
                raise ValueError("it is too short")
            # torch wants memory that may be written to. Nobody does, and it would not reach the file. Pages come when
            # they are read: all at once would be all for writing, so that each engine had copies of its own.
            self._mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
        body = memoryview(self._mapping)[: size - _END.size]
        mark, first, end, digest = _END.unpack_from(self._mapping, size - _END.size)
        if mark != _MARK or not first <= end == len(body) or xxhash.xxh3_128_digest(body) != digest:
            raise ValueError("it has lost bytes")
        self._index = msgspec.msgpack.decode(body[first:end], type=Index)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._other = other

    def filled(self, key: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """See ``FilledMemory``."""
        start, found = self._index.get(key, (0, -1))
        if not key or found != nbytes:
            return self._other.filled("", nbytes, fill)
        return self._bytes[start : start + nbytes]


class WeightDraft:
    """Satisfies ``FilledMemory`` with the bytes of a file that is being made. ``other`` has weights without a key.

    ``close`` must be called in the end; without ``finish`` before, nothing is left of the file, and the memory stays as
    long as it is used.
    """

    def __init__(self, path: Path, other: FilledMemory) -> None:
        """Raises OSError if there cannot be a file beside ``path``."""
        self._path = path
        self._draft = path.with_suffix(_DRAFT)
        self._fd = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._other = other
        self._index: Index = {}
        self._size = 0
        self._pieces: list[torch.Tensor] = []
        self._left = (0, torch.empty(0, dtype=torch.uint8))
        """Where the rest of the last piece begins in the file, and that rest."""
        self._failed = False

    def filled(self, key: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """See ``FilledMemory``. Where the disk is full, this memory is the process's own, and there will be no file."""
        if not key or key in self._index or self._failed:
            return self._other.filled("", nbytes, fill)
        try:
            start, taken = self._take(nbytes)
        except OSError as exc:
            log.warning("the packed weights cannot be kept in %s: %s", self._path.parent, exc)
            self._failed = True
            return self._other.filled("", nbytes, fill)
        fill(taken)
        self._index[key] = (start, nbytes)
        return taken

    def finish(self) -> None:
        """Gives the file its name, and makes it and its memory unwritable. Raises OSError."""
        if self._failed:
            return
        body = xxhash.xxh3_128()
        for piece in self._pieces:
            body.update(memoryview(piece.numpy()))  # type: ignore[arg-type]  # ndarray is a buffer, unannotated
        index = msgspec.msgpack.encode(self._index)
        body.update(index)
        end = _END.pack(_MARK, self._size, self._size + len(index), body.digest())
        _write_all(self._fd, index + end, self._size)
        os.fchmod(self._fd, 0o444)
        for piece in self._pieces:
            _protect(piece)
        os.rename(self._draft, self._path)

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._draft)
        os.close(self._fd)

    def _take(self, nbytes: int) -> tuple[int, torch.Tensor]:
        rounded = -(-nbytes // LINE) * LINE
        if rounded > PIECE // 4:
            start, piece = self._piece(rounded)
            return start, piece[:nbytes]
        start, left = self._left
        if rounded > left.numel():
            start, left = self._piece(PIECE)
        self._left = (start + rounded, left[rounded:])
        return start, left[:nbytes]

    def _piece(self, nbytes: int) -> tuple[int, torch.Tensor]:
        """Makes the file longer, by memory that the disk has: to write where it has none would end the process."""
        start, nbytes = self._size, -(-nbytes // _PAGE) * _PAGE
        os.posix_fallocate(self._fd, start, nbytes)
        piece = torch.frombuffer(mmap.mmap(self._fd, nbytes, offset=start), dtype=torch.uint8)
        self._size += nbytes
        self._pieces.append(piece)
        return start, piece


@contextmanager
def kept_weights(path: Path, nbytes: int, most_mib: int, other: FilledMemory) -> Iterator[FilledMemory]:
    """Yields where to pack weights of about ``nbytes`` within the block: into the file ``path``, or from it.

    Files beside it that were used longest ago are removed until all have at most ``most_mib``. Where there can be no
    file, ``other`` is yielded; the same holds where another process takes very long to make it.
    """
    with ExitStack() as stack:
        memory: FilledMemory | None = _opened(path, other)
        draft: WeightDraft | None = None
        if memory is None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if nbytes <= most_mib * _MIB and 2 * nbytes <= shutil.disk_usage(path.parent).free:
                    stack.enter_context(FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S))
                    memory = _opened(path, other)
                    if memory is None:
                        memory = draft = WeightDraft(path, other)
                        stack.callback(draft.close)
            except (OSError, Timeout) as exc:
                log.warning("the packed weights are not kept in %s: %s", path.parent, exc)
        yield memory or other
        if draft is not None:
            try:
                draft.finish()
                _remove_old(path, most_mib * _MIB)
            except OSError as exc:
                log.warning("the packed weights cannot be kept in %s: %s", path.parent, exc)


def weights_name(model: Path, *form: object) -> tuple[str, int]:
    """Returns the name of the file for a model's weights in this form, and how many bytes the model's files have.

    A file of the model that was written anew is another one. Raises ModelError if there is none.
    """
    digest = xxhash.xxh3_128(repr((_FORM, fingerprint(model), *form)).encode())
    total = 0
    try:
        for path in [model] if is_gguf(model) else weight_files(model):
            status = path.stat()
            total += status.st_size
            digest.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    except OSError as exc:
        raise ModelError(f"the weights of {model} cannot be found: {exc}") from exc
    return digest.hexdigest() + _SUFFIX, total


def _opened(path: Path, other: FilledMemory) -> WeightFile | None:
    """Returns the file if it is there and whole."""
    try:
        found = WeightFile(path, other)
        os.utime(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        log.warning("%s is not used: %s", path, exc)
        return None
    return found


def _remove_old(newest: Path, most_bytes: int) -> None:
    """Removes files, and what processes that were killed have left. Who has mapped a file keeps its memory."""
    total = 0
    found = {path: path.stat() for path in newest.parent.glob(f"*{_SUFFIX}")}
    for path in sorted(found, key=lambda each: (each == newest, found[each].st_mtime_ns), reverse=True):
        total += found[path].st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)
    for draft in newest.parent.glob(f"*{_DRAFT}"):
        # Who makes it has the lock.
        with contextlib.suppress(Timeout, FileNotFoundError), FileLock(draft.with_suffix(".lock"), timeout=0):
            draft.unlink()


def _write_all(fd: int, data: bytes, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _protect(piece: torch.Tensor) -> None:
    """Keeps this process from writing to a mapping: other engines would compute with what it writes."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.nbytes), mmap.PROT_READ) != 0:
        raise OSError(ctypes.get_errno(), "memory cannot be protected")
