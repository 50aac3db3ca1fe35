"""LlamaIndex's client for OpenAI-like servers: completions, chats, streams and tools."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

from lab.compat.programs.checks import ANSWER, QUESTION, Server, run_checks


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=40)


def weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"It is sunny in {city}."


def model(server: Server) -> Any:
    return OpenAILike(
        api_base=server.openai_url,
        api_key="none",
        model=server.model,
        temperature=0,
        max_tokens=200,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )


def complete(server: Server) -> None:
    assert ANSWER in str(model(server).complete(QUESTION))


def chat(server: Server) -> None:
    assert ANSWER in str(model(server).chat([ChatMessage(role="user", content=QUESTION)]))


def stream(server: Server) -> None:
    pieces = [piece.delta or "" for piece in model(server).stream_complete(QUESTION)]
    assert len(pieces) > 2 and ANSWER in "".join(pieces), pieces


def tool_call(server: Server) -> None:
    llm = model(server)
    tools = [FunctionTool.from_defaults(fn=weather)]
    answer = llm.chat_with_tools(tools, user_msg="What is the weather in Paris?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "weather" and "city" in calls[0].tool_kwargs, answer


def structured_answer(server: Server) -> None:
    answer = model(server).as_structured_llm(City).complete(QUESTION)
    assert isinstance(answer.raw, City), answer


if __name__ == "__main__":
    run_checks((complete, chat, stream, tool_call, structured_answer))
