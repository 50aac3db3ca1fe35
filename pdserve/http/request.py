"""The label of an HTTP request, and what the request holds until its connection is done with it.

The label is the ``x-request-id`` that clients and logs see. It is never a key.

``RequestOwner`` frees what a request holds, however the request ends. A handler can be cancelled, a response's
generator may never be started (its ``finally`` then never runs), and when the server cancels the whole ASGI call
Quart leaves the handler behind, running. The ASGI call around it all always returns.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, cast

from quart import request

REQUEST_ID_HEADER = "x-request-id"
_ACCEPTABLE = re.compile(r"[\x21-\x7e]{1,128}")


def request_label(given: str | None) -> str:
    """``given``, if it is fit for a header and a log line, or a new one."""
    return given if given and _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex


_KEY = "pdserve.owned"

Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class RequestOwner:
    """ASGI middleware: ends with each HTTP request what was given to ``own`` in it."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owned = scope[_KEY] = Owned()
        try:
            await self._app(scope, receive, send)
        finally:
            owned.end()


class Owned:
    """What one HTTP request holds."""

    def __init__(self) -> None:
        self._ended = False
        self._held: list[tuple[Callable[[], None], asyncio.Task[Any] | None]] = []

    def add(self, close: Callable[[], None]) -> None:
        """Raises CancelledError if the request is over already; ``close`` has been called then."""
        if self._ended:
            close()
            raise asyncio.CancelledError
        self._held.append((close, asyncio.current_task()))

    def end(self) -> None:
        self._ended = True
        for close, task in self._held:
            close()
            if task is not None:
                task.cancel()


def own(close: Callable[[], None]) -> None:
    """Calls ``close`` when the current request is over, and cancels this task if it still runs then.

    Only within a request.
    """
    cast("dict[str, Owned]", request.scope)[_KEY].add(close)
