"""Tests that the parts of a body are counted in linear time, without building it."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.api.requests import openai_request as body_bounds
from pdserve.api.requests.openai_request import BodyParser, ChatRequest, CompletionRequest, check_values
from pdserve.api.requests.prompts import Prompt
from pdserve.api.requests.sampling_fields import MAX_ECHOED_CHARS, MAX_SHOWN_PROMPT_IDS, check_shown_prompts
from pdserve.errors import InvalidRequest
from tests.api.node import MODEL, NodeUnderTest
from tests.api.plain_http import get, send
from tests.cpu_time import least_cpu_s

MIB = 2**20
TEXT = b'{"model":"m","prompt":"'


def refused(body: bytes) -> bool:
    try:
        check_values(body)
    except InvalidRequest as error:
        assert error.code == "too_many_values"
        return True
    return False


@st.composite
def documents(draw: st.DrawFn) -> Any:
    words = st.text('[{,:"\\x\n', max_size=8)
    values = st.recursive(words | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(words, inner))
    return draw(values)


def counts(document: Any) -> tuple[int, int]:
    """Returns the number of lists, objects and fields, and the number of commas between values."""
    match document:
        case list():
            inner, containers, items = document, 1, len(document)
        case dict():
            inner, containers, items = list(document.values()), 1 + len(document), len(document)
        case _:
            return 0, 0
    found = [counts(value) for value in inner]
    return containers + sum(a for a, _ in found), max(items - 1, 0) + sum(b for _, b in found)


@given(document=documents(), piece=st.integers(1, 9), ascii_only=st.booleans())
def test_values_are_counted_and_what_strings_hold_is_not(document: Any, piece: int, ascii_only: bool) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    containers, items = counts(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_bounds, "UNCOUNTED_BYTES", -1)
        patch.setattr(body_bounds, "_PIECE_BYTES", piece)
        patch.setattr(body_bounds, "MAX_CONTAINERS", containers)
        patch.setattr(body_bounds, "MAX_ITEMS", items)
        assert not refused(body)
        patch.setattr(body_bounds, "MAX_CONTAINERS", containers - 1)
        assert refused(body) or containers == 0
        patch.setattr(body_bounds, "MAX_CONTAINERS", containers)
        patch.setattr(body_bounds, "MAX_ITEMS", items - 1)
        assert refused(body) or items == 0


@pytest.mark.parametrize("unit", [b"a, ", b'\\"', b"\\\\", b"\\u00e9", b"\\n", b"[{,:"], ids=str)
def test_a_text_takes_time_in_proportion_to_its_length(unit: bytes) -> None:
    """This holds also for a text that never ends and consists of backslashes and quotes."""
    parser = BodyParser(CompletionRequest)

    def parse(size: int) -> None:
        with pytest.raises(InvalidRequest):
            parser.parse(TEXT + unit * (size // len(unit)))

    small, large = (least_cpu_s(functools.partial(parse, size)) for size in (MIB // 2, 2 * MIB))
    assert large < 8 * small + 0.01


@pytest.mark.parametrize(
    ("before", "unit", "after"),
    [
        (b'{"chat_template_kwargs":{"a":[', b"[],", b"0]}}"),
        (b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""},', b"0]}]}"),
        (b'{"prompt":[', b"1,", b"1]}"),
        (b'{"prompt":[', b"[],", b"[]]}"),
        (b'{"unknown":', b"[", b""),
        (b'{"stop":[', b'"a",', b'"a"]}'),
        (b'{"logit_bias":{', b'"1":1,', b'"1":1}}'),
        (b"{", b'"a":1,', b'"a":1}'),
    ],
)
def test_eight_mib_of_values_cost_no_more_than_a_few_mib_of_text(before: bytes, unit: bytes, after: bytes) -> None:
    body = before + unit * (8 * MIB // len(unit)) + after
    text = TEXT + b"word, " * (8 * MIB // 6) + b'"}'

    def refuse() -> None:
        with pytest.raises(InvalidRequest):
            BodyParser(ChatRequest).parse(body)

    values_s = least_cpu_s(refuse, runs=1)
    assert values_s < 3 * least_cpu_s(lambda: BodyParser(CompletionRequest).parse(text), runs=1)


def test_token_ids_of_the_longest_contexts_pass() -> None:
    body = json.dumps({"model": "m", "prompt": list(range(400_000))}).encode()
    assert len(BodyParser(CompletionRequest).parse(body).request.prompt) == 400_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"messages":' + b"[" * 50_000, "invalid_json"),
        (b'{"chat_template_kwargs":' + b'{"a":' * 15_000 + b"1" + b"}" * 15_000 + b"}", "invalid_json"),
        (b'{"unknown":' + b"[" * 40_000 + b"]" * 40_000 + b"}", "invalid_json"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_json"),
        (b'{"messages":[{"role":"user","content":"\\udc00x"}]}', "invalid_json"),
        (b'{"model":"' + MODEL.encode() + b'","messages":NaN}', "invalid_json"),
    ],
)
def test_deep_and_broken_bodies_are_refused_and_the_node_goes_on(body: bytes, code: str, node: NodeUnderTest) -> None:
    answer = send("POST", f"{node.url}/v1/chat/completions", content=body)
    assert (answer.status, answer.json()["error"]["code"]) == (400, code)
    assert get(f"{node.url}/health").status == 200


@pytest.mark.parametrize(
    ("fields", "echo", "ids", "param"),
    [
        ({"echo": True}, MAX_ECHOED_CHARS // 64, 5, None),
        ({"echo": True}, MAX_ECHOED_CHARS // 64 + 1, 5, "echo"),
        ({"return_token_ids": True}, 0, MAX_SHOWN_PROMPT_IDS // 64, None),
        ({"return_token_ids": True}, 0, MAX_SHOWN_PROMPT_IDS // 64 + 1, "return_token_ids"),
        ({}, 0, MAX_SHOWN_PROMPT_IDS, None),
    ],
)
def test_choices_do_not_multiply_long_prompts(fields: dict[str, Any], echo: int, ids: int, param: str | None) -> None:
    request = CompletionRequest(prompt="x", n=32, **fields)
    prompts = [Prompt([7] * ids, 1, "x" * echo)] * 2
    try:
        check_shown_prompts(request, prompts)
    except InvalidRequest as error:
        assert error.param == param
    else:
        assert param is None
