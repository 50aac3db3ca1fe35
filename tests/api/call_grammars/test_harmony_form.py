"""Tests the grammars of Harmony answers with the compiler that engines use; the parser reads what they allow."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from llguidance import LLTokenizer

from pdserve.api.call_grammars.tool_grammar import rules_before, tool_grammar
from pdserve.api.message.formats import MessageFormats
from pdserve.api.message.harmony import CALL, MARKERS, RETURN
from pdserve.api.message.parts import joined
from pdserve.api.requests.answer_reading import AnswerReading
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.api.requests.tools import FunctionReference, NamedToolChoice, Tools, tool_use
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.grammars.compiling import compile_grammar, load_vocabulary
from pdserve.grammars.trial import try_grammar
from pdserve.wire.sampling_params import Grammar, GrammarKind, GrammarTrial
from tests.api.call_grammars.test_tool_grammar import TOOLS

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Should I call <f> or f_?"
F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1, "b": "x\\"y"}'
F_ = " to=functions.f_<|channel|>commentary json<|message|>{}"
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module", params=[True, False], ids=["special", "texts"])
def marked(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, LLTokenizer]:
    """A tokeniser with a token for each marker, special or not. GGUF files have both kinds."""
    folder = shutil.copytree(model_dir, tmp_path_factory.mktemp("harmony") / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizers.AddedToken(text, special=request.param, normalized=False) for text in MARKERS]
    (backend.add_special_tokens if request.param else backend.add_tokens)(tokens)
    backend.save(str(folder / "tokenizer.json"))
    ends = [token_id for text in (RETURN, CALL) if (token_id := backend.token_to_id(text)) is not None]
    return load_tokenizer(folder), load_vocabulary(folder, ends)


def reading(choice: Any, *, parallel: bool | None = None, tools: Any = TOOLS) -> AnswerReading:
    use = tool_use(msgspec.convert(tools, Tools), choice, parallel)
    return AnswerReading(MessageFormats(ToolFormat.HARMONY, ReasoningFormat.HARMONY), use)


def allows(grammar: Grammar | None, text: str, marked: tuple[Tokenizer, LLTokenizer], end: str = RETURN) -> bool:
    """Returns whether an answer may be ``text``, as the model's tokens, and end."""
    assert grammar is not None
    tokenizer, vocabulary = marked
    matcher = compile_grammar(grammar, vocabulary).matcher
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if matcher.try_consume_tokens(token_ids) < len(token_ids) or not matcher.is_accepting():
        return False
    [end_id] = tokenizer.encode(end, add_special_tokens=False)
    mask = matcher.compute_bitmask()
    return bool(mask[end_id // 8] >> end_id % 8 & 1)


def made(reading: AnswerReading, marked: tuple[Tokenizer, LLTokenizer], prompt: str = PROMPT) -> Grammar | None:
    return tool_grammar(reading, prompt[-64:], marked[0].special_id, marked[0].is_text_token)


def calls(text: str, prompt: str = PROMPT) -> list[tuple[str | None, object]]:
    parser = reading("required").parser(prompt)
    assert parser is not None
    parts = joined([parser.add(text), parser.finish()])
    assert parts.content == ""
    return [(piece.name, json.loads(piece.arguments)) for piece in parts.calls]


def test_forced_calls(marked: tuple[Tokenizer, LLTokenizer]) -> None:
    grammar = made(reading("required"), marked)
    for before in ("", THOUGHT + NEXT, THOUGHT + NEXT + THOUGHT + NEXT):
        for text, called in ((F, ["f"]), (F_, ["f_"]), (F + NEXT + F_, ["f", "f_"])):
            assert allows(grammar, before + text, marked)
            assert allows(grammar, before + text, marked, CALL)
            assert [name for name, _ in calls(before + text)] == called
    wrong = ["Hello", f"{FINAL}Hello", "", THOUGHT, F.replace('"a": 1', '"a": 3'), F + "x", F.replace(".f ", ".g ")]
    wrong += [f"<|channel|>commentary<|message|>Hi{NEXT}{F}", f"<|channel|>analysis<|message|><|start|>{NEXT}{F}"]
    assert [text for text in wrong if allows(grammar, text, marked)] == []


def test_one_call_where_one_is_named_or_wanted(marked: tuple[Tokenizer, LLTokenizer]) -> None:
    named = made(reading(NamedToolChoice(FunctionReference("f_"))), marked)
    assert allows(named, F_, marked)
    assert not allows(named, F, marked)
    single = made(reading("required", parallel=False), marked)
    assert allows(single, F, marked)
    assert not allows(single, F + NEXT + F_, marked)


def test_strict_calls_where_none_is_forced(marked: tuple[Tokenizer, LLTokenizer]) -> None:
    grammar = made(reading("auto"), marked)
    preamble = "<|channel|>commentary<|message|>I look."
    for text in (f"{FINAL}Hello", FINAL, THOUGHT + NEXT + F, f"{THOUGHT}{NEXT}{preamble}{NEXT}{F}", F + NEXT + F_):
        assert allows(grammar, text, marked), text
    for text in (F.replace('"a": 1', '"a": 3'), F.replace(".f ", ".g "), "Hello", f"{FINAL}Hello{NEXT}"):
        assert not allows(grammar, text, marked), text
    lax = [{"type": "function", "function": {"name": "f"}}]
    assert made(reading("auto", tools=lax), marked) is None


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        (PROMPT + FINAL + "I say", NEXT),
        (PROMPT + THOUGHT, " or g?" + NEXT),
        (PROMPT + FINAL + "I said.<|end|>", "<|start|>assistant"),
    ],
    ids=["in the answer", "in reasoning", "behind a message"],
)
def test_forced_calls_behind_what_the_prompt_begins(
    prompt: str, before: str, marked: tuple[Tokenizer, LLTokenizer]
) -> None:
    grammar = made(reading("required"), marked, prompt)
    assert allows(grammar, before + F, marked)
    assert not allows(grammar, F, marked)
    assert calls(before + F, prompt) == [("f", {"a": 1, "b": 'x"y'})]


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
STRUCTURES = [
    (Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), '{"a": 1}', '{"a": "x"}'),
    (Grammar(GrammarKind.REGEX, "[a/]+"), "a/a", "b"),
    (Grammar(GrammarKind.LARK, 'start: WORD "!"\nWORD: /[a-z]+/\n'), "hi!", "hi"),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), STRUCTURES, ids=lambda value: getattr(value, "kind", None))
def test_a_structure_is_that_of_the_final_message(
    grammar: Grammar, good: str, bad: str, marked: tuple[Tokenizer, LLTokenizer]
) -> None:
    tokenizer, vocabulary = marked

    def within(prompt: str) -> Grammar:
        rules = rules_before(reading("auto"), prompt[-64:], tokenizer.special_id, tokenizer.is_text_token)
        tried = try_grammar(GrammarTrial(msgspec.structs.replace(grammar, before=rules)), vocabulary)
        assert tried.refusal == ""
        assert tried.grammar.before == rules
        return tried.grammar

    whole = within(PROMPT)
    for before in (FINAL, THOUGHT + NEXT + FINAL):
        assert allows(whole, before + good, marked)
        assert not allows(whole, before + bad, marked)
    for text in (good, THOUGHT + NEXT + good, f"<|channel|>commentary<|message|>{good}", FINAL + good + NEXT):
        assert not allows(whole, text, marked)
    assert allows(within(PROMPT + THOUGHT), f"?{NEXT}{FINAL}{good}", marked)
    assert allows(within(PROMPT + FINAL), good, marked)


def test_gbnf_keeps_what_is_around_it(marked: tuple[Tokenizer, LLTokenizer]) -> None:
    tokenizer, vocabulary = marked
    rules = rules_before(reading("auto"), PROMPT, tokenizer.special_id, tokenizer.is_text_token)
    wanted = Grammar(GrammarKind.LARK, 'root ::= "yes" | "no"', rules)
    tried = try_grammar(GrammarTrial(wanted, ebnf=True), vocabulary)
    assert tried.refusal == ""
    assert allows(tried.grammar, THOUGHT + NEXT + FINAL + "yes", marked)
    assert not allows(tried.grammar, "yes", marked)
    refused = try_grammar(GrammarTrial(Grammar(GrammarKind.REGEX, "a(", rules)), vocabulary)
    assert refused.refusal
