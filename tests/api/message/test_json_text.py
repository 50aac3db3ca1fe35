"""Tests that JSON is followed character by character as Python's own parser reads it at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.api.message.json_text import MAX_DEPTH, JsonText, as_json, as_object

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def followed(text: str) -> tuple[int, str] | None:
    """Returns where the object, list or string at the beginning of ``text`` ends, and that as JSON has it."""
    reader, written = JsonText(), ""
    for index, char in enumerate(text):
        if (piece := reader.add(char)) is None:
            return None
        written += piece
        if reader.over:
            return index + 1, written
    return None


@given(
    st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=3), VALUES, max_size=3) | st.text(max_size=9),
    st.booleans(),
)
@example([10**200, -1e-300, 1.5e200], True)
def test_whole_values_end_where_they_end(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=None if ascii_only else 1)
    assert followed(text + " {") == (len(text), text)


@given(st.text("{}[]\",:\\ tnu01.-e+'\n\x00", max_size=12))
@example('{"a": 01}')
@example('{"a": 1.}')
@example('{"a": tru}')
@example('["\\u00g0"]')
@example("[1,]")
@example("[-]")
@example(" []")
def test_what_is_followed_to_its_end_is_json(text: str) -> None:
    """All of it is that but escapes and control characters, which are written as JSON has them."""
    found = followed(text)
    start = len(text) - len(text.lstrip(" \n"))
    decoder = json.JSONDecoder(parse_constant=lambda name: 1 / 0)
    try:
        value, end = decoder.raw_decode(text, start)
    except ValueError:
        if found is not None:
            assert decoder.decode(found[1]) is not None
            assert "\\" in text or json.JSONDecoder(strict=False).raw_decode(text, start)[1] == found[0]
    else:
        if text[start] in ("{", "[", '"'):
            assert found is not None
            assert (found[0], decoder.decode(found[1])) == (end, value)
        else:
            assert found is None


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("a\nb\t\r\x00\x1b", "a\nb\t\r\x00\x1b"),
        (r"\d+\.\(", r"\d+\.\("),
        (r"it\'s", "it's"),
        (r"C:\x\u12", r"C:\x\u12"),
        (r"\u12\n\u", "\\u12\n\\u"),
        ("\\\n", "\\\n"),
        (r"\\ \" \/ \u00e9", '\\ " / é'),
    ],
)
def test_strings_as_models_write_them(written: str, read: str) -> None:
    text = f'{{"{written}": ["{written}"]}}'
    found = followed(text)
    assert found is not None
    assert (found[0], json.loads(found[1])) == (len(text), {read: [read]})
    assert as_json(text) == found[1]


@pytest.mark.parametrize("text", ['{"a": 1', "{'a': 1}", '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1e999}', "{"])
def test_arguments_that_are_no_json_are_kept_in_an_object(text: str) -> None:
    assert json.loads(as_object(text)) == {"INVALID_JSON": text}
    assert json.loads(as_object('{"a": "\n\\d"}')) == {"a": "\n\\d"}


def test_depth_is_bounded() -> None:
    assert followed("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None
    assert followed("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)) is None
