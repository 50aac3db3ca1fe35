"""Anthropic's SDK: messages, their streams, tools and token counts."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, BadRequestError

from lab.compat.programs.checks import ANSWER, QUESTION, Server, run_checks

QUESTIONS: Any = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
"""This version of the SDK has no parameter for it."""

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


def message(server: Server) -> None:
    answer = client(server).messages.create(model=server.model, max_tokens=32, messages=QUESTIONS, extra_body=GREEDY)
    assert answer.content[0].type == "text" and ANSWER in answer.content[0].text, answer
    assert answer.usage.input_tokens > 0, answer


def message_in_events(server: Server) -> None:
    with client(server).messages.stream(
        model=server.model, max_tokens=32, messages=QUESTIONS, extra_body=GREEDY, system="You are brief."
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1 and final.content[0].type == "text" and "".join(pieces) == final.content[0].text, final


def tool_use(server: Server) -> None:
    answer = client(server).messages.create(
        model=server.model,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        extra_body=GREEDY,
        tools=[WEATHER],
        tool_choice={"type": "any"},
    )
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert uses and isinstance(uses[0].input, dict) and "city" in uses[0].input, answer
    assert answer.stop_reason == "tool_use", answer


def tool_use_in_events(server: Server) -> None:
    with client(server).messages.stream(
        model=server.model,
        max_tokens=200,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        extra_body=GREEDY,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather"},
    ) as stream:
        final = stream.get_final_message()
    uses = [block for block in final.content if block.type == "tool_use"]
    assert uses and isinstance(uses[0].input, dict) and "city" in uses[0].input, final


def tool_result(server: Server) -> None:
    answer = client(server).messages.create(
        model=server.model,
        max_tokens=16,
        messages=[
            {"role": "user", "content": "What is the weather in Paris?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "18 degrees"}]},
        ],
        tools=[WEATHER],
    )
    assert answer.content, answer


def count_of_tokens(server: Server) -> None:
    counted = client(server).messages.count_tokens(model=server.model, messages=QUESTIONS)
    used = client(server).messages.create(model=server.model, max_tokens=1, messages=QUESTIONS).usage
    assert counted.input_tokens == used.input_tokens + (used.cache_read_input_tokens or 0), (counted, used)


def wrong_request(server: Server) -> None:
    try:
        client(server).messages.create(model=server.model, max_tokens=-1, messages=QUESTIONS)
    except BadRequestError as error:
        body: Any = error.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error", body
        return
    raise AssertionError("max_tokens -1 was taken")


if __name__ == "__main__":
    run_checks((message, message_in_events, tool_use, tool_use_in_events, tool_result, count_of_tokens, wrong_request))
