"""Keeps small files in a folder of the user's cache: complete ones, those that were used last, and nobody else's.

``code_digest`` tells which code makes such a file, so that other code does not take that file for its own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from pdserve.machine.file_system import check_own, make_own_folder

_DEAD_DRAFT_S = 3600.0
"""A draft that is older was left by a process that has died: to write one takes milliseconds."""
_DIGEST_BYTES = 16
_WAITS_S = 1.0
"""Whoever waits for another process says so at this interval."""


def tell_nobody() -> None:
    """Is what a long wait calls where nobody wants to know that it goes on."""


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """The files of one kind. Each has a key, which names everything that its bytes depend on."""

    folder: Path
    suffix: str
    most: int
    """So many stay in the cache."""
    lock_timeout_s: float

    def load(self, key: str) -> bytes | None:
        """Returns the bytes under ``key``, or None if they are not there, not complete, or not this user's.

        Raises OSError.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                check_own(os.fstat(file.fileno()))
                data = file.read()
        except (FileNotFoundError, PermissionError):
            return None
        body = data[_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(body) != data[:_DIGEST_BYTES]:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return body

    @contextlib.contextmanager
    def locked(self, key: str, waits: Callable[[], None] = tell_nobody) -> Iterator[None]:
        """Lets one process at a time make what is under ``key``. Where another one takes very long, it goes on.

        ``waits`` is called again and again while another process has it. Raises OSError.
        """
        make_own_folder(self.folder)
        lock = FileLock(self._path(key).with_suffix(".lock"))
        until = time.monotonic() + self.lock_timeout_s
        while not _acquired(lock, min(_WAITS_S, until - time.monotonic())) and time.monotonic() < until:
            waits()
        try:
            yield
        finally:
            lock.release()

    def save(self, key: str, body: bytes) -> None:
        """Keeps ``body`` within a ``locked`` block. Raises OSError."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".draft", delete=False) as draft:
            try:
                draft.write(xxhash.xxh3_128_digest(body) + body)
                # Everybody may read it where root keeps the cache. A temporary file is its maker's alone.
                os.fchmod(draft.fileno(), 0o644)
                draft.close()
                os.rename(draft.name, self._path(key))
            except BaseException:
                os.unlink(draft.name)
                raise
        self._remove_old()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.{self.suffix}"

    def _remove_old(self) -> None:
        """Removes all but the files that were used last, and the drafts that dead processes have left."""
        ages = self._ages(f"*.{self.suffix}")
        for old in sorted(ages, key=lambda each: ages[each])[self.most :]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
        for draft, age in self._ages(".*.draft").items():
            if age > _DEAD_DRAFT_S:
                draft.unlink(missing_ok=True)

    def _ages(self, pattern: str) -> dict[Path, float]:
        """Returns the files and the seconds since each was used, without those that others remove meanwhile."""
        now, ages = time.time(), {}
        for path in self.folder.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                ages[path] = now - path.stat().st_mtime
        return ages


def _acquired(lock: FileLock, within_s: float) -> bool:
    try:
        lock.acquire(timeout=max(0.0, within_s))
    except Timeout:
        return False
    return True


def code_digest(sources: Iterable[Path], packages: Iterable[str] = ()) -> str:
    """Returns a digest of these files and of the versions of pdserve and ``packages``. Raises OSError."""
    digest = xxhash.xxh3_128()
    for package in ("pdserve", *packages):
        digest.update(f"{package} {_version(package)}\0".encode())
    for source in sources:
        data = source.read_bytes()
        digest.update(f"{source.name} {len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
