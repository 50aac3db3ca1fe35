"""Stop strings end the text, and never show through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.api.stop_strings import StopStrings

ALPHABET = "abc\n"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The plain meaning: the first position at which the text so far ends with a stop string; the longest of those."""
    for end in range(len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@given(parts=st.lists(st.text(ALPHABET, max_size=5), max_size=8), stops=STOPS, include=st.booleans())
def test_meaning_does_not_depend_on_how_text_is_split(parts: list[str], stops: list[str], include: bool) -> None:
    stop_strings = StopStrings(stops, include=include)
    shown = ""
    for part in parts:
        shown += stop_strings.add(part)
        whole, found = expected("".join(parts), stops, include)
        assert whole.startswith(shown), "nothing is shown that has to be taken back"
    shown += stop_strings.flush()
    assert (shown, stop_strings.found) == (whole if parts else "", found if parts else False)


@given(text=st.text(ALPHABET, max_size=30), stops=STOPS)
def test_no_more_is_held_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    shown = "".join(stop_strings.add(char) for char in text)
    if not stop_strings.found:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_partial_match_is_held_until_it_is_none() -> None:
    stop_strings = StopStrings(["END"])
    assert stop_strings.add("abcE") == "abc"
    assert stop_strings.add("N") == ""
    assert stop_strings.add("x") == "ENx"
    assert not stop_strings.found


def test_found_over_many_pieces() -> None:
    stop_strings = StopStrings(["END"])
    assert [stop_strings.add(char) for char in "xENDy"] == ["x", "", "", "", ""]
    assert stop_strings.found
    assert stop_strings.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    stop_strings = StopStrings([])
    assert stop_strings.add("anything") == "anything"
    assert not stop_strings.found
