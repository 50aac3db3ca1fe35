"""Tests that clients notice what goes wrong with an answer, and that they ask all the time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from lab.deploy_containers.clients import Client, load


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


WHOLE = event("a") + event("b") + "data: [DONE]\n\n"


@asynccontextmanager
async def answering(*bodies: str, status: int = 200) -> AsyncIterator[Client]:
    """Yields a client of a server that gives these answers, the last one again and again."""
    left, bodies_seen = list(bodies), set[bytes]()

    async def answer(request: web.Request) -> web.Response:
        # Whoever asks again sends the same bytes.
        bodies_seen.add(await request.read())
        assert len(bodies_seen) == 1
        return web.Response(text=left.pop(0) if len(left) > 1 else left[0], status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session:
            yield Client(f"http://127.0.0.1:{port}", session)
    finally:
        await runner.cleanup()


async def test_a_whole_answer_has_its_text_and_no_failure() -> None:
    async with answering(WHOLE) as client:
        answer = await client.ask("?", 2)
    assert (answer.text, answer.failure, len(answer.arrivals)) == ("ab", "", 2)


@pytest.mark.parametrize(
    ("body", "status", "failure"),
    [
        (event("a"), 200, "without [DONE]"),
        (event("a") + 'data: {"error": {"message": "lost"}}\n\n' + "data: [DONE]\n\n", 200, "lost"),
        ("no node", 503, "503: no node"),
    ],
)
async def test_what_is_no_whole_answer_is_a_failure(body: str, status: int, failure: str) -> None:
    async with answering(body, status=status) as client:
        assert failure in (await client.ask("?", 2)).failure


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with answering(WHOLE) as client:
        pass
    async with aiohttp.ClientSession() as client.session:
        assert "ClientConnector" in (await client.ask("?", 2)).failure


async def test_a_client_that_asks_again_goes_on_behind_what_it_has() -> None:
    async with answering("id: k.1\n" + event("a"), event("b") + "data: [DONE]\n\n") as client:
        answer = await client.ask("?", 2, retries=3)
    assert (answer.text, answer.failure, answer.retries) == ("ab", "", 1)
    async with answering("no node", status=503) as client:
        answer = await client.ask("?", 2, retries=1)
    assert (answer.failure, answer.retries) == ("503: no node", 1)


async def test_load_keeps_each_answer_and_tells_the_broken_and_the_wrong_from_the_others() -> None:
    async with (
        answering(event("a"), event("x") + "data: [DONE]\n\n", WHOLE) as client,
        load(client, {"?": "ab"}, clients=1, max_tokens=2) as seen,
    ):
        await seen.more(4)
    assert len(seen.failed) == len(seen.wrong) == 1
    assert len(seen.answers) >= 4
