"""The HTTP server in this process, before an application of the test's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from pdserve.config import HttpConfig
from pdserve.http.server import HttpServer, bind


@asynccontextmanager
async def http_serving(app: Any, config: HttpConfig) -> AsyncIterator[tuple[str, int]]:
    """Its address."""
    with closing(bind(config)) as listener:
        server = HttpServer(app, listener, config)
        await server.start()
        try:
            yield listener.getsockname()
        finally:
            await server.stop()
