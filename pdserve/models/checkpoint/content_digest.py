"""Digests every byte of a large file, in parallel and once: other processes, and later starts, find the result.

What relies on it is who may exchange KV blocks, go on with another's answer, or map its packed weights. Those who
could want two models with one digest are the ones who supply both models, to an operator who serves them anyway. So it
has 128 bits against chance, and is not cryptographic: XXH3 took a tenth of the time of SHA-256 (7 and 0.6 GB/s, one
core). The digest depends on the bytes alone, and is the same on every host.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import xxhash

from pdserve.errors import ModelError
from pdserve.models.checkpoint.cached_files import KeptFiles, tell_nobody

log = logging.getLogger(__name__)

PIECE: Final = 2**26
"""The bytes of a piece, whose digest is one thread's work. It is part of what every digest means."""
REMEMBERED: Final = 2**24
"""Smaller files are read again, which takes milliseconds."""
_READ_AT_ONCE = 2**22
_THREADS = 8
"""More are no faster on any disk that one engine has for itself."""
_SETTLED_NS = 2 * 10**9
"""A file that changed this lately may change again and keep its ctime, which is as coarse as the kernel's clock."""
_KEPT = 1024
_LOCK_TIMEOUT_S = 3600.0
"""Whoever waits for another process to read the file would only read it a second time, and slow that one down."""

_State = tuple[int, int, int, int, int]
_known: dict[_State, bytes] = {}
"""What this process has found or been told: it asks more than once, and may have no folder to remember in."""


def content_digest(path: Path, cache_dir: Path | None = None, goes_on: Callable[[], None] = tell_nobody) -> bytes:
    """Returns a digest of all bytes of a file, from ``cache_dir`` if the file has not changed since they were read.

    To read a large file from a slow disk takes many minutes: ``goes_on`` is called after each piece, and while another
    process reads the file. Raises OSError, and ModelError if the file changes while it is read.
    """
    with path.open("rb") as file:
        fd = file.fileno()
        state = _state(fd, path)
        if state[2] < REMEMBERED:
            return _read(fd, state, path, goes_on)
        found = _known.get(state)
        if found is None:
            # A change while it is read has another ctime only if it was settled before.
            settled = _is_settled(state)
            found = _found(fd, state, path, cache_dir if settled else None, goes_on)
            if settled:
                _known[state] = found
        return found


def _found(fd: int, state: _State, path: Path, cache_dir: Path | None, goes_on: Callable[[], None]) -> bytes:
    if cache_dir is None:
        return _read(fd, state, path, goes_on)
    kept = KeptFiles(cache_dir / "digests", "digest", _KEPT, _LOCK_TIMEOUT_S)
    key = xxhash.xxh3_128_hexdigest(repr(state).encode())
    found: bytes | None = None
    try:
        if (known := kept.load(key)) is not None:
            return known
        with kept.locked(key, goes_on):
            found = kept.load(key)
            if found is None:
                found = _read(fd, state, path, goes_on)
                kept.save(key, found)
    except OSError as exc:
        log.warning("digests of weights cannot be kept in %s: %s", kept.folder, exc)
    return found if found is not None else _read(fd, state, path, goes_on)


def _state(fd: int, path: Path) -> _State:
    """Returns what changes with the bytes of a file. ``cp -p`` and images set an mtime; nobody sets a ctime."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path} is no regular file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_settled(state: _State) -> bool:
    return abs(time.time_ns() - state[4]) > _SETTLED_NS


def _read(fd: int, state: _State, path: Path, goes_on: Callable[[], None]) -> bytes:
    size = state[2]
    starts = range(0, size, PIECE)
    digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
    threads = max(1, min(_THREADS, len(os.sched_getaffinity(0)), len(starts)))
    with ThreadPoolExecutor(threads) as pool:
        try:
            for piece in pool.map(lambda start: _piece(fd, start, min(PIECE, size - start)), starts):
                digest.update(piece)
                goes_on()
        except EOFError as exc:
            raise _changed(path) from exc
        finally:
            pool.shutdown(cancel_futures=True)
    if _state(fd, path) != state:
        raise _changed(path)
    return digest.digest()


def _piece(fd: int, start: int, nbytes: int) -> bytes:
    """Returns the digest of a part of the file. The lock of the interpreter is free nearly all of the time."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_AT_ONCE, nbytes)))
    end = start + nbytes
    while start < end:
        count = os.preadv(fd, [buffer[: end - start]], start)
        if not count:
            raise EOFError
        digest.update(buffer[:count])
        start += count
    return digest.digest()


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path} has changed while it was read: start the node when the file is whole")
