"""A server whose answers the test decides: it speaks as much of OpenAI's API as the load generator asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LIMIT_S = 30.0


@dataclass
class OpenAiServer:
    """Streams ``max_tokens`` chunks. It keeps the bodies that it received, and the most requests at once."""

    fault: str = ""
    gathers: int = 1
    """The server answers the first request when this number of requests has come."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    """The headers of the requests, in lower case."""
    fails_after: int | None = None
    """The server answers so many requests and refuses the later ones."""
    running: int = 0
    most: int = 0
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.running += 1
        self.most = max(self.most, self.running)
        self._together.set() if self.running >= self.gathers else None
        await asyncio.wait_for(self._together.wait(), LIMIT_S)
        try:
            return await self._stream(request, body)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.fault == "refuse" or (self.fails_after is not None and len(self.bodies) > self.fails_after):
            return web.json_response({"error": {"message": "full"}}, status=503)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        tokens = body["max_tokens"] - (1 if self.fault == "short" else 0)
        if "messages" in body:
            await self._write(response, {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None})
        for index in range(tokens):
            if self.fault == "cut" and index == 1:
                assert request.transport is not None
                request.transport.close()
                return response
            if self.fault == "error event" and index == 1:
                await response.write(b'event: error\ndata: {"error": {"message": "engine died"}}\n\n')
                return response
            if "messages" in body:
                await self._write(response, {"index": 0, "delta": {"content": f"w{index}"}, "finish_reason": None})
                continue
            first = body["prompt"][0] if isinstance(body["prompt"], list) else 0
            choice = {"index": 0, "text": "x", "token_ids": [first + index], "finish_reason": None}
            await self._write(response, choice)
        if self.fault == "no end":
            return response
        usage = {"choices": [], "usage": {"completion_tokens": tokens}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def _write(self, response: web.StreamResponse, choice: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

    async def serve(self, work: Callable[[], Awaitable[Any]], limit_s: float = LIMIT_S) -> Any:
        self._together = asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self.answer),
                web.post("/v1/chat/completions", self.answer),
                web.get("/v1/models", self.models),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            return await asyncio.wait_for(work(), limit_s)
        finally:
            await runner.cleanup()
