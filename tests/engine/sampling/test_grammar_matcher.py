"""Tests which tokens a grammar leaves, alone and with the other parameters that allow or forbid tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from pdserve.engine.sampling.grammar_matcher import MASK_S, MASKS_S, AtOnce, GrammarMatcher, TokenBits
from pdserve.engine.sampling.logit_rules import grammar_bits
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.grammars.compiling import CompiledGrammar, compile_grammar
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_vocabulary import EOS, FIRST_BYTE, tiny_vocabulary

X, Y, Z = (FIRST_BYTE + byte for byte in b"xyz")
PROMPT = [5, 6, 7]
X_OR_MORE = Grammar(GrammarKind.REGEX, "x[xy]*")
ONLY_X = Grammar(GrammarKind.REGEX, "x")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def named(bits: TokenBits | None) -> set[int] | None:
    """Returns the tokens that bits name."""
    return None if bits is None else set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def left(vocabulary: LLTokenizer, grammar: Grammar, answer: list[int], **rules: Any) -> set[int] | None:
    """Returns the tokens that a row may go on with."""
    sampling = SamplingParams(max_tokens=100, seed=1, grammar=grammar, **rules)
    matcher = GrammarMatcher(compile_grammar(grammar, vocabulary))
    return named(grammar_bits(SamplingRow(sampling, PROMPT + answer, len(PROMPT), matcher=matcher), VOCAB_SIZE, {EOS}))


def test_an_answer_may_end_where_its_grammar_does(vocabulary: LLTokenizer) -> None:
    matcher = GrammarMatcher(compile_grammar(X_OR_MORE, vocabulary))
    assert named(matcher.open_bits([], VOCAB_SIZE)) == {X}
    assert named(matcher.open_bits([X], VOCAB_SIZE)) == {X, Y, EOS}


def test_a_matcher_that_begins_in_the_middle_is_where_the_other_is(vocabulary: LLTokenizer) -> None:
    compiled = compile_grammar(Grammar(GrammarKind.REGEX, "x(yz)+"), vocabulary)
    stepwise, answer = GrammarMatcher(compiled), [X, Y, Z, Y]
    for count in range(len(answer) + 1):
        wanted = named(stepwise.open_bits(answer[:count], VOCAB_SIZE))
        assert named(GrammarMatcher(compiled, answer[:count]).open_bits(answer[:count], VOCAB_SIZE)) == wanted


def test_an_answer_that_does_not_fit_has_no_next_token(vocabulary: LLTokenizer) -> None:
    matcher = GrammarMatcher(compile_grammar(X_OR_MORE, vocabulary), [Y])
    assert named(matcher.open_bits([Y], VOCAB_SIZE)) == set()
    assert matcher.failure == "the tokens that the answer begins with do not fit its grammar"


def test_tokens_that_the_model_lacks_are_not_open(vocabulary: LLTokenizer) -> None:
    matcher = GrammarMatcher(compile_grammar(ONLY_X, vocabulary))
    assert named(matcher.open_bits([], X)) == set()
    assert matcher.failure == "the model has no token that the grammar allows here"


GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "string"}}'),
    Grammar(GrammarKind.JSON_SCHEMA, '{"properties": {"ab": {"enum": [1, "x\\u00e9", null]}}, "required": ["ab"]}'),
    Grammar(GrammarKind.REGEX, "(ab|cd){0,3}[^a]?"),
    Grammar(GrammarKind.LARK, 'start: "ab" /(?s:.*)/'),
    Grammar(GrammarKind.LARK, 'start: "ab" (<[1]> "c")*'),
)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text)
def test_each_token_that_may_follow_is_allowed_and_no_other(vocabulary: LLTokenizer, grammar: Grammar) -> None:
    compiled, rng = compile_grammar(grammar, vocabulary), random.Random(1)
    for _ in range(6):
        answer: list[int] = []
        matcher = GrammarMatcher(compiled)
        while len(answer) < 12 and EOS not in answer:
            masked = named(matcher.open_bits(answer, VOCAB_SIZE)) or set()
            allowed = {token for token in range(VOCAB_SIZE + 9) if matcher.allows(answer, token)}
            assert matcher.failure is None
            # Where nothing but its end may follow, an answer needs the mask.
            assert masked <= allowed | {EOS}
            # Of tokens that write the one text that may come next, the mask has the first one alone.
            other = compiled.matcher.deep_copy()
            assert other.consume_tokens(answer)
            for token in allowed - masked:
                assert other.deep_copy().consume_token(token)
            answer.append(rng.choice(sorted(allowed | masked)))


def test_no_token_is_allowed_where_an_answer_cannot_go_on(vocabulary: LLTokenizer) -> None:
    matcher = GrammarMatcher(compile_grammar(ONLY_X, vocabulary), [Y])
    assert not any(matcher.allows([Y], token) for token in range(VOCAB_SIZE))


def test_a_grammar_with_too_many_places_at_once_fails(vocabulary: LLTokenizer) -> None:
    """Masks take time by the square of this count."""
    grammar = Grammar(GrammarKind.LARK, "start: " + " ".join(f'("x" | "y{i}")*' for i in range(600)))
    assert left(vocabulary, grammar, []) is not None
    assert left(vocabulary, grammar, [X]) is None


@pytest.mark.parametrize(
    ("grammar", "answer", "rules", "wanted"),
    [
        (X_OR_MORE, [X], {"allowed_token_ids": (Y, Z)}, {Y, EOS}),
        (X_OR_MORE, [], {"allowed_token_ids": (Y, Z)}, None),
        (X_OR_MORE, [X], {"bad_words": ((Y,),)}, {X, EOS}),
        (X_OR_MORE, [X], {"bad_words": ((X, Y),)}, {X, EOS}),
        (X_OR_MORE, [], {"bad_words": ((X,),)}, {X}),
        (X_OR_MORE, [X], {"ignore_eos": True}, {X, Y}),
        (ONLY_X, [X], {"ignore_eos": True}, {EOS}),
        (X_OR_MORE, [X], {"min_tokens": 2}, {X, Y}),
        (X_OR_MORE, [X, Y], {"min_tokens": 2}, {X, Y, EOS}),
        (ONLY_X, [X], {"min_tokens": 2}, {EOS}),
        (X_OR_MORE, [X], {"min_tokens": 2, "stop_token_ids": (Y,)}, {X}),
        (X_OR_MORE, [X], {"stop_token_ids": (Y,)}, {X, Y, EOS}),
    ],
)
def test_what_a_grammar_allows_prevails_over_bans(
    vocabulary: LLTokenizer, grammar: Grammar, answer: list[int], rules: dict[str, Any], wanted: set[int] | None
) -> None:
    assert left(vocabulary, grammar, answer, **rules) == wanted


A = FIRST_BYTE + ord("a")
MASKS = 1_000


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> CompiledGrammar:
    grammar = Grammar(GrammarKind.REGEX, "a{1,2000}")
    return compile_grammar(grammar, tiny_vocabulary(tmp_path_factory.mktemp("vocabulary")))


def masks_until_failure(compiled: CompiledGrammar, seconds_each: float) -> tuple[int, str | None]:
    """Returns how many masks an answer gets, each of which takes so long, and why it cannot go on."""
    clock = [0.0]

    def now() -> float:
        clock[0] += seconds_each
        return clock[0]

    answer: list[int] = []
    matcher = GrammarMatcher(compiled, reader=AtOnce(now))
    while len(answer) < MASKS and matcher.open_bits(answer, VOCAB_SIZE).any():
        answer.append(A)
    return len(answer), matcher.failure


def test_an_answer_whose_masks_take_long_again_and_again_ends(letters: CompiledGrammar) -> None:
    masks, why = masks_until_failure(letters, 2 * MASKS_S)
    assert masks == 2  # the first one was made with the grammar
    assert why is not None
    assert "too much work" in why
    masks, _ = masks_until_failure(letters, 3 * MASK_S)
    assert MASKS_S / (3 * MASK_S) < masks < MASKS


def test_asking_for_tokens_takes_of_the_same_time(letters: CompiledGrammar) -> None:
    clock = [0.0]

    def now() -> float:
        clock[0] += MASKS_S
        return clock[0]

    matcher = GrammarMatcher(letters, reader=AtOnce(now))
    assert matcher.allows([A], A)
    assert matcher.allows([A, A], A)
    assert not matcher.allows([A, A, A], A)
    assert not matcher.open_bits([A, A, A], VOCAB_SIZE).any()
    assert "too much work" in (matcher.failure or "")


def test_an_answer_of_usual_masks_goes_on(letters: CompiledGrammar) -> None:
    assert masks_until_failure(letters, MASK_S / 2) == (MASKS, None)
