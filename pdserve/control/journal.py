"""The journal of a streamed answer: the tokens of each event, so that another node can resume the answer exactly.

A node that was asked for a journal begins every event with a comment of server-sent events, its *entry*:

    :0 314 8 2290         the event shows these tokens of choice 0, and those before them that had no event
    :0.                   the event ends choice 0; tokens that had no event are here
    :usage                the event is the chunk with the usage
    :done                 the event ends the stream
    :move 912             no event: the node wishes that another one goes on, with free blocks for so many tokens
    :0 314 8 [[-0.5,1,[]],[-2.25,3,[]]]
                          so in an answer in one piece: with the tokens' log probabilities as JSON

If a choice's last tokens have an event before that of its end, all of them are in that event's entry, with a stop token
that is not shown. So a choice whose tokens end it by the engine's rules has shown all its text, whatever was held back.

Entry and event are one block of lines, so a client has the event exactly if the proxy has relayed the entry. The proxy
cuts the entries off and keeps them as bytes; nobody parses one unless the node is lost. A stream without entries is an
ordinary one, which cannot be resumed. No line of JSON begins with a colon after an empty line, so no text of an answer
can look like an entry.

**An answer in one piece** has its entries before it:

    :0 314 8 2290         these tokens of choice 0 were generated after those that have an entry already
    :1 17
    {"status":200,"headers":{"content-type":"application/json"}}
    {"id": …              the answer's body, to the end of the response

The client gets nothing but the answer's own status, headers and body. Until they are complete, another node can go on
with the answer: the proxy sends it the entries, as those of a stream. No entry says that a choice is over: the node
that goes on says so itself, and shows all of the text once more. Where log probabilities are asked for, entries have
them too, because no other node can report those of tokens that it has not generated. An answer that is ready soon goes
out without all this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated

import msgspec

from pdserve.wire.sampling_params import TokenLogprobs

MAX_JOURNAL_BYTES = 2**26
"""The largest journal that a ticket can announce."""
DIGEST_BYTES = 32

_ENTRY = re.compile(rb"(0|[1-9][0-9]{0,6})((?: (?:0|[1-9][0-9]{0,9}))*)(?: (\[[0-9eE+\-.,\[\]]*\]))?(\.?)")
_USAGE, _DONE = b"usage", b"done"
_MOVE_BLOCK = re.compile(rb"(?:\A|(?<=\n\n)):move ([0-9]{1,12})\n\n")
_MOVE_LINE = re.compile(rb"^:move ([0-9]{1,12})\n", re.MULTILINE)
_SIGNS = bytes.maketrans(b"[,", b": ")
_encode = msgspec.json.Encoder().encode
_logprobs = msgspec.json.Decoder(list[TokenLogprobs])

USAGE_ENTRY = b":" + _USAGE + b"\n"
DONE_ENTRY = b":" + _DONE + b"\n"


class JournalError(ValueError):
    """The bytes are no journal of such an answer. The message says where and why."""


@dataclass(slots=True)
class JournaledChoice:
    """What a client has of one choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    over: bool = False
    """Whether the client has the choice's finish reason."""
    groups: list[int] = field(default_factory=list)
    """How many tokens each entry has that names any."""
    empty_since: int = 0
    """How many entries without tokens follow the last one of those, or the beginning."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Those of each token, if the entries have any."""

    @property
    def last_group(self) -> list[int]:
        """The tokens of the last entry that names any."""
        return self.token_ids[-self.groups[-1] :] if self.groups else []

    def split(self, count: int) -> tuple[JournaledChoice, JournaledChoice]:
        """Returns the first ``count`` tokens, and the others."""
        first = JournaledChoice(self.token_ids[:count], logprobs=self.logprobs[:count])
        return first, JournaledChoice(self.token_ids[count:], self.over, logprobs=self.logprobs[count:])


@dataclass(slots=True)
class Journal:
    """What a client has of an answer. A choice without any event is not in ``choices``."""

    choices: dict[int, JournaledChoice] = field(default_factory=dict)
    usage: bool = False
    """Whether the client has the chunk with the usage."""
    done: bool = False
    """Whether the client has the end of the stream."""
    events: int = 0
    """How many entries there are: the number of events that the client has."""

    def emitted(self, choice: int) -> tuple[int, ...]:
        """Returns the tokens that the client has of ``choice``."""
        return tuple(self.choices[choice].token_ids) if choice in self.choices else ()


def entry(choice: int, token_ids: Sequence[int], *, over: bool = False) -> bytes:
    """Returns the line that begins an event of ``choice``."""
    # A JSON list with other signs: nothing writes many numbers faster, and every event of every stream has an entry.
    return _encode((choice, *token_ids)).translate(_SIGNS, b"]") + (b".\n" if over else b"\n")


def entry_with_logprobs(choice: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> bytes:
    """Returns the entry of tokens that are reported with log probabilities, all of them finite."""
    return entry(choice, token_ids).rstrip(b"\n") + b" " + _encode(logprobs) + b"\n"


def move_block(tokens: int) -> bytes:
    """Returns what a node writes between two events if it wishes that another one goes on.

    ``tokens`` are those of all choices, with those that come soon: the other node should have free blocks for them.
    """
    return b":move %d\n\n" % tokens


def move_line(tokens: int) -> bytes:
    """Returns what a node writes between two entries of an answer in one piece if it has such a wish; 0 is none."""
    return b":move %d\n" % tokens if tokens else b""


def cut_move_blocks(events: bytes) -> tuple[bytes, int]:
    """Returns complete events without wishes to move, and the tokens of the last wish; 0 if there is none."""
    return _without(_MOVE_BLOCK, events)


def cut_move_lines(entries: bytes) -> tuple[bytes, int]:
    """Returns entries of an answer in one piece without wishes to move, and the tokens of the last wish, or 0."""
    return _without(_MOVE_LINE, entries)


def _without(wish: re.Pattern[bytes], data: bytes) -> tuple[bytes, int]:
    if b":move " not in data:
        return data, 0
    wishes = wish.findall(data)
    return wish.sub(b"", data), int(wishes[-1]) if wishes else 0


def cut(events: bytes) -> tuple[bytes, bytes]:
    """Splits complete events into what the client gets and the entries, one a line, without their colons.

    ``events`` begins where an event begins. An event without an entry passes as it is.
    """
    # Every entry follows the empty line that ends the event before it.
    before, *parts = (b"\n\n" + events).split(b"\n\n:")
    shown, entries = [before], []
    for part in parts:
        line, _, event = part.partition(b"\n")
        entries.append(line + b"\n")
        shown.append(event)
    return b"\n\n".join(shown).removeprefix(b"\n\n"), b"".join(entries)


def parse(entries: bytes, choices: int, vocab_size: int) -> Journal:
    """Returns what ``entries``, in the form that ``cut`` gives, say of an answer with so many choices.

    Raises JournalError if they are anything else.
    """
    journal = Journal()
    lines = entries.split(b"\n")
    if lines.pop():
        raise JournalError("the journal's last entry has no end")
    journal.events = len(lines)
    for number, line in enumerate(lines):
        if line == _USAGE:
            journal.usage = True
        elif line == _DONE:
            journal.done = True
        else:
            _add(journal, line, number, choices, vocab_size)
    return journal


def digest(entries: bytes) -> bytes:
    """Returns what a ticket says of a journal, so that no other one can be sent with it."""
    return blake2b(entries, digest_size=DIGEST_BYTES).digest()


def _add(journal: Journal, line: bytes, number: int, choices: int, vocab_size: int) -> None:
    match = _ENTRY.fullmatch(line)
    if match is None:
        raise JournalError(f"entry {number} of the journal is none: {line[:80]!r}")
    index, token_ids = int(match[1]), [int(token_id) for token_id in match[2].split()]
    if index >= choices or max(token_ids, default=0) >= vocab_size:
        raise JournalError(f"entry {number} of the journal names choice {index} and tokens that the request lacks")
    choice = journal.choices.setdefault(index, JournaledChoice())
    if choice.over:
        raise JournalError(f"entry {number} of the journal goes on with choice {index}, which is over")
    if match[3]:
        choice.logprobs += _read_logprobs(match[3], number, len(token_ids), vocab_size)
    choice.token_ids += token_ids
    if choice.logprobs and len(choice.logprobs) != len(choice.token_ids):
        raise JournalError(f"entry {number} of the journal has log probabilities of some tokens, and not of all")
    if token_ids:
        choice.groups.append(len(token_ids))
        choice.empty_since = 0
    else:
        choice.empty_since += 1
    choice.over = bool(match[4])


def _read_logprobs(data: bytes, number: int, tokens: int, vocab_size: int) -> list[TokenLogprobs]:
    try:
        logprobs = _logprobs.decode(data)
    except msgspec.MsgspecError as exc:
        raise JournalError(f"entry {number} of the journal has no log probabilities where they should be") from exc
    named = [token_id for each in logprobs for token_id, _ in each.top]
    if len(logprobs) != tokens or not all(0 <= token_id < vocab_size for token_id in named):
        raise JournalError(f"entry {number} of the journal has log probabilities of other tokens")
    return logprobs


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
        """Returns the complete entries that ``piece`` completes, each with its colon and its end of line.

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
