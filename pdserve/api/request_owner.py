"""Frees what a request holds when its connection is done with it, however that came about.

A handler can be cancelled, a response's generator may never be started (its ``finally`` then never runs), and when the
server cancels the whole ASGI call Quart leaves the handler behind, running. The ASGI call around it all always returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from quart import request

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
