"""Fetches the files of one commit into the cache: several at a time, each from where an earlier fetch stopped.

huggingface_hub's own download begins again after a restart, and compares nothing but sizes. Here the bytes are digested
as they come, with the digest by which the hub names each file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import httpx2
from filelock import FileLock, Timeout

from pdserve.errors import HubError
from pdserve.hub.cache import PARTIAL, CachedRepository
from pdserve.hub.download import in_gb
from pdserve.hub.remote import RETRIES, Listing, RemoteFile, explained, opened, retry_pause_s, url_of

AT_ONCE = 4
"""Files that are fetched at the same time."""
STILL_S = 300.0
"""Whoever waits for another process to fetch the model gives up when that has fetched nothing for so long."""
_LOOK_S = 1.0
_KEEP_FREE = 2**26
"""Bytes of the disk that stay free."""
_LARGEST = 50 * 10**9
"""Bytes of the largest file that the hub gives by plain HTTP."""


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Stopped(Exception):
    """Another file has failed."""


@dataclass
class Fetcher:
    """Fetches files of ``listing`` into ``repository``."""

    listing: Listing
    repository: CachedRepository
    moved: Callable[[int], None]
    """Is called with the number of bytes that have come, which is negative where bytes turn out to be of no use."""
    said: Callable[[str], None]
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def snapshot(self) -> Path:
        """The folder of the commit."""
        return self.repository.snapshot(self.listing.commit)

    def missing(self, files: Sequence[RemoteFile]) -> int:
        """Returns how many bytes of ``files`` are not here."""
        return sum(file.nbytes - self.present(file) for file in files)

    def present(self, file: RemoteFile) -> int:
        """Returns how many bytes of a file are here."""
        if self._blob(file).is_file():
            return file.nbytes
        try:
            return min(self._partial(file).stat().st_size, file.nbytes)
        except OSError:
            return 0

    def check_free_space(self, files: Sequence[RemoteFile]) -> None:
        """Raises HubError if the disk has too little free space, or a file is too large for plain HTTP."""
        for file in files:
            if file.nbytes > _LARGEST and not self._blob(file).is_file():
                raise HubError(
                    f"{self.listing.name.repository}/{file.path} has {in_gb(file.nbytes)}, and the hub gives files of "
                    f"more than {in_gb(_LARGEST)} to its own program only: fetch it with 'hf download'"
                )
        needed, free = self.missing(files) + _KEEP_FREE, shutil.disk_usage(_existing(self.repository.folder)).free
        if needed > free:
            raise HubError(
                f"{self.listing.name} needs {in_gb(needed)} more on the disk of {self.repository.cache}, and "
                f"{in_gb(free)} are free; free some, or name another folder in HF_HOME"
            )

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Fetches what is missing of ``files``, and links them. Raises HubError and ModelError."""
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                try:
                    # Large files first, so that none of them is left alone at the end. Files that are alike are one.
                    unlike = sorted({file.digest: file for file in files}.values(), key=lambda file: -file.nbytes)
                    work = [pool.submit(self._fetch, file) for file in unlike]
                    for each in work:
                        each.result()
                except BaseException:
                    self._stop.set()
                    pool.shutdown(cancel_futures=True)
                    for each in work:
                        error = None if each.cancelled() else each.exception()
                        if error is not None and not isinstance(error, _Stopped):
                            raise error from None
                    raise
            for file in files:
                self.repository.link(self.listing.commit, file.path, self._blob(file))
        except OSError as exc:
            raise self._cannot_be_written(exc) from exc

    def _cannot_be_written(self, exc: OSError) -> HubError:
        return HubError(f"{self.listing.name} cannot be stored in {self.repository.cache}: {exc}")

    def fetch_start(self, file: RemoteFile, nbytes: int) -> Path:
        """Fetches the first ``nbytes`` of a file, or all of a shorter one, and returns where they are.

        They need not be what the hub has: only a complete file is checked. Raises HubError and ModelError.
        """
        blob = self._blob(file)
        if blob.is_file():
            return blob
        try:
            blob.parent.mkdir(parents=True, exist_ok=True)
            with self._partial(file).open("a+b") as partial:
                self._append(file, partial, min(nbytes, file.nbytes))
        except OSError as exc:
            raise self._cannot_be_written(exc) from exc
        return self._partial(file)

    def _fetch(self, file: RemoteFile) -> None:
        blob = self._blob(file)
        if not blob.is_file():
            blob.parent.mkdir(parents=True, exist_ok=True)
            with self._partial(file).open("a+b") as partial:
                self._complete(file, partial)
                partial.flush()
                os.fsync(partial.fileno())
            os.replace(self._partial(file), blob)

    def _complete(self, file: RemoteFile, partial: IO[bytes]) -> None:
        """Appends what is missing of a file, and checks the whole."""
        digest, have = self._append(file, partial, file.nbytes)
        if have != file.nbytes or digest.hexdigest() != file.digest:
            self.moved(-have)
            self._partial(file).unlink()
            raise HubError(
                f"{self.listing.name.repository}/{file.path} did not come as the hub has it (its digest is wrong), "
                "and was deleted; try again, and if it is the same, ask what stands between this machine and the hub"
            )

    def _append(self, file: RemoteFile, partial: IO[bytes], end: int) -> tuple[_Digest, int]:
        """Appends bytes until there are ``end``, or a few more. Returns their digest and how many there are."""
        digest = _begin(file)
        have = _digest_again(partial, digest)
        attempt, failed_at = 0, have
        while have < end:
            try:
                with opened(url_of(self.listing, file.path), have) as (pieces, start):
                    if start < have:
                        self.moved(-have)
                        digest, have = _begin(file), 0
                        partial.truncate(0)
                    for piece in pieces:
                        partial.write(piece)
                        digest.update(piece)
                        have += len(piece)
                        self.moved(len(piece))
                        if self._stop.is_set():
                            raise _Stopped
                        if have > file.nbytes or have >= end:
                            break
                if have < end:
                    raise httpx2.RemoteProtocolError("the connection ended early")
            except httpx2.HTTPError as error:
                attempt = 0 if have > failed_at else attempt + 1
                failed_at = have
                pause_s = retry_pause_s(error, attempt)
                if pause_s is None or attempt > RETRIES:
                    raise explained(error, self.listing.name) from error
                self.said(f"{file.path}: {str(error) or type(error).__name__}; goes on in {pause_s:g} s")
                if self._stop.wait(pause_s):
                    raise _Stopped from None
        return digest, have

    def _blob(self, file: RemoteFile) -> Path:
        return self.repository.blobs / file.digest

    def _partial(self, file: RemoteFile) -> Path:
        return self.repository.blobs / f"{file.digest}{PARTIAL}"


@contextmanager
def alone(repository: CachedRepository, said: Callable[[str], None]) -> Iterator[None]:
    """Lets one process of this machine at a time fetch a repository; the others wait while that gets on.

    Raises HubError.
    """
    path = repository.cache / ".locks" / repository.folder.name / "pdserve.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        before, since = -1, time.monotonic()
        while True:
            try:
                lock.acquire(timeout=_LOOK_S)
                break
            except Timeout:
                if before < 0:
                    said(f"another process fetches {repository.name}")
                now = repository.nbytes() if repository.folder.is_dir() else 0
                if now != before:
                    before, since = now, time.monotonic()
                elif time.monotonic() - since > STILL_S:
                    raise HubError(
                        f"another process has begun to fetch {repository.name} and got nowhere for {STILL_S:.0f} s: "
                        f"end it (it holds {path}), and try again"
                    ) from None
    except OSError as exc:
        raise HubError(f"models cannot be stored in {repository.cache}: {exc}") from exc
    try:
        yield
    finally:
        lock.release()


def _begin(file: RemoteFile) -> _Digest:
    """Returns the empty digest of the kind that ``file`` has."""
    if file.is_large:
        return hashlib.sha256()
    # Git's digest of a file. It protects against spoilt bytes, and is not asked to do more.
    return hashlib.sha1(f"blob {file.nbytes}\0".encode(), usedforsecurity=False)


def _digest_again(partial: IO[bytes], digest: _Digest) -> int:
    """Digests what an earlier fetch has left, and returns how much that is."""
    partial.seek(0)
    have = 0
    while piece := partial.read(2**22):
        digest.update(piece)
        have += len(piece)
    return have


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())
