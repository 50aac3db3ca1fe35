"""Reads a stream to its end though connections break: each try goes on behind the last event that came.

python examples/resume_stream.py [URL]
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

URL = "http://127.0.0.1:8000"
QUESTION = {
    "messages": [{"role": "user", "content": "Count to twenty."}],
    "stream": True,
    "max_tokens": 64,
    "temperature": 0,
}
ASK_AGAIN = (502, 503)
"""With these statuses, the node that has the answer could not be asked just now."""


def events(url: str, question: dict[str, Any], tries: int = 5) -> Iterator[dict[str, Any]]:
    """Yields each event of the answer once."""
    body = json.dumps(question).encode()  # The same bytes each time: they say which answer is meant.
    last = ""  # Without a value, the header asks the server to keep the answer and to number its events.
    for _ in range(tries):
        event: dict[bytes, bytes] = {}
        try:
            request = Request(url, body, {"content-type": "application/json", "last-event-id": last})
            with urlopen(request, timeout=600) as lines:
                for line in lines:
                    if line.strip():
                        field, _, event[field] = line.strip().partition(b": ")
                    elif event:  # An empty line ends an event. What a broken connection has cut does not count.
                        last, data = event.pop(b"id", b"").decode() or last, event.pop(b"data")
                        if data == b"[DONE]":
                            return
                        yield json.loads(data)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, HTTPError) and error.code not in ASK_AGAIN:
                raise SystemExit(error.read().decode()) from error
        print(f"\n[the connection broke behind event {last!r}]", file=sys.stderr)
        time.sleep(1)
    raise SystemExit(f"gave up after {tries} tries")


def main(url: str) -> None:
    for event in events(f"{url}/v1/chat/completions", QUESTION):
        if "error" in event:
            raise SystemExit(event["error"]["message"])
        print(event["choices"][0]["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:] or [URL])
