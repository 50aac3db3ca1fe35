"""Tests that JSON is followed character by character as Python's own parser reads it at once."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.api.message.json_text import MAX_DEPTH, JsonText

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def length(text: str) -> int | None:
    """Returns where the object, list or string at the beginning of ``text`` ends; None if there is none."""
    reader = JsonText()
    for index, char in enumerate(text):
        if not reader.add(char):
            return None
        if reader.over:
            return index + 1
    return None


@given(
    st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=3), VALUES, max_size=3) | st.text(max_size=9),
    st.booleans(),
)
@example([10**200, -1e-300, 1.5e200], True)
def test_whole_values_end_where_they_end(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=None if ascii_only else 1)
    assert length(text + " {") == len(text)


@given(st.text('{}[]",:\\ tnu01.-e+', max_size=12))
@example('{"a": 01}')
@example('{"a": 1.}')
@example('{"a": tru}')
@example('["\\u00g0"]')
@example("[1,]")
@example("[-]")
@example(" []")
def test_what_is_followed_to_its_end_is_json(text: str) -> None:
    end = length(text)
    start = len(text) - len(text.lstrip(" "))
    try:
        _, wanted = json.JSONDecoder(parse_constant=lambda name: 1 / 0).raw_decode(text, start)
    except ValueError:
        wanted = None
    is_followed = text[start : start + 1] in ("{", "[", '"')
    assert end == (wanted if is_followed else None)


def test_depth_is_bounded() -> None:
    assert length("[" * MAX_DEPTH + "]" * MAX_DEPTH) == 2 * MAX_DEPTH
    assert length("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None
