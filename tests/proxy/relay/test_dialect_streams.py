"""Streams of named events, several of them for one token, go on at another node behind any of them."""

from __future__ import annotations

import json

import pytest

from pdserve.control.journal import DONE_ENTRY, cut, entry
from tests.proxy.fake_node import Behaviour, Exchange
from tests.proxy.journaling_nodes import nodes, split
from tests.proxy.shared_proxy import SharedProxy

EVENTS = [
    entry(0, [5, 6]) + b"event: begin\ndata: {}\n\n",
    entry(0, ()) + b"event: open\ndata: {}\n\n",
    entry(0, ()) + b'event: piece\ndata: {"text": "a"}\n\n',
    entry(0, [7]) + b'event: piece\ndata: {"text": "b"}\n\n',
    entry(0, [8]) + b"event: close\ndata: {}\n\n",
    DONE_ENTRY + b"event: end\ndata: {}\n\n",
]
"""The events of a stream with their entries."""
SHOWN = cut(b"".join(EVENTS))[0]


def answers_up_to(end: int) -> Behaviour:
    """Returns the behaviour of a node that goes on where the journal ends, and dies unless it comes to the end."""

    async def answer(exchange: Exchange) -> None:
        _, journal = split(exchange.request)
        await exchange.begin_stream()
        await exchange.chunk(b"".join(EVENTS[journal.count(b"\n") : end]))
        if end < len(EVENTS):
            exchange.die()
        else:
            await exchange.finish()

    return answer


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("end", range(1, len(EVENTS)))
async def test_the_stream_goes_on_wherever_its_node_dies(proxy: SharedProxy, end: int, path: str) -> None:
    async with proxy.cluster() as running, nodes(running, answers_up_to(end), answers_up_to(len(EVENTS))) as asked:
        async with running.http.post(path, json={"model": "m", "stream": True}) as response:
            assert await response.read() == SHOWN
        assert split(asked.asked[1])[1] == cut(b"".join(EVENTS[:end]))[1]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/responses", {"type": "error", "code": "upstream_lost", "param": None, "sequence_number": 2}),
        ("/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
    ],
)
async def test_a_stream_that_nobody_goes_on_with_ends_with_the_error_of_its_route(
    proxy: SharedProxy, path: str, error: dict[str, object]
) -> None:
    async with (
        proxy.cluster() as running,
        nodes(running, answers_up_to(2), answers_up_to(2)),
        running.http.post(path, json={"model": "m", "stream": True}) as response,
    ):
        body = await response.read()
    begin = cut(b"".join(EVENTS[:2]))[0] + b"event: error\ndata: "
    assert body.startswith(begin)
    found = json.loads(body[len(begin) :])
    assert found.get("error", found).pop("message")
    # Anthropic's form alone names the request.
    assert found.pop("request_id", None) == (response.headers["x-request-id"] if "error" in error else None)
    assert found == error


async def test_the_proxy_s_own_errors_have_the_form_of_the_route(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running:
        async with running.http.post("/v1/messages", json={"model": "m"}) as response:
            error = json.loads(await response.read())
            assert (response.status, error["type"], error["error"]["type"]) == (503, "error", "overloaded_error")
            assert error["request_id"] == response.headers["x-request-id"]
        async with running.http.get("/v1/messages/batches") as response:
            error = json.loads(await response.read())
            assert (response.status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
            assert error["request_id"] == response.headers["x-request-id"]
        async with running.http.post("/v1/responses", json={"model": "m"}) as response:
            assert set(json.loads(await response.read())["error"]) == {"message", "type", "param", "code"}


async def test_tokens_are_counted_by_a_node(proxy: SharedProxy) -> None:
    async def answer(exchange: Exchange) -> None:
        assert exchange.request.path == "/v1/messages/count_tokens"
        await exchange.answer(200, b'{"input_tokens": 3}')

    async with (
        proxy.cluster() as running,
        nodes(running, answer),
        running.http.post("/v1/messages/count_tokens", json={"model": "m"}) as response,
    ):
        assert json.loads(await response.read()) == {"input_tokens": 3}
