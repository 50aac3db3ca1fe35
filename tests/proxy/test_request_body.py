"""What the proxy reads of a body, and what it takes out."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest
from pdserve_proxy.request_body import LEAD_BYTES, MAX_DEPTH, is_shallow, read_body

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_an_ordinary_body_goes_through_byte_for_byte() -> None:
    data = b'{ "model":"m",  "messages":[{"content":"kv"}], "stream" : true, "temperature":0.10 }'
    body = read_body(data)
    assert body.data is data
    assert (body.model, body.stream) == ("m", True)


@pytest.mark.parametrize("stream", [b"false", b"null", b"1", b'"true"', b"[true]"])
def test_only_true_is_a_stream(stream: bytes) -> None:
    assert not read_body(b'{"stream": ' + stream + b"}").stream


def test_the_model_may_be_missing_or_null() -> None:
    assert read_body(b"{}").model is None
    assert read_body(b'{"model": null}').model is None


@pytest.mark.parametrize(
    "key", ["kv_transfer_params", "kv_transfer", "pdserve_ticket", "x-pdserve-ticket", "\\u006bv_transfer_params"]
)
def test_internal_fields_are_taken_out(key: str) -> None:
    data = f'{{"model":"m","{key}":{{"a":[1]}},"messages":[],"top_p":0.10}}'.encode()
    assert read_body(data).data == b'{"model":"m","messages":[],"top_p":0.10}'


def test_the_words_inside_a_message_are_no_internal_fields() -> None:
    data = b'{"model":"m","messages":[{"kv_transfer_params":1,"content":"pdserve_x \\u006bv_transfer"}]}'
    assert read_body(data).data is data


@given(st.dictionaries(st.text() | st.sampled_from(["kv_transfer_x", "pdserve_y", "x-pdserve-z"]), VALUES, max_size=6))
def test_everything_else_keeps_its_meaning(fields: dict[str, object]) -> None:
    fields.pop("model", None)
    for data in (msgspec.json.encode(fields), json.dumps(fields).encode()):
        kept = msgspec.json.decode(read_body(data).data)
        internal = ("kv_transfer", "pdserve_", "x-pdserve")
        assert kept == {name: value for name, value in fields.items() if not name.startswith(internal)}


@pytest.mark.parametrize("data", [b"", b"{", b"nonsense", b'{"model": "m"} x', b"\xff\xfe", b'{"a":' * 5000])
def test_broken_json_is_the_clients_error(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_body(data)


@pytest.mark.parametrize(("data", "param"), [(b"[]", None), (b'"m"', None), (b'{"model": 5}', "model")])
def test_the_wrong_type_is_the_clients_error(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_body(data)
    assert caught.value.param == param


@given(VALUES, st.integers(0, 8))
def test_depth_is_what_a_parser_would_count(value: object, limit: int) -> None:
    def depth(of: object) -> int:
        inner = of if isinstance(of, list) else list(of.values()) if isinstance(of, dict) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert is_shallow(json.dumps(value).encode(), limit) or depth(value) > limit
    assert not is_shallow(json.dumps(value).encode(), limit) or depth(value) <= limit


def test_what_is_nested_too_deeply_is_refused_and_brackets_in_strings_are_not_nesting() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    read_body(nested(MAX_DEPTH))
    read_body(b'{"a": "' + b'[\\"{' * 1000 + b'", "b": [' + b"[]," * 1000 + b"[]]}")
    for depth in (MAX_DEPTH + 1, 2**20):
        with pytest.raises(InvalidRequest) as caught:
            read_body(nested(depth))
        assert caught.value.code == "json_too_deep"


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_the_lead_is_the_beginning_of_the_prompt(name: str) -> None:
    prompt = json.dumps([{"role": "user", "content": "x" * 2 * LEAD_BYTES}]).encode()
    assert read_body(b'{"%b": %b}' % (name.encode(), prompt)).lead == prompt[:LEAD_BYTES]
    assert read_body(b"{}").lead == b""
