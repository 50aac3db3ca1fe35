"""Reads the requests of ``pdserve bench load --dataset FILE``: JSON lines, or one JSON list of the same objects.

Each object is recognised by its fields (``_SHAPES`` names them). The file is read twice: once before anything is sent,
so that a wrong line costs no run, and then while the load runs. In memory are one object at a time, 4 bytes for each
session, and 8 bytes for each line that names its session.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from pdserve.bench.load import FIRST_ID, Job, Session, Turn
from pdserve.config.bench import DatasetConfig
from pdserve.errors import BenchError

_SHAPES = "prompt, messages, conversations, turns or input_length"
_MAX_OBJECT = 64 * 2**20
"""The most bytes or characters of one object."""
_READ = 2**18
_BETWEEN = re.compile(r"[\s,]*")
_CUT = 16
"""A JSON error so near the end of what was read may only mean that there is more to read."""

_Tokens = Annotated[int, Meta(ge=1, le=2**24)]
_Milliseconds = Annotated[float, Meta(ge=0)]


class _Said(msgspec.Struct):
    """A message in ShareGPT's shape."""

    speaker: str = msgspec.field(name="from")
    value: str


class _LineTurn(msgspec.Struct):
    """A turn of an object that holds a complete session."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    delay: _Milliseconds | None = None
    timestamp: _Milliseconds | None = None
    output_length: _Tokens | None = None
    max_tokens: _Tokens | None = None


class _Line(msgspec.Struct):
    """One object of a dataset. Times are in milliseconds."""

    prompt: str | list[Annotated[int, Meta(ge=0)]] | None = None
    text_input: str | None = None
    messages: list[dict[str, Any]] | None = None
    conversations: list[_Said] | None = None
    turns: list[_LineTurn] | None = None
    input_length: _Tokens | None = None
    hash_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    output_length: _Tokens | None = None
    output_tokens: _Tokens | None = None
    max_tokens: _Tokens | None = None
    timestamp: _Milliseconds | None = None
    delay: _Milliseconds | None = None
    session_id: str | int | None = None
    tools: list[dict[str, Any]] | None = None


_lines = msgspec.json.Decoder(_Line)
_ROLES = {"system": "system", "human": "user", "user": "user"}


@dataclass(frozen=True, slots=True)
class _Found:
    """An object of the file, and where it stands."""

    number: int
    offset: int
    """The first byte of its line; -1 in a JSON list."""
    line: _Line


@dataclass(slots=True)
class Dataset:
    """A file whose objects are all right."""

    config: DatasetConfig
    output_tokens: int
    vocab_size: int
    seed: int
    turns: array[int] = field(default_factory=lambda: array("I"))
    """The number of requests of each session."""
    left_out: int = 0
    """The number of conversations in which no person says anything."""
    timed: bool = False
    """Whether the file says when its sessions begin, and its times are wanted."""
    last_at_s: float = 0.0
    """When the last of them begins."""
    _first_ms: float = 0.0
    _ids: dict[str | int, array[int]] = field(default_factory=dict)
    """The offsets of each session's lines."""

    @property
    def name(self) -> str:
        return self.config.file

    def sessions(self, first: int, count: int) -> Iterator[Session]:
        """Yields ``count`` sessions, from the one with the number ``first`` on. Raises BenchError."""
        return itertools.islice(self._sessions(), first, first + count)

    def requests(self, first: int, count: int) -> int:
        return sum(self.turns[first : first + count])

    def _sessions(self) -> Iterator[Session]:
        for found in _objects(Path(self.name)):
            line = found.line
            if line.session_id is None or line.turns is not None or line.conversations is not None:
                turns = self._turns(found)
                if turns:
                    yield Session(turns, turns[0].at_s)
            elif self._ids[line.session_id][0] == found.offset:
                yield Session(self._later_lines(self._ids[line.session_id]), self._at_s(line.timestamp))

    def _later_lines(self, offsets: Sequence[int]) -> Iterator[Turn]:
        """Yields the turns of a session whose lines begin at ``offsets``, each when it is asked for."""
        for offset in offsets:
            with Path(self.name).open("rb") as file:
                file.seek(offset)
                yield self._line_turn(_decode(self.name, offset, file.readline(_MAX_OBJECT)), offset)

    def check(self) -> None:
        """Reads the file to its end. Raises BenchError for the first object that is wrong."""
        latest: float | None = None
        for found in _objects(Path(self.name)):
            line = found.line
            turns = self._turns(found)
            at_ms = line.timestamp if line.turns is None else line.turns[0].timestamp
            grouped = line.session_id is not None and line.turns is None and line.conversations is None
            starts = not (grouped and line.session_id in self._ids)
            if latest is None and not self.turns:
                self._first_ms = at_ms or 0.0
                self.timed = at_ms is not None and self.config.speed > 0
                latest = at_ms
            elif at_ms is None and latest is not None and starts:
                raise _wrong(self.name, found, "it has no timestamp, and those before it have one")
            elif at_ms is not None:
                if latest is None:
                    raise _wrong(self.name, found, "it has a timestamp, and those before it have none")
                if at_ms < latest:
                    raise _wrong(self.name, found, f"its timestamp, {at_ms:g}, is before the last one, {latest:g}")
                latest = at_ms
            if not turns:
                self.left_out += 1
            elif grouped and line.session_id is not None:
                self._note_line(found, line.session_id)
            else:
                self.turns.append(len(turns))
        if not self.turns:
            why = ": no person says anything in its conversations" if self.left_out else ""
            raise BenchError(f"--dataset: {self.name} has no request{why}")
        self.turns = array("I", self._counts()) if self._ids else self.turns
        self.last_at_s = self._at_s(latest)

    def _note_line(self, found: _Found, session: str | int) -> None:
        if found.offset < 0:
            raise _wrong(self.name, found, "it has a session_id, which only JSON lines may have")
        if session not in self._ids:
            self._ids[session] = array("Q")
            # The session's number of lines is filled in at the end.
            self.turns.append(0)
        self._ids[session].append(found.offset)

    def _counts(self) -> Iterator[int]:
        lengths = iter([len(offsets) for offsets in self._ids.values()])
        for count in self.turns:
            yield count or next(lengths)

    def _turns(self, found: _Found) -> list[Turn]:
        line = found.line
        given = [
            name
            for name in ("prompt", "text_input", "messages", "conversations", "turns")
            if getattr(line, name) is not None
        ]
        if len(given) > 1:
            raise _wrong(self.name, found, f"it has both {given[0]} and {given[1]}")
        if not given and line.input_length is None:
            raise _wrong(self.name, found, f"it has none of {_SHAPES}")
        most = self.config.turns or None
        if line.conversations is not None:
            return _conversation(line.conversations, self.output_tokens)[:most]
        if line.turns is not None:
            if not line.turns:
                raise _wrong(self.name, found, "it has no turns")
            return [self._turn(found, number, turn) for number, turn in enumerate(line.turns[:most], 1)]
        if line.messages is not None and not line.messages:
            raise _wrong(self.name, found, "it has no messages")
        if line.hash_ids is not None and line.input_length is not None:
            self._check_blocks(found, len(line.hash_ids), line.input_length)
        return [self._line_turn(line, found.offset if found.offset >= 0 else found.number)]

    def _check_blocks(self, found: _Found, blocks: int, tokens: int) -> None:
        size = self.config.block_tokens
        if blocks != -(-tokens // size):
            what = f"its {blocks} hash_ids of {size} tokens do not make its input_length, {tokens}"
            raise _wrong(self.name, found, f"{what}: --dataset-block-tokens says how many tokens an id stands for")

    def _turn(self, found: _Found, number: int, turn: _LineTurn) -> Turn:
        """Returns a turn of an object that holds a complete session."""
        messages = turn.messages or ([{"role": "user", "content": turn.text}] if turn.text else [])
        if not messages:
            raise _wrong(self.name, found, f"its turn {number} has neither text nor messages")
        tokens, exact = self._length(turn.output_length, turn.max_tokens)
        job = Job((), tokens, exact=exact, messages=messages)
        return Turn(job, self._think_s(turn.delay), self._at_s(turn.timestamp), continues=True)

    def _line_turn(self, line: _Line, place: int) -> Turn:
        """Returns the one turn of an object. ``place`` makes a random prompt unlike those of other objects."""
        tokens, exact = self._length(line.output_length or line.output_tokens, line.max_tokens)
        prompt: Sequence[int] | str = ()
        if line.messages is None:
            text = line.prompt if line.prompt is not None else line.text_input
            prompt = text if text is not None else self._random_prompt(line, place)
        sampling = {"tools": line.tools} if line.tools else {}
        job = Job(prompt, tokens, sampling, exact, line.messages or ())
        return Turn(job, self._think_s(line.delay), self._at_s(line.timestamp))

    def _random_prompt(self, line: _Line, place: int) -> list[int]:
        """Returns a prompt of ``input_length`` tokens; objects share what their leading ``hash_ids`` share."""
        tokens = line.input_length or 0
        if line.hash_ids is None:
            return self._random(tokens, 0, place)
        size = self.config.block_tokens
        return [token for each in line.hash_ids for token in self._random(size, 1, each)][:tokens]

    def _random(self, tokens: int, *seed: int) -> list[int]:
        source = np.random.default_rng([self.seed, *seed])
        found: list[int] = source.integers(FIRST_ID, self.vocab_size, tokens).tolist()
        return found

    def _length(self, exact: int | None, most: int | None) -> tuple[int, bool]:
        return (exact, True) if exact is not None else (most or self.output_tokens, False)

    def _at_s(self, timestamp: float | None) -> float:
        if timestamp is None or not self.timed:
            return 0.0
        return (timestamp - self._first_ms) / 1e3 / self.config.speed

    def _think_s(self, delay: float | None) -> float:
        return delay / 1e3 / self.config.speed if delay and self.config.speed else 0.0


def _conversation(said: Sequence[_Said], output_tokens: int) -> list[Turn]:
    """Returns a turn for each message of a person. The answers in the file are left out: the server gives its own."""
    turns: list[Turn] = []
    new: list[dict[str, Any]] = []
    for message in said:
        role = _ROLES.get(message.speaker)
        if role is None or not message.value:
            continue
        new.append({"role": role, "content": message.value})
        if role == "user":
            turns.append(Turn(Job((), output_tokens, exact=False, messages=tuple(new)), continues=True))
            new = []
    return turns


def open_dataset(config: DatasetConfig, output_tokens: int, vocab_size: int, seed: int) -> Dataset:
    """Returns the dataset after a reading of all of it. Raises BenchError for the first object that is wrong."""
    if not Path(config.file).is_file():
        raise BenchError(f"--dataset: there is no file {config.file!r}")
    dataset = Dataset(config, output_tokens, vocab_size, seed)
    try:
        dataset.check()
    except OSError as exc:
        raise BenchError(f"--dataset: cannot read {config.file}: {exc.strerror}") from exc
    return dataset


def _wrong(name: str, found: _Found, what: str) -> BenchError:
    return BenchError(f"{name}, {'line' if found.offset >= 0 else 'entry'} {found.number}: {what}")


def _objects(path: Path) -> Iterator[_Found]:
    """Yields the objects of a file. Raises BenchError for one that cannot be read, and OSError."""
    with path.open("rb") as file:
        is_list = file.read(_READ).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if not is_list:
            file.seek(0)
            yield from _line_objects(path.name, file)
            return
    with path.open(encoding="utf-8-sig") as text:
        yield from _list_objects(path.name, text)


def _line_objects(name: str, file: io.BufferedReader) -> Iterator[_Found]:
    offset = 0
    for number in itertools.count(1):
        line = file.readline(_MAX_OBJECT)
        if not line:
            return
        if len(line) == _MAX_OBJECT:
            raise BenchError(f"{name}, line {number}: it has more than {_MAX_OBJECT // 2**20} MiB")
        if line.strip():
            yield _Found(number, offset, _decode(name, number, line))
        offset += len(line)


def _decode(name: str, number: int, line: bytes) -> _Line:
    try:
        # msgspec before 0.23 and since say otherwise that a text is not UTF-8.
        return _lines.decode(line.decode("utf-8-sig"))
    except msgspec.MsgspecError as exc:
        raise BenchError(f"{name}, line {number}: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise BenchError(f"{name}, line {number}: it is not UTF-8") from exc


def _list_objects(name: str, file: io.TextIOWrapper) -> Iterator[_Found]:
    number = 0
    try:
        for number, value in enumerate(_list_values(name, file), 1):
            yield _Found(number, -1, msgspec.convert(value, _Line))
    except msgspec.ValidationError as exc:
        raise BenchError(f"{name}, entry {number}: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise BenchError(f"{name}, after entry {number}: it is not UTF-8") from exc


def _list_values(name: str, file: io.TextIOWrapper) -> Iterator[object]:
    """Yields the values of one JSON list, of which only a part is in memory."""
    decoder = json.JSONDecoder()
    rest, at, step, number = file.read(_READ).lstrip().removeprefix("["), 0, _READ, 1
    while True:
        between = _BETWEEN.match(rest, at)
        at = between.end() if between else at
        if rest[at : at + 1] == "]":
            return
        try:
            value, at = decoder.raw_decode(rest, at)
        except json.JSONDecodeError as exc:
            cut = exc.pos >= len(rest) - _CUT or exc.msg.startswith("Unterminated string")
            more = file.read(step) if cut and len(rest) - at < _MAX_OBJECT else ""
            if not more:
                raise BenchError(f"{name}, entry {number}: {exc.msg}") from exc
            # Twice as much each time: a long entry is decoded anew only a few times.
            rest, at, step = rest[at:] + more, 0, 2 * step
            continue
        yield value
        step, number = _READ, number + 1
