"""instructor: validated answers in its modes for tools and JSON Schema, whole and in parts."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

from lab.compat.programs.checks import QUESTION, Server, run_checks


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=40)
    country: str = Field(max_length=40)


def ask(server: Server, mode: Any, response_model: Any = City, **more: Any) -> Any:
    client: Any = instructor.from_openai(OpenAI(base_url=server.openai_url, api_key="none", max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        response_model=response_model,
        temperature=0,
        max_tokens=300,
        max_retries=1,
        **more,
    )


def by_tool(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.TOOLS), City)


def by_strict_tool(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.TOOLS_STRICT), City)


def by_json_schema(server: Server) -> None:
    assert isinstance(ask(server, instructor.Mode.JSON_SCHEMA), City)


def in_parts(server: Server) -> None:
    parts = list(ask(server, instructor.Mode.JSON_SCHEMA, instructor.Partial[City], stream=True))
    assert len(parts) > 1 and City.model_validate(parts[-1].model_dump()), parts


if __name__ == "__main__":
    run_checks((by_tool, by_strict_tool, by_json_schema, in_parts))
