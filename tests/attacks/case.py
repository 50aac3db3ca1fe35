"""An attack over HTTP as data: what is sent, and what may come back."""

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
"""Both are right: what matters is that somebody answers."""


class At(enum.Enum):
    """Whom a case attacks."""

    PROXY = "proxy"
    DECODE = "decode-0"
    PREFILL = "prefill-0"


@dataclass(frozen=True)
class HttpCase:
    """One request, which need not be one."""

    name: str
    pieces: tuple[bytes, ...]
    """Written one after the other, each by itself."""
    allowed: frozenset[int] = BAD
    """Statuses that the answer may have."""
    param: str | None = None
    """What ``error.param`` begins with."""
    closes: bool = False
    """Whether to close the connection without an answer is right, too."""
    tokens: bool = False
    """Whether the answer must be that of the ordinary request."""
    complete: bool = True
    """Whether the request ends where the bytes do, so that another one can follow."""
    method: str = "POST"
    at: At = At.PROXY


def head(method: str, path: str, *fields: str, version: str = "HTTP/1.1") -> bytes:
    """A request's head, with a Host unless ``fields`` say something about it."""
    host = () if any(field.lower().startswith("host") for field in fields) else ("Host: pdserve",)
    return "\r\n".join([f"{method} {path} {version}", *host, *fields, "", ""]).encode("latin-1")


def post(path: str, body: bytes, *fields: str) -> bytes:
    """A whole request with a JSON body."""
    return head("POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", *fields) + body


def fields_of(path: str) -> dict[str, object]:
    """The fields of a short request that is right."""
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
    """That request with further fields, or other ones, given as JSON text, so that it can be what JSON is not."""
    fields = {name: json.dumps(value) for name, value in fields_of(path).items()} | literals
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()
