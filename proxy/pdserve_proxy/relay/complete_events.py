"""Cuts a stream at the ends of its server-sent events, which are looked for and not parsed."""

from __future__ import annotations

MAX_EVENT_BYTES = 2**20
BEGINNING_BYTES = 2**16
"""So much is looked at of an event that may be the last. That of a failed response says all that it had."""

_ENDINGS = (b"\n\n", b"\r\n\r\n")
_LONGEST_ENDING = 4


class CompleteEvents:
    """Passes a byte stream on in pieces that end where an event ends.

    A client then never holds half an event when its stream breaks, and an error event can always follow. Nodes write
    complete events, so nearly every piece passes unchanged. At most ``MAX_EVENT_BYTES`` of an event are held back. The
    work per byte is constant, however the stream is cut.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """The pieces of an event whose end has not come."""
        self._held_bytes = 0
        self._tail = b""
        """The last bytes of that event, which may be the beginning of its ending."""
        self._inside = False
        """Whether the client has the beginning of that event already."""
        self.long_event = b""
        """The beginning of the last event that was passed on in parts; empty if there was none."""

    @property
    def inside(self) -> bool:
        """Whether the client has the beginning of an event, and not its end."""
        return self._inside

    def feed(self, piece: bytes) -> bytes:
        """Returns the bytes that can be sent on now, which may be none."""
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
            self._begin_parts(rest)
            return out + rest
        self._hold(piece)
        self._tail = seam[1 - _LONGEST_ENDING :]
        if self._held_bytes <= MAX_EVENT_BYTES:
            return b""
        held = self._take()
        if not self._inside:
            self._begin_parts(held)
        return held

    def rest(self) -> bytes:
        """Returns the bytes that are held back, for a stream that ended in good order."""
        return self._take()

    def close_broken(self) -> bytes:
        """Drops the bytes that are held back, and returns what has to precede an error event in a broken stream."""
        self._take()
        return b"\n\n" if self._inside else b""

    def _release(self, last: bytes, rest: bytes) -> bytes:
        """Returns the held bytes and ``last``, which ends an event. ``rest`` begins the next event."""
        self._tail = rest[1 - _LONGEST_ENDING :]
        self._inside = False
        return self._take() + last if self._held else last

    def _begin_parts(self, beginning: bytes) -> None:
        self._inside = True
        self.long_event = beginning[:BEGINNING_BYTES]

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)

    def _take(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held
