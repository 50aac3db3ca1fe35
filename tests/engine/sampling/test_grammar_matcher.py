"""Tests which tokens a grammar leaves, alone and with the other parameters that allow or forbid tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer

from pdserve.engine.sampling.grammar_matcher import GrammarMatcher, TokenBits
from pdserve.engine.sampling.logit_rules import grammar_bits
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.grammars.compiling import compile_grammar
from pdserve.wire.grammar import Grammar, GrammarKind
from pdserve.wire.sampling_params import SamplingParams
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


def test_a_grammar_with_too_many_places_at_once_fails(vocabulary: LLTokenizer) -> None:
    """Masks take time by the square of this count."""
    grammar = Grammar(GrammarKind.LARK, "start: " + " ".join(f'("x" | "y{i}")*' for i in range(500)))
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
