"""Remembers how long a cluster took to start on this machine, so that the next start can say what to expect."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

_MOST = 32


class StartTimes:
    """The times of the last starts, in a file of the user's cache folder. What cannot be read or kept is not known."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / "start-times.json"

    def expected(self, what: str) -> float | None:
        """Returns how many seconds the last start of ``what`` took; None if nobody knows."""
        return self._read().get(what)

    def note(self, what: str, took_s: float) -> None:
        """Keeps the time of a start, and forgets those that are longest ago."""
        times = self._read()
        times.pop(what, None)
        times[what] = round(took_s, 1)
        newest = dict(list(times.items())[-_MOST:])
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(newest))
            draft.replace(self._path)

    def _read(self) -> dict[str, float]:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        return {}
