"""Tests what all routes of nodes and proxies share: request ids, refusals, and requests that end with their client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from quart import Response
from werkzeug.exceptions import LengthRequired

from pdserve.config import HttpConfig
from pdserve.errors import TooManyRequests
from pdserve.http import request as http_request
from pdserve.http.request import HttpRequest
from pdserve.http.routes import DirectRoutes, quart_app
from tests.api.plain_http import Answer, send
from tests.http.http_serving import http_serving

WAIT_S = 10.0


class Application:
    """An application with direct routes and one route of Quart's, which records the statuses of its errors."""

    def __init__(self) -> None:
        self.errors: list[int] = []
        self.hanging, self.cancelled = asyncio.Event(), asyncio.Event()
        app = quart_app("node", 1000, self.errors.append)
        app.add_url_rule("/length", "length", self._length)
        app.add_url_rule("/defect", "defect", self._quart_defect)
        app.add_url_rule("/", "root", self._root)
        app.add_url_rule("/named/<path:name>/end", "named", self._named)
        handlers = {
            "/echo": self._echo,
            "/stream": self._stream,
            "/refuse": self._refuse,
            "/break": self._break,
            "/break-off": self._break_off,
            "/hang": self._hang,
        }
        self.asgi = DirectRoutes(handlers, app, "node", self.errors.append)

    async def _length(self) -> Response:
        raise LengthRequired

    async def _root(self) -> Response:
        return Response("root")

    async def _named(self, name: str) -> Response:
        return Response(name)

    async def _quart_defect(self) -> Response:
        raise ValueError("a secret")

    async def _echo(self, request: HttpRequest) -> None:
        await request.respond(200, {"content-type": "text/plain"}, await request.body(1000))

    async def _stream(self, request: HttpRequest) -> None:
        await request.begin(200, {}, b"a", more=True)
        assert request.write(b"b")
        await request.drain()
        await request.send(b"c", more=False)

    async def _refuse(self, request: HttpRequest) -> None:
        request.label = "the-tickets"
        raise TooManyRequests("slow down", retry_after_s=7)

    async def _break(self, request: HttpRequest) -> None:
        raise ValueError("a secret")

    async def _break_off(self, request: HttpRequest) -> None:
        await request.begin(200, {"content-length": "10"}, b"half", more=True)
        raise TooManyRequests("too late")

    async def _hang(self, request: HttpRequest) -> None:
        await request.body(1000)
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def answers(method: str, path: str, app: Application | None = None, **options: Any) -> Answer:
    async with http_serving((app or Application()).asgi, HttpConfig()) as (host, port):
        return await asyncio.to_thread(send, method, f"http://{host}:{port}{path}", **options)


async def asked(path: str, app: Application, method: str = "GET") -> tuple[int, bytes]:
    """Returns the status and body of the answer for ``path`` as it is written here: clients mend some spellings."""
    async with http_serving(app.asgi, HttpConfig()) as (host, port), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    return int(head.split()[1]), body


ODD = """
//length ///length /%2flength /%2Flength /./length /length/ /length%2f /%6cength // /%2f //named/x/end /%6eamed/x/end
/named%2fx/end http://a//length //echo /%2fecho /%65cho /echo%2f
"""


@pytest.mark.parametrize("path", ODD.split())
async def test_a_path_has_one_spelling(path: str) -> None:
    """Whoever guards a path in front of this server guards it by that one."""
    app = Application()
    status, body = await asked(path, app, "POST" if "cho" in path else "GET")
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_url")
    assert app.errors == [404]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/named/a%2Fb%20c/end", b"a/b c"), ("/named/%6c/end?x=%2f", b"l"), ("/?a", b"root"), ("http://a/", b"root")],
)
async def test_what_a_path_names_may_be_escaped(path: str, body: bytes) -> None:
    assert await asked(path, Application()) == (200, body)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/audio/speech", "speech and its transcriptions"),
        ("/v1/images/generations", "images"),
        ("/v1/messages/batches", "batches"),
    ],
)
async def test_what_others_serve_and_this_server_does_not_is_refused_by_name(path: str, what: str) -> None:
    """OpenAI's clients ask once more after a 5xx, so this is a 404."""
    answer = await answers("POST", path, content=b"{}")
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["type"]) == (404, "not_found_error")
    assert error["message"] == f"{what} are not served: pdserve generates text, and nothing else"
    assert ("request_id" in json.loads(answer.body)) is path.startswith("/v1/messages")
    assert (await asked("/v1/embeddingsx", Application()))[1].count(b"unknown request URL") == 1


async def test_an_unknown_path_is_told_with_the_base_urls_of_both_kinds_of_clients() -> None:
    """Anthropic's client adds /v1 to its base URL, and OpenAI's does not."""
    _, body = await asked("/v1/v1/messages", Application())
    message = json.loads(body)["error"]["message"]
    assert message.endswith("the base URL of OpenAI's clients ends in /v1, and that of Anthropic's clients does not")


@pytest.mark.parametrize("path", ["/echo", "/stream", "/length", "/nothing"])
async def test_every_response_has_the_clients_label_or_a_new_one(path: str) -> None:
    given = await answers("POST", path, content=b"x", headers={"x-request-id": "mine"})
    assert given.headers["x-request-id"] == "mine"
    made = await answers("POST", path, content=b"x", headers={"x-request-id": "not fit"})
    assert len(made.headers["x-request-id"]) == 32


async def test_a_body_comes_back_whole_and_a_stream_in_order() -> None:
    assert (await answers("POST", "/echo", content=b"hello")).body == b"hello"
    assert (await answers("POST", "/echo", content=iter([b"he", b"llo"]))).body == b"hello"
    assert (await answers("POST", "/stream")).body == b"abc"


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "headers"),
    [
        ("GET", "/echo", 405, None, {"allow": "OPTIONS, POST"}),
        ("POST", "/length", 405, None, {"allow": "GET, HEAD, OPTIONS"}),
        ("GET", "/length", 411, None, {}),
        ("GET", "/nothing", 404, "unknown_url", {}),
        ("GET", "/defect", 500, None, {}),
        ("POST", "/break", 500, None, {}),
        ("POST", "/refuse", 429, None, {"retry-after": "7", "x-request-id": "the-tickets"}),
    ],
)
async def test_every_error_has_one_shape_keeps_its_status_and_is_counted(
    method: str, path: str, status: int, code: str | None, headers: dict[str, str]
) -> None:
    app = Application()
    answer = await answers(method, path, app)
    assert (answer.status, app.errors) == (status, [status])
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == code
    assert "secret" not in answer.text
    found = {name: ", ".join(sorted(answer.headers[name].split(", "))) for name in headers}
    assert found == headers


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_above_the_limit_is_refused(chunked: bool) -> None:
    body = b"x" * 1001
    answer = await answers("POST", "/echo", content=iter([body]) if chunked else body)
    assert (answer.status, json.loads(answer.body)["error"]["type"]) == (413, "invalid_request_error")


async def test_a_body_that_does_not_come_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_request, "UPLOAD_TIMEOUT_S", 0.05)
    answer = await answers("POST", "/echo", content=b"", headers={"content-length": "5"})
    assert (answer.status, answer.json()["error"]["code"]) == (408, "upload_timeout")


async def test_a_response_that_has_begun_is_broken_off() -> None:
    app = Application()
    async with http_serving(app.asgi, HttpConfig()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /break-off HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
    assert answer.endswith(b"\r\n\r\nhalf")
    assert app.errors == []


async def test_a_handler_is_cancelled_when_its_client_leaves() -> None:
    app = Application()
    async with http_serving(app.asgi, HttpConfig()) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /hang HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        await asyncio.wait_for(app.hanging.wait(), WAIT_S)
        assert not app.cancelled.is_set()
        writer.close()
        await asyncio.wait_for(app.cancelled.wait(), WAIT_S)
