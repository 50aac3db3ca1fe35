"""Reads streams of named server-sent events."""

from __future__ import annotations

import json
from typing import Any

from pdserve.control.journal import cut


def events_in(stream: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream, each of which is named as its data says. Entries are left out."""
    *blocks, rest = cut(stream)[0].split(b"\n\n")
    assert not rest
    events = []
    for block in blocks:
        name, data = block.split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events
