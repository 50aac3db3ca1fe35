"""Tests that scripts of allowed web pages may read every answer, that others may not, and that no page can post."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.config import HttpConfig
from pdserve.http.request import HttpRequest
from pdserve.http.routes import CrossOrigin, DirectRoutes, preflight_fields, quart_app
from tests.api.plain_http import Answer, send
from tests.http.http_serving import http_serving

WAIT_S = 10.0
PAGE = "https://chat.example.com"
OTHER = "https://evil.example.com"
ONE = (PAGE, "http://localhost:3000")
ALL = ("*",)
ANSWERS = [("POST", "/json", 200), ("POST", "/stream", 200), ("GET", "/json", 405), ("GET", "/nothing", 404)]


async def _json(request: HttpRequest) -> None:
    request.check_body_form()
    await request.respond(200, {"content-type": "application/json"}, await request.body(1000))


async def _stream(request: HttpRequest) -> None:
    await request.begin(200, {"content-type": "text/event-stream"}, b"data: 1\n\n", more=True)
    await request.send(b"data: 2\n\n", more=False)


def _ignore(status: int) -> None:
    pass


APPLICATION = DirectRoutes({"/json": _json, "/stream": _stream}, quart_app("proxy", 1000, _ignore), "proxy", _ignore)


async def answer(origins: tuple[str, ...], method: str, path: str, **headers: str) -> Answer:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http_serving(APPLICATION, HttpConfig(cors_origins=origins)) as (host, port):
        content = b"{}" if method == "POST" else None
        return await asyncio.to_thread(send, method, f"http://{host}:{port}{path}", content=content, headers=fields)


@pytest.mark.parametrize(("method", "path", "status"), ANSWERS)
@pytest.mark.parametrize(("origins", "named"), [(ALL, "*"), (ONE, PAGE)])
async def test_an_allowed_page_may_read_every_answer(
    origins: tuple[str, ...], named: str, method: str, path: str, status: int
) -> None:
    got = await answer(origins, method, path, origin=PAGE, content_type="application/json")
    assert (got.status, got.headers["access-control-allow-origin"]) == (status, named)
    exposed = got.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after"} <= set(exposed)
    assert got.headers["x-request-id"]
    assert "access-control-allow-credentials" not in got.headers


@pytest.mark.parametrize(("method", "path", "status"), ANSWERS)
@pytest.mark.parametrize(("origins", "origin"), [((), PAGE), (ONE, OTHER), (ONE, "null"), (ONE, PAGE + ".evil.com")])
async def test_no_other_page_may(origins: tuple[str, ...], origin: str, method: str, path: str, status: int) -> None:
    """Nor a page whose host name an attacker points at the server, which browsers take for one of the server's own."""
    got = await answer(origins, method, path, origin=origin, content_type="application/json")
    assert (got.status, "access-control-allow-origin" in got.headers) == (403, False)
    assert got.json()["error"]["code"] == "origin_not_allowed"
    assert (await answer(origins, method, path, content_type="application/json")).status == status


async def test_caches_know_which_answers_depend_on_the_page() -> None:
    assert (await answer(ONE, "GET", "/nothing")).headers["vary"] == "origin"
    assert "vary" not in (await answer(ALL, "GET", "/nothing")).headers


@pytest.mark.parametrize("path", ["/json", "/nothing"])
@pytest.mark.parametrize("origins", [ALL, ONE])
async def test_a_preflight_is_answered_for_every_path(origins: tuple[str, ...], path: str) -> None:
    got = await answer(
        origins,
        "OPTIONS",
        path,
        origin=PAGE,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type,x-stainless-os",
    )
    assert got.status == 200
    assert got.headers["access-control-allow-origin"] in ("*", PAGE)
    assert "POST" in got.headers["access-control-allow-methods"]
    # A star would not stand for the header of the API key.
    assert got.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"


async def test_a_preflight_of_another_page_allows_nothing() -> None:
    got = await answer(ONE, "OPTIONS", "/json", origin=OTHER, access_control_request_method="POST")
    assert got.status == 403
    assert "access-control-allow-origin" not in got.headers


async def test_options_without_a_question_names_the_methods() -> None:
    assert (await answer((), "OPTIONS", "/json")).headers["allow"] == "POST, OPTIONS"


@pytest.mark.parametrize("origins", [ALL, ONE])
async def test_a_page_may_read_a_refusal_that_comes_before_the_application(origins: tuple[str, ...]) -> None:
    async with http_serving(APPLICATION, HttpConfig(cors_origins=origins)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(f"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\norigin: {PAGE}\r\nx-request-id: mine\r\n\r\n".encode())
        refusal = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
    assert refusal.startswith(b"HTTP/1.1 400 ")
    assert b"\r\naccess-control-allow-origin: " in refusal
    assert b"\r\nx-request-id: mine\r\n" in refusal


@pytest.mark.parametrize("wanted", [None, "a\x7fb", "é", "x" * 1025, ""])
def test_names_that_are_none_are_not_allowed(wanted: str | None) -> None:
    assert "access-control-allow-headers" not in preflight_fields(wanted)


def test_a_server_without_origins_adds_nothing_to_its_answers() -> None:
    assert CrossOrigin(()).defaults == []
    assert not CrossOrigin(()).selects
    assert not CrossOrigin(ALL).selects


# ------------------------------------------------------------------ bodies that any page could send

FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8", "origin": PAGE}, 200),
        ({}, 200),
        ({"content-type": FORM}, 200),
        ({"content-type": "application/octet-stream"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "text/plain;charset=UTF-8", "origin": PAGE}, 415),
        ({"content-type": "text/plain; a=application/json", "origin": PAGE}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": FORM, "origin": "null"}, 403),
        ({"content-type": FORM, "sec-fetch-site": "cross-site"}, 415),
        ({"origin": PAGE}, 415),
        ({"content-type": "", "origin": PAGE}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
    ],
    ids=str,
)
async def test_a_page_can_only_post_what_its_browser_asks_for_first(headers: dict[str, Any], status: int) -> None:
    got = await answer(ONE, "POST", "/json", **headers)
    assert got.status == status
    if status == 415:
        assert got.json()["error"]["type"] == "invalid_request_error"
        assert got.json()["error"]["code"] in ("unsupported_content_type", "unsupported_content_encoding")
        assert got.headers["accept-post"] == "application/json"
