"""Ends an answer at the first stop string in what it shows as content.

What the model thinks and the calls that it writes have no stop strings in them. So a parser of its own reads the text
ahead of the one that takes the answer apart, which gets nothing that a stop string may still cut off.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TypeAlias

from pdserve.api.answers.stop_strings import StopStrings, StopTable
from pdserve.api.message.message_parser import ContentPiece, MessageParser


class ContentStops:
    """Does for an answer that a parser takes apart what ``StopStrings`` does for a plain text.

    A stop string lies in one piece of content: it does not go on behind a call.
    """

    wanted = True

    def __init__(self, stops: StopTable, ahead: MessageParser, *, include: bool = False) -> None:
        """``ahead`` is a new parser of the answer."""
        self._strings = StopStrings(stops, include=include)
        self._ahead = ahead
        self._held = ""
        self._passed = 0
        """How many characters of the answer are before those that are held back."""
        self._content_end = 0
        """Where the last piece of content ends in the answer."""
        self._may_end_from = 0
        """No stop string ends before this place of the answer."""

    @property
    def found_string(self) -> str | None:
        return self._strings.found_string

    @property
    def found(self) -> bool:
        return self._strings.found

    @property
    def held(self) -> str:
        """The characters that are held back."""
        return self._held

    def add(self, text: str, *, may_end: bool = True) -> str:
        """Returns the text that the answer's parser may have now. After ``found`` the output is over.

        Unless ``may_end``, no stop string ends in ``text``, but one may begin there that ends later.
        """
        if self.found:
            return ""
        self._held += text
        if not may_end:
            self._may_end_from = self._passed + len(self._held)
        return self._look_at(self._ahead.content(text))

    def flush(self) -> str:
        """Returns the text that was held back, when no more follows. A stop string may be found in it."""
        if self.found:
            return ""
        text = self._look_at(self._ahead.rest_of_content())
        if not self.found:
            self._strings.flush()
            text += self._pass(self._passed + len(self._held))
        return text

    def at_end(self, text: str, *, may_end: bool) -> str | None:
        """Returns the stop string that ends the output if ``text`` is the last of it."""
        probe = deepcopy(self)
        probe.add(text, may_end=may_end)
        probe.flush()
        return probe.found_string

    def _look_at(self, pieces: list[ContentPiece]) -> str:
        for piece in pieces:
            if piece.start != self._content_end:
                self._strings.flush()
            at = min(max(self._may_end_from - piece.start, 0), len(piece.text))
            for start, text, may_end in ((0, piece.text[:at], False), (at, piece.text[at:], True)):
                held = len(self._strings.held)
                shown = self._strings.add(text, may_end=may_end)
                if self.found:
                    passed = self._pass(piece.start + start - held + len(shown))
                    self._held = ""
                    return passed
            self._content_end = piece.start + len(piece.text)
        held = len(self._strings.held)
        return self._pass(min(self._ahead.decided, self._content_end - held) if held else self._ahead.decided)

    def _pass(self, end: int) -> str:
        """Returns the held text up to a place of the answer."""
        count = end - self._passed
        passed, self._held = self._held[:count], self._held[count:]
        self._passed = end
        return passed


Stops: TypeAlias = StopStrings | ContentStops
