"""Tests which texts the grammars of structural tags take, with the compiler that engines use."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer

from pdserve.api.call_grammars.schema_parts import MAX_DEPTH
from pdserve.api.requests.structural_tags import MAX_TRIGGER_CHARS, MAX_TRIGGERS
from pdserve.api.requests.structured_outputs import StructuredFields, wanted_grammar
from pdserve.errors import GrammarRefused, InvalidRequest
from pdserve.grammars.compiling import compile_grammar
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, Grammar
from tests.tiny_vocabulary import tiny_vocabulary

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OLDER: dict[str, Any] = {
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "end": "</f>"},
        {"begin": "[h]", "schema": True, "end": ""},
    ],
    "triggers": ["<f=", "["],
}
OF_OLDER = ["hi", "<f=x>{}</f>", "<f=z>", '<f=x>{"a": 1}', '<f=y>{"a": 1}</f> [f]', "<f=x>[]</f>"]
JSON_PART = {"type": "json_schema", "json_schema": SCHEMA}
ANY = {"type": "any_text"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def in_order(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def triggered(*tags: dict[str, Any], triggers: tuple[str, ...] = ("<",), **flags: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **flags}


def separated(*tags: dict[str, Any], **flags: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": ",", "tags": list(tags), **flags}


def repeated(content: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "repeat", "content": content, "min": least, "max": most}


def of_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}


DEEP: dict[str, Any] = {}
for _ in range(MAX_DEPTH):
    DEEP = {"not": DEEP}
A, B = tag("<a>", const("1"), "</a>"), tag("<b", ANY, ["</b>", "/>"])
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (const('"} %json\n'), ['"} %json\n'], ["", '"}']),
    (const(""), [""], ["a"]),
    (JSON_PART, ['{"a":1}', '{\n  "a": 1\n}'], ['{"a":1,"b":2}', "{}"]),
    ({"type": "json_schema", "json_schema": True}, ["[1]"], ["a"]),
    ({"type": "regex", "pattern": r"^[0-9]+/\d$"}, ["1/2", "33/4"], ["/2", "1/22", "1/2$"]),
    ({"type": "regex", "pattern": r"a|\/\$"}, ["a", "/$"], ["", "\\/"]),
    ({"type": "regex", "pattern": "a\nb"}, ["a\nb"], ["ab"]),
    ({"type": "regex", "pattern": "^$"}, [""], ["a"]),
    (in_order(const("("), {"type": "regex", "pattern": "a|b"}, const(")")), ["(a)", "(b)"], ["(a", "b)"]),
    (in_order({"type": "regex", "pattern": "(?x)a b # c"}, const("d")), ["abd"], ["a bd"]),
    (ANY, ["", "a<b"], []),
    ({**ANY, "excludes": ["no", "<"]}, ["", "n o"], ["a no", "<"]),
    (in_order(ANY, const("end")), ["end", "a\nb end"], ["en", "end end"]),
    (in_order(tag("(", ANY, ")"), const("!"), ANY), ["(a)!", "()! b)"], ["(a)b)!", "(a)"]),
    (in_order(tag("(", {**ANY, "excludes": ["b"]}, ")")), ["(a)"], ["(b)", "(ab)"]),
    ({"type": "or", "elements": [const("1"), in_order(const("2"), ANY)]}, ["1", "2", "2 a"], ["", "1 a"]),
    (in_order({"type": "optional", "content": const("1")}, const("2")), ["2", "12"], ["1", "112"]),
    ({"type": "star", "content": const("12")}, ["", "1212"], ["1"]),
    ({"type": "plus", "content": A}, ["<a>1</a>", "<a>1</a><a>1</a>"], ["", "<a>"]),
    (repeated(const("1"), 1, 2), ["1", "11"], ["", "111"]),
    (repeated(const("1"), 2, -1), ["11", "1111"], ["1"]),
    (repeated(const("1"), 0, 0), [""], ["1"]),
    (tag("(", ANY, ""), ["(", "(a"], ["", "a("]),
    (B, ["<b</b>", "<b x/>"], ["<b", "<b/></b>"]),
    (separated(A, B), ["", "<a>1</a>", "<a>1</a>,<b/>,<a>1</a>"], ["<a>1</a>,", "<a>1</a><b/>", "x"]),
    (separated(A, at_least_one=True, stop_after_first=True), ["<a>1</a>"], ["", "<a>1</a>,<a>1</a>"]),
    (triggered(A, B), ["", "hi <a>1</a> <b i/>.", ">"], ["<", "<c", "hi <a>2</a>"]),
    (triggered(A, at_least_one=True), ["<a>1</a>", "<a>1</a> b <a>1</a>"], ["", "hi <a>1</a>"]),
    (triggered(A, stop_after_first=True), ["hi", "hi <a>1</a>"], ["hi <a>1</a>.", "<"]),
    (triggered(A, at_least_one=True, stop_after_first=True), ["<a>1</a>"], ["", "<a>1</a>."]),
    (triggered(A, excludes=["no"]), ["n o <a>1</a>"], ["no", "<a>1</a> no"]),
    (in_order(tag("(", ANY, ")"), triggered(A)), ["(<)", "(<) b <a>1</a>"], ["", "(<) <"]),
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def asked(fields: dict[str, Any]) -> StructuredFields:
    return msgspec.convert(fields, StructuredFields)


def grammar_of(fields: dict[str, Any]) -> Grammar:
    wanted = wanted_grammar(asked(fields))
    assert wanted is not None
    return wanted.trial.grammar


def of_format(asked_format: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": asked_format}}


def takes(grammar: Grammar, text: str, vocabulary: LLTokenizer) -> bool:
    matcher = compile_grammar(grammar, vocabulary).matcher.deep_copy()
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(("wanted", "fitting", "others"), CASES, ids=lambda case: json.dumps(case)[:60])
def test_a_format_takes_its_texts_alone(
    wanted: dict[str, Any], fitting: list[str], others: list[str], vocabulary: LLTokenizer
) -> None:
    grammar = grammar_of(of_format(wanted))
    assert [text for text in fitting if not takes(grammar, text, vocabulary)] == []
    assert [text for text in others if takes(grammar, text, vocabulary)] == []


def test_what_older_clients_write_is_the_same_as_triggered_tags(vocabulary: LLTokenizer) -> None:
    whole = {"type": "structural_tag", **OLDER}
    grammars = {
        grammar_of(fields)
        for fields in (
            {"response_format": whole},
            {"structured_outputs": {"structural_tag": whole}},
            {"structured_outputs": {"structural_tag": json.dumps(whole)}},
            {"structural_tag": json.dumps(whole)},
        )
    }
    assert len(grammars) == 1
    grammar = grammars.pop()
    for text in ("", "hi <f", 'hi <f=x>{"a": 1}</f><f=y>[]</f> bye', "[h]1 or [h]{}"):
        assert takes(grammar, text, vocabulary), text
    assert [text for text in OF_OLDER if takes(grammar, text, vocabulary)] == ["hi"]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({}, "needs 'format', or 'structures' and 'triggers'"),
        ({"structures": OLDER["structures"]}, "needs 'format', or 'structures' and 'triggers'"),
        ({**OLDER, "format": ANY}, "has both"),
        ({**OLDER, "triggers": ["<f=", "[", "f"]}, "has a trigger with another one in it: '<f='"),
        ({**OLDER, "triggers": ["<f="]}, r"begins with no trigger: '\[h\]'"),
        ({**OLDER, "triggers": ["<f=", "[", "no"]}, "begins with the trigger 'no'"),
        ({"format": in_order(ANY, JSON_PART)}, r"format.elements\[0\]' is any text"),
        ({"format": in_order(ANY, ANY)}, r"format.elements\[0\]' is any text"),
        ({"format": in_order(tag("<", ANY, ""), JSON_PART)}, r"format.elements\[0\].content' is any text"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "a schema that nothing follows"),
        ({"format": {"type": "star", "content": ANY}}, "format.content' is any text"),
        ({"format": tag("(", triggered(A), ")")}, "format.content' has free text at its end"),
        ({"format": repeated(ANY, 2, 1)}, "must be -1, or 'min' at least"),
        ({"format": {"type": "regex", "pattern": "a\\"}}, "ends within an escape"),
        ({"format": {"type": "regex", "pattern": "(?x)a # b\nc"}}, "has the flag 'x' and several lines"),
        ({"format": {"type": "json_schema", "json_schema": DEEP}}, r"format\.json_schema' is nested too deeply"),
        (of_schema(DEEP), r"'response_format\.structures\[0\]\.schema' is nested too deeply"),
        (of_schema(False), r"'response_format\.structures\[0\]\.schema' is a schema that nothing follows"),
    ],
    ids=str,
)
def test_what_has_no_grammar_is_refused(wanted: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        grammar_of({"response_format": {"type": "structural_tag", **wanted}})
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "token", "token": 1},
        {"type": "grammar", "grammar": 'root ::= "a"'},
        {**ANY, "max_tokens": 3},
        {**JSON_PART, "style": "qwen_xml"},
        {**JSON_PART, "any_order": True},
        {**JSON_PART, "excludes": ["a"]},
        {**JSON_PART, "max_whitespace_cnt": 1},
        {**ANY, "max_chars": 3},
        triggered(A, triggers=("<" * (MAX_TRIGGER_CHARS + 1),)),
        triggered(A, triggers=tuple(f"<{number}" for number in range(MAX_TRIGGERS + 1))),
        tag("<", {"type": "token", "token": 1}, ">"),
    ],
    ids=str,
)
def test_formats_that_are_not_supported_are_refused_by_their_place(wanted: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"response_format\.format"):
        grammar_of(of_format(wanted))
    with pytest.raises(InvalidRequest, match="'structural_tag' is no structural tag"):
        grammar_of({"structural_tag": json.dumps({"type": "structural_tag", "format": wanted})})


def test_fields_that_ask_for_nothing_are_taken() -> None:
    plain = in_order(tag("<", JSON_PART, ">"), ANY)
    neutral: dict[str, Any] = {"any_order": False, "max_whitespace_cnt": None, "excludes": []}
    whole: dict[str, Any] = {"excludes": [], "max_tokens": None, "max_chars": None}
    written = in_order(tag("<", {**JSON_PART, "style": "json", **neutral}, ">"), {**ANY, **whole})
    assert grammar_of(of_format(written)) == grammar_of(of_format(plain))


def test_the_triggers_of_structures_are_as_bounded_as_those_of_formats() -> None:
    for triggers in (["<f=" * MAX_TRIGGER_CHARS], [f"<{number}" for number in range(MAX_TRIGGERS + 1)]):
        fields = {"type": "structural_tag", **OLDER, "triggers": triggers}
        with pytest.raises(msgspec.ValidationError, match=r"response_format\.triggers"):
            grammar_of({"response_format": fields})
        with pytest.raises(InvalidRequest, match=r"triggers"):
            grammar_of({"structural_tag": json.dumps(fields)})


@pytest.mark.parametrize("pattern", ["a)|(?:b", "(a"])
def test_a_pattern_is_refused_that_is_none_by_itself(pattern: str, vocabulary: LLTokenizer) -> None:
    with pytest.raises(GrammarRefused):
        compile_grammar(grammar_of(of_format({"type": "regex", "pattern": pattern})), vocabulary)


@pytest.mark.parametrize("fits", [True, False])
def test_formats_have_so_many_levels(fits: bool) -> None:
    wanted: dict[str, Any] = const("a")
    for _ in range(MAX_DEPTH - (1 if fits else 0)):
        wanted = {"type": "optional", "content": wanted}
    if fits:
        grammar_of(of_format(wanted))
    else:
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            grammar_of(of_format(wanted))


def test_a_grammar_has_so_many_bytes() -> None:
    large = in_order(*(const("x" * 4_096) for _ in range(MAX_GRAMMAR_BYTES // 4_096 + 1)))
    with pytest.raises(InvalidRequest, match=f"{MAX_GRAMMAR_BYTES}"):
        grammar_of(of_format(large))


def test_the_client_learns_of_its_own_parts_alone() -> None:
    wanted = wanted_grammar(asked({"response_format": {"type": "structural_tag", **OLDER}}))
    assert wanted is not None
    assert wanted.parts is not None
    assert [part.name for part in wanted.parts()] == [
        f"'response_format.structures[{index}].schema'" for index in range(len(OLDER["structures"]))
    ]
    wanted = wanted_grammar(
        asked(of_format(in_order({"type": "regex", "pattern": "a"}, triggered(tag("<", JSON_PART, "")))))
    )
    assert wanted is not None
    assert wanted.parts is not None
    assert [part.name for part in wanted.parts()] == [
        "'response_format.format.elements[0].pattern'",
        "'response_format.format.elements[1].tags[0].content.json_schema'",
    ]
