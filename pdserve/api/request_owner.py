"""Frees what a request holds when its connection is done with it, however that came about.

A handler can be cancelled, and a response's generator may never be started (its ``finally`` then never runs); the ASGI
call around both always returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, cast

from quart import request

_KEY = "pdserve.owner"

Scope = Any
Asgi = Callable[[Any, Any, Any], Awaitable[None]]


class RequestOwner:
    """ASGI middleware: gives each HTTP request an exit stack, and closes it at the end."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with contextlib.ExitStack() as owned:
            scope[_KEY] = owned
            await self._app(scope, receive, send)


def own(close: Callable[[], None]) -> None:
    """Calls ``close`` when the current request is over. Only within a request."""
    owned: contextlib.ExitStack = cast("dict[str, Any]", request.scope)[_KEY]
    owned.callback(close)
