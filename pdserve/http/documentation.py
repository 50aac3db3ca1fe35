"""Serves the description of the HTTP interface: ``/openapi.json`` for programs, and ``/docs`` for people.

``openapi.json`` beside this module is made of the types that validate requests
(``python -m tests.docs.openapi_document``). The page is made of it here, and loads nothing else.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

import msgspec
from quart import Quart, Response

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


def openapi_document(process: str) -> dict[str, Any]:
    """Returns the description of the routes of ``process``, which is ``node`` or ``proxy``."""
    document: dict[str, Any] = msgspec.json.decode(files("pdserve.http").joinpath("openapi.json").read_bytes())
    paths = document["paths"]
    document["paths"] = {path: one for path, one in paths.items() if one.get(ONLY, process) == process}
    return document


def add_documentation(app: Quart, process: str) -> None:
    """Adds ``/openapi.json`` and ``/docs`` to an application of ``process``."""
    document = openapi_document(process)
    data, page = msgspec.json.encode(document), _page(document)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(data, content_type="application/json")

    @app.get("/docs")
    async def docs() -> Response:
        return Response(page, headers=PAGE_HEADERS, content_type="text/html; charset=utf-8")


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
