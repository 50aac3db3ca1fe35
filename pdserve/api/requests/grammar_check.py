"""Finds out whether clients' grammars compile, before an engine gets them, in a process beside this one.

The process starts with the first grammar. One that takes too long, or that a grammar has ended, is replaced by the
next. Outcomes are kept by content, refusals too, so that a client who sends the same schema with every request waits
for it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdserve.config import GrammarConfig
from pdserve.errors import DeadlineExceeded, InvalidRequest, Unavailable
from pdserve.process import AnsweringProcess, ChildDied, python_program
from pdserve.wire.grammar import Grammar, GrammarKind, GrammarTrial, TriedGrammar

START_S = 60.0
"""The process has this long to start and to read the vocabulary."""
MAX_WAITING = 64
"""This many grammars may wait to be tried before more get 503."""
STOP_S = 0.1
RETRY_AFTER_S = 1

_FIRST = GrammarTrial(Grammar(GrammarKind.REGEX, "a"))
"""The answer to this says that the process has started."""
_decoder = msgspec.json.Decoder(TriedGrammar)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """A grammar as a request has it."""

    trial: GrammarTrial
    param: str
    """The request's field that has it, for errors."""


class GrammarCheck:
    """The grammars of one node's requests. ``close`` ends the process."""

    def __init__(
        self,
        model_dir: Path,
        config: GrammarConfig,
        command: Callable[[Path], tuple[str, ...]] = lambda folder: python_program(
            "pdserve.grammars.trial", str(folder)
        ),
    ) -> None:
        self._command = command(model_dir)
        self._config = config
        self._outcomes: OrderedDict[GrammarTrial, TriedGrammar] = OrderedDict()
        self._waiting = 0
        # The kernel ends a child with the thread that started it, so one thread does everything with it.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._process: AnsweringProcess | None = None
        """Only the thread uses it."""

    async def compiled(self, wanted: WantedGrammar, timeout_s: float) -> Grammar:
        """Returns the grammar as engines get it.

        Raises InvalidRequest if it does not compile in time, Unavailable if too many wait, and DeadlineExceeded.
        """
        size = len(wanted.trial.grammar.text.encode())
        if size > self._config.max_bytes:
            raise InvalidRequest(
                f"{wanted.param!r} has a grammar of {size} bytes; at most {self._config.max_bytes} are allowed",
                param=wanted.param,
                code="grammar_too_long",
            )
        tried = self._outcomes.get(wanted.trial)
        if tried is None:
            tried = await self._try(wanted, timeout_s)
            self._outcomes[wanted.trial] = tried
            if len(self._outcomes) > self._config.cached:
                self._outcomes.popitem(last=False)
        else:
            self._outcomes.move_to_end(wanted.trial)
        if tried.refusal:
            place = f"{wanted.param}.{tried.place}" if tried.place else wanted.param
            raise InvalidRequest(
                f"{place!r} cannot be followed: {tried.refusal}", param=wanted.param, code="invalid_grammar"
            )
        return tried.grammar

    def close(self) -> None:
        """Tries no more grammars, and ends the process without waiting for it."""
        self._thread.submit(self._end_process)
        self._thread.shutdown(wait=False)

    async def _try(self, wanted: WantedGrammar, timeout_s: float) -> TriedGrammar:
        if self._waiting >= MAX_WAITING:
            raise Unavailable("too many grammars wait to be compiled", code="overloaded", retry_after_s=RETRY_AFTER_S)
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._thread.submit(self._ask, wanted))
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed before its grammar was compiled", code="deadline_exceeded"
            ) from None
        finally:
            self._waiting -= 1

    def _ask(self, wanted: WantedGrammar) -> TriedGrammar:
        """Returns the outcome of a trial. Raises InvalidRequest if it takes too long; blocks."""
        process = self._running()
        try:
            return _decoder.decode(process.ask(wanted.trial, self._config.compile_s))
        except ChildDied as exc:
            ended = process.ended(STOP_S)
            log.warning("a client's grammar in %s was too much: %s", wanted.param, exc)
            self._end_process()
            if ended:
                return TriedGrammar(wanted.trial.grammar, "it takes more memory, or deeper nesting, than is allowed")
            # A busy machine may be at fault, so this is not kept.
            raise InvalidRequest(
                f"{wanted.param!r} takes longer than {self._config.compile_s:g} s to compile: make it smaller",
                param=wanted.param,
                code="invalid_grammar",
            ) from exc

    def _running(self) -> AnsweringProcess:
        """Returns the process, which is started if there is none. Raises Unavailable if it does not start; blocks."""
        if self._process is not None and self._process.ended():
            self._end_process()
        if self._process is None:
            try:
                self._process = AnsweringProcess("the process that tries grammars", self._command)
                self._process.ask(_FIRST, START_S)
            except (ChildDied, OSError) as exc:
                log.error("%s", exc)
                self._end_process()
                raise Unavailable("grammars cannot be compiled on this node", code="no_grammars") from exc
        return self._process

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.reap(STOP_S)
            self._process = None
