"""Gets an answer that follows a JSON Schema, so that a program can read it.

python examples/json_schema.py [URL]
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

URL = "http://127.0.0.1:8000"
# The bounds matter: a string without maxLength may go on until max_tokens cuts the JSON.
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["complaint", "question", "praise"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["name", "kind", "urgency"],
    "additionalProperties": False,
}
MAIL = "Hello, my order arrived broken, and I need it tomorrow! Ada"


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="unused")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": f"Who wrote this mail, of what kind and how urgent is it?\n\n{MAIL}"}],
        response_format={"type": "json_schema", "json_schema": {"name": "mail", "schema": SCHEMA, "strict": True}},
        temperature=0,
        max_tokens=128,
    )
    choice = answer.choices[0]
    if choice.finish_reason != "stop":
        raise SystemExit(f"the JSON is not whole: the answer ended with {choice.finish_reason}")
    mail = json.loads(choice.message.content or "")
    print(f"{mail['name']!r} wrote a {mail['kind']} of urgency {mail['urgency']}")


if __name__ == "__main__":
    main(*sys.argv[1:] or [URL])
