"""Server-sent events, as far as a relay has to know them: where one ends."""

from __future__ import annotations

MAX_EVENT_BYTES = 2**20

_ENDINGS = (b"\n\n", b"\r\n\r\n")
_LONGEST_ENDING = 4


class WholeEvents:
    """Passes a byte stream on in pieces that end where an event ends.

    A client then never holds half an event when its stream breaks, and an error event can always follow. Nodes write
    whole events, so nearly every piece goes through as it came. Of an event above ``MAX_EVENT_BYTES`` no more than that
    is held back. Every byte is looked at a fixed number of times, however the stream is cut.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """Of an event whose end has not come."""
        self._held_bytes = 0
        self._tail = b""
        """The last bytes of such an event, with which its ending may begin."""
        self._inside = False
        """Whether the client has got the beginning of such an event."""

    def feed(self, piece: bytes) -> bytes:
        """What can be sent on now; may be empty."""
        seam = self._tail + piece if self._tail else piece
        if seam.endswith(_ENDINGS):
            return self._release(piece, b"")
        end = max(seam.rfind(ending) + len(ending) if ending in seam else 0 for ending in _ENDINGS)
        if end:
            end -= len(seam) - len(piece)
            rest = piece[end:]
            out = self._release(piece[:end], rest)
            if len(rest) <= MAX_EVENT_BYTES:
                self._hold(rest)
                return out
            self._inside = True
            return out + rest
        self._hold(piece)
        self._tail = seam[1 - _LONGEST_ENDING :]
        if self._held_bytes <= MAX_EVENT_BYTES:
            return b""
        held = self._take()
        self._inside = True
        return held

    def rest(self) -> bytes:
        """What is held back, for a stream that ended in good order."""
        return self._take()

    def close_broken(self) -> bytes:
        """What has to go before an event of our own once the stream broke. What is held back is given up."""
        self._take()
        return b"\n\n" if self._inside else b""

    def _release(self, last: bytes, rest: bytes) -> bytes:
        """All that is held and ``last``, with which an event ends; ``rest`` is of the next one."""
        self._tail = rest[1 - _LONGEST_ENDING :]
        self._inside = False
        return self._take() + last if self._held else last

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)

    def _take(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held
