"""OpenAI's SDK: streams, parsed answers, its helpers for tools, and responses."""

from __future__ import annotations

import json
from typing import Any, Literal

from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from lab.compat.programs.checks import ANSWER, QUESTION, Server, run_checks


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=40)
    unit: Literal["celsius", "fahrenheit"]


QUESTIONS: Any = [{"role": "user", "content": QUESTION}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def client(server: Server) -> OpenAI:
    return OpenAI(base_url=server.openai_url, api_key="none", max_retries=0)


def chat(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=QUESTIONS, temperature=0, max_tokens=32
    )
    assert ANSWER in (answer.choices[0].message.content or ""), answer


def chat_in_events(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model, messages=QUESTIONS, temperature=0, max_tokens=32
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content, deltas
    assert len(deltas) > 1, deltas


def parsed_answer(server: Server) -> None:
    answer = client(server).chat.completions.parse(
        model=server.model, messages=WEATHER, temperature=0, max_tokens=200, response_format=Weather
    )
    assert isinstance(answer.choices[0].message.parsed, Weather), answer


def parsed_answer_in_events(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model, messages=WEATHER, temperature=0, max_tokens=200, response_format=Weather
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Weather), final


def json_object(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Write a very short JSON object with a name."}],
        temperature=0,
        max_tokens=400,
        response_format={"type": "json_object"},
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict), answer


def parsed_tool_call(server: Server) -> None:
    answer = client(server).chat.completions.parse(
        model=server.model,
        messages=WEATHER,
        temperature=0,
        max_tokens=200,
        tools=[pydantic_function_tool(Weather)],
        tool_choice="required",
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Weather), answer
    assert answer.choices[0].finish_reason == "tool_calls", answer


def tool_call_in_events(server: Server) -> None:
    with client(server).chat.completions.stream(
        model=server.model,
        messages=WEATHER,
        temperature=0,
        max_tokens=200,
        tools=[pydantic_function_tool(Weather)],
        tool_choice={"type": "function", "function": {"name": "Weather"}},
    ) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Weather), final
    assert len(pieces) > 1, pieces


def result_of_a_tool(server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "Weather", "arguments": '{"city": "Paris"}'}}
    history: Any = [
        *WEATHER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees and sun"},
    ]
    answer = client(server).chat.completions.create(
        model=server.model, messages=history, max_tokens=32, tools=[pydantic_function_tool(Weather)]
    )
    assert answer.choices[0].message.content is not None, answer


def response(server: Server) -> None:
    answer = client(server).responses.create(
        model=server.model, input=QUESTION, temperature=0, max_output_tokens=32, store=False
    )
    assert ANSWER in answer.output_text, answer


def response_in_events(server: Server) -> None:
    with client(server).responses.stream(
        model=server.model, input=QUESTION, temperature=0, max_output_tokens=32, store=False
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text, final
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        event.sequence_number for event in events if hasattr(event, "sequence_number")
    )


def parsed_response(server: Server) -> None:
    answer = client(server).responses.parse(
        model=server.model,
        input="The weather in Paris, in celsius",
        max_output_tokens=200,
        text_format=Weather,
        store=False,
    )
    assert isinstance(answer.output_parsed, Weather), answer


def log_probabilities(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=QUESTIONS, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content and len(found.content[0].top_logprobs) == 3, answer


def too_long_a_prompt(server: Server) -> None:
    try:
        client(server).completions.create(model=server.model, prompt="word " * 20_000, max_tokens=4)
    except BadRequestError as error:
        assert "maximum context length" in str(error), error
        return
    raise AssertionError("the prompt was taken")


if __name__ == "__main__":
    run_checks(
        (
            chat,
            chat_in_events,
            parsed_answer,
            parsed_answer_in_events,
            json_object,
            parsed_tool_call,
            tool_call_in_events,
            result_of_a_tool,
            response,
            response_in_events,
            parsed_response,
            log_probabilities,
            too_long_a_prompt,
        )
    )
