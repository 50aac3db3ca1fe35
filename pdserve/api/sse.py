"""Server-sent events of one streamed response. What all its chunks share is encoded once."""

from __future__ import annotations

import msgspec

from pdserve.api.error_response import error_body
from pdserve.api.responses import ChunkChoice, Envelope, Usage
from pdserve.errors import RequestError

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


class ChunkEncoder:
    """With ``include_usage`` every chunk has a ``usage``, which is null in all but the last."""

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self._head = b"data: " + _encoder.encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: ChunkChoice) -> bytes:
        return self._head + _encoder.encode(choice) + self._tail

    def usage(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encoder.encode(usage) + b"}\n\n"


def error_event(error: RequestError) -> bytes:
    """The last event of a stream that failed; no ``[DONE]`` follows."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
