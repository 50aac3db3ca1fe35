"""A server that speaks as much of the hub's API as a download needs, and fails on demand.

Large files are redirected to a second server, as the hub does, which refuses whoever sends it the hub's token.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")
_PIECE = 4096


@dataclass
class Repository:
    """One repository of the fake hub, with one folder for each revision."""

    revisions: dict[str, Path]
    token: str = ""
    """Only requests with this token may know of the repository; empty if everybody may."""
    accepted: bool = True
    """Whether the terms of a gated repository were accepted."""
    more: dict[str, Any] = field(default_factory=dict)
    """What the description of the repository has beside its files."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes that are said in place of the real ones."""
    bare: bool = False
    """Whether the description leaves out the sizes and digests of files, as some mirrors do."""

    def commit(self, revision: str) -> str:
        """Returns the commit of a branch or commit; empty if there is none."""
        commits = {name: _sha1(str(folder).encode()) for name, folder in self.revisions.items()}
        return revision if revision in commits.values() else commits.get(revision, "")

    def folder(self, commit: str) -> Path:
        return next(folder for name, folder in self.revisions.items() if self.commit(name) == commit)


@dataclass
class Request:
    method: str
    path: str
    first: int
    """The first byte that was asked for."""
    token: str


class FakeHub:
    """The state of both servers; tests change it while they run."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.statuses: deque[tuple[int, dict[str, str]]] = deque()
        """The next requests of the API are answered with these statuses and headers."""
        self.breaks: dict[str, deque[int]] = defaultdict(deque)
        """Each next request of a file's bytes is cut off behind so many of them."""
        self.spoilt: set[str] = set()
        """Files whose last byte is another one."""
        self.hold_at: dict[str, int] = {}
        """Files that stop behind so many bytes until ``let_go`` is set."""
        self.held = threading.Event()
        self.let_go = threading.Event()
        self.url = ""
        self.store_url = ""

    def environ(self, cache: Path, **more: str) -> dict[str, str]:
        """Returns the variables of a process that uses this hub, and the folder ``cache`` for its models."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_CACHE": str(cache), "HF_TOKEN": "", "HF_HUB_OFFLINE": "", **more}

    def fetched(self, ending: str) -> list[Request]:
        """Returns the requests of bytes of files whose path ends so."""
        return [each for each in self.requests if each.method == "GET" and each.path.endswith(ending)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    is_store: bool

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        ranged = self.headers.get("Range", "")
        first = int(ranged.removeprefix("bytes=").rstrip("-")) if ranged else 0
        self.hub.requests.append(Request(self.command, path, first, token))
        if self.is_store:
            if token:
                return self._send(400, {"x-error-message": "the token of the hub was given to another host"})
            return self._file(Path(path), path, first)
        if self.hub.statuses:
            status, headers = self.hub.statuses.popleft()
            return self._send(status, headers)
        words = path.strip("/").split("/")
        name = "/".join(words[2:4]) if words[0] == "api" else "/".join(words[:2])
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.token and token != repository.token):
            return self._send(404 if token else 401, {"x-error-code": "RepoNotFound"})
        if words[0] == "api":
            return self._describe(name, repository, words[5] if len(words) > 5 else "main")
        if words[2] == "resolve":
            return self._resolve(repository, words[3], "/".join(words[4:]), first)
        return self._send(404)

    def _describe(self, name: str, repository: Repository, revision: str) -> None:
        commit = repository.commit(revision)
        if not commit:
            return self._send(404, {"x-error-code": "RevisionNotFound"})
        files = []
        folder = repository.folder(commit)
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            path = str(file.relative_to(folder))
            data = file.read_bytes()
            entry: dict[str, Any] = {"rfilename": path}
            if not repository.bare:
                size = repository.sizes.get(path, len(data))
                entry |= {"size": size, "blobId": _git_digest(data)}
                if path.endswith(LARGE):
                    entry["lfs"] = {"size": size, "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
            files.append(entry)
        body = {"id": name, "sha": commit, "siblings": files, "gated": not repository.accepted} | repository.more
        return self._send(200, {"content-type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, repository: Repository, revision: str, path: str, first: int) -> None:
        commit = repository.commit(revision)
        if not commit:
            return self._send(404, {"x-error-code": "RevisionNotFound"})
        if not repository.accepted:
            return self._send(403, {"x-error-code": "GatedRepo"})
        file = repository.folder(commit) / path
        if not file.is_file():
            return self._send(404, {"x-error-code": "EntryNotFound"})
        data = file.read_bytes()
        headers = {"x-repo-commit": commit, "accept-ranges": "bytes"}
        if path.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"location": f"{self.hub.store_url}{file}", "x-linked-etag": f'"{digest}"'}
            return self._send(302, headers | {"x-linked-size": str(len(data))})
        if self.command == "HEAD":
            self.send_response(200)
            for key, value in (headers | {"etag": f'"{_git_digest(data)}"', "content-length": str(len(data))}).items():
                self.send_header(key, value)
            return self.end_headers()
        return self._file(file, path, first, headers)

    def _file(self, file: Path, path: str, first: int, headers: dict[str, str] | None = None) -> None:
        data = file.read_bytes()
        if file.name in self.hub.spoilt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        cut = self.hub.breaks[file.name].popleft() if self.hub.breaks[file.name] else None
        self.send_response(206 if first else 200)
        if first:
            self.send_header("content-range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.send_header("content-length", str(len(data) - first))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        for at in range(first, len(data), _PIECE):
            if cut is not None and at - first >= cut:
                self.close_connection = True
                self.connection.close()
                return
            hold = self.hub.hold_at.get(file.name)
            if hold is not None and at >= hold:
                self.wfile.flush()
                self.hub.held.set()
                self.hub.let_go.wait(60)
            self.wfile.write(data[at : at + _PIECE])

    def _send(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that was killed


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs both servers within the block."""
    hub = FakeHub()
    servers = [
        _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub, "is_store": is_store}))
        for is_store in (False, True)
    ]
    hub.url, hub.store_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.let_go.set()
        for server in servers:
            with suppress(OSError):
                server.shutdown()
                server.server_close()
        for thread in threads:
            thread.join()


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _git_digest(data: bytes) -> str:
    return _sha1(f"blob {len(data)}\0".encode() + data)
