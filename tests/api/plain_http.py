"""A minimal HTTP client: it opens a connection for each request and returns the answer's bytes unchanged."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    """Field names are in lower case."""
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def send(
    method: str,
    url: str,
    *,
    body: Any = None,
    content: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Sends ``body`` as JSON, or ``content`` unchanged."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        data = json.dumps(body).encode() if content is None and body is not None else content
        connection.request(
            method,
            urlsplit(url)._replace(scheme="", netloc="").geturl(),
            body=data,
            headers=headers or {},
        )
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def get(url: str) -> Answer:
    return send("GET", url)


def post(url: str, body: Any = None, **headers: str) -> Answer:
    """Sends a POST request. A ``_`` in a header's name stands for ``-``."""
    return send("POST", url, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})
