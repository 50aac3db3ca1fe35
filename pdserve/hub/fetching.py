"""Fetches the files of one commit into the cache: several at a time, each from where an earlier fetch stopped.

huggingface_hub's own download begins again after a restart, and compares nothing but sizes. Here the bytes are digested
as they come, with the digest by which the hub names each file. What goes wrong becomes a sentence with a way out.

Only the process that fetches imports this module: huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, TypeVar

import httpx2
from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # its __init__ has them, and no __all__
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from pdserve.errors import HubError, ModelError
from pdserve.hub.cache import PARTIAL, CachedRepository
from pdserve.hub.download import in_gb
from pdserve.hub.selection import HubName

# Otherwise each process asks the hub for a list of environment variables, tells it which of them this machine has, and
# fails for a day where the hub's answer is no such list.
constants.HF_HUB_DISABLE_TELEMETRY = True

TIMEOUT_S = 20.0
"""The hub has so long for a connection, and for each further piece of an answer."""
RETRIES = 4
"""A request that the hub could not answer just then is sent so many times more."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_SHA256 = re.compile("[0-9a-f]{64}")
_SHA1 = re.compile("[0-9a-f]{40}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository in one commit."""

    path: str
    nbytes: int
    digest: str
    """The SHA-256 of its bytes if it is stored as a large file, and else git's own digest, in hexadecimal."""

    @property
    def is_large(self) -> bool:
        return _SHA256.fullmatch(self.digest) is not None


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository in one commit."""

    name: HubName
    commit: str
    files: Mapping[str, RemoteFile | None]
    """The files by their paths; None where the hub has not said a file's size and digest."""
    architecture: str
    """What the hub says of the architecture of a repository's GGUF files; empty if it says nothing."""
    formats: frozenset[str]
    """What the hub says of the number formats in its safetensors files; empty if it says nothing."""


def list_files(name: HubName, said: Callable[[str], None]) -> Listing:
    """Returns what the hub has of a revision. Raises ModelError, and HubError if it cannot be asked."""

    def ask() -> Listing:
        with _as_hubs_answer():
            info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True, timeout=TIMEOUT_S)
            if not info.sha or not _SHA1.fullmatch(info.sha):
                raise ValueError("it names no commit")
            files: dict[str, RemoteFile | None] = {}
            for file in info.siblings or ():
                digest = file.lfs.sha256 if file.lfs is not None else file.blob_id
                files[str(file.rfilename)] = _remote_file(str(file.rfilename), file.size, digest)
            formats = frozenset(info.safetensors.parameters) if info.safetensors is not None else frozenset[str]()
            return Listing(name, info.sha, files, str((info.gguf or {}).get("architecture", "")), formats)

    return persistently(ask, name, said)


def _remote_file(path: str, nbytes: object, digest: object) -> RemoteFile | None:
    """Returns a file of the hub; None if its size or digest is missing or cannot be one."""
    if not isinstance(nbytes, int) or nbytes < 0 or not isinstance(digest, str):
        return None
    return RemoteFile(path, nbytes, digest) if _SHA256.fullmatch(digest) or _SHA1.fullmatch(digest) else None


@contextmanager
def _as_hubs_answer() -> Iterator[None]:
    """Turns what goes wrong where an answer has not the shape of a hub's into a HubError."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise HubError(
            f"{constants.ENDPOINT} does not answer as a hub of models does: {_reason(error)[:200]}"
        ) from error


def look_up(listing: Listing, path: str, said: Callable[[str], None]) -> RemoteFile:
    """Returns a file of the listing, for which the hub is asked again if it has not said enough.

    Raises ModelError and HubError.
    """
    found = listing.files.get(path)
    if found is not None:
        return found

    def ask() -> RemoteFile:
        with _as_hubs_answer():
            metadata = get_hf_file_metadata(url_of(listing, path), timeout=TIMEOUT_S)
        file = _remote_file(path, metadata.size, metadata.etag)
        if file is None:
            raise HubError(f"the hub does not say the size and digest of {listing.name.repository}/{path}")
        return file

    return persistently(ask, listing.name, said)


def url_of(listing: Listing, path: str) -> str:
    return hf_hub_url(listing.name.repository, path, revision=listing.commit)


@contextmanager
def opened(url: str, start: int) -> Iterator[tuple[Iterator[bytes], int]]:
    """Yields the bytes of a file, in pieces, and where they begin: at ``start``, or 0 if the server can only do that.

    Raises httpx2.HTTPError, as all that reads the pieces does. The token goes to the hub's own host alone.
    """
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        partial = response.status_code == httpx2.codes.PARTIAL_CONTENT
        yield response.iter_raw(), start if partial else 0


def persistently(ask: Callable[[], T], name: HubName, said: Callable[[str], None]) -> T:
    """Returns what ``ask`` returns, which is called again while the hub has too much to do.

    Raises ModelError if it is of no use to ask again, and HubError if it was of none.
    """
    for attempt in range(RETRIES + 1):
        try:
            return ask()
        except httpx2.HTTPError as error:
            pause_s = retry_pause_s(error, attempt)
            if pause_s is None or attempt == RETRIES:
                raise explained(error, name) from error
            said(f"{_status_words(error)}; it is asked again in {pause_s:g} s")
            time.sleep(pause_s)
    raise AssertionError("the last attempt raises")


def retry_pause_s(error: httpx2.HTTPError, attempt: int) -> float | None:
    """Returns how long to wait before the request is sent again; None if that is of no use."""
    own = min(_FIRST_PAUSE_S * 2.0**attempt, _LONGEST_PAUSE_S)
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in _PASSING:
            return None
        asked = error.response.headers.get("Retry-After", "")
        return min(float(asked), _LONGEST_PAUSE_S) if asked.isdecimal() else own
    if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol)):
        return None
    return own


def explained(error: Exception, name: HubName) -> ModelError | HubError:
    """Returns a sentence about what went wrong, and what would be right."""
    hub, repository = constants.ENDPOINT, name.repository
    match error:
        case GatedRepoError():
            way = (
                "the account of your token has not been given access: ask for it there"
                if get_token()
                else f"accept them there, and give a token of your account in HF_TOKEN ({hub}/settings/tokens)"
            )
            return ModelError(f"{repository} is given only to those who accept its terms at {hub}/{repository}; {way}")
        case RevisionNotFoundError():
            return ModelError(
                f"{repository} has no revision {name.revision!r}; {hub}/{repository}/tree/main lists them"
            )
        case DisabledRepoError():
            return ModelError(f"the hub has closed {repository}; {hub}/{repository} says why")
        case EntryNotFoundError():
            return ModelError(f"{repository} has lost a file while it was read; try again")
        case RepositoryNotFoundError():
            return ModelError(_no_repository(repository))
        case HfHubHTTPError():
            return _explained_status(error, name)
        case httpx2.TimeoutException():
            return HubError(f"{_host()} did not answer within {TIMEOUT_S:g} s; {OFFLINE_WAY}")
        case httpx2.HTTPError():
            return HubError(f"{_host()} cannot be reached ({_reason(error)}); {OFFLINE_WAY}")
    return HubError(f"{_host()} gives no usable answer: {error}")


OFFLINE_WAY = (
    "check the network and HF_ENDPOINT, or name a model that is here: 'pdserve models' lists them, and --offline asks "
    "nobody"
)


def _explained_status(error: HfHubHTTPError, name: HubName) -> ModelError | HubError:
    status, repository = error.response.status_code, name.repository
    if status == 401:
        return ModelError(
            f"the hub does not know the token in HF_TOKEN; make another at {constants.ENDPOINT}/settings/tokens"
        )
    if status == 403:
        return ModelError(f"your token may not read {repository}; use one that may, in HF_TOKEN")
    if status == 404:
        return ModelError(_no_repository(repository))
    if status == 429:
        return HubError(
            "the hub takes no more requests from here for now (429); wait a few minutes"
            + ("" if get_token() else ", or give a token in HF_TOKEN, which may send more")
        )
    return HubError(f"the hub answers with status {status}; try again later, or use what is here with --offline")


def _no_repository(repository: str) -> str:
    if get_token():
        return f"the hub has no model {repository}, or your token may not read it: check the name and HF_TOKEN"
    return f"the hub has no model {repository}, or it is private: check the name, or give a token in HF_TOKEN"


def _status_words(error: httpx2.HTTPError) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers with status {error.response.status_code}"
    return f"the hub did not answer ({_reason(error)})"


def _host() -> str:
    return f"the hub at {constants.ENDPOINT}"


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


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
