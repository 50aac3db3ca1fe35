"""Compiles grammars, and answers the questions to them that take long, in threads beside the step loop.

A request waits, and others run, until it has its matcher, and while its matcher is ``awaited``. Clients take turns, so
that one with many slow grammars delays another's by one. A thread starts with its first work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_matcher import GrammarBudget, GrammarMatcher
from pdserve.errors import GrammarRefused, ModelError
from pdserve.grammars.client_turns import WaitingTurns
from pdserve.grammars.compiling import CompiledGrammar, compile_grammar, thread_with_deep_stack
from pdserve.wire.sampling_params import Grammar

log = logging.getLogger(__name__)

NICENESS = 5
CLOSE_S = 1.0
LONG_S = 0.001
"""Shorter masks say nothing about how much of a processor their thread gets."""
MOST_COMPILED = 16
"""How many compiled grammars are cached for later requests. A usual one takes some 100 kB, and none more than 80 MB."""

_Work = tuple[GrammarMatcher, Callable[[], None]]


@dataclass(frozen=True, slots=True, eq=False)
class _OpeningOrder:
    """A family of requests, the parent first, with what each answer begins with."""

    family: tuple[Request, ...]
    grammar: Grammar
    answers: tuple[tuple[int, ...], ...]
    budget: GrammarBudget


@dataclass(frozen=True, slots=True)
class _Opened:
    order: _OpeningOrder
    matchers: tuple[GrammarMatcher, ...]
    failure: str | None = None


class GrammarOpener:
    """Gives requests their matchers. All methods are for the step loop's thread."""

    def __init__(self, load: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        """``load`` reads the vocabulary, and ``wake`` is called when ``take`` has something to do; both in a thread."""
        self._compiler = _Compiler(load)
        self._wake = wake
        self._worker = GrammarWorker(self._compiler.vocabulary, wake)
        self._budgets: WeakValueDictionary[int | bytes, GrammarBudget] = WeakValueDictionary()
        """The budgets of clients' requests, by their group ids, for as long as they have matchers."""
        self._orders: WaitingTurns[_OpeningOrder] = WaitingTurns()
        self._opened: deque[_Opened] = deque()
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Reads the vocabulary now, in a thread that ends with that, so that no stream stands still for it later.

        Where this fails, the requests that have a grammar fail with the reason.
        """
        thread_with_deep_stack(self._compiler.prepare, "vocabulary")

    def open(self, parent: Request) -> None:
        """Begins to make matchers for a new request and its children, if they have a grammar."""
        grammar = parent.sampling.grammar
        if grammar is None or parent.terms.fetch_only:
            return
        if self._thread is None:
            self._thread = thread_with_deep_stack(self._serve, "grammars")
        family = (parent, *parent.children)
        budget = self._budgets.setdefault(parent.group_id, GrammarBudget())
        order = _OpeningOrder(family, grammar, tuple(tuple(member.answer) for member in family), budget)
        self._orders.put(parent.terms.client, order)

    def take(self) -> list[tuple[Request, str]]:
        """Gives finished matchers to their requests, and lets those go on whose matchers were ``awaited``.

        Returns the requests that can have none, and why.
        """
        self._worker.take()
        failed = []
        while self._opened:
            opened = self._opened.popleft()
            if opened.failure is not None:
                failed += [(member, opened.failure) for member in opened.order.family]
            for member, matcher in zip(opened.order.family, opened.matchers, strict=False):
                member.matcher = matcher
        return failed

    def close(self) -> None:
        """Ends the threads. They are not waited for if they are still at work on large grammars."""
        self._worker.close()
        if self._thread is not None:
            self._orders.end()
            self._thread.join(CLOSE_S)

    def _matchers(self, order: _OpeningOrder, compiled: CompiledGrammar) -> tuple[GrammarMatcher, ...]:
        def is_over(member: Request) -> Callable[[], bool]:
            return lambda: member.ended

        return tuple(
            GrammarMatcher(
                compiled,
                answer,
                budget=order.budget,
                worker=self._worker,
                client=order.family[0].terms.client,
                is_over=is_over(member),
            )
            for member, answer in zip(order.family, order.answers, strict=True)
        )

    def _serve(self) -> None:
        while (order := self._orders.take()) is not None:
            if all(member.ended for member in order.family):
                continue
            try:
                compiled = self._compiler.compile(order.grammar)
                opened = _Opened(order, self._matchers(order, compiled))
            except GrammarRefused as exc:
                opened = _Opened(order, (), f"the grammar cannot be compiled: {exc}")
            except ModelError as exc:
                opened = _Opened(order, (), str(exc))
            except BaseException as exc:
                # llguidance's own errors are values. A defect in it panics, which is an exception of no class of ours.
                log.exception("%s its grammar cannot be compiled", order.family[0])
                opened = _Opened(order, (), f"the grammar cannot be compiled: {type(exc).__name__}")
            self._opened.append(opened)
            self._wake()


class GrammarWorker:
    """Works out in one thread what the grammars of answers say, where a step cannot wait for it.

    The thread yields to the step loop: it is less urgent to the kernel, and the interpreter's lock is free while
    llguidance works. Of its functions that read a token, only the one for several matchers frees the lock, so each
    matcher is read beside one that reads nothing. It works in a thread of its own, whose processor time nobody tells.
    ``now`` counts it by the share of a processor that this thread gets for its masks.

    The thread calls ``read``, ``mask`` and ``now``, and the step loop the others.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer], wake: Callable[[], None]) -> None:
        """``vocabulary`` returns that of all matchers. ``wake`` is called when ``take`` has something to do."""
        self._vocabulary, self._wake = vocabulary, wake
        self._waiting: WaitingTurns[_Work] = WaitingTurns()
        self._done: deque[GrammarMatcher] = deque()
        self._thread: threading.Thread | None = None
        self._executor: LLExecutor | None = None
        self._reads_nothing: LLMatcher | None = None
        self._read_s = 0.0
        """The processor time of all reading, as far as it can be told."""
        self._share = 1.0
        """The part of the last long masks' time in which they had a processor."""

    def ask(self, matcher: GrammarMatcher, work: Callable[[], None]) -> None:
        """Has ``work`` done for a matcher, which is not ``awaited`` any more after a ``take``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="masks", daemon=True)
            self._thread.start()
        self._waiting.put(matcher.client, (matcher, work))

    def take(self) -> None:
        """Lets the requests go on whose questions were worked out."""
        while self._done:
            self._done.popleft().awaited = False

    def close(self) -> None:
        """Ends the thread. It is not waited for if it is still at work on a large grammar."""
        if self._thread is not None:
            self._waiting.end()
            self._thread.join(CLOSE_S)

    def read(self, matcher: LLMatcher, token_id: int) -> bool:
        """Lets a matcher read a token while other threads run. Returns whether the token fits."""
        if self._executor is None or self._reads_nothing is None:
            # Its own thread is as nice as this one.
            self._executor = LLExecutor(1)
            self._reads_nothing = LLMatcher(self._vocabulary(), "no grammar", log_level=0)
        began = time.monotonic()
        fits = self._executor.consume_token_par([(matcher, token_id), (self._reads_nothing, 0)])[0]
        self._read_s += self._share * (time.monotonic() - began)
        return fits

    def mask(self, matcher: LLMatcher) -> bytes:
        """Returns the mask of a matcher while other threads run."""
        began, began_here = time.monotonic(), time.thread_time()
        computed = matcher.compute_bitmask()
        wall_s, here_s = time.monotonic() - began, time.thread_time() - began_here
        if here_s > LONG_S:
            self._share = here_s / wall_s
        return computed

    def now(self) -> float:
        """Returns the processor time that questions have taken. Only questions may call this."""
        return time.thread_time() + self._read_s

    def _serve(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (asked := self._waiting.take()) is not None:
            matcher, work = asked
            try:
                if not matcher.is_over():
                    work()
            except BaseException as exc:
                # A defect in llguidance panics, which is an exception of no class of ours.
                log.exception("an answer cannot go on by its grammar")
                matcher.failure = f"the answer cannot go on by its grammar: {type(exc).__name__}"
            self._done.append(matcher)
            self._wake()


class _Compiler:
    def __init__(self, load: Callable[[], LLTokenizer]) -> None:
        self._load = load
        self._reading = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def prepare(self) -> None:
        try:
            self.vocabulary()
        except BaseException as exc:
            # A tokenizer may be of a kind at which llguidance panics.
            log.info("grammars: the vocabulary cannot be read: %s", exc)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar. Raises GrammarRefused or ModelError."""
        vocabulary = self.vocabulary()
        compiled = self._compiled.pop(grammar, None) or compile_grammar(grammar, vocabulary)
        self._compiled[grammar] = compiled
        if len(self._compiled) > MOST_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def vocabulary(self) -> LLTokenizer:
        """Returns the vocabulary, which is read once. Raises ModelError."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary
