"""Tests that what a step cannot wait for is worked out beside it, with the same outcome, and for whom."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llguidance import LLTokenizer

from pdserve.engine.sampling import sampler
from pdserve.engine.sampling.grammar_matcher import MASK_S, MASKS_S, GrammarBudget, GrammarMatcher, GrammarWaits
from pdserve.engine.sampling.grammar_opener import GrammarWorker
from pdserve.engine.sampling.sampler import sample
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.grammars.compiling import CompiledGrammar, compile_grammar
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.eventually import eventually
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_vocabulary import EOS, FIRST_BYTE, tiny_vocabulary

WAIT_S = 60.0
A = FIRST_BYTE + ord("a")
PARTS = 200
AMBIGUOUS = Grammar(
    GrammarKind.LARK,
    "\n".join(
        [
            f"start: {' '.join(f'r{i}?' for i in range(PARTS))}",
            *(f'r{i}: "a" | "b" | "ab" | /[a-z]+/' for i in range(PARTS)),
        ]
    ),
)
LATER = Grammar(GrammarKind.LARK, AMBIGUOUS.text.replace("start:", 'start: "a"'))
LETTERS = Grammar(GrammarKind.REGEX, "[a-p]{1,40}")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


class Beside:
    """A worker, and how often it has called."""

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.worker = GrammarWorker(lambda: vocabulary, lambda: self.woken.put(None))

    def wait(self) -> None:
        """Waits until a question is worked out."""
        self.woken.get(timeout=WAIT_S)
        self.worker.take()


@pytest.fixture
def beside(vocabulary: LLTokenizer) -> Iterator[Beside]:
    one = Beside(vocabulary)
    yield one
    one.worker.close()


def choose(matcher: GrammarMatcher, answer: list[int], seed: int, beside: Beside | None, **how: Any) -> int | None:
    """Returns the next token, in as many steps as it takes."""
    torch.manual_seed(len(answer) + 100 * seed)
    logits = torch.randn(1, VOCAB_SIZE) * 3
    sampling = SamplingParams(max_tokens=100, seed=seed, grammar=LETTERS, **how)
    row = SamplingRow(sampling, [5, 6, *answer], 2, matcher=matcher)
    (token,) = sample(logits, [row], {EOS})
    while matcher.awaited:
        assert token is None
        assert sample(logits, [row], {EOS}) == [None], "no step waits"
        assert beside is not None
        beside.wait()
        (token,) = sample(logits, [row], {EOS})
    return None if token is None else token.token_id


def heavy(compiled: CompiledGrammar) -> CompiledGrammar:
    return CompiledGrammar(compiled.matcher, compiled.first_bits, compiled.num_tokens)


@pytest.mark.parametrize("grammar", [LETTERS, LATER, AMBIGUOUS], ids=["light", "heavy later", "heavy"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"bad_words": ((A,),)}], ids=str)
def test_a_token_is_the_same_in_whichever_step_it_comes(
    vocabulary: LLTokenizer, beside: Beside, grammar: Grammar, how: dict[str, Any]
) -> None:
    compiled = compile_grammar(grammar, vocabulary)
    for seed in range(2):
        at_once, later = GrammarMatcher(compiled), GrammarMatcher(compiled, worker=beside.worker)
        alone = GrammarMatcher(heavy(compiled), worker=beside.worker)
        answer: list[int] = []
        while len(answer) < 4 and EOS not in answer:
            token = choose(at_once, answer, seed, None, **how)
            assert token == choose(later, answer, seed, beside, **how)
            assert token == choose(alone, answer, seed, beside, **how)
            assert token is not None
            answer.append(token)


def test_no_step_asks_a_heavy_grammar(vocabulary: LLTokenizer, beside: Beside) -> None:
    assert compile_grammar(LETTERS, vocabulary).quick is not None
    for grammar, answer in ((AMBIGUOUS, [A]), (LATER, [A, A])):
        matcher = GrammarMatcher(compile_grammar(grammar, vocabulary), worker=beside.worker)
        with pytest.raises(GrammarWaits):
            matcher.open_bits(answer, VOCAB_SIZE)
        beside.wait()
        assert matcher.open_bits(answer, VOCAB_SIZE).any(), "the question is answered at once now"


def test_rows_beyond_the_time_of_a_step_wait(
    vocabulary: LLTokenizer, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "STEP_S", 1e-9)
    compiled = compile_grammar(LETTERS, vocabulary)
    matchers = [GrammarMatcher(compiled, [A], worker=beside.worker) for _ in range(5)]
    sampling = SamplingParams(max_tokens=9, seed=1, grammar=LETTERS, top_p=0.9)
    rows = [SamplingRow(sampling, [5, 6, A], 2, matcher=matcher) for matcher in matchers]
    logits = torch.randn(5, VOCAB_SIZE)
    got = sample(logits, rows, {EOS})
    assert [token is None for token in got] == [matcher.awaited for matcher in matchers]
    assert sum(token is not None for token in got) == 1
    for _ in range(4):
        beside.wait()
    monkeypatch.undo()
    assert None not in sample(logits, rows, {EOS})


def test_all_answers_of_a_request_share_its_time(vocabulary: LLTokenizer, beside: Beside) -> None:
    compiled, budget = compile_grammar(AMBIGUOUS, vocabulary), GrammarBudget()
    first, second = (GrammarMatcher(compiled, budget=budget, worker=beside.worker) for _ in range(2))
    budget.spend(MASKS_S + 1)
    for matcher in (first, second):
        assert not matcher.open_bits([A], VOCAB_SIZE).any()
        assert "too much work" in (matcher.failure or "")


def test_what_tokens_leave_over_is_not_saved_up() -> None:
    budget = GrammarBudget()
    for _ in range(1_000):
        budget.spend(0.0, MASK_S)
    assert budget.left_s == MASKS_S


def test_nothing_is_worked_out_for_an_answer_that_is_over(vocabulary: LLTokenizer, beside: Beside) -> None:
    matcher = GrammarMatcher(compile_grammar(AMBIGUOUS, vocabulary), worker=beside.worker, is_over=lambda: True)
    for _ in range(2):
        with pytest.raises(GrammarWaits):
            matcher.open_bits([A], VOCAB_SIZE)
        beside.wait()
        assert not matcher.awaited


def test_a_defect_ends_the_one_answer(vocabulary: LLTokenizer, beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise RuntimeError

    compiled = compile_grammar(AMBIGUOUS, vocabulary)
    matcher, other = (GrammarMatcher(compiled, worker=beside.worker) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "read", broken)
        assert choose(matcher, [A], 1, beside) is None
    assert matcher.failure == "the answer cannot go on by its grammar: RuntimeError"
    assert choose(other, [A], 1, beside) is not None


def test_other_threads_run_while_the_worker_reads_a_token(vocabulary: LLTokenizer, beside: Beside) -> None:
    first = compile_grammar(AMBIGUOUS, vocabulary).matcher
    over, turns = threading.Event(), [0]

    def count() -> None:
        while not over.is_set():
            time.sleep(0)
            turns[0] += 1

    def turns_while_reading() -> int:
        matcher, before = first.deep_copy(), turns[0]
        assert beside.worker.read(matcher, A)
        return turns[0] - before

    counting = threading.Thread(target=count)
    counting.start()
    try:
        # Whoever keeps the lock while it reads lets the other one have a single turn.
        eventually(lambda: turns_while_reading() > 10, "another thread runs meanwhile")
    finally:
        over.set()
        counting.join()
