"""Asks a running cluster one question, as a client would, and streams the answer."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdserve.errors import PdserveError

MAX_TOKENS = 256


class AskFailed(PdserveError):
    """The cluster did not answer the question."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """How long an answer took. Times are in seconds."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    decode_s: float
    """The time from the first piece of text to the end."""

    def __str__(self) -> str:
        rate = (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0
        return (
            f"TTFT {self.ttft_s * 1000:.0f} ms, {rate:.1f} tok/s "
            f"({self.prompt_tokens} prompt tokens, {self.completion_tokens} generated)"
        )


async def ask(
    url: str,
    model: str,
    question: str,
    show: Callable[[str], None],
    *,
    api_key: str,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> TimedAnswer:
    """Asks ``question`` at ``url`` and hands each piece of the answer to ``show``. Raises AskFailed.

    An empty ``api_key`` is not sent. ``tls`` is for an HTTPS ``url``; without it the system's authorities count.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    start = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=tls or True)) as session,
            session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise AskFailed(f"the cluster answered {response.status}: {(await response.text())[:2000]}")
            return await _receive(response, show, start)
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise AskFailed(f"no answer from {url}: {exc!r}") from exc


async def _receive(response: aiohttp.ClientResponse, show: Callable[[str], None], start: float) -> TimedAnswer:
    first = end = 0.0
    finish = ""
    usage: dict[str, int] = {}
    async for chunk in answer_events(response):
        if "error" in chunk:
            raise AskFailed(f"the answer broke off: {chunk['error'].get('message', chunk['error'])}")
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            end = time.monotonic()
            finish = choice.get("finish_reason") or finish
            if text := choice["delta"].get("content"):
                first = first or end
                show(text)
    if not (finish and first and usage):
        raise AskFailed("the answer ended without a text, a finish reason or usage")
    return TimedAnswer(usage["prompt_tokens"], usage["completion_tokens"], first - start, end - first)


async def answer_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of an SSE stream. Raises AskFailed if it ends before ``[DONE]``."""
    async for line in response.content:
        data = line.decode().strip()
        if not data.startswith("data:"):
            continue
        payload = data.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        try:
            yield json.loads(payload)
        except ValueError as exc:
            raise AskFailed(f"not a chunk of an answer: {payload[:200]!r}") from exc
    raise AskFailed("the stream ended without [DONE]")
