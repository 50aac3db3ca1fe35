"""Tests that stop strings end what an answer shows as content, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.api.answers.stop_strings import ContentStops, StopTable
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.message.parts import MessageParts, joined
from pdserve.config import ToolFormat
from tests.api.message.test_parsers import FORMATS, TEXTS, parse, parser
from tests.examples import examples

STOPS = ["<", "</tool", "x", "a", "f", " ", '"}', "1", "\n\n", "é<", "k>\n", "no such text"]


def shown(pieces: list[str], form: ToolFormat, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Returns the text that a parser gets, and the stop string that has ended it."""
    reader = ContentStops(StopTable(stops), parser(form, reasoning=True), include=include)
    text = "".join(map(reader.add, pieces))
    return text + reader.flush(), reader.found_string


def content_pieces(text: str, form: ToolFormat) -> list[str]:
    """Returns the content of an answer, with a new piece behind each gap."""
    reader: MessageParser = parser(form, reasoning=True)
    pieces, end = [""], 0
    for piece in reader.content(text) + reader.rest_of_content():
        assert text[piece.start : piece.start + len(piece.text)] == piece.text
        if piece.start == end:
            pieces[-1] += piece.text
        else:
            pieces.append(piece.text)
        end = piece.start + len(piece.text)
    return pieces


@settings(max_examples=examples(150))
@given(
    st.sampled_from(FORMATS),
    st.tuples(st.sampled_from(["", "<think>a</think>\n", "<think>x", "\n <thi"]), TEXTS).map("".join),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
    st.sets(st.integers(1, 200), max_size=12),
    st.booleans(),
)
@example(ToolFormat.HERMES, "ab<tool_call>x", ["</tool", "<tool_call>x"], {3, 5}, False)
def test_content_ends_at_the_first_stop_string(
    form: ToolFormat, text: str, stops: list[str], cuts: set[int], include: bool
) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    passed, found = shown(pieces, form, stops, include=include)
    assert (passed, found) == shown([text], form, stops, include=include)
    assert text.startswith(passed)
    expected = ""
    for piece in content_pieces(text, form):
        ends = [(at + len(stop), -len(stop)) for stop in stops if (at := piece.find(stop)) >= 0]
        if ends:
            end, length = min(ends)
            expected += piece[: end if include else end + length]
            assert found is not None
            break
        expected += piece
    else:
        assert (found, passed) == (None, text)
    parts, whole = parse([passed], form, reasoning=True), parse([text], form, reasoning=True)
    assert parts.content == expected
    assert whole.reasoning.startswith(parts.reasoning)
    for mine, other in zip(parts.calls, whole.calls, strict=False):
        assert mine.name == other.name
        assert other.arguments.startswith(mine.arguments)


def test_nothing_is_shown_that_may_be_cut_off() -> None:
    """A parser that reads each piece at once never shows more than the whole answer has."""
    text = "<think>stop</think>\n<tool_call>\nst<tool_call>op"
    reader, told = parser(ToolFormat.HERMES, reasoning=True), list[MessageParts]()
    stops = ContentStops(StopTable(["<tool_call>\nst", "op"]), parser(ToolFormat.HERMES, reasoning=True))
    for char in text:
        told.append(reader.add(stops.add(char)))
        assert joined(told).content == ""
    told.append(reader.add(stops.flush()))
    assert joined([*told, reader.finish()]) == MessageParts("", "stop", ())
    assert stops.found_string == "<tool_call>\nst"


@pytest.mark.parametrize(("least", "found"), [(2, "bc"), (3, "bc"), (4, "e")])
def test_no_stop_string_ends_too_soon(least: int, found: str) -> None:
    """Characters count by their own place, though the parser holds back what may be a marker."""
    stops = ContentStops(StopTable(["bc", "e", "<t"]), parser(ToolFormat.HERMES))
    for number, char in enumerate("abcde"):
        stops.add(char, may_end=number >= least - 1)
    assert stops.found_string == found
    held = ContentStops(StopTable(["<t"]), parser(ToolFormat.HERMES))
    for number, char in enumerate("<tx"):
        held.add(char, may_end=number >= 2)
    assert held.found_string is None


@pytest.mark.parametrize("last", ["", "p", "q"])
def test_the_stop_string_at_the_end_is_told_without_ending(last: str) -> None:
    stops = ContentStops(StopTable(["<tool", "op"]), parser(ToolFormat.HERMES))
    passed = stops.add("ok <to")
    assert stops.at_end("ol", may_end=True) == "<tool"
    assert stops.at_end("x o", may_end=True) is None
    assert (passed + stops.add("x o" + last), stops.found) == (
        ("ok <tox ", True) if last == "p" else ("ok <tox oq" if last else "ok <tox ", False)
    )
