"""Asks a question with Anthropic's client: once for the whole answer, and once as a stream.

python examples/messages.py [URL]
"""

from __future__ import annotations

import sys

from anthropic import Anthropic
from anthropic.types import MessageParam

URL = "http://127.0.0.1:8000"
MESSAGES: list[MessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = "You answer in one sentence."
GREEDY = {"temperature": 0}
"""This client has no parameter for it any more, and pdserve has the field."""


def main(url: str) -> None:
    client = Anthropic(base_url=url, api_key="unused")
    model = client.models.list().data[0].id

    answer = client.messages.create(model=model, system=SYSTEM, messages=MESSAGES, max_tokens=32, extra_body=GREEDY)
    print("whole:   ", "".join(block.text for block in answer.content if block.type == "text"))

    print("streamed: ", end="")
    with client.messages.stream(
        model=model, system=SYSTEM, messages=MESSAGES, max_tokens=32, extra_body=GREEDY
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print(f"\n{stream.get_final_message().usage.output_tokens} tokens of answer")


if __name__ == "__main__":
    main(*sys.argv[1:] or [URL])
