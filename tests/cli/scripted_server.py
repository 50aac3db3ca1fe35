"""A server with OpenAI's API that answers as a test has written it, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_S = 60.0
DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'


class UntilGone:
    """Instead of a piece of an answer: the server waits until the client has closed the connection."""


Part = bytes | UntilGone


@dataclass
class Answer:
    """One scripted answer to a chat request."""

    parts: Sequence[Part]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def delta(content: str = "", finish: str | None = None, **more: str) -> bytes:
    """Returns one event of a stream."""
    choice = {"index": 0, "delta": {"content": content, **more}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def whole(*texts: str) -> Answer:
    """Returns an answer with these pieces of text that ends as it should."""
    return Answer([*map(delta, texts), delta(finish="stop"), USAGE, DONE])


class ScriptedServer(ThreadingHTTPServer):
    """Gives its answers in their order. Whatever else is asked gets 404."""

    daemon_threads = True

    def __init__(self, answers: Sequence[Answer], models: object, documents: dict[str, object]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = iter(answers)
        self.documents = {"/v1/models": models, **documents}
        self.asked: list[Any] = []
        """The bodies of the requests so far."""
        self.paths: list[str] = []
        self.authorization: list[str] = []
        self.client_gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def questions(self) -> list[list[tuple[str, str]]]:
        """The messages of each request so far, as roles and texts."""
        return [[(one["role"], one["content"]) for one in body["messages"]] for body in self.asked]


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.authorization.append(self.headers.get("authorization", ""))
        document = self.server.documents.get(self.path)
        status = 404 if document is None else 200
        answer = {"error": {"message": "nothing here"}} if document is None else document
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.authorization.append(self.headers.get("authorization", ""))
        answer = next(self.server.answers)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        for part in answer.parts:
            if isinstance(part, UntilGone):
                self.connection.settimeout(WAIT_S)
                if not self.connection.recv(1):
                    self.server.client_gone.set()
            else:
                self.wfile.write(part)
                self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


def models(*names: str, owner: str = "somebody") -> object:
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner} for name in names]}


@contextmanager
def scripted(
    *answers: Answer, listed: object = None, documents: dict[str, object] | None = None
) -> Iterator[ScriptedServer]:
    """Runs a server that has the model ``m`` and gives these answers."""
    server = ScriptedServer(answers, models("m") if listed is None else listed, documents or {})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
