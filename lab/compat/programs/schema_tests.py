"""Schemathesis on ``/openapi.json``: valid and invalid requests get documented statuses, and never a server error."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.compat.programs.checks import Server, run_checks
from lab.compat.programs.commands import run_command

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LONGEST_ANSWER = 4
EXAMPLES = 40
TIMEOUT_S = 300.0
"""An invalid length may be none at all: null, which the server takes, and then the answer fills the context."""


def valid_requests(server: Server) -> None:
    _run(server, "positive")


def invalid_requests(server: Server) -> None:
    _run(server, "negative")


def _run(server: Server, mode: str) -> None:
    asked = ["--url", server.url, "--mode", mode, "--checks", CHECKS, "--max-examples", str(EXAMPLES)]
    asked += ["--request-timeout", str(TIMEOUT_S), "--no-shrink", "--continue-on-failure", "--seed", "1"]
    asked += ["--phases", "examples,coverage,fuzzing", "--suppress-health-check", "all", "--warnings", "off"]
    run_command(server.cache, "schemathesis", "run", str(_narrowed(server)), *asked)


def _narrowed(server: Server) -> Path:
    """Returns a file with the server's schema, in which the model is the one that there is, and answers are short.

    Otherwise hardly any request would get past the name of the model, and each of the rest would fill the context.
    Schemas that contain themselves contain themselves no more: Schemathesis writes each out, and the formats of
    structural tags, which may all contain each other, took it 17 GB.
    """
    with urllib.request.urlopen(f"{server.url}/openapi.json", timeout=TIMEOUT_S) as response:
        schema = json.load(response)
    _narrow(schema, server.model)
    _end_circles(schema["components"]["schemas"])
    path = server.cache / "openapi.json"
    path.write_text(json.dumps(schema))
    return path


def _narrow(part: Any, model: str) -> None:
    if isinstance(part, list):
        for item in part:
            _narrow(item, model)
    if not isinstance(part, dict):
        return
    properties = part.get("properties")
    if isinstance(properties, dict) and "model" in properties:
        properties["model"] = {"const": model}
        lengths = [name for name in LENGTHS if name in properties]
        for name in lengths:
            properties[name] = {"type": "integer", "minimum": 1, "maximum": LONGEST_ANSWER}
        if lengths:
            part["required"] = sorted({*part.get("required", ()), *lengths})
    for item in part.values():
        _narrow(item, model)


def _end_circles(schemas: dict[str, Any]) -> None:
    """Takes out of each choice between schemas those that contain themselves, within such schemas."""
    named = {name: set(_references(schema)) for name, schema in schemas.items()}
    reached = {name: set(direct) for name, direct in named.items()}
    for _ in named:
        for known in reached.values():
            known |= {further for name in known for further in named[name]}
    circular = {name for name, known in reached.items() if name in known}
    for name in circular:
        _keep_outside(schemas[name], circular)


def _keep_outside(part: Any, circular: set[str]) -> None:
    if isinstance(part, list):
        for item in part:
            _keep_outside(item, circular)
    if isinstance(part, dict):
        choices = part.get("anyOf", [])
        kept = [choice for choice in choices if not circular & set(_references(choice))]
        if kept:
            part["anyOf"] = kept
        for item in part.values():
            _keep_outside(item, circular)


def _references(part: Any) -> Iterator[str]:
    if isinstance(part, list):
        for item in part:
            yield from _references(item)
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str):
            yield reference.rsplit("/", 1)[-1]
        for item in part.values():
            yield from _references(item)


if __name__ == "__main__":
    run_checks((valid_requests, invalid_requests))
