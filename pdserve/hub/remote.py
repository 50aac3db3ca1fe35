"""Talks to the hub through huggingface_hub, and turns what goes wrong into sentences with a way out.

Only the process that fetches imports this module: huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx2
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
from pdserve.hub.names import HubName

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
