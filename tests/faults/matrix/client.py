"""The client of a cell: it reads a stream, and can go on with it at another proxy."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.nodes import MODEL

NEW_TOKENS = 48
OVER_S = 60.0
MAX_TRIES = 20


@dataclass(frozen=True)
class Refusal:
    """An answer that is none."""

    status: int
    code: str
    message: str
    request_id: str


@dataclass
class Client:
    """One request, whose stream a thread reads. With several URLs, it asks the next one for what it lacks."""

    urls: Sequence[str]
    prompt: Sequence[int]
    silence_s: float = OVER_S
    """The client gives a connection up when it has heard nothing for so long."""
    seed: int = 0
    """A request is known by its bytes: one with another seed is another one, with the same answer."""
    tokens: list[int] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)
    """When tokens have come, on the monotonic clock."""
    tries: int = 0
    over: bool = False
    refusal: Refusal | None = None
    _last_id: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for the end of the request. Fails the test if there is none."""
        self._thread.join(OVER_S)
        assert not self._thread.is_alive(), f"the request is not over; it has {len(self.tokens)} tokens"

    def longest_pause_s(self, since_s: float) -> float:
        """Returns the longest time that the client has waited for its next tokens, from ``since_s`` on."""
        times = [since_s, *(at for at in self.heard_s if at > since_s)]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def _run(self) -> None:
        for url in itertools.islice(itertools.cycle(self.urls), MAX_TRIES):
            self.tries += 1
            try:
                self._ask(url)
            except (OSError, http.client.HTTPException):
                if len(self.urls) == 1:
                    return
                continue
            if self.over or self.refusal is None or len(self.urls) == 1:
                return

    def _ask(self, url: str) -> None:
        body = {"model": MODEL, "prompt": list(self.prompt), "max_tokens": NEW_TOKENS, "temperature": 0}
        options = {"seed": self.seed, "ignore_eos": True, "stream": True, "return_token_ids": True}
        # With this header, events have ids, and a client can go on behind the last one that it has.
        headers = {"content-type": "application/json", "last-event-id": self._last_id}
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=self.silence_s)
        try:
            connection.request("POST", "/v1/completions", json.dumps({**body, **options}), headers)
            response = connection.getresponse()
            request_id = response.headers.get("x-request-id", "")
            if response.status != 200:
                self._refuse(response.status, json.loads(response.read()), request_id)
                return
            self._read(response, request_id)
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse, request_id: str) -> None:
        event_id = ""
        while line := response.readline():
            if line.startswith(b"id: "):
                event_id = line[4:].decode().strip()
            elif line.startswith(b"data: [DONE]"):
                self.over = True
                return
            elif line.startswith(b"data: "):
                said = json.loads(line[6:])
                if "error" in said:
                    self._refuse(200, said, request_id)
                    return
                self._last_id = event_id
                if new := [token for choice in said["choices"] for token in choice.get("token_ids") or ()]:
                    self.tokens += new
                    self.heard_s.append(time.monotonic())
        raise http.client.IncompleteRead(b"")

    def _refuse(self, status: int, said: Mapping[str, Any], request_id: str) -> None:
        error = said["error"]
        self.refusal = Refusal(status, error.get("code") or "", error["message"], request_id)
