"""Runs an agent with tools: the model calls a function, reads its result, and answers.

python examples/agent.py [URL]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import cast

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall as Call
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

URL = "http://127.0.0.1:8000"
TURNS = 4
"""The model gets so many turns. In the last one it must answer."""


def temperature(city: str, unit: str) -> dict[str, object]:
    """Stands for a service that knows the weather."""
    celsius = 10 + len(city)
    return {"city": city, "unit": unit, "degrees": celsius if unit == "celsius" else celsius * 9 / 5 + 32}


FUNCTIONS: dict[str, Callable[..., object]] = {"temperature": temperature}
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "temperature",
            "description": "The temperature in a city, now.",
            "strict": True,  # The arguments of every call follow the schema, whatever the model would like to write.
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 40},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]


def run(client: OpenAI, model: str, question: str) -> str:
    """Returns the answer to ``question``, and prints each call on the way."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for turn in range(TURNS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            # The first turn has to call a function. After that, the model decides; in the last turn it may not call.
            tool_choice="required" if turn == 0 else "none" if turn == TURNS - 1 else "auto",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        )
        said = answer.choices[0].message
        calls = [call for call in said.tool_calls or [] if isinstance(call, Call)]
        if not calls:
            return said.content or ""
        messages.append(cast(ChatCompletionMessageParam, said.to_dict()))
        for call in calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"called {call.function.name}({call.function.arguments}): {json.dumps(result)}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    raise AssertionError("the last turn has no calls")


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    print("answer:", run(client, model, "How warm is it in Paris, in degrees Celsius?"))


if __name__ == "__main__":
    main(*sys.argv[1:] or [URL])
