"""Compiles the grammars of new requests in a thread beside the step loop.

A request waits, and others run, until it has its matcher. Clients take turns, so that one with many slow grammars
delays another's by one. The thread starts with the first request that has a grammar.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from llguidance import LLTokenizer

from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_lane import GrammarLane
from pdserve.engine.sampling.grammar_matcher import GrammarBudget, GrammarMatcher
from pdserve.errors import GrammarRefused, ModelError
from pdserve.grammars.client_turns import WaitingTurns
from pdserve.grammars.compiling import CompiledGrammar, compile_grammar, thread_with_deep_stack
from pdserve.wire.grammar import Grammar

log = logging.getLogger(__name__)

CLOSE_S = 1.0
KEPT = 16
"""How many compiled grammars are kept for later requests. A usual one takes some 100 kB, and none more than 80 MB."""


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
        self._lane = GrammarLane(self._compiler.vocabulary, wake)
        self._budgets: WeakValueDictionary[int | bytes, GrammarBudget] = WeakValueDictionary()
        """The budgets of clients' requests, by their group ids, for as long as they have matchers."""
        self._orders: WaitingTurns[_OpeningOrder] = WaitingTurns()
        self._opened: deque[_Opened] = deque()
        self._thread: threading.Thread | None = None

    def prepare(self) -> None:
        """Reads the vocabulary now, in a thread that ends with that, so that no stream stands still for it later.

        Where this fails, the requests that have a grammar are told so.
        """
        thread_with_deep_stack(self._compiler.prepare, "vocabulary")

    def open(self, parent: Request) -> None:
        """Begins to make matchers for a new request and its children, if they have a grammar."""
        grammar = parent.sampling.grammar
        if grammar is None or parent.fetch_only:
            return
        if self._thread is None:
            self._thread = thread_with_deep_stack(self._serve, "grammars")
        family = (parent, *parent.children)
        budget = self._budgets.setdefault(parent.group_id, GrammarBudget())
        order = _OpeningOrder(family, grammar, tuple(tuple(member.answer) for member in family), budget)
        self._orders.put(parent.client, order)

    def take(self) -> list[tuple[Request, str]]:
        """Gives finished matchers to their requests, and lets those go on whose matchers were ``awaited``.

        Returns the requests that can have none, and why.
        """
        self._lane.take()
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
        self._lane.close()
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
                lane=self._lane,
                client=order.family[0].client,
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
        if len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        return compiled

    def vocabulary(self) -> LLTokenizer:
        """Returns the vocabulary, which is read once. Raises ModelError."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary
