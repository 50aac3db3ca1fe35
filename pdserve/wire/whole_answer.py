"""The answer in one piece of a node that journals it: entries as its tokens come, and the answer behind them.

    :0 314 8 2290         these tokens of choice 0 were generated after those that have an entry already
    :1 17
    {"status":200,"headers":{"content-type":"application/json"}}
    {"id": …              the answer's body, to the end of the response

The client gets nothing but the answer's own status, headers and body. Until they are whole, another node can go on
with the answer: the proxy sends it the entries, as those of a stream (``pdserve.wire.journal``). No entry says that a
choice is over: the node that goes on says so itself, and shows all of the text once more. Where log probabilities are
asked for, entries have them too, because no other node can report those of tokens that it has not generated. An answer
that is ready soon goes out without all this.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

JOURNALED_ANSWER = "application/vnd.pdserve.answer"
"""The content type of such a response, which no client sees."""
MAX_LINE_BYTES = 2**20
"""The largest line before the body."""

_HeaderValue = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]*\Z")]


class AnswerError(ValueError):
    """The bytes are no such response. The message says why."""


class AnswerHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The status and the headers of the answer that follows."""

    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    headers: dict[str, _HeaderValue]
    """The headers, whose names are in lower case."""

    def encode(self) -> bytes:
        """Returns the line that precedes the answer's body."""
        return msgspec.json.encode(self) + b"\n"


_head = msgspec.json.Decoder(AnswerHead)


class AnswerReader:
    """Takes the body of one such response apart, however it is cut."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._line = b""
        """The beginning of a line whose end has not come."""
        self._pieces: list[bytes] = []
        self._size = 0
        self.head: AnswerHead | None = None
        """None until it has come."""

    def feed(self, piece: bytes) -> bytes:
        """Returns the whole entries that ``piece`` completes, each with its colon and its end of line.

        Raises AnswerError.
        """
        if self.head is not None:
            self._add(piece)
            return b""
        # An entry has numbers and brackets: the first brace begins the head.
        entries, brace, rest = (self._line + piece).partition(b"{")
        if brace:
            line, end, body = rest.partition(b"\n")
            self._line = b"" if end else brace + line
            if end:
                self.head = _decode(brace + line)
                self._add(body)
        else:
            entries, end, self._line = entries.rpartition(b"\n")
            entries += end
        if len(self._line) > MAX_LINE_BYTES:
            raise AnswerError(f"a line is above {MAX_LINE_BYTES} bytes")
        if entries and not (entries.startswith(b":") and entries.endswith(b"\n")):
            raise AnswerError(f"a line is no entry: {entries[:80]!r}")
        return entries

    def body(self) -> bytes:
        """Returns what has come of the answer's body."""
        return b"".join(self._pieces)

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > self._max_body_bytes:
            raise AnswerError(f"the answer is above {self._max_body_bytes} bytes")
        if piece:
            self._pieces.append(piece)


def _decode(line: bytes) -> AnswerHead:
    try:
        return _head.decode(line)
    except msgspec.MsgspecError as exc:
        raise AnswerError(f"the answer's head is none: {exc}") from exc
