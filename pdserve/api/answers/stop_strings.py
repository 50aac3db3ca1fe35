"""Ends an output at the first stop string, and never shows a client the beginning of one.

All stop strings of a request are looked for at once, each character in constant time on average, however they and the
text are made (Aho and Corasick, 1975).

An answer that a parser takes apart ends at the first stop string in its content: what the model thinks and the calls
that it writes have none in them (``ContentStops``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import TypeAlias

from pdserve.api.message.message_parser import ContentPiece, MessageParser


class _StopState:
    """The longest end of the text that begins a stop string, or is one."""

    __slots__ = ("after", "held", "matched", "shorter")

    def __init__(self, length: int) -> None:
        self.after: dict[str, _StopState] = {}
        """The states that follow, by the next character."""
        self.shorter: _StopState | None = None
        """The state of the next shorter such end; None for the empty one."""
        self.matched = 0
        """The length of the longest stop string that ends here."""
        self.held = length
        """How many characters of the text may still become a stop string."""


class StopTable:
    """The stop strings of one request, for all of its outputs."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.start = _StopState(0)
        for stop in stops:
            state = self.start
            for length, char in enumerate(stop, 1):
                state = state.after.setdefault(char, _StopState(length))
            state.matched = len(stop)
        self._link()
        self.wanted = bool(stops)
        """Whether there is any."""

    def next(self, state: _StopState, char: str) -> _StopState:
        """Returns the state that one more character leads to."""
        following = state.after.get(char)
        while following is None:
            if state.shorter is None:
                return self.start
            state = state.shorter
            following = state.after.get(char)
        return following

    def _link(self) -> None:
        queue = deque([self.start])
        while queue:
            state = queue.popleft()
            for char, following in state.after.items():
                following.shorter = self.start if state.shorter is None else self.next(state.shorter, char)
                following.matched = max(following.matched, following.shorter.matched)
                if not following.after:
                    following.held = following.shorter.held
                queue.append(following)


class StopStrings:
    """Looks for stop strings in the text of one output.

    The one that ends first wins, however the text is split.
    """

    def __init__(self, stops: StopTable, *, include: bool = False) -> None:
        self._table = stops
        self._state = stops.start
        self._include = include
        self._held = ""
        self.found_string: str | None = None
        self.wanted = stops.wanted
        """Whether there is something to look for."""

    @property
    def found(self) -> bool:
        return self.found_string is not None

    def add(self, text: str, *, may_end: bool = True) -> str:
        """Returns the text that may be shown now. After ``found`` the output is over.

        Unless ``may_end``, no stop string is found in ``text``, but one may begin there that ends later.
        """
        if not self.wanted or self.found:
            return "" if self.found else text
        table, state, known = self._table, self._state, len(self._held)
        text = self._held + text
        for end in range(known, len(text)):
            state = table.next(state, text[end])
            if state.matched and may_end:
                self.found_string, self._held = text[end + 1 - state.matched : end + 1], ""
                return text[: end + 1 if self._include else end + 1 - state.matched]
        self._state = state
        shown = len(text) - state.held
        self._held = text[shown:]
        return text[:shown]

    @property
    def held(self) -> str:
        """The characters that are held back."""
        return self._held

    def at_end(self, text: str, *, may_end: bool) -> str | None:
        """Returns the stop string that ends the output if ``text`` is the last of it."""
        probe = copy(self)
        probe.add(text, may_end=may_end)
        return probe.found_string

    def __deepcopy__(self, memo: dict[int, object]) -> StopStrings:
        """Returns a copy that shares the table, which does not change."""
        return copy(self)

    def flush(self) -> str:
        """Returns the text that was held back, when no more follows."""
        held, self._held = self._held, ""
        self._state = self._table.start
        return held


class ContentStops:
    """Does for an answer that a parser takes apart what ``StopStrings`` does for a plain text.

    A parser of its own reads the text ahead of the one that takes the answer apart, which gets nothing that a stop
    string may still cut off.
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
