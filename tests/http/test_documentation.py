"""Tests that the description of the HTTP interface is what the types say, and is a valid one of OpenAPI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from quart import Quart

from pdserve.api.routes.description import render
from pdserve.http.documentation import ONLY, add_documentation, description

METHODS = ("get", "post", "delete")


def references(value: Any) -> Iterator[str]:
    match value:
        case {"$ref": str(reference)}:
            yield reference
        case dict():
            for inner in value.values():
                yield from references(inner)
        case list():
            for inner in value:
                yield from references(inner)


def test_every_schema_is_valid_and_every_reference_leads_to_something() -> None:
    document = json.loads(render())
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"} <= schemas.keys()
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    found = set(references(document))
    assert found
    for reference in found:
        part = document
        for name in reference.removeprefix("#/").split("/"):
            part = part[name]
    for path, described in document["paths"].items():
        assert path.startswith("/")
        for operation in (described[method] for method in METHODS if method in described):
            assert operation["summary"].endswith(".")
            assert {"200"} < operation["responses"].keys()


async def test_what_is_served_is_what_the_types_say() -> None:
    made = json.loads(render())
    assert json.loads(await description()) == made
    for process in ("node", "proxy"):
        app = Quart(__name__)
        add_documentation(app, process)
        answer = await app.test_client().get("/openapi.json")
        assert answer.status_code == 200
        served = await answer.get_json()
        own = {path: one for path, one in made["paths"].items() if one.get(ONLY, process) == process}
        assert served == {**made, "paths": own}
    assert any(one.get(ONLY) == "proxy" for one in made["paths"].values())
