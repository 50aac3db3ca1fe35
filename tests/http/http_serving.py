"""Runs the HTTP server in this process, in front of an application of the test's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from pdserve.config import HttpConfig
from pdserve.http.server import HttpServer, bind


@asynccontextmanager
async def http_serving(app: Any, config: HttpConfig) -> AsyncIterator[tuple[str, int]]:
    """Yields the server's address."""
    with closing(bind(config)) as listener:
        server = HttpServer(app, listener, config)
        await server.start()
        try:
            yield listener.getsockname()
        finally:
            await server.stop()
