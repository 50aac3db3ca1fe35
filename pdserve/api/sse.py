"""Server-sent events of one streamed response. What all its chunks share is encoded once."""

from __future__ import annotations

import msgspec

from pdserve.api.responses import ChunkChoice, Envelope, Usage
from pdserve.error_body import error_body
from pdserve.errors import RequestError

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def encode_text(text: str) -> bytes:
    """As a JSON string."""
    return _encoder.encode(text)


class ChunkEncoder:
    """What is around each choice. With ``include_usage`` every chunk has a ``usage``, null in all but the last."""

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self.head = b"data: " + _encoder.encode(envelope)[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: ChunkChoice) -> bytes:
        return self.wrap(_encoder.encode(choice))

    def wrap(self, choice: bytes) -> bytes:
        """The chunk of a choice that is encoded already."""
        return self.head + choice + self.tail

    def use(self, usage: Usage) -> None:
        """What the next chunks say was used, in place of null."""
        self.tail = b'],"usage":' + _encoder.encode(usage) + b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self.head + b'],"usage":' + _encoder.encode(usage) + b"}\n\n"


def error_event(error: RequestError) -> bytes:
    """The last event of a stream that failed; no ``[DONE]`` follows."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"
