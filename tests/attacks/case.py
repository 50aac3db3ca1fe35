"""An attack over HTTP as data: the bytes that are sent and the answers that are allowed."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass

from tests.cluster.nodes import MODEL

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"

BAD = frozenset({400})
FINE = frozenset({200})
EITHER = BAD | FINE
"""Both statuses are right: the server only has to answer."""


class At(enum.Enum):
    """The process that a case attacks."""

    PROXY = "proxy"
    DECODE = "decode-0"
    PREFILL = "prefill-0"


@dataclass(frozen=True)
class HttpCase:
    """The bytes of one request, which may be wrong."""

    name: str
    pieces: tuple[bytes, ...]
    """Each piece is written by itself, one after the other."""
    allowed: frozenset[int] = BAD
    """The statuses that the answer may have."""
    param: str | None = None
    """The beginning of ``error.param``."""
    closes: bool = False
    """Whether the server may also close the connection without an answer."""
    tokens: bool = False
    """Whether the answer must be that of the ordinary request."""
    complete: bool = True
    """Whether the request ends where the bytes do, so that another one can follow."""
    method: str = "POST"
    at: At = At.PROXY


def head(method: str, path: str, *fields: str, version: str = "HTTP/1.1") -> bytes:
    """Returns a request's head. It gets a Host field if ``fields`` have none."""
    host = () if any(field.lower().startswith("host") for field in fields) else ("Host: pdserve",)
    return "\r\n".join([f"{method} {path} {version}", *host, *fields, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *fields: str) -> bytes:
    """Returns a whole request with a JSON body."""
    return head("POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", *fields) + body


def fields_of(path: str) -> dict[str, object]:
    """Returns the fields of a short and correct request."""
    few: dict[str, object] = {"model": MODEL, "max_tokens": 1}
    match path:
        case "/v1/chat/completions":
            return few | {"messages": [{"role": "user", "content": "Hi"}]}
        case "/v1/completions":
            return few | {"prompt": "Hi"}
        case "/tokenize":
            return {"model": MODEL, "prompt": "Hi"}
        case _:
            return {"model": MODEL, "tokens": [5]}


def body_with(path: str, literals: dict[str, str]) -> bytes:
    """Returns the body of that request with these fields set. Their values are texts, which may be invalid JSON."""
    fields = {name: json.dumps(value) for name, value in fields_of(path).items()} | literals
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()
