"""LiteLLM's completion function: streams, tools, structured answers, and the errors that it recognises."""

from __future__ import annotations

import json
from typing import Any

import litellm

from lab.compat.programs.checks import ANSWER, QUESTION, Server, run_checks

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}},
    "required": ["name"],
    "additionalProperties": False,
}


def ask(server: Server, content: str, **more: Any) -> Any:
    return litellm.completion(
        model=f"hosted_vllm/{server.model}",
        api_base=server.openai_url,
        api_key="none",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=200,
        num_retries=0,
        **more,
    )


def completion(server: Server) -> None:
    assert ANSWER in ask(server, QUESTION).choices[0].message.content


def stream(server: Server) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(server, QUESTION, stream=True)]
    assert ANSWER in "".join(pieces), pieces


def stream_with_usage(server: Server) -> None:
    chunks = list(ask(server, QUESTION, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0, chunks[-1]


def tool_call(server: Server) -> None:
    answer = ask(server, "What is the weather in Paris?", tools=[WEATHER], tool_choice="required")
    assert "city" in json.loads(answer.choices[0].message.tool_calls[0].function.arguments), answer


def structured_answer(server: Server) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    assert "name" in json.loads(ask(server, QUESTION, response_format=shape).choices[0].message.content)


def context_error(server: Server) -> None:
    try:
        ask(server, "word " * 20_000)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("the prompt was taken")


if __name__ == "__main__":
    run_checks((completion, stream, stream_with_usage, tool_call, structured_answer, context_error))
