"""The client of a cell: it reads a stream, and can go on with it at another proxy."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.nodes import MODEL

NEW_TOKENS = 48
OVER_S = 60.0
MAX_TRIES = 20
MAX_PAUSE_S = 5.0
"""The client heeds a Retry-After of so many seconds at most."""


@dataclass(frozen=True)
class Refusal:
    """An answer that is none."""

    status: int
    code: str
    message: str
    request_id: str
    retry_after_s: float | None = None

    @property
    def invites(self) -> bool:
        """Whether it says that the same request may come again."""
        return self.status in (502, 503) and self.retry_after_s is not None


@dataclass
class Client:
    """One request, whose stream a thread reads. With several URLs, it asks the next one for what it lacks."""

    urls: Sequence[str]
    prompt: Sequence[int]
    silence_s: float = OVER_S
    """When the client has lost patience, it gives a connection up on which it has heard nothing for so long."""
    seed: int = 0
    """A request is known by its bytes: one with another seed is another one, with the same answer."""
    tokens: list[int] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)
    """When tokens have come, on the monotonic clock."""
    event_ids: bool = True
    """Whether it may ask again. The proxy chooses the node of such a request by its key, and of others in turn."""
    tries: int = 0
    over: bool = False
    refusals: list[Refusal] = field(default_factory=list)
    _impatient: bool = False
    _connection: http.client.HTTPConnection | None = None
    _last_id: str = ""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def refusal(self) -> Refusal | None:
        """The last one."""
        return self.refusals[-1] if self.refusals else None

    def lose_patience(self) -> None:
        """From now on, silence is a reason to go to the next proxy. Before the fault it is none."""
        self._impatient = True
        threading.Thread(target=self._watch, args=(self._connection,), daemon=True).start()

    def _watch(self, first: http.client.HTTPConnection | None) -> None:
        """Ends the connection that the fault has met, once it is silent."""
        while self._thread.is_alive() and first is self._connection:
            heard = len(self.heard_s)
            time.sleep(self.silence_s)
            if len(self.heard_s) == heard and first is self._connection and first is not None:
                # It has no socket any more if it has ended meanwhile.
                with suppress(OSError, AttributeError):
                    first.sock.shutdown(socket.SHUT_RDWR)
                return

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
            if self.over or len(self.urls) == 1:
                return
            refusal = self.refusals[-1]
            if not refusal.invites:
                return
            time.sleep(min(refusal.retry_after_s or 0.0, MAX_PAUSE_S))

    def _ask(self, url: str) -> None:
        body = {"model": MODEL, "prompt": list(self.prompt), "max_tokens": NEW_TOKENS, "temperature": 0}
        options = {"seed": self.seed, "ignore_eos": True, "stream": True, "return_token_ids": True}
        headers = {"content-type": "application/json"}
        if self.event_ids:
            # With this header, events have ids, and a client can go on behind the last one that it has.
            headers["last-event-id"] = self._last_id
        patience_s = self.silence_s if self._impatient else OVER_S
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=patience_s)
        self._connection = connection
        try:
            connection.request("POST", "/v1/completions", json.dumps({**body, **options}), headers)
            response = connection.getresponse()
            request_id = response.headers.get("x-request-id", "")
            if response.status != 200:
                said, pause = json.loads(response.read()), response.headers.get("retry-after")
                self._refuse(response.status, said, request_id, None if pause is None else float(pause))
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

    def _refuse(
        self, status: int, said: Mapping[str, Any], request_id: str, retry_after_s: float | None = None
    ) -> None:
        error = said["error"]
        self.refusals.append(Refusal(status, error.get("code") or "", error["message"], request_id, retry_after_s))
