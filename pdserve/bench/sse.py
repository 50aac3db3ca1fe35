"""Server-sent events out of a byte stream. Sans I/O."""

from __future__ import annotations

from pdserve.errors import BenchError

_MAX_EVENT = 8 * 2**20


class EventReader:
    """Takes bytes as they come, gives the data of each whole event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that ``data`` completes. Raises BenchError for an event without an end."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > _MAX_EVENT:
            raise BenchError(f"the server sent {len(self._rest)} bytes without the end of an event")
        return [payload for event in whole if (payload := _data(event))]


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
