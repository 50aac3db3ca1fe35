"""Tests ``--ask`` against servers that answer correctly and servers that do not."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.cli.chat.server import Access, Answer, AskFailed, Server, ask, latency_line
from pdserve.cli.up.command import api_key, status_is_shown
from pdserve.config import HttpConfig
from pdserve.errors import ConfigError

KEY = "0123456789abcdef0123"


def chunk(text: str | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(pieces: list[bytes], status: int = 200, authorization: str | None = None) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers.get("authorization") == authorization
        body = await request.json()
        assert body["stream"] is True
        assert body["messages"] == [{"role": "user", "content": "Why?"}]
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def put(pieces: list[bytes], status: int = 200, *, key: str = "") -> tuple[Answer, str]:
    shown: list[str] = []

    async with server(pieces, status, f"Bearer {key}" if key else None) as url:
        answer = await ask(Server(url, "m", False, Access(key, timeout_s=20)), "Why?", shown.append)
    return answer, "".join(shown)


async def test_the_answer_is_shown_and_counted() -> None:
    answer, shown = await put([chunk(), chunk("Because"), chunk("."), chunk(finish="stop"), USAGE, DONE])
    assert shown == "Because."
    assert (answer.prompt_tokens, answer.completion_tokens) == (5, 2)
    assert answer.began_s < answer.first_s < answer.last_s
    assert re.fullmatch(r"TTFT [\d.]+ m?s, [\d.]+ tok/s, 5 prompt \+ 2 answer tokens", latency_line(answer, None))


async def test_a_key_is_sent_where_one_is_wanted() -> None:
    assert (await put([chunk("Because"), chunk(finish="stop"), USAGE, DONE], key="a-key"))[1] == "Because"


@pytest.mark.parametrize("source", ["variable", "file", "toml"])
def test_the_key_comes_from_where_the_proxy_has_it(tmp_path: Path, source: str) -> None:
    keys, settings = tmp_path / "keys", tmp_path / "pdserve.toml"
    keys.write_text(f"# ours\nalice {KEY}\nbob {KEY[::-1]}\n")
    settings.write_text(f'[admission]\napi-key = ["{KEY}"]\n')
    given = {
        "variable": {"PDSERVE_API_KEY": f"{KEY},{KEY[::-1]}"},
        "file": {"PDSERVE_API_KEY_FILE": str(keys)},
        "toml": {"PDSERVE_CONFIG": str(settings)},
    }
    assert api_key(given[source]) == KEY


def test_no_key_is_made_up() -> None:
    assert api_key({}) == ""


def test_the_status_page_is_named_where_there_is_one() -> None:
    here, everywhere = HttpConfig(), HttpConfig(host="0.0.0.0")
    assert status_is_shown({}, here)
    assert not status_is_shown({"PDSERVE_STATUS_PAGE": "off"}, here)
    assert not status_is_shown({}, everywhere)
    assert status_is_shown({"PDSERVE_API_KEY": KEY}, everywhere)


def test_keys_that_no_proxy_would_take_are_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="16 to"):
        api_key({"PDSERVE_API_KEY": "short"})


@pytest.mark.parametrize(
    ("pieces", "status", "message"),
    [
        ([b'{"error": {"message": "full"}}'], 503, "answers with status 503: full"),
        ([chunk("B"), b'event: error\ndata: {"error": {"message": "died"}}\n\n'], 200, "broke off: died"),
        ([chunk("B"), chunk(finish="stop"), USAGE], 200, r"broke off: the stream ended without \[DONE\]"),
        ([chunk("B"), USAGE, DONE], 200, "broke off: the server gave no reason for its end"),
        ([chunk(finish="stop"), USAGE, DONE], 200, "has no text"),
        ([b"data: nonsense\n\n", DONE], 200, "not a chunk"),
    ],
)
async def test_anything_less_is_a_failure(pieces: list[bytes], status: int, message: str) -> None:
    with pytest.raises(AskFailed, match=message):
        await put(pieces, status)


async def test_nobody_there_is_a_failure() -> None:
    with pytest.raises(AskFailed, match="nobody answers"):
        await ask(Server("http://127.0.0.1:1", "m", False, Access(timeout_s=5)), "Why?", print)
