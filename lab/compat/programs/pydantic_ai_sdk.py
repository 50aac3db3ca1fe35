"""pydantic-ai: texts, streams, and typed outputs through tools and through JSON Schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from lab.compat.programs.checks import ANSWER, QUESTION, Server, run_checks


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=40)
    country: str = Field(max_length=40)


def agent(server: Server, output: Any = str) -> Any:
    model: Any = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.openai_url, api_key="none"))
    return Agent(model, output_type=output, model_settings={"temperature": 0, "max_tokens": 300}, retries=0)


def text(server: Server) -> None:
    assert ANSWER in agent(server).run_sync(QUESTION).output


async def stream(server: Server) -> None:
    async with agent(server).run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert ANSWER in "".join(pieces), pieces


def output_by_tool(server: Server) -> None:
    assert isinstance(agent(server, ToolOutput(City)).run_sync(QUESTION).output, City)


def output_by_json_schema(server: Server) -> None:
    assert isinstance(agent(server, NativeOutput(City)).run_sync(QUESTION).output, City)


if __name__ == "__main__":
    run_checks((text, stream, output_by_tool, output_by_json_schema))
