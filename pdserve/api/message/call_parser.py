"""The state machine that all formats of tool calls share: content, and regions in it that hold calls.

``find_marker`` finds markers like ``<tool_call>`` in text that comes in pieces.

A region begins with a marker, such as ``<tool_call>``, or where the complete answer begins with a character that no
ordinary text of the format begins with. A format may also know a call by its own beginning. Each format says how one
call of a region reads. What is no call of a function that the request has becomes content, with the marker before it.
A call whose arguments have begun stays a call, as far as it is one, because the client has its beginning already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.api.message.parts import PartsBuilder
from pdserve.api.message.tool_schemas import ToolSchema

MAX_BLANK = 64
"""How many spaces before a marker are held back, to be left out if it comes."""


class Found(NamedTuple):
    """The first marker of a text, or none."""

    start: int
    """Where the marker begins; without one, where the text begins that may become one."""
    marker: str
    """Empty if the text has no marker."""


def find_marker(text: str, markers: Sequence[str]) -> Found:
    """Returns the marker that begins first."""
    starts = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    if starts:
        return Found(*min(starts))
    return Found(len(text) - _held(text, markers), "")


def begins(text: str, marker: str) -> bool | None:
    """Returns whether ``text`` begins with ``marker``; None if it is too short to say."""
    if text.startswith(marker):
        return True
    return None if marker.startswith(text) else False


def _held(text: str, markers: Sequence[str]) -> int:
    """Returns how many of the last characters may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for start in range(max(len(text) - longest, 0), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return len(text) - start
    return 0


MAX_HELD = 65_536
"""How many characters of something that may be a call are held back. More become content."""


@dataclass(frozen=True, slots=True)
class CallMarkers:
    """What stands around the calls of a format."""

    openings: tuple[str, ...]
    closing: str = ""
    """Empty if nothing closes a region but text that is no call."""
    bare: str = ""
    """The characters that begin a region without a marker, where they begin the answer."""
    separators: str = " \t\r\n,;"
    """The characters that may stand between the calls of a region."""
    inner: tuple[str, ...] = ()
    """The markers within calls."""
    unwrapped: str = ""
    """What a call begins with that may stand without a marker before it; empty if none may."""

    @property
    def around(self) -> tuple[str, ...]:
        return (*self.openings, self.closing) if self.closing else self.openings

    @property
    def beginnings(self) -> tuple[str, ...]:
        return (*self.openings, self.unwrapped) if self.unwrapped else self.openings

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.around, *self.inner)


class StateParser:
    """Takes the text of one message apart, which may call functions.

    Each state is a method that takes what it can of the text that waits, and returns whether it took anything or
    another state is next.
    """

    def __init__(self, tools: Mapping[str, ToolSchema], state: Callable[[], bool], *, parallel: bool) -> None:
        """``tools`` are the functions that may be called, by name. Unless ``parallel``, only the first call counts."""
        self.calls = 0
        """How many calls have begun."""
        self._tools = tools
        self._parallel = parallel
        self._state = state
        self._parts = PartsBuilder()
        self._waiting = ""
        self._over = False
        self._shown_index: int | None = None
        """The number of the call whose arguments come; None if it does not count."""

    def add(self, text: str, parts: PartsBuilder) -> None:
        """Tells ``parts`` what ``text`` adds to the message."""
        self._parts = parts
        self._waiting += text
        self._run()

    @property
    def unread(self) -> int:
        """How many of the last characters no state has taken yet."""
        return len(self._waiting)

    def _run(self) -> None:
        while self._waiting and self._state():
            pass

    def _take(self, count: int) -> str:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _start_call(self, name: str) -> None:
        """Begins a call of the function ``name``, which the request has."""
        self._shown_index = self.calls if self._parallel or not self.calls else None
        self.calls += 1
        if self._shown_index is not None:
            self._parts.call(self._shown_index, name, "")

    def _argue(self, arguments: str) -> None:
        """Adds to the arguments of the call."""
        if self._shown_index is not None and arguments:
            self._parts.call(self._shown_index, None, arguments)


class CallParser(StateParser, ABC):
    """Takes the content of one message apart."""

    def __init__(self, markers: CallMarkers, tools: Mapping[str, ToolSchema], *, parallel: bool) -> None:
        super().__init__(tools, self._content, parallel=parallel)
        self._markers = markers
        self._fresh: str | None = ""
        """The spaces at the beginning of content, which are left out before a call; None behind them."""
        self._begin = True
        """Whether nothing but spaces has come."""
        self._held = ""
        """What has come of a region before its first call has begun, or of a later call. It may become content."""
        self._broken_ends: tuple[str, ...] = ()
        """What ends arguments that are no JSON."""
        self._broken_tail = ""
        """The brackets that close behind such arguments, of what is around them."""
        self._behind_broken: Callable[[], bool] = self._between

    def finish(self, parts: PartsBuilder) -> None:
        """Tells ``parts`` what was held back, when no more text follows."""
        self._parts, self._over = parts, True
        self._run()
        self._fail()
        self._run()
        if self._fresh and not self.calls:
            parts.content(self._fresh)
            self._fresh = None

    @property
    def undecided(self) -> int:
        """How many of the last characters may still become content."""
        return len(self._fresh or "") + len(self._held) + len(self._waiting)

    @abstractmethod
    def _call(self) -> bool:
        """Reads one call: the state at its first character."""

    @abstractmethod
    def _begins_call(self, char: str) -> bool:
        """Returns whether a call may begin with ``char``."""

    def _content(self) -> bool:
        if self._fresh is not None and self._skip_spaces():
            return True
        if self._begin:
            self._begin = False
            if self._waiting[0] in self._markers.bare:
                self._state = self._between
                return True
        start, marker = find_marker(self._waiting, self._markers.beginnings)
        if self._over and not marker:
            start = len(self._waiting)
        if start:
            self._show(self._take(start))
            return True
        if not marker:
            return False
        if marker == self._markers.unwrapped:
            self._state = self._call
            return True
        self._held = (self._fresh or "") + self._take(len(marker))
        self._fresh = ""
        self._state = self._between
        return True

    def _skip_spaces(self) -> bool:
        """Takes spaces at the beginning of content. Returns whether there were any."""
        count = len(self._waiting) - len(self._waiting.lstrip())
        spaces = self._take(count)
        if self._begin:
            self._fresh = (self._fresh or "") + spaces
            if len(self._fresh) > MAX_BLANK:
                self._begin = False
                self._show("")
        return bool(count)

    def _show(self, text: str) -> None:
        self._parts.content((self._fresh or "") + text)
        self._fresh = None

    def _between(self) -> bool:
        """Reads what stands before the next call of a region, or behind the last one."""
        for marker in self._markers.around:
            match begins(self._waiting, marker):
                case True:
                    return self._read_marker(marker)
                case None if not self._over:
                    return False
        char = self._waiting[0]
        if self._begins_call(char):
            self._state = self._call
        elif char in self._markers.separators:
            self._hold(self._take(1))
        else:
            self._fail()
        return True

    def _read_marker(self, marker: str) -> bool:
        if marker == self._markers.closing:
            if self._held:
                self._held += self._take(len(marker))
                self._fail()
            else:
                self._take(len(marker))
                self._state = self._content
        elif self._held:
            self._fail()
        else:
            self._held = self._take(len(marker))
        return True

    def _hold(self, text: str) -> None:
        """Holds back what may become content. What stands between two calls is neither."""
        if self._held or not self.calls:
            self._held += text
        if len(self._held) > MAX_HELD:
            self._fail()

    def _fail(self) -> None:
        """Makes content of what is held: it is no call. What waits is read once more, as content."""
        held, self._held = self._held, ""
        if held:
            self._show(held)
        self._state = self._content

    def _start_call(self, name: str) -> None:
        self._held = self._fresh = ""
        super()._start_call(name)

    def _pass_on(self, ends: tuple[str, ...], tail: str, then: Callable[[], bool]) -> None:
        """Goes on with arguments that are no JSON, as they are, up to one of ``ends``, or to the end of the text.

        ``tail`` are the brackets that close there without being of the arguments. ``then`` is the state behind them.
        """
        self._broken_ends, self._broken_tail, self._behind_broken = ends, tail, then
        self._state = self._read_broken

    def _read_broken(self) -> bool:
        start, marker = find_marker(self._waiting, self._broken_ends)
        if self._over and not marker:
            start = len(self._waiting)
        text = self._waiting[:start]
        if marker or self._over:
            self._argue(_without(text, self._broken_tail))
            self._take(start)
            self._state = self._behind_broken
            return bool(marker)
        # What may stand behind the arguments waits, whatever else has come with it.
        end = text[-MAX_BLANK:]
        waits = len(end) - len(end.rstrip(f"{_BLANKS}{self._broken_tail}"))
        self._argue(self._take(len(text) - waits))
        return False


def _without(text: str, tail: str) -> str:
    """Returns the text without the spaces at its end, and without the brackets of ``tail`` that stand there."""
    text = text.rstrip(_BLANKS)
    for bracket in tail:
        text = text.removesuffix(bracket).rstrip(_BLANKS)
    return text


_BLANKS = " \t\r\n,;"
"""What may stand behind arguments before another call, or the end."""
