"""Works out beside the steps what the grammars of answers say, where a step cannot wait for it.

Clients take turns. The thread yields to the step loop: it is less urgent to the kernel, and the interpreter's lock is
free while llguidance works. Of its functions that read a token, only the one for several matchers frees the lock, so
each matcher is read beside one that reads nothing. It works in a thread of its own, whose processor time nobody tells.
``now`` counts it by the share of a processor that this thread gets for its masks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.grammars.client_turns import WaitingTurns

log = logging.getLogger(__name__)

NICENESS = 5
CLOSE_S = 1.0
LONG_S = 0.001
"""Shorter masks say nothing about how much of a processor their thread gets."""

_Work = tuple[GrammarMatcher, Callable[[], None]]


class GrammarLane:
    """One thread, which starts with the first question. It calls ``read``, ``mask`` and ``now``, and the step loop the
    others.
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
