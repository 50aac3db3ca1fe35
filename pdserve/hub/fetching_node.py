"""What a node answers while its model is fetched, before it has an engine: it lives, and is not ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from pdserve.config import HttpConfig, NodeConfig
from pdserve.http.server import HttpServer, bind
from pdserve.hub.download import DownloadProgress, Message, ProgressLines, percent
from pdserve.hub.finding import FoundModel, WantedModel, fetched_model
from pdserve.signals import stop_signals

log = logging.getLogger(__name__)

Scope = Mapping[str, Any]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


async def fetch_model(wanted: WantedModel, config: NodeConfig, environ: Mapping[str, str]) -> FoundModel | None:
    """Fetches a node's model, and answers meanwhile at the node's address how far that is, if it has a fixed port.

    Returns None if the node has to end before. Raises ModelError, HubError, and ConfigError if it cannot listen.
    """
    state = FetchingState(str(wanted.name))
    lines = ProgressLines(str(wanted.name), log.info)

    def tell(message: Message) -> None:
        state.take(message)
        lines.take(message)

    with stop_signals() as signals:
        server = await _answering(state, config.http)
        fetching = asyncio.create_task(fetched_model(wanted, environ, tell))
        stopping = asyncio.create_task(signals.drain.wait())
        try:
            await asyncio.wait([fetching, stopping], return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() else None
        finally:
            fetching.cancel()
            stopping.cancel()
            await asyncio.gather(fetching, stopping, return_exceptions=True)
            if server is not None:
                await server.stop()


async def _answering(state: FetchingState, http: HttpConfig) -> HttpServer | None:
    """Returns a server that has to be stopped; None for a port that the system chooses, which nobody knows yet."""
    if not http.port:
        return None
    server = HttpServer(state, bind(http), http, shutdown_s=1)
    await server.start()
    return server


class FetchingState:
    """How far the download is, and the ASGI application that says so."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._share = ""

    def take(self, message: Message) -> None:
        if isinstance(message, DownloadProgress):
            self._share = f" {percent(message)} %"

    @property
    def words(self) -> str:
        return f"downloading{self._share}"

    async def __call__(self, scope: Scope, receive: object, send: Send) -> None:
        """Answers one request: 200 to whether the node lives, and 503 to all others."""
        if scope["type"] != "http":
            return
        status, body = 503, {"status": self.words, "reason": f"the model {self._name} is being fetched"}
        if scope["path"] in ("/live", "/health", "/ping"):
            status, body = 200, {"status": "live" if scope["path"] == "/live" else "healthy"}
        headers = [(b"content-type", b"application/json"), *([(b"retry-after", b"5")] if status == 503 else [])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": msgspec.json.encode(body)})
