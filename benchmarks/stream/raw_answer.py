"""Keeps a streamed answer as bytes while the clock runs, and reads it afterwards. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

import httptools
import msgspec

from pdserve.bench.streamed_answer import DONE, SHOWN_ERROR, EventReader, Stream, read_chunk
from pdserve.errors import BenchError

_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = b"data: "


class RawAnswer:
    """The bytes of one response and the times at which they came, in seconds of one monotonic clock."""

    __slots__ = ("_begun", "_tail", "ended", "pieces", "started")

    def __init__(self, started: float) -> None:
        self.started = started
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = False
        self._begun = False
        self._tail = b""

    def feed(self, now: float, data: bytes) -> bool:
        """Returns True, once, if the first event has come. ``data`` is empty at the end of the connection."""
        self.pieces.append((now, data))
        # These bytes end a chunked body. Inside a body, an event ends with two newlines.
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        self.ended = not data or self._tail == _LAST_CHUNK
        if self._begun or _EVENT not in data:
            return False
        self._begun = True
        return True

    @property
    def last_words(self) -> int:
        """Returns about how many words came in the last piece: an event has a space for each, and at its beginning."""
        _, data = self.pieces[-1]
        if not self._begun:
            return 0
        return data.count(b" ", data.find(_EVENT)) - data.count(_EVENT)


class Wording(msgspec.Struct, frozen=True):
    """The text of every answer; a token is a word with a space before it."""

    period: str
    """The text that is repeated from its beginning."""
    last: str
    """The word at the end of the answer."""


class WordStream(msgspec.Struct):
    """An answer in the words of a ``Wording``."""

    times: Stream
    words: list[int]
    """The number of words in the chunk that came at the same index of ``times.arrivals``."""


def read_answer(raw: RawAnswer, wording: Wording) -> WordStream:
    """Returns what the client of ``raw`` got and when. An answer that is not complete has an error in its stream."""
    reader = _Reader()
    found = WordStream(Stream(raw.started), [])
    said: list[str] = []
    finish = None
    done = False
    try:
        for now, data in raw.pieces:
            for payload in reader.feed(data):
                if payload == DONE:
                    done = True
                    continue
                for choice in read_chunk(payload).choices:
                    finish = choice.finish_reason or finish
                    if choice.text:
                        found.times.arrivals.append(now)
                        found.words.append(choice.text.count(" "))
                        said.append(choice.text)
            found.times.ended = now
    except (httptools.HttpParserError, msgspec.MsgspecError, BenchError) as exc:
        found.times.error = f"not a stream of events: {exc}"[:SHOWN_ERROR]
        return found
    found.times.output_tokens = sum(found.words)
    found.times.error = reader.refused() or _fault("".join(said), wording)
    if not found.times.error and not (done and finish == "length"):
        found.times.error = f"the answer did not end as it should, but with {finish}"
    return found


def _fault(said: str, wording: Wording) -> str:
    if not said:
        return "no answer came"
    if not said.endswith(wording.last):
        return f"the answer broke off after {said.count(' ')} words"
    body = said.removesuffix(wording.last)
    same = wording.period * (len(body) // len(wording.period) + 1)
    return "" if same.startswith(body) else "another text came than the engine gave"


class _Reader:
    """Removes the framing of HTTP, and then that of events."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._events = EventReader()
        self._bodies: list[bytes] = []
        self._refusal: list[bytes] = []

    def feed(self, data: bytes) -> Sequence[bytes]:
        self._parser.feed_data(data)
        if not self._bodies:
            return ()
        body = b"".join(self._bodies)
        self._bodies.clear()
        if self._parser.get_status_code() != 200:
            self._refusal.append(body)
            return ()
        return self._events.feed(body)

    def refused(self) -> str:
        """Returns what the server said in place of an answer; empty if it gave one."""
        said = b"".join(self._refusal).decode(errors="replace")
        return f"status {self._parser.get_status_code()}: {said}"[:SHOWN_ERROR] if said else ""

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)
