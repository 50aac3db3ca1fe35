"""The proxy reads few fields of a body, in linear time, and removes internal ones."""

from __future__ import annotations

import functools
import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.requests.openai_request import BodyParser, CompletionRequest
from pdserve.api.requests.prompts import _listed
from pdserve.errors import InvalidRequest
from pdserve_proxy.requests.request_body import MAX_ANSWERS, MAX_FIELDS, MAX_HITS, PROMPT_START_BYTES, read_body
from tests.cpu_time import least_cpu_s
from tests.examples import examples

ZEROS = "0" * 70
"""More digits than anybody writes."""
NUMBERS = st.sampled_from(
    [
        *("0", "-0", "1", "2", "3", "7", "19", "20", "21", "128", "129", "100", "-100", "-101", "true", "null", "1.5"),
        *("2.0", "3.000", "2e0", "1e1", "1E+2", "128e0", "0.2e1", "1e-400", "1e400", "-1e2", "0.5e1", "30e-1"),
        *(f"0.{ZEROS}3e71", f"0.{ZEROS}128e73", f"-0.{ZEROS}7e71", f"5.{ZEROS}", f"4{ZEROS}e-70", f"1{ZEROS}"),
        *('"2"', "[2]", "{}", '""', "0.9999999999999999999999999", "2.0000000000000000000000001", "9007199254740993.0"),
        *("01", "+1", "1.", ".5", "1e", "0x2", "1_0", "NaN", "Infinity", "\u0661"),  # no numbers of JSON
    ]
)
PROMPTS = st.sampled_from(
    [
        *('"x"', '"[,"', '["x"]', '["a", "b"]', '[ "a" , "\\"," ]', "[1, 2]", "[[1], [2, 3]]", "[ [1],[2],[3] ]", "[]"),
        *('["a", 1]', '[[1], "a"]', "[-1]", "[1.0, 2]", "[[1.0], [2]]", '["[", "["]', "null", "5", "{}", '[["a"]]'),
        *("[" + " " * PROMPT_START_BYTES + item for item in ("1, 2]", "[1], [2]]", '"a", "b"]')),
    ]
)
FIELDS = st.one_of(
    st.tuples(st.sampled_from(["n", "best_of", "priority"]), NUMBERS),
    st.tuples(st.just("prompt"), PROMPTS),
    st.tuples(st.just("stream"), st.sampled_from(["true", "false", "null", "1", '"true"', "[true]", "True", " true "])),
    st.tuples(st.just("model"), st.sampled_from(['"m"', '"\\u006d"', "null", "5", '""', '["m"]'])),
    st.tuples(st.sampled_from(["N", "nn", "Stream", " n", "kv_transfer", "x"]), NUMBERS),
)
"""Names and values of fields, right and wrong, in all the ways in which they can be written."""


@st.composite
def written(draw: st.DrawFn) -> bytes:
    """Returns a body, whose fields may come twice, with letters written as escapes, and with blanks around them."""
    fields = [("prompt", draw(PROMPTS)), *draw(st.lists(FIELDS, max_size=6))]
    blank = st.sampled_from(["", "", " ", "\n\t ", "\r"])

    def name(letters: str) -> str:
        return "".join(f"\\u{ord(letter):04x}" if draw(st.integers(0, 9)) == 0 else letter for letter in letters)

    def entry(letters: str, value: str) -> str:
        return f'{draw(blank)}"{name(letters)}"{draw(blank)}:{draw(blank)}{value}{draw(blank)}'

    return ("{" + ",".join(entry(*field) for field in fields) + "}").encode()


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


@pytest.mark.parametrize("data", [b"", b" \r\n"])
def test_an_empty_body_is_called_so(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no body") as caught:
        read_body(data)
    assert caught.value.code == "empty_body"


@pytest.mark.parametrize(("data", "param"), [(b"[]", None), (b'"m"', None), (b'{"model": 5}', "model")])
def test_the_wrong_type_is_the_clients_error(data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_body(data)
    assert caught.value.param == param


PIECES = st.sampled_from(
    [b" ", *rb"""" \" \ [ ] { } [], {"":1}, "", 1, x : \u \u00e9 \u0061 "kv_transfer":1, \"kv_transfer""".split()]
)
"""The pieces of bodies that are meant to be slow to read."""


@settings(max_examples=examples(400))
@given(written())
def test_the_proxy_reads_what_a_node_reads(data: bytes) -> None:
    """Whatever a node takes, it takes for what the proxy has counted."""
    try:
        node = BodyParser(CompletionRequest).parse(data).request
        prompts = len(_listed(node.prompt))
    except InvalidRequest:
        read_any(data)
        return
    try:
        body = read_body(data)
    except InvalidRequest as exc:
        assert exc.param == "model", "of two models the proxy may refuse the first, where a node reads the second"
        return
    assert (body.model, body.stream, body.priority) == (node.model, bool(node.stream), node.priority or 0)
    # Token ids behind thousands of blanks count as so many prompts, which costs nobody but their client.
    assert body.prompts == prompts or ((body.prompts > prompts and len(data) > PROMPT_START_BYTES) or b"[-1" in data)
    assert body.answers == min(body.prompts * node.choices, MAX_ANSWERS)
    assert BodyParser(CompletionRequest).parse(body.data).request == node


def read_any(body: bytes) -> None:
    """Reads ``body``, whether or not it is valid."""
    with suppress(InvalidRequest):
        read_body(body)


@settings(max_examples=examples(60))
@given(
    st.sampled_from([b"", b'{"a":', b'{"a":[', b'{"a":"', b'{"prompt":["', b"[" * 65, b"[" * 65 + b'"']),
    st.lists(PIECES, min_size=1, max_size=4).map(b"".join),
    st.sampled_from([b"", b'"]}', b"]}", b"1]}"]),
)
def test_twice_the_bytes_take_at_most_twice_the_time_whatever_they_are(head: bytes, piece: bytes, tail: bytes) -> None:
    def body(size: int) -> bytes:
        return head + piece * (size // len(piece)) + tail

    small, large = (least_cpu_s(functools.partial(read_any, body(size))) for size in (2**14, 2**18))
    # 16 times the bytes: 256 times the time if it grew with their square. Below a millisecond the clock is too coarse.
    assert large < 64 * max(small, 5e-5)


@pytest.mark.parametrize(
    ("head", "piece", "tail"),
    [
        (b'{"a":[', b"[],", b"1]}"),
        (b'{"a":[', b'{"":1},', b"1]}"),
        (b'{"prompt":[', b'"",', b'""]}'),
        (b'{"prompt":[', b"[],", b"[]]}"),
        (b'{"a":"', b'\\"', b'"}'),
        (b'{"a":"', b"\\u00e9", b'"}'),
        (b'{"a":[', b'"kv_transfer",', b"1]}"),
        (b'{"a":"', b'\\"kv_transfer', b'"}'),
    ],
)
def test_a_body_holds_the_event_loop_for_a_few_passes_of_a_parser_at_most(
    head: bytes, piece: bytes, tail: bytes
) -> None:
    body = head + piece * (2**21 // len(piece)) + tail
    dense = b"[%b[]]" % (b"[]," * (2**21 // 3))
    one_pass = least_cpu_s(lambda: msgspec.json.decode(dense, type=msgspec.Raw))
    assert least_cpu_s(lambda: read_any(body)) < 5 * one_pass


def test_so_many_fields_that_taking_one_out_would_take_long_are_refused() -> None:
    many = b",".join(b'"%d":1' % number for number in range(MAX_FIELDS))
    assert read_body(b"{%b}" % many).data == b"{%b}" % many
    for internal in (b'"kv_transfer":1', b'"\\u006bv_transfer":1'):
        with pytest.raises(InvalidRequest) as caught:
            read_body(b"{%b,%b}" % (many, internal))
        assert caught.value.code == "too_many_fields"
    inside = b'{"%b": "x"}' % (b'\\"kv_transfer' * 2 * MAX_HITS)
    assert read_body(inside).data == inside


def test_what_is_nested_too_deeply_is_refused_and_brackets_in_strings_are_not_nesting() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    read_body(nested(64))
    read_body(b'{"a": "' + b'[\\"{' * 1000 + b'", "b": [' + b"[]," * 1000 + b"[]]}")
    too_deep = b"[" * 10**5 + b"]" * 10**5
    for body in (nested(2**20), b'{"prompt":%b}' % too_deep, b'{"n":%b}' % too_deep, b'{"a":' * 10**5):
        with pytest.raises(InvalidRequest) as caught:
            read_body(body)
        assert caught.value.code == "json_too_deep"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ('"text [ , ["', 1),
        ("[1, 2, 3]", 1),
        ('["a"]', 1),
        ('[ "a, b", "[c\\"]", "\\\\" ]', 3),
        ("[[1, 2], [3], [4]]", 3),
        ("[]", 1),
        ("null", 1),
        (json.dumps(["a"] * MAX_ANSWERS), MAX_ANSWERS),
        (json.dumps(["a"] * 5 * MAX_ANSWERS), MAX_ANSWERS),
        (json.dumps([[1]] * 5 * MAX_ANSWERS), MAX_ANSWERS),
        (json.dumps([1] * 5 * MAX_ANSWERS), 1),
    ],
)
def test_prompts_are_counted_in_all_of_their_forms(prompt: str, count: int) -> None:
    body = read_body(f'{{"prompt": {prompt}}}'.encode())
    assert (body.prompts, body.answers) == (count, count)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ('"n": 128', 8 * 128),
        ('"n": 3, "best_of": 2', 24),
        ('"best_of": 4', 32),
        ('"n": 1e2', 800),
        ('"n": 2.0', 16),
        ('"n": null', 8),
        ('"n": -5', 8),
        ('"n": "9"', 8),
        ('"n": [9]', 8),
        (f'"n": {"9" * 5000}', MAX_ANSWERS),
        (f'"n": 0.{"0" * 70}128e73', 1024),
        (f'"n": 16.{"0" * 70}', 128),
        (f'"n": 1{"0" * 70}e-70', 8),
        (f'"best_of": 0.{"0" * 70}2e71', 16),
        ('"n": true', 8),
        ('"n": 1.5', 8),
        ('"n": 1, "n": 128', 1024),
    ],
)
def test_a_request_counts_as_the_answers_that_it_asks_for(fields: str, answers: int) -> None:
    body = read_body(f'{{"prompt": {json.dumps(["a"] * 8)}, {fields}}}'.encode())
    assert (body.prompts, body.answers) == (8, answers)


@pytest.mark.parametrize(
    ("value", "priority"),
    [
        ("-100", -100),
        ("100.0", 100),
        ("null", 0),
        ("101", 0),
        ("-1e300", 0),
        ('"7"', 0),
        ("[7]", 0),
        ("9" * 5000, 0),
        (f"0.{'0' * 70}1e71", 1),
        (f"-0.{'0' * 70}7e71", -7),
        ("1.0000000000000000000000000000000000000000000000000000000000000000000000000000", 1),
    ],
)
def test_the_priority_is_that_which_a_node_takes(value: str, priority: int) -> None:
    assert read_body(f'{{"prompt": "a", "priority": {value}}}'.encode()).priority == priority


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_the_lead_is_the_beginning_of_the_prompt(name: str) -> None:
    prompt = json.dumps([{"role": "user", "content": "x" * 2 * PROMPT_START_BYTES}]).encode()
    assert read_body(b'{"%b": %b}' % (name.encode(), prompt)).prompt_start == prompt[:PROMPT_START_BYTES]
    assert read_body(b"{}").prompt_start == b""
