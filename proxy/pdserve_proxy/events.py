"""Server-sent events, as far as a relay has to know them: where one ends."""

from __future__ import annotations

MAX_EVENT_BYTES = 2**20

_ENDINGS = (b"\n\n", b"\r\n\r\n")


class WholeEvents:
    """Passes a byte stream on in pieces that end where an event ends.

    A client then never holds half an event when its stream breaks, and an error event can always follow. Nodes write
    whole events, so nearly every piece goes through as it came. An event above ``MAX_EVENT_BYTES`` is not held back.
    """

    def __init__(self) -> None:
        self._held = b""
        self._inside = False

    def feed(self, piece: bytes) -> bytes:
        """What can be sent on now; may be empty."""
        data = self._held + piece if self._held else piece
        if data.endswith(_ENDINGS):
            self._held, self._inside = b"", False
            return data
        end = max(data.rfind(ending) + len(ending) if ending in data else 0 for ending in _ENDINGS)
        if len(data) - end > MAX_EVENT_BYTES:
            self._held, self._inside = b"", True
            return data
        self._held = data[end:]
        self._inside = self._inside and end == 0
        return data[:end]

    def rest(self) -> bytes:
        """What is held back, for a stream that ended in good order."""
        held, self._held = self._held, b""
        return held

    def close_broken(self) -> bytes:
        """What has to go before an event of our own once the stream broke. What is held back is given up."""
        self._held = b""
        return b"\n\n" if self._inside else b""
