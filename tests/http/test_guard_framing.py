"""Tests where a request ends: offers of other protocols, heads with two meanings, and clients of HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, TypeAlias

import pytest
import uvicorn
import uvloop

from pdserve.http.guard import GuardedHttp
from pdserve.http.outlet import OUTLET, Outlet
from tests.http.test_guard_connection import Reader, Server, Writer

WAIT_S = 10.0
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
HEAD = b"POST /first HTTP/1.1\r\nhost: x\r\n"
UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"sec-websocket-version: 13\r\n",
    "anything": b"connection: keep-alive, Upgrade\r\nupgrade: some/1.0, other\r\n",
}
NESTED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
"""This body would be a request if it were not read as a body."""
BODIES = {
    "content-length": (b"content-length: %d\r\n\r\n" % len(NESTED), NESTED),
    "chunked": (
        b"transfer-encoding: chunked\r\n\r\n",
        b"4\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (NESTED[:4], len(NESTED) - 4, NESTED[4:]),
    ),
    "none": (b"\r\n", b""),
}

Run: TypeAlias = Callable[[Coroutine[Any, Any, Any]], Any]
Talk: TypeAlias = Callable[..., list[tuple[list[str], bytes]]]


class Echo:
    """Answers with the method, the path and the body of each request."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        said = b"<%b %b %b>" % (scope["method"].encode(), scope["path"].encode(), body)
        match scope["path"]:
            case "/unsized":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for piece in (said[:3], said[3:]):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})
            case "/outlet":
                outlet: Outlet = scope["extensions"][OUTLET]
                await send({"type": "http.response.start", "status": 200, "headers": []})
                outlet.write_chunk(said)
                await send({"type": "http.response.body"})
            case _:
                length = (b"content-length", b"%d" % len(said))
                await send({"type": "http.response.start", "status": 200, "headers": [length]})
                await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(app, port=0, http=GuardedHttp, ws="none", lifespan="off", log_config=None)
    server = Server(config)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(WAIT_S):
            port = await server.listening
        yield port
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, WAIT_S)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[Reader, Writer]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(WAIT_S):
        with closing(writer):
            yield reader, writer


async def send_all(writer: Writer, packets: Iterable[bytes]) -> None:
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0)  # The packets should arrive separately, but nothing changes if they do not.


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@pytest.fixture
def talk(run: Run) -> Talk:
    """Sends each client's packets over a connection of its own.

    Returns, for each client, the paths of the requests that the application received, and all that the server sent.
    """

    def run_all(*clients: Sequence[bytes]) -> list[tuple[list[str], bytes]]:
        async def scenario() -> list[tuple[list[str], bytes]]:
            app = Echo()
            async with serving(app) as port:
                return [await one(app, port, packets) for packets in clients]

        async def one(app: Echo, port: int, packets: Sequence[bytes]) -> tuple[list[str], bytes]:
            app.paths.clear()
            async with connected(port) as (reader, writer):
                await send_all(writer, packets)
                said = await reader.read()
            return app.paths.copy(), said

        outcomes: list[tuple[list[str], bytes]] = run(scenario())
        return outcomes

    return run_all


def answered(said: bytes) -> list[bytes]:
    """Returns the bodies of the answers, which are all in angle brackets."""
    return [part.partition(b">")[0] for part in said.split(b"<")[1:]]


def refusal(said: bytes) -> tuple[int, str]:
    head, _, body = said.partition(b"\r\n\r\n")
    assert len(re.findall(rb"^HTTP/1.1 \d", said, re.MULTILINE)) == 1, said
    assert b"\r\nconnection: close" in head
    return int(head.split(b" ", 2)[1]), json.loads(body)["error"]["code"]


# ------------------------------------------------------------------ offers of other protocols


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("upgrade", UPGRADES)
def test_an_offered_upgrade_is_ignored_and_the_body_stays_the_body(run: Run, upgrade: str, body: str) -> None:
    framing, sent = BODIES[body]
    head = HEAD + UPGRADES[upgrade] + framing
    cuts = ([head + sent], [head, sent], [bytes([byte]) for byte in head + sent])

    async def scenario() -> None:
        app = Echo()
        async with serving(app) as port, connected(port) as (reader, writer):
            for packets in cuts:
                await send_all(writer, packets)
                said = await reader.readuntil(b">")
                assert said.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" not in said
                assert answered(said) == [b"POST /first " + (NESTED if sent else b"")]
            writer.write(LAST)
            assert answered(await reader.read()) == [b"GET /last "]
        assert app.paths == ["/first"] * len(cuts) + ["/last"]

    run(scenario())


def test_what_is_pipelined_behind_an_offered_upgrade_is_dropped_and_ends_the_connection(talk: Talk) -> None:
    requests = [HEAD + UPGRADES["h2c"] + framing + sent for framing, sent in BODIES.values()]
    for paths, said in talk(*([request * 2 + LAST] for request in requests)):
        assert paths == ["/first"]
        assert b"connection: close" in said
        assert len(answered(said)) == 1


def test_a_body_that_is_wrong_behind_an_offered_upgrade_is_refused(talk: Talk) -> None:
    head = HEAD + UPGRADES["h2c"] + b"transfer-encoding: chunked\r\n\r\n"
    for _, said in talk([head, b"nonsense\r\n"], [head + b"nonsense\r\n"]):
        assert refusal(said) == (400, "invalid_http")


NOT_HTTP_1 = {
    b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n" + LAST: (501, "unknown_method"),
    b"CONNECT /first HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc" + LAST: (501, "unknown_method"),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + LAST: (400, "invalid_http"),
    b"GET / HTTP/2.0\r\nhost: x\r\n\r\n": (505, "http_version_not_supported"),
    b"GET / HTTP/0.9\r\n\r\n": (505, "http_version_not_supported"),
    b"GET /\r\n\r\n": (505, "http_version_not_supported"),
    b"GET / HTTP/1.2\r\nhost: x\r\n\r\n": (400, "invalid_http"),
}


def test_what_is_no_request_of_http_1_is_refused(talk: Talk) -> None:
    for (sent, expected), (paths, said) in zip(NOT_HTTP_1.items(), talk(*([sent] for sent in NOT_HTTP_1)), strict=True):
        assert refusal(said) == expected, sent
        assert paths == [], sent


# ------------------------------------------------------------------ heads with two meanings

_POST = b"POST /first HTTP/1.1\r\n"
_CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"


def test_a_host_that_is_missing_doubled_or_none_is_refused(talk: Talk) -> None:
    several = [b"", b"host: x\r\nhost: x\r\n", b"host: x\r\nHOST: y\r\n"]
    wrong = [b"host: %b\r\n" % host for host in (b"x, y z", b"a b", b"a/b", b"u@x", b"x\\y", b"\xe4", b"x?y", b"x#y")]
    for paths, said in talk(*([_POST + host + b"content-length: 0\r\n\r\n"] for host in several + wrong)):
        assert refusal(said) == (400, "invalid_host")
        assert paths == []


def test_hosts_in_proper_form_are_taken(talk: Talk) -> None:
    hosts = (b"x", b"x:8000", b"127.0.0.1:1", b"[::1]:8000", b"a-b.example", b"")
    for paths, _ in talk(*([b"GET /first HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % host] for host in hosts)):
        assert paths == ["/first"]


TRICKS = {
    "two equal lengths": b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "two lengths": b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
    "list of lengths": b"content-length: 3, 3\r\n\r\nabc",
    "signed length": b"content-length: +3\r\n\r\nabc",
    "negative length": b"content-length: -3\r\n\r\nabc",
    "hexadecimal length": b"content-length: 0x3\r\n\r\nabc",
    "empty length": b"content-length: \r\n\r\nabc",
    "length of 2^64 + 3": b"content-length: 18446744073709551619\r\n\r\nabc",
    "split length": b"content-length: 3 3\r\n\r\nabc",
    "length and chunked": b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n" + _CHUNKS,
    "chunked and length": b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n" + _CHUNKS,
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + _CHUNKS,
    "chunked, chunked": b"transfer-encoding: chunked, chunked\r\n\r\n" + _CHUNKS,
    "chunked, identity": b"transfer-encoding: chunked, identity\r\n\r\n" + _CHUNKS,
    "empty coding": b"transfer-encoding: \r\n\r\n" + _CHUNKS,
    "coding behind a control character": b"transfer-encoding: \x0bchunked\r\n\r\n" + _CHUNKS,
    "folded coding": b"transfer-encoding:\r\n chunked\r\n\r\n" + _CHUNKS,
    "space before the colon": b"transfer-encoding : chunked\r\n\r\n" + _CHUNKS,
    "space before the name": b" transfer-encoding: chunked\r\n\r\n" + _CHUNKS,
    "bare line feed": b"a: b\ncontent-length: 3\r\n\r\nabc",
    "bare carriage return": b"a: b\rcontent-length: 3\r\n\r\nabc",
    "NUL in a value": b"a: b\x00\r\n\r\n",
    "no name": b": b\r\n\r\n",
    "no colon": b"content-length 3\r\n\r\nabc",
    "folded header": b"a: b\r\n c\r\n\r\n",
    "hexadecimal prefix in a chunk": b"transfer-encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "space after a chunk's size": b"transfer-encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n",
    "signed chunk": b"transfer-encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    "chunk of 2^64 and more": b"transfer-encoding: chunked\r\n\r\nffffffffffffffff3\r\nabc\r\n0\r\n\r\n",
    "line feed alone behind a chunk's size": b"transfer-encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    "line feed alone in a chunk's extension": b"transfer-encoding: chunked\r\n\r\n3;a\nabc\r\n0\r\n\r\n",
    "line feed alone behind a chunk": b"transfer-encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n",
    "longer chunk than its size": b"transfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
}


def test_requests_whose_end_could_be_read_in_two_ways_are_refused(talk: Talk) -> None:
    sent = [[_POST + b"host: x\r\n" + trick + LAST] for trick in TRICKS.values()]
    for name, (paths, said) in zip(TRICKS, talk(*sent), strict=True):
        assert refusal(said) == (400, "invalid_http"), name
        assert "/last" not in paths, name


def test_other_transfer_codings_than_chunked_are_not_implemented(talk: Talk) -> None:
    codings = (b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked", b"identity", b"xchunked", b"chunked;a=b")
    for paths, said in talk(
        *([_POST + b"host: x\r\ntransfer-encoding: " + coding + b"\r\n\r\n" + _CHUNKS + LAST] for coding in codings)
    ):
        assert refusal(said) == (501, "unknown_transfer_encoding")
        assert paths == []


# ------------------------------------------------------------------ HTTP/1.0


def test_chunks_are_never_sent_to_a_client_of_http_1_0(talk: Talk) -> None:
    paths = (b"/sized", b"/unsized", b"/outlet")
    kinds = [(path, more) for path in paths for more in (b"", b"connection: keep-alive\r\n", b"host: x\r\n")]
    sent = [[b"POST %b HTTP/1.0\r\n%bcontent-length: 2\r\n\r\nab" % kind] for kind in kinds]
    for (path, _), (_, said) in zip(kinds, talk(*sent), strict=True):
        head, _, body = said.partition(b"\r\n\r\n")
        assert body == b"<POST %b ab>" % path
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head


def test_http_1_1_gets_chunks(talk: Talk) -> None:
    paths = (b"/unsized", b"/outlet")
    for _, said in talk(*([b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path] for path in paths)):
        assert b"transfer-encoding: chunked" in said
        assert said.endswith(b"\r\n0\r\n\r\n")


def test_a_client_of_http_1_0_is_told_nothing_on_the_way(talk: Talk) -> None:
    [(_, said)] = talk([b"POST / HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n", b"ab"])
    assert said.startswith(b"HTTP/1.1 200 ")


def test_http_1_0_is_no_way_around(talk: Talk) -> None:
    heads = {b"host: x\r\nhost: y\r\n": "invalid_host", b"transfer-encoding: chunked\r\n": "invalid_http"}
    sent = [[b"POST / HTTP/1.0\r\n" + head + b"\r\n" + _CHUNKS] for head in heads]
    for code, (paths, said) in zip(heads.values(), talk(*sent), strict=True):
        assert refusal(said) == (400, code)
        assert paths == []
