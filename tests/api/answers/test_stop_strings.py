"""Tests that stop strings end the text and are never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.api.answers.stop_strings import StopStrings, StopTable, _StopState

ALPHABET = "abc\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Applies the definition: the text ends where it first ends with a stop string, and the longest one counts."""
    for end in range(len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@given(parts=st.lists(st.text(ALPHABET, max_size=5), max_size=8), stops=STOPS, include=st.booleans())
def test_meaning_does_not_depend_on_how_text_is_split(parts: list[str], stops: list[str], include: bool) -> None:
    stop_strings = StopStrings(StopTable(stops), include=include)
    shown = ""
    for part in parts:
        shown += stop_strings.add(part)
        whole, found = expected("".join(parts), stops, include)
        assert whole.startswith(shown), "nothing is shown that has to be taken back"
    shown += stop_strings.flush()
    assert (shown, stop_strings.found) == (whole if parts else "", found if parts else False)


@given(text=st.text(ALPHABET, max_size=30), stops=STOPS)
def test_no_more_is_held_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    stop_strings = StopStrings(StopTable(stops))
    shown = "".join(stop_strings.add(char) for char in text)
    if not stop_strings.found:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_partial_match_is_held_until_it_is_none() -> None:
    stop_strings = StopStrings(StopTable(["END"]))
    assert stop_strings.add("abcE") == "abc"
    assert stop_strings.add("N") == ""
    assert stop_strings.add("x") == "ENx"
    assert not stop_strings.found


def test_found_over_many_pieces() -> None:
    stop_strings = StopStrings(StopTable(["END"]))
    assert [stop_strings.add(char) for char in "xENDy"] == ["x", "", "", "", ""]
    assert stop_strings.found
    assert stop_strings.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    stop_strings = StopStrings(StopTable([]))
    assert stop_strings.add("anything") == "anything"
    assert not stop_strings.found


@pytest.mark.parametrize(
    ("stops", "unit"),
    [
        (["a" * 1_023 + "b"] * 2 + ["a" * length + "c" for length in range(1_009, 1_023)], "a"),
        (["ab" * 500 + "c" * i for i in range(1, 17)], "ab"),
        (["b" * 500 + "a" * 500 + "c" * i for i in range(1, 17)], "ba"),
    ],
)
def test_each_character_takes_the_same_few_steps_on_average(stops: list[str], unit: str) -> None:
    """This holds for any stop strings, wherever the text breaks off the beginning of one."""

    class Counting(StopTable):
        looked_at = 0

        def next(self, state: _StopState, char: str) -> _StopState:
            while char not in state.after and state.shorter is not None:
                self.looked_at += 1
                state = state.shorter
            self.looked_at += 1
            return super().next(state, char)

    def steps(length: int) -> float:
        table = Counting(stops)
        table.looked_at = 0
        stop_strings = StopStrings(table)
        text = (unit * 700 + "x") * (length // 700)
        shown = "".join(stop_strings.add(text[i : i + 4]) for i in range(0, len(text), 4)) + stop_strings.flush()
        assert shown == text
        return table.looked_at / len(text)

    assert max(steps(7_000), steps(28_000)) <= 2.01


def test_one_table_serves_many_outputs() -> None:
    table = StopTable(["END", "STOP"])
    one, two = StopStrings(table), StopStrings(table)
    assert (one.add("xEN"), two.add("yST")) == ("x", "y")
    assert (one.add("Dz"), two.add("Az")) == ("", "STAz")
    assert (one.found, two.found) == (True, False)
    assert two.flush() == ""
