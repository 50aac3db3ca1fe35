"""Tests the choice of tokens by a grammar: which are chosen, how often, and that masks are made only where needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from msgspec.structs import replace

from pdserve.engine.request import TokenCounts
from pdserve.engine.sampling import token_choice
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher, TokenBits
from pdserve.engine.sampling.pending_tokens import DeviceTokens, can_sample_on_device
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.sampling.token_choice import TokenIds
from pdserve.grammars.compiling import CompiledGrammar, compile_grammar
from pdserve.wire.sampling_params import Grammar, GrammarKind, SampledToken, SamplingParams
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_vocabulary import EOS, FIRST_BYTE, tiny_vocabulary

X, Y, Z = (FIRST_BYTE + byte for byte in b"xyz")
X_OR_MORE = Grammar(GrammarKind.REGEX, "x[xy]*")
NO_CAPITALS = Grammar(GrammarKind.REGEX, "(?s:[^A-Z])*")
EVERY_WAY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "hot": {"temperature": 1.7},
    "top-p": {"top_p": 0.8},
    "wide top-p": {"top_p": 0.99},
    "top-k": {"top_k": 5},
    "min-p": {"min_p": 0.05},
    "bias": {"logit_bias": ((X, 2.0), (Z, 5.0))},
    "penalties": {"presence_penalty": 1.0, "repetition_penalty": 1.3},
    "bans": {"bad_words": ((X,),), "min_tokens": 5},
    "allowed": {"allowed_token_ids": (X, Y)},
    "everything": {"top_p": 0.9, "frequency_penalty": 0.5, "ignore_eos": True, "logprobs": 2},
}
LETTERS = Grammar(GrammarKind.REGEX, "[a-p]{1,40}")
A, B, C, D = (FIRST_BYTE + byte for byte in b"abcd")
EVERY_FIELD: dict[str, tuple[dict[str, Any], ...]] = {
    "max_tokens": ({"max_tokens": 3},),
    "seed": ({"seed": 2**63 - 1},),
    "temperature": ({"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 2.0}),
    "top_p": ({"top_p": 0.3}, {"top_p": 0.9}),
    "top_k": ({"top_k": 1}, {"top_k": 5}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.6}),
    "stop_token_ids": (
        {"stop_token_ids": (A, B), "min_tokens": 5},
        {"stop_token_ids": (A,), "min_tokens": 5, "top_k": 4},
    ),
    "ignore_eos": ({"ignore_eos": True}, {"ignore_eos": True, "top_p": 0.8}),
    "min_tokens": ({"min_tokens": 5}, {"min_tokens": 5, "min_p": 0.1}),
    "presence_penalty": ({"presence_penalty": 2.0}, {"presence_penalty": 2.0, "top_p": 0.7}),
    "frequency_penalty": ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0, "top_k": 3}),
    "repetition_penalty": ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8, "min_p": 0.2}),
    "logit_bias": ({"logit_bias": ((B, 3.0), (Z, 9.0))}, {"logit_bias": ((B, 3.0),), "top_p": 0.6}),
    "allowed_token_ids": ({"allowed_token_ids": (A, C, D, Z)}, {"allowed_token_ids": (A, C, D), "top_k": 2}),
    "bad_words": ({"bad_words": ((A,), (X, B))}, {"bad_words": ((A,),), "top_p": 0.5}),
    "logprobs": ({"logprobs": 2},),
    "logprob_token_ids": ({"logprobs": 0, "logprob_token_ids": (A, Z)},),
    "prompt_logprobs": ({"prompt_logprobs": 1},),
    "grammar": ({"grammar": LETTERS},),
}
"""Few tokens and complete rows have to agree with these values, of which each field of ``SamplingParams`` has some."""
WITHOUT_EFFECT = {"max_tokens", "prompt_logprobs", "grammar"}
"""The fields that change nothing about one token; of ``grammar``, the matcher has what does."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def row(compiled: CompiledGrammar, answer: Sequence[int] = (), seed: int = 1, **how: Any) -> SamplingRow:
    sampling = SamplingParams(max_tokens=100, seed=seed, grammar=X_OR_MORE, **how)
    return SamplingRow(sampling, [5, 6, *answer], 2, matcher=GrammarMatcher(compiled, answer))


def ids(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | None]:
    return [None if token is None else token.token_id for token in sample(logits, rows, {EOS})]


ON_DEVICE = [how for name, how in EVERY_WAY.items() if name in ("greedy", "drawn", "hot", "bias", "penalties")]


@pytest.mark.parametrize("unknown", [0, 1])
@pytest.mark.parametrize("kept", [False, True])
def test_what_is_proposed_on_the_device_is_answered_as_by_the_sampler(
    vocabulary: LLTokenizer, unknown: int, kept: bool
) -> None:
    torch.manual_seed(8)
    compiled = [compile_grammar(X_OR_MORE, vocabulary), compile_grammar(NO_CAPITALS, vocabulary)]
    known = [row(compiled[i % 2], [X, Y], i, logprobs=2, **ON_DEVICE[i // 2 % len(ON_DEVICE)]) for i in range(40)]
    for how in EVERY_WAY.values():
        assert can_sample_on_device(row(compiled[0], [X], **how)) is (how in ON_DEVICE)
    known.append(SamplingRow(SamplingParams(max_tokens=9, seed=3, logprobs=1), [5, 6, X, Y], 2))
    logits = torch.randn(45, VOCAB_SIZE) * 2
    logits[:, [X, Y]] += 5.0
    logits[7], logits[9, [X, Y, EOS]] = float("nan"), -torch.inf
    sources = [3, *range(1, 40), 44]
    wanted = sample(logits, known, {EOS}, sources)
    answers = [list(one.token_ids[: 4 - unknown]) for one in known]
    rows = [
        replace(one, token_ids=tokens, num_unknown_tokens=unknown, counts=TokenCounts())
        for one, tokens in zip(known, answers, strict=True)
    ]
    pending = DeviceTokens(logits, rows, sources, {EOS}, torch.full((41,), Y) if unknown else None)
    if kept:
        pending.keep()
        logits.fill_(1.0)
    for tokens in answers:
        tokens += [Y] * unknown
    asked = [index for index in range(41) if index not in (4, 5)]
    assert pending.read(asked) == [wanted[index] for index in asked]
    own = dict(enumerate(pending.tokens.tolist()))
    differ = {index for index in asked if (token := wanted[index]) is None or token.token_id != own[index]}
    assert pending.refused == differ - {40}
    assert 5 < len(pending.refused) < 35


@pytest.mark.parametrize("grammar", [X_OR_MORE, NO_CAPITALS], ids=["few tokens", "many tokens"])
def test_tokens_are_as_likely_as_if_there_were_no_others(vocabulary: LLTokenizer, grammar: Grammar) -> None:
    torch.manual_seed(3)
    compiled, count = compile_grammar(grammar, vocabulary), 3_000
    logits = torch.randn(VOCAB_SIZE)
    logits[[X, Y, Z, EOS]] = torch.tensor([7.0, 6.5, 6.0, 5.0])
    logits[FIRST_BYTE + ord("A")] = 7.5
    mask = GrammarMatcher(compiled, [X]).open_bits([X], VOCAB_SIZE)
    closed = torch.from_numpy(np.unpackbits(mask, bitorder="little")) == 0
    wanted = logits.masked_fill(closed, -torch.inf).softmax(-1)
    rows = [row(compiled, [X], seed) for seed in range(count)]
    drawn = Counter(ids(logits.expand(count, -1), rows))
    for token, chance in enumerate(wanted.tolist()):
        assert abs(drawn[token] / count - chance) < 0.04
        assert chance or not drawn[token]


@pytest.mark.parametrize("how", EVERY_WAY.values(), ids=EVERY_WAY)
def test_the_best_or_a_drawn_token_is_one_that_the_grammar_allows(vocabulary: LLTokenizer, how: dict[str, Any]) -> None:
    torch.manual_seed(4)
    compiled = compile_grammar(X_OR_MORE, vocabulary)
    for seed in range(30):
        logits = torch.randn(1, VOCAB_SIZE) * 3
        assert set(ids(logits, [row(compiled, [X], seed, **how)])) <= {X, Y, EOS}
    if how == {"temperature": 0.0}:
        logits = torch.randn(1, VOCAB_SIZE)
        assert ids(logits, [row(compiled, [X], **how)]) == [max((X, Y, EOS), key=lambda token: float(logits[0, token]))]


def test_a_token_does_not_depend_on_batch_mates(vocabulary: LLTokenizer) -> None:
    torch.manual_seed(5)
    few, many = compile_grammar(X_OR_MORE, vocabulary), compile_grammar(NO_CAPITALS, vocabulary)
    kinds = [(compiled, how) for compiled in (few, many) for how in EVERY_WAY.values()]

    def rows() -> list[SamplingRow]:
        return [row(compiled, [X], seed, **how) for seed, (compiled, how) in enumerate(kinds)]

    free = SamplingRow(SamplingParams(max_tokens=100, seed=1), [5, 6], 2)
    logits = torch.randn(len(kinds) + 1, VOCAB_SIZE) * 3
    before = logits.clone()
    together = sample(logits, [*rows(), free], {EOS})
    assert together == [sample(logits[i : i + 1], [one], {EOS})[0] for i, one in enumerate([*rows(), free])]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("how", EVERY_WAY.values(), ids=EVERY_WAY)
def test_among_few_tokens_the_choice_is_that_among_all(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    torch.manual_seed(6)
    compiled = compile_grammar(X_OR_MORE, vocabulary)
    logits = torch.randn(40, VOCAB_SIZE) * 2
    among_few = ids(logits, [row(compiled, [X], seed, **how) for seed in range(40)])
    monkeypatch.setattr(token_choice, "MAX_BYTES", -1)
    assert ids(logits, [row(compiled, [X], seed, **how) for seed in range(40)]) == among_few


def test_every_field_has_a_case() -> None:
    assert set(EVERY_FIELD) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("field", "how"), [(field, how) for field, each in EVERY_FIELD.items() for how in each], ids=str
)
def test_every_field_means_the_same_for_few_tokens_and_complete_rows(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch, field: str, how: dict[str, Any]
) -> None:
    torch.manual_seed(7)
    compiled = compile_grammar(LETTERS, vocabulary)
    logits = torch.randn(60, VOCAB_SIZE) * 2
    logits[:, [A, B, EOS]] += 1.5

    def tokens(how: dict[str, Any]) -> list[SampledToken | None]:
        base: dict[str, Any] = {"max_tokens": 9, "grammar": LETTERS}
        rows = [
            SamplingRow(
                SamplingParams(**(base | {"seed": seed} | how)), [5, A, A, B], 1, matcher=GrammarMatcher(compiled)
            )
            for seed in range(len(logits))
        ]
        return sample(logits, rows, {EOS})

    few_asked: list[bool] = []
    few_tokens = token_choice.few_tokens

    def noted(bits: TokenBits) -> TokenIds | None:
        found = few_tokens(bits)
        few_asked.append(found is not None)
        return found

    monkeypatch.setattr(token_choice, "few_tokens", noted)
    among_few, plain = tokens(how), tokens({})
    assert True in few_asked, "the grammar leaves few tokens"
    assert None not in among_few
    assert (among_few == plain) is (field in WITHOUT_EFFECT), "the case shows what the field does"
    monkeypatch.setattr(token_choice, "MAX_BYTES", -1)
    assert tokens(how) == among_few


def test_an_answer_that_follows_its_grammar_by_itself_needs_no_mask(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any) -> Any:
        raise AssertionError("a mask was made")

    compiled = compile_grammar(X_OR_MORE, vocabulary)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, Y] = 60.0
    with monkeypatch.context() as patch:
        patch.setattr(GrammarMatcher, "open_bits", made)
        for how in ({"temperature": 0.0}, {}, {"logit_bias": ((Z, 1.0),)}):
            assert ids(logits, [row(compiled, [X], **how)]) == [Y]
        with pytest.raises(AssertionError, match="a mask was made"):
            ids(logits, [row(compiled, [], temperature=0.0)])
    assert ids(logits, [row(compiled, [], temperature=0.0)]) == [X]


@pytest.mark.parametrize("how", EVERY_WAY.values(), ids=EVERY_WAY)
def test_tokens_that_the_model_rules_out_are_not_chosen(vocabulary: LLTokenizer, how: dict[str, Any]) -> None:
    compiled = compile_grammar(X_OR_MORE, vocabulary)
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [X, Y, EOS]] = -torch.inf
    rows = [row(compiled, [X], **how), row(compiled, [X], **how)]
    assert [token is None for token in ids(logits, rows)] == [True, False]


def test_few_tokens_are_those_of_the_mask() -> None:
    bits = np.zeros(1_000, np.uint8)
    for token in (0, 7, 8, 4_001, 7_999):
        bits[token // 8] |= 1 << token % 8
    found = token_choice.few_tokens(bits)
    assert found is not None
    assert found.tolist() == [0, 7, 8, 4_001, 7_999]
    bits[: token_choice.MAX_BYTES + 1] = 1
    assert token_choice.few_tokens(bits) is None
