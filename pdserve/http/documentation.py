"""Serves the description of the HTTP interface: ``/openapi.json`` for programs, and ``/docs`` for people.

A wheel has the description in a file beside this module. In a source tree a process of its own makes it of the types
that validate requests, when somebody asks for it first. The page is made of it here, and loads nothing else.
"""

from __future__ import annotations

import asyncio
import subprocess
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.process import ChildDied, ChildProcess, python_program

if TYPE_CHECKING:  # A build that describes the interface has no Quart.
    from quart import Quart, Response

FILE = "openapi.json"
DESCRIBER = "pdserve.api.routes.description"
"""The module that prints the description. It is run and not imported: a proxy imports none of a node's code."""
DESCRIBE_S = 60.0
PAGE_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""A browser runs no script on the page and loads nothing from elsewhere."""
ONLY = "x-pdserve-process"
"""The key of a path that one kind of process serves alone."""

_STYLE = "body{font:15px sans-serif;margin:2em;max-width:60em}code{background:#eee}td{padding:.2em 1em .2em 0}"


class PathDescription(msgspec.Struct, rename={"only": ONLY}):
    """The methods of one path."""

    get: dict[str, Any] | None = None
    post: dict[str, Any] | None = None
    delete: dict[str, Any] | None = None
    only: str | None = None


class Documentation:
    """The description of the routes of ``process``, which is ``node`` or ``proxy``."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._turn = asyncio.Lock()
        self._made: tuple[bytes, str] | None = None

    async def document_and_page(self) -> tuple[bytes, str]:
        """Returns the description, as JSON and as a page. Raises ChildDied or TimeoutError if nothing makes it."""
        async with self._turn:
            if self._made is None:
                document = msgspec.json.decode(await description())
                paths = document["paths"]
                document["paths"] = {
                    path: one for path, one in paths.items() if one.get(ONLY, self._process) == self._process
                }
                self._made = msgspec.json.encode(document), _page(document)
            return self._made


async def description() -> bytes:
    """Returns the description of all routes. Raises ChildDied or TimeoutError if nothing makes it."""
    file = files("pdserve.http").joinpath(FILE)
    if file.is_file():
        return file.read_bytes()
    child = ChildProcess("what describes the HTTP interface", python_program(DESCRIBER), stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(DESCRIBE_S):
            made = await child.output()
            status = await child.wait()
    finally:
        await child.end(0.0)
    if status != 0:
        raise ChildDied(child.describe_end())
    return made


def add_documentation(app: Quart, process: str) -> None:
    """Adds ``/openapi.json`` and ``/docs`` to an application of ``process``."""
    documentation = Documentation(process)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return app.response_class((await documentation.document_and_page())[0], content_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        page = (await documentation.document_and_page())[1]
        return app.response_class(page, headers=PAGE_HEADERS, content_type="text/html; charset=utf-8")


def _page(document: dict[str, Any]) -> str:
    paths = msgspec.convert(document["paths"], dict[str, PathDescription])
    rows = "".join(
        f"<tr><td>{method}<td><code>{escape(path)}</code><td>{escape(operation['summary'])}"
        for path, described in paths.items()
        for method, operation in (("GET", described.get), ("POST", described.post), ("DELETE", described.delete))
        if operation is not None
    )
    schemas = document["components"]["schemas"]
    names = dict.fromkeys(
        described.post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for described in paths.values()
        if described.post is not None
    )
    fields = "".join(f"<h2>{escape(name)}</h2><p>{_fields(schemas[name])}" for name in names)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>pdserve</title><style>{_STYLE}</style>'
        f'<h1>pdserve</h1><p>Programs read <a href="openapi.json">openapi.json</a>.<table>{rows}</table>{fields}</html>'
    )


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    return " ".join(
        f"<code>{escape(name)}</code>{' (required)' if name in required else ''}" for name in schema["properties"]
    )
