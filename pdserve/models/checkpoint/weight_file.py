"""Stores a model's packed weights in a file of the user's cache, which all engines of the machine map.

The first engine packs the weights, writes them to a draft of the file, gives that its name at the end, and maps it in
the place of its own memory. Engines that come later, and those that have waited for it, map the file: they read
and pack nothing of the model's own, and the memory of the weights is there once, however many engines use it.

A file's name is a digest of all that its bytes depend on: the model's files, the code that reads and packs them, the
kernels, the dtype and the rank. It ends with an index and a digest of the bytes, so that a file which lost some of them
in a crash is packed anew.

There is none on a file system that other machines may change: whoever has mapped a file would be killed when another
machine removes it. There is none in memory either, where it would take the memory of the weights a second time.
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
from pdserve.machine.file_system import check_own, file_system, make_own_folder
from pdserve.machine.memory import MIB
from pdserve.models.checkpoint.cached_files import code_digest
from pdserve.models.checkpoint.fingerprint import weights_fingerprint
from pdserve.models.checkpoint.gguf.file import gguf_parts, is_gguf
from pdserve.models.checkpoint.model_files import weight_files
from pdserve_kernels.cpu.weight_memory import LINE, PIECE, FilledMemory

log = logging.getLogger(__name__)

SMALLEST = 32 * 2**20
"""Weights of fewer bytes are packed by each engine: that takes no time, and a cache of many test models takes space."""
LOCK_TIMEOUT_S = 300.0
_UNFIT_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x65735546: "FUSE",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
}
"""The magic numbers of file systems that other machines may change, or that are in memory."""
_SUFFIX = ".weights"
_DRAFT = ".draft"
_END = struct.Struct("<8sQQ16s")
"""What a file ends with: a mark, where the index begins and ends, and the digest of everything before this."""
_MARK = b"pdweight"
_LARGE_PAGE = 2**21
_WRITTEN_AT_ONCE = 2**23
_MAP_FIXED = 0x10

Index = dict[str, tuple[int, int]]
"""Where the bytes of each key begin, and how many they are."""


class WeightFile:
    """Satisfies ``FilledMemory`` with the bytes of a file. ``other`` has what the file has not."""

    def __init__(self, path: Path, other: FilledMemory) -> None:
        """Maps the file. Raises OSError if it is not there or not this user's, and ValueError if it is not complete."""
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            check_own(found)
            size = found.st_size
            if size < _END.size:
                raise ValueError("it is too short")
            # torch wants memory that may be written to. Nobody does, and it would not reach the file. Pages come when
            # they are read: all at once would be all for writing, so that each engine had copies of its own.
            self._mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
            with contextlib.suppress(OSError):  # A system may have no large pages.
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
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
    """Satisfies ``FilledMemory`` with memory that becomes the bytes of a file. ``other`` has weights without a key.

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
        """The bytes of all pieces."""
        self._pieces: list[tuple[int, torch.Tensor]] = []
        """Where each piece begins in the file, and its memory."""
        self._left = (0, torch.empty(0, dtype=torch.uint8))
        """Where the rest of the last piece begins in the file, and that rest."""

    def filled(self, key: str, nbytes: int, fill: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """See ``FilledMemory``."""
        if not key or key in self._index:
            return self._other.filled("", nbytes, fill)
        start, taken = self._take(nbytes)
        fill(taken)
        self._index[key] = (start, nbytes)
        return taken

    @property
    def size(self) -> int:
        """The bytes that the file has if it is finished now."""
        return self._size + len(msgspec.msgpack.encode(self._index)) + _END.size

    def finish(self) -> None:
        """Writes the file and gives it its name. The memory is the file's from then on, and cannot be written to.

        Raises OSError, and then the memory stays this process's own. Without a key, no file is made.
        """
        if not self._index:
            return
        digest = xxhash.xxh3_128()
        for start, piece in self._pieces:
            data = memoryview(piece.numpy())  # type: ignore[arg-type]  # ndarray is a buffer, unannotated
            digest.update(data)
            # In large parts, so that the system keeps the file in large pages, which halve what translation costs.
            for at in range(0, len(data), _WRITTEN_AT_ONCE):
                _write_all(self._fd, data[at : at + _WRITTEN_AT_ONCE], start + at)
        index = msgspec.msgpack.encode(self._index)
        digest.update(index)
        end = _END.pack(_MARK, self._size, self._size + len(index), digest.digest())
        _write_all(self._fd, memoryview(index + end), self._size)
        # Some disks report only now what they could not write. Afterwards, nobody has these bytes but the file.
        os.fsync(self._fd)
        os.fchmod(self._fd, 0o444)
        os.rename(self._draft, self._path)
        for start, piece in self._pieces:
            _map_over(piece, self._fd, start)

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
        """Returns a new piece. It begins at a large page in memory and in the file, so that it can be made of such."""
        start, nbytes = self._size, -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE
        mapping = mmap.mmap(-1, nbytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # A system may have no large pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        piece = memory[-memory.data_ptr() % _LARGE_PAGE :][:nbytes]
        self._size += nbytes
        self._pieces.append((start, piece))
        return start, piece


@contextmanager
def kept_weights(path: Path, nbytes: int, most_mib: int, other: FilledMemory, ranks: int = 1) -> Iterator[FilledMemory]:
    """Yields where to pack weights of at least ``nbytes`` within the block: into the file ``path``, or from it.

    Files beside it that were used longest ago are removed until all have at most ``most_mib``. Where there can be no
    file, ``other`` is yielded; the same holds where another process takes very long to make it. None is made if as
    many as there are ``ranks`` would not be kept side by side.
    """
    with ExitStack() as stack:
        memory: FilledMemory | None = None
        draft: WeightDraft | None = None
        try:
            make_own_folder(path.parent)
            if _may_be_mapped(path.parent):
                memory = _opened(path, other)
                if memory is None and _has_room(path.parent, nbytes, most_mib, ranks):
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
                if _has_room(path.parent, draft.size, most_mib, ranks):
                    draft.finish()
                    _remove_old(path, most_mib * MIB)
            except OSError as exc:
                log.warning("the packed weights cannot be kept in %s: %s", path.parent, exc)


def weights_name(model: Path, cache_dir: Path, *form: object) -> tuple[str, int]:
    """Returns the name of the file for a model's weights in this form, and how many bytes the model's files have.

    Digests of those are cached in ``cache_dir``. Raises ModelError if there are no weights.
    """
    digest = xxhash.xxh3_128(repr((weights_fingerprint(model, cache_dir), *form)).encode())
    try:
        digest.update(code_digest(_sources()).encode())
        total = sum(path.stat().st_size for path in (gguf_parts(model) if is_gguf(model) else weight_files(model)))
    except OSError as exc:
        raise ModelError(f"the weights of {model} cannot be found: {exc}") from exc
    return digest.hexdigest() + _SUFFIX, total


def _sources() -> list[Path]:
    """Returns the code that says which bytes a key means: it reads the weights, and puts several into one."""
    here = Path(__file__)
    formats = (path for folder in ("gguf", "safetensors") for path in sorted(here.parent.glob(f"{folder}/*.py")))
    readers = [here, here.with_name("weights.py"), *formats]
    models = here.parents[1]
    builders = (path for folder in ("families", "parts") for path in sorted(models.glob(f"{folder}/*.py")))
    return [*readers, models / "decoder.py", models / "recipe.py", *builders]


def _may_be_mapped(folder: Path) -> bool:
    """Returns whether a file in this folder may take the place of memory."""
    unfit = _UNFIT_FILE_SYSTEMS.get(file_system(folder))
    if unfit is not None:
        log.info("the packed weights are not kept in %s, because that is %s", folder, unfit)
    return unfit is None


def _has_room(folder: Path, nbytes: int, most_mib: int, ranks: int) -> bool:
    """Returns whether files of ``nbytes`` for each rank may be kept, and whether half of the free disk has one.

    A warning says why not. Raises OSError.
    """
    needed, free = ranks * nbytes / MIB, shutil.disk_usage(folder).free
    if needed > most_mib:
        log.warning("packed weights of %.0f MiB are not kept: --packed-weights-mib is %d", needed, most_mib)
    elif 2 * nbytes > free:
        log.warning("packed weights of %.0f MiB are not kept: %s has %.0f MiB left", needed, folder, free / MIB)
    else:
        return True
    return False


def _opened(path: Path, other: FilledMemory) -> WeightFile | None:
    """Returns the file if it is there and complete."""
    try:
        found = WeightFile(path, other)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        log.warning("%s is not used: %s", path, exc)
        return None
    with contextlib.suppress(OSError):  # It may be on a disk that is only read.
        os.utime(path)
    return found


def _remove_old(newest: Path, most_bytes: int) -> None:
    """Removes files, and what processes that were killed have left. Who has mapped a file keeps its memory."""
    total = 0
    found: dict[Path, os.stat_result] = {}
    for path in newest.parent.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # Another process removes it.
            found[path] = path.stat()
    for path in sorted(found, key=lambda each: (each == newest, found[each].st_mtime_ns), reverse=True):
        total += found[path].st_size
        if total > most_bytes:
            path.unlink(missing_ok=True)
    for draft in newest.parent.glob(f"*{_DRAFT}"):
        # Who makes it has the lock.
        with contextlib.suppress(Timeout, FileNotFoundError), FileLock(draft.with_suffix(".lock"), timeout=0):
            draft.unlink()


def _write_all(fd: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(fd, data, at)
        data, at = data[written:], at + written


def _map_over(memory: torch.Tensor, fd: int, start: int) -> None:
    """Puts a file's bytes in the place of the same ones in memory, which is freed. Nobody can write to them.

    Raises OSError; the memory is then as it was.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(memory.data_ptr(), memory.nbytes, mmap.PROT_READ, flags, fd, start) != memory.data_ptr():
        raise OSError(ctypes.get_errno(), "memory cannot be mapped")


class MappedFile:
    """The bytes of a model's file, which nobody may write to. A part of it is in memory only while it is used."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened, and ValueError if it is empty."""
        with path.open("rb") as file:
            # torch wants memory that may be written to. Nobody does, and it would not reach the file.
            self._mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        self.size = len(self._mapping)

    def tensor(self, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """Returns ``count`` numbers, from byte ``start`` of the file on, without reading them."""
        if not count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=start)

    def read_ahead(self, start: int, nbytes: int) -> None:
        """Begins to read these bytes from the disk, in larger pieces than those in which they are used."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes:
            self._mapping.madvise(mmap.MADV_WILLNEED, first, start + nbytes - first)

    def drop(self) -> None:
        """Takes all that has been read out of this process's memory. Tensors stay: their bytes come again when used."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
