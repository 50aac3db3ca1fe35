"""Asks a question with OpenAI's client: once for the whole answer, and once as a stream.

python examples/chat.py [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

URL = "http://127.0.0.1:8000"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=32)
    print("whole:   ", answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    print("streamed: ", end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage:  # The last chunk has no choices.
            print(f"\n{chunk.usage.prompt_tokens} tokens of prompt, {chunk.usage.completion_tokens} of answer")


if __name__ == "__main__":
    main(*sys.argv[1:] or [URL])
