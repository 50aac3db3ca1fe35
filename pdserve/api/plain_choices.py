"""The encoded choices of chunks that carry text and nothing else: all but the text is the same in every response."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdserve.api.outcome import Outcome
from pdserve.api.responses import ChunkChoice
from pdserve.api.surface import Surface, finish_of

_NO_TEXT = b'""'
"""An empty text, encoded; nothing after the text of a plain choice looks like it."""


@dataclass(frozen=True, slots=True)
class PlainChoice:
    """Of one index."""

    first: tuple[bytes, bytes]
    """What is before and after the text of its first chunk."""
    later: tuple[bytes, bytes]
    last: dict[Outcome, bytes]
    """The choice of the chunk with the finish reason."""


class PlainChoices(dict[int, PlainChoice]):
    """Of one surface, by index, encoded as they are first asked for."""

    def __init__(self, surface: Surface) -> None:
        super().__init__()
        self._surface = surface

    def __missing__(self, index: int) -> PlainChoice:
        surface = self._surface
        choice = self[index] = PlainChoice(
            _around(surface.chunk(index, "", None, first=True)),
            _around(surface.chunk(index, "", None, first=False)),
            {
                outcome: msgspec.json.encode(surface.last_chunk(index, finish_of(outcome)))
                for outcome in (Outcome.STOP, Outcome.LENGTH)
            },
        )
        return choice


def _around(choice: ChunkChoice) -> tuple[bytes, bytes]:
    before, _, after = msgspec.json.encode(choice).rpartition(_NO_TEXT)
    return before, after
