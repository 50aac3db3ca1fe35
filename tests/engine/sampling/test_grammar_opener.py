"""Tests when the vocabulary is read, and which requests get matchers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from llguidance import LLTokenizer

from pdserve.engine.request import Request
from pdserve.engine.sampling import grammar_opener
from pdserve.engine.sampling.grammar_opener import GrammarOpener
from pdserve.errors import ModelError
from pdserve.grammars import compiling
from pdserve.grammars.compiling import CompiledGrammar
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.terms import made_terms
from tests.tiny_vocabulary import tiny_vocabulary

WAIT_S = 60.0


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return tiny_vocabulary(tmp_path_factory.mktemp("vocabulary"))


def request(pattern: str, client: bytes = b"") -> Request:
    sampling = SamplingParams(max_tokens=9, seed=1, grammar=Grammar(GrammarKind.REGEX, pattern))
    return Request(bytes(16), [5], 1, sampling, arrived=0.0, terms=made_terms(9.0, client=client))


class Opened:
    """An opener, and what it has been given back."""

    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.opener = GrammarOpener(load, lambda: self._woken.put(None))
        self.failed: list[tuple[Request, str]] = []

    def wait(self, count: int) -> None:
        """Waits until so many requests have what they get."""
        for _ in range(count):
            self._woken.get(timeout=WAIT_S)
        self.failed += self.opener.take()


@contextmanager
def opened(load: Callable[[], LLTokenizer]) -> Iterator[Opened]:
    one = Opened(load)
    try:
        yield one
    finally:
        one.opener.close()


def test_a_vocabulary_that_was_read_before_is_not_read_with_the_first_grammar(vocabulary: LLTokenizer) -> None:
    readers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def load() -> LLTokenizer:
        readers.put(threading.current_thread().name)
        return vocabulary

    with opened(load) as one:
        one.opener.prepare()
        assert readers.get(timeout=WAIT_S) == "vocabulary"
        first = request("a")
        one.opener.open(first)
        one.wait(1)
    assert first.matcher is not None
    assert readers.empty()


def test_a_vocabulary_that_cannot_be_read_is_an_error_of_requests_with_a_grammar() -> None:
    tried = threading.Semaphore(0)

    def load() -> LLTokenizer:
        tried.release()
        raise ModelError("no tokenizer here")

    with opened(load) as one:
        one.opener.prepare()
        assert tried.acquire(timeout=WAIT_S)
        first = request("a")
        one.opener.open(first)
        one.wait(1)
    assert one.failed == [(first, "no tokenizer here")]


def test_the_grammar_of_requests_that_have_ended_is_not_compiled(
    vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, compiled = threading.Event(), []

    def load() -> LLTokenizer:
        assert go_on.wait(WAIT_S)
        return vocabulary

    def counting(grammar: Grammar, own: LLTokenizer) -> CompiledGrammar:
        compiled.append(grammar.text)
        return real(grammar, own)

    real = compiling.compile_grammar
    monkeypatch.setattr(grammar_opener, "compile_grammar", counting)
    first, left, parent, last = map(request, ("a", "b", "c", "d"))
    child = parent.add_child(seed=2)
    with opened(load) as one:
        for each in (first, left, parent, last):
            one.opener.open(each)
        left.ended = parent.ended = True
        go_on.set()
        one.wait(3)
    assert compiled == ["a", "c", "d"]
    assert left.matcher is None
    assert all(each.matcher is not None for each in (first, child, last))
    assert not one.failed


def test_clients_take_turns(vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go_on = threading.Event(), threading.Event()
    compiled = []

    def load() -> LLTokenizer:
        loading.set()
        assert go_on.wait(WAIT_S)
        return vocabulary

    def noting(grammar: Grammar, own: LLTokenizer) -> CompiledGrammar:
        compiled.append(grammar.text)
        return real(grammar, own)

    real = compiling.compile_grammar
    monkeypatch.setattr(grammar_opener, "compile_grammar", noting)
    waiting = [("a0", b"a"), ("a1", b"a"), ("a2", b"a"), ("b0", b"b"), ("b1", b"b"), ("c0", b"c")]
    with opened(load) as one:
        one.opener.open(request("first", b"a"))
        assert loading.wait(WAIT_S)
        for pattern, client in waiting:
            one.opener.open(request(pattern, client))
        go_on.set()
        one.wait(1 + len(waiting))
    assert compiled == ["first", "a0", "b0", "c0", "a1", "b1", "a2"]
