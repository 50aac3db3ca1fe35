"""LangChain's ChatOpenAI: streams, tools and structured output."""

from __future__ import annotations

from typing import Annotated, Any

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

from lab.compat.programs.checks import ANSWER, QUESTION, Server, run_checks


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=40)
    country: str = Field(max_length=40)


def weather(city: Annotated[str, Field(max_length=40)]) -> str:
    """Returns the weather of a city."""
    return f"It is sunny in {city}."


WEATHER: Any = tool(weather)


def model(server: Server) -> Any:
    return ChatOpenAI(
        base_url=server.openai_url, api_key="none", model=server.model, temperature=0, max_tokens=200, max_retries=0
    )


def invoke(server: Server) -> None:
    assert ANSWER in model(server).invoke(QUESTION).content


def stream(server: Server) -> None:
    pieces = [chunk.content for chunk in model(server).stream(QUESTION)]
    assert len(pieces) > 2 and ANSWER in "".join(pieces), pieces


def text_completion(server: Server) -> None:
    completions: Any = OpenAI(
        base_url=server.openai_url, api_key="none", model=server.model, temperature=0, max_tokens=8
    )
    assert ANSWER in completions.invoke("The capital of France is")


def bind_tools(server: Server) -> None:
    answer = model(server).bind_tools([WEATHER], tool_choice="any").invoke("What is the weather in Paris?")
    assert answer.tool_calls and answer.tool_calls[0]["name"] == "weather", answer
    assert isinstance(answer.tool_calls[0]["args"]["city"], str), answer


def bind_tools_in_a_stream(server: Server) -> None:
    whole: Any = None
    for chunk in model(server).bind_tools([WEATHER], tool_choice="weather").stream("What is the weather in Paris?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls and isinstance(whole.tool_calls[0]["args"]["city"], str), whole


def result_of_a_tool(server: Server) -> None:
    asked = model(server).bind_tools([WEATHER], tool_choice="any").invoke("What is the weather in Paris?")
    call = asked.tool_calls[0]
    result = ToolMessage(content="It is sunny.", tool_call_id=call["id"])
    answer = model(server).bind_tools([WEATHER]).invoke([("user", "What is the weather in Paris?"), asked, result])
    assert isinstance(answer.content, str), answer


def structured_output_by_schema(server: Server) -> None:
    found = model(server).with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(found, City), found


def structured_output_by_function(server: Server) -> None:
    found = model(server).with_structured_output(City, method="function_calling").invoke(QUESTION)
    assert isinstance(found, City), found


if __name__ == "__main__":
    run_checks(
        (
            invoke,
            stream,
            text_completion,
            bind_tools,
            bind_tools_in_a_stream,
            result_of_a_tool,
            structured_output_by_schema,
            structured_output_by_function,
        )
    )
