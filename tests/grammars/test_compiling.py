"""Tests which texts the compiled grammars take, and which grammars are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from pdserve.api.requests.structured_outputs import StructuredFields, wanted_grammar
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.errors import GrammarRefused, ModelError
from pdserve.grammars.compiling import compile_grammar, load_vocabulary
from pdserve.wire.sampling_params import Grammar, GrammarKind
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_vocabulary import EOS, FIRST_BYTE, save_tiny_tokenizer, tiny_vocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
COMPACT = '{"x-guidance": {"whitespace_flexible": false, "whitespace_pattern": null}}'


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def takes(grammar: Grammar, text: str, vocabulary: LLTokenizer) -> bool:
    """Returns whether ``text`` is a whole text of the grammar."""
    matcher = compile_grammar(grammar, vocabulary).matcher.deep_copy()
    tokens = vocabulary.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "grammar", "text", "fits"),
    [
        (GrammarKind.REGEX, "[ab]{2}", "ab", True),
        (GrammarKind.REGEX, "[ab]{2}", "a", False),
        (GrammarKind.REGEX, "^(a+)+$", "a" * 60, True),
        (GrammarKind.REGEX, "^(a+)+$", "a" * 60 + "b", False),
        (GrammarKind.LARK, 'start: "x" INNER*\nINNER: /[0-9]/', "x07", True),
        (GrammarKind.LARK, 'start: "x" INNER*\nINNER: /[0-9]/', "07", False),
        (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), '{"name":"é","age":3}', True),
        (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), '{"age":3,"name":"é"}', False),
        (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), '{\n  "name": "a",\n  "age": 3\n}', True),
        (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), '{"name":  "a", "age": 3}', False),
        (GrammarKind.JSON_SCHEMA, "{}", '"a"', True),
        (GrammarKind.JSON_SCHEMA, "{}", '{"a": [1, null]}', True),
        (GrammarKind.JSON_SCHEMA, "{}", "a", False),
        (GrammarKind.JSON_SCHEMA, COMPACT, "[1,2]", True),
        (GrammarKind.JSON_SCHEMA, COMPACT, "[1, 2]", False),
    ],
)
def test_a_grammar_takes_its_texts_alone(
    vocabulary: LLTokenizer, kind: GrammarKind, grammar: str, text: str, fits: bool
) -> None:
    assert takes(Grammar(kind, grammar), text, vocabulary) is fits


def test_an_added_token_that_is_a_text_is_its_letters(tmp_path: Path) -> None:
    """As Qwen's files have ``<tool_call>``. The token that ends answers ends them, whatever the file says of it."""
    save_tiny_tokenizer(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    plain = {name: value for name, value in state["added_tokens"][0].items() if name not in ("id", "content")}
    added = {"<call>": False, "<special>": True, "<end>": False}
    ids = {text: VOCAB_SIZE + place for place, text in enumerate(added)}
    state["added_tokens"] += [plain | {"id": ids[text], "content": text, "special": added[text]} for text in added]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    vocabulary = load_vocabulary(tmp_path, [ids["<end>"]])
    for text in ('start: "<call>" /[ab]*/', 'start: /a*/ "<call>" /[ab]*/', "start: /(?s:.*)/"):
        matcher = compile_grammar(Grammar(GrammarKind.LARK, text), vocabulary).matcher
        letters = [FIRST_BYTE + code for code in b"<call>"]
        for written in (letters, [ids["<call>"]]):
            assert matcher.deep_copy().validate_tokens([*written, ids["<end>"]]) == len(written) + 1
        assert matcher.deep_copy().validate_tokens([ids["<special>"]]) == 0
        assert not vocabulary.is_special_token(ids["<call>"])
    exact = compile_grammar(Grammar(GrammarKind.LARK, f"start: <[{ids['<special>']}]>"), vocabulary).matcher
    assert exact.validate_tokens([ids["<special>"]]) == 1
    ends = compile_grammar(Grammar(GrammarKind.REGEX, "<end>"), vocabulary).matcher
    assert ends.validate_tokens([ids["<end>"]]) == 0


@pytest.mark.parametrize(
    "choice", [chr(code) for code in range(128)] + ["é", "\u2028", "\ufeff", "😀", '\\"', "a\x7fb"]
)
def test_a_choice_may_have_any_character(vocabulary: LLTokenizer, choice: str) -> None:
    wanted = wanted_grammar(StructuredFields(guided_choice=[choice]))
    assert wanted is not None
    assert takes(wanted.trial.grammar, choice, vocabulary)


@pytest.mark.parametrize(
    ("kind", "grammar", "why"),
    [
        (GrammarKind.REGEX, "(a", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)b", "look-around"),
        (GrammarKind.LARK, "start: missing", "missing"),
        (GrammarKind.JSON_SCHEMA, "[]", "object"),
        (GrammarKind.JSON_SCHEMA, '{"type": "duck"}', "duck"),
        (GrammarKind.JSON_SCHEMA, '{"uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no text fits"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}', "greater than maximum"),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps({"type": "array", "prefixItems": [{"type": "integer"}] * 7_000}),
            "too big",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    vocabulary: LLTokenizer, kind: GrammarKind, grammar: str, why: str
) -> None:
    with pytest.raises(GrammarRefused, match=why):
        compile_grammar(Grammar(kind, grammar), vocabulary)


@pytest.mark.parametrize(("count", "kept"), [(900, True), (1_100, False)])
def test_so_many_optional_properties_are_refused_that_a_mask_would_take_long(
    vocabulary: LLTokenizer, count: int, kept: bool
) -> None:
    """Masks take time by the square of this count. Of a grammar that is taken, every mask is within its bounds."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    if kept:
        matcher = GrammarMatcher(compile_grammar(grammar, vocabulary))
        answer: list[int] = []
        for token in vocabulary.tokenize_str('{"p0":1,"p3":4}'):
            assert matcher.open_bits(answer, VOCAB_SIZE).any(), matcher.failure
            answer.append(token)
        assert matcher.open_bits(answer, VOCAB_SIZE).any(), matcher.failure
        return
    with pytest.raises(GrammarRefused, match="too big"):
        compile_grammar(grammar, vocabulary)


def test_a_model_without_an_end_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_vocabulary(tmp_path, [])


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "{} has no tokenizer.json"), ("no JSON", "tokenizer in {}"), ("{}", "tokenizer in {}")],
)
def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=re.escape(words.format(tmp_path))):
        load_vocabulary(tmp_path, [EOS])
