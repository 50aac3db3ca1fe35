"""Finds out whether clients' grammars compile, before an engine gets them, in a process beside this one.

The process starts with the first grammar. One that takes too long, or that a grammar has ended, is replaced by the
next. Outcomes are cached by content, refusals too, so that a client who sends the same schema with every request waits
for it once. Requests that come with the same schema at a time wait for one trial.

One grammar is tried at a time. Clients take turns, so that one with many slow grammars delays another's by one trial.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import msgspec

from pdserve.api.generation.request_log import shutting_down
from pdserve.config import GrammarConfig
from pdserve.errors import DeadlineExceeded, InvalidRequest, RequestError, TooManyRequests, Unavailable
from pdserve.grammars.client_turns import ClientTurns
from pdserve.process import AnsweringProcess, ChildDied, python_program
from pdserve.wire.sampling_params import Grammar, GrammarKind, GrammarTrial, TriedGrammar

START_S = 60.0
"""The process has this long to start and to read the vocabulary."""
MAX_WAITING = 128
"""This many grammars may wait to be tried before others get 503. Any number of requests may wait for one of them."""
MAX_OF_CLIENT = 32
"""This many of them may wait for one client before its others get 429."""
TRIES = 2
"""A process that somebody kills is replaced so often for one grammar, less once."""
MAX_PARTS_TRIED = 128
"""So many parts of a refused grammar are tried alone, to find the one that is at fault."""
STOP_S = 0.1
RETRY_AFTER_S = 1

_FIRST = GrammarTrial(Grammar(GrammarKind.REGEX, "a"))
"""The answer to this says that the process has started."""
_TOO_MUCH = "it takes more memory, or deeper nesting, than is allowed"
_ROW_NUMBER = re.compile(r"\Aat \d+\(\d+\): ")
_ROWS = re.compile(r"\n\s*\d+ \| ")
_decoder = msgspec.json.Decoder(TriedGrammar)

log = logging.getLogger(__name__)


class _Killed(Exception):
    """The process that tried a grammar was killed by somebody else."""


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """What a client has written of a grammar that this node has made."""

    name: str
    """What errors call it."""
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """A grammar as a request has it."""

    trial: GrammarTrial
    param: str
    """The request's field that has it, for errors."""
    parts: Callable[[], Iterable[GrammarPart]] | None = None
    """Returns what the client has written of a grammar that this node has made."""

    def within(self, before: str) -> WantedGrammar:
        """Returns the same for an answer of which the grammar is one part, as the rules ``before`` say."""
        if not before:
            return self
        grammar = msgspec.structs.replace(self.trial.grammar, before=before)
        return replace(self, trial=msgspec.structs.replace(self.trial, grammar=grammar))


@dataclass(slots=True)
class _Trying:
    """The trial of a grammar for which requests wait."""

    outcome: asyncio.Future[TriedGrammar | None]
    """Its result is None if the trial takes too long."""
    requests: int = 0
    begun: bool = False
    kept: bool = False
    """Whether a request asks for this grammar itself. Of one that only explains another, nothing is cached."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a grammar is refused that this node has made."""

    part: Grammar | None
    """What the client has written that is at fault; None if nothing is that by itself."""
    tried: TriedGrammar


class GrammarCheck:
    """The grammars of one node's requests. ``close`` ends the process."""

    def __init__(
        self,
        model_dir: Path,
        config: GrammarConfig,
        command: Callable[[Path], tuple[str, ...]] = lambda folder: python_program(
            "pdserve.grammars.trial", str(folder)
        ),
        cache_dir: Path | None = None,
    ) -> None:
        """``command``, of a model's folder or file, starts the process. ``cache_dir`` may have the tokenizer."""
        self._command = (*command(model_dir), *([str(cache_dir)] if cache_dir is not None else []))
        self._config = config
        self._outcomes: OrderedDict[GrammarTrial, TriedGrammar] = OrderedDict()
        self._faults: OrderedDict[GrammarTrial, _Fault] = OrderedDict()
        self._trying: dict[GrammarTrial, _Trying] = {}
        """The trial under way, and those that wait for their turn."""
        self._turns: ClientTurns[GrammarTrial] = ClientTurns()
        self._trials: asyncio.Task[None] | None = None
        """Makes the trials, while any is left."""
        self._closed = False
        # The kernel ends a child with the thread that started it, so one thread does everything with it.
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._process: AnsweringProcess | None = None
        """Only the thread uses it, but for its end."""

    async def compiled(self, wanted: WantedGrammar, timeout_s: float, client: bytes = b"") -> Grammar:
        """Returns the grammar as engines get it. ``client`` is whose turn it is tried in.

        Raises InvalidRequest if it does not compile in time, TooManyRequests if too many of the client's wait,
        Unavailable if too many of all clients wait, and DeadlineExceeded.
        """
        size = len(wanted.trial.grammar.text.encode())
        if size > self._config.max_bytes:
            raise InvalidRequest(
                f"{wanted.param!r} has a grammar of {size} bytes; at most {self._config.max_bytes} are allowed",
                param=wanted.param,
                code="grammar_too_long",
            )
        deadline = asyncio.get_running_loop().time() + timeout_s
        tried = await self._outcome(wanted, deadline, client)
        if tried.refusal:
            raise await self._refused(wanted, tried, deadline, client)
        return tried.grammar

    def close(self) -> None:
        """Tries no more grammars, and ends the process, whatever it is at work on, without waiting for it."""
        self._closed = True
        if self._trials is not None:
            self._trials.cancel()
        for trying in self._trying.values():
            trying.outcome.cancel()
        if self._process is not None:
            # The thread may do the same just now.
            with contextlib.suppress(OSError):
                self._process.kill()
        self._thread.submit(self._end_process)
        self._thread.shutdown(wait=False)

    async def _refused(
        self, wanted: WantedGrammar, tried: TriedGrammar, deadline: float, client: bytes
    ) -> InvalidRequest:
        """Returns why a grammar is refused, in terms of what the client knows of it."""
        name, at_fault = repr(wanted.param), tried
        if wanted.parts is not None:
            parts = tuple(islice(wanted.parts(), MAX_PARTS_TRIED))
            fault = await self._fault(wanted, tried, parts, deadline, client)
            at_fault = fault.tried
            # Requests that describe one grammar differently have different names for its parts.
            name = next((part.name for part in parts if part.grammar == fault.part), name)
        place = f" at {at_fault.place!r}" if at_fault.place else ""
        return InvalidRequest(
            f"{name} cannot be followed{place}: {at_fault.refusal}", param=wanted.param, code="invalid_grammar"
        )

    async def _fault(
        self, wanted: WantedGrammar, tried: TriedGrammar, parts: tuple[GrammarPart, ...], deadline: float, client: bytes
    ) -> _Fault:
        """Returns why a grammar is refused that is made of ``parts``. It is cached if all were tried that had to be."""
        known = self._faults.get(wanted.trial)
        if known is not None:
            self._faults.move_to_end(wanted.trial)
            return known
        fault = _Fault(None, msgspec.structs.replace(tried, refusal=_without_rows(tried.refusal)))
        for grammar in dict.fromkeys(part.grammar for part in parts):
            part = WantedGrammar(GrammarTrial(grammar), wanted.param)
            try:
                outcome = await self._outcome(part, deadline, client, kept=False)
            except RequestError:
                # That the whole is refused is known, and this says no more than why it is not known better.
                return fault
            if outcome.refusal:
                fault = _Fault(grammar, outcome)
                break
        self._faults[wanted.trial] = fault
        if len(self._faults) > self._config.cached:
            self._faults.popitem(last=False)
        return fault

    async def _outcome(
        self, wanted: WantedGrammar, deadline: float, client: bytes, *, kept: bool = True
    ) -> TriedGrammar:
        """Returns the outcome of a grammar's trial, which may have been made before.

        Without ``kept``, that of a new trial is not cached for this.
        """
        tried = self._outcomes.get(wanted.trial)
        if tried is None:
            return await self._tried(wanted, deadline, client, kept=kept)
        self._outcomes.move_to_end(wanted.trial)
        return tried

    async def _tried(self, wanted: WantedGrammar, deadline: float, client: bytes, *, kept: bool) -> TriedGrammar:
        """Returns the outcome of the trial that all requests with this grammar share.

        A trial that has begun goes on without them, as its outcome is cached. Any other ends with the last of them.
        """
        trying = self._joined(wanted.trial, client)
        trying.requests += 1
        trying.kept |= kept
        try:
            async with asyncio.timeout_at(deadline):
                tried = await asyncio.shield(trying.outcome)
        except TimeoutError:
            raise DeadlineExceeded(
                "the request's deadline passed before its grammar was compiled", code="deadline_exceeded"
            ) from None
        finally:
            trying.requests -= 1
            if not (trying.requests or trying.begun):
                self._turns.discard(wanted.trial)
                self._trying.pop(wanted.trial, None)
        if tried is None:
            # A busy machine may be at fault, so this is not cached.
            raise InvalidRequest(
                f"{wanted.param!r} takes longer than {self._config.compile_s:g} s to compile: make it smaller",
                param=wanted.param,
                code="invalid_grammar",
            )
        return tried

    def _joined(self, trial: GrammarTrial, client: bytes) -> _Trying:
        """Returns the trial of a grammar, which gets its turn when this client has one, or another that waits for it.

        Raises TooManyRequests or Unavailable.
        """
        if self._closed:
            raise shutting_down()
        trying = self._trying.get(trial)
        if trying is None:
            if self._turns.count(client) >= MAX_OF_CLIENT:
                raise TooManyRequests(
                    f"{MAX_OF_CLIENT} new grammars of this client wait to be compiled",
                    code="rate_limit_exceeded",
                    retry_after_s=RETRY_AFTER_S,
                )
            if len(self._trying) >= MAX_WAITING:
                raise Unavailable(
                    "too many grammars wait to be compiled", code="overloaded", retry_after_s=RETRY_AFTER_S
                )
            trying = self._trying[trial] = _Trying(asyncio.get_running_loop().create_future())
            trying.outcome.add_done_callback(_look_at)
        if not trying.begun:
            self._turns.add(client, trial)
        if self._trials is None:
            self._trials = asyncio.create_task(self._make_trials(), name="grammars")
        return trying

    async def _make_trials(self) -> None:
        try:
            while (trial := self._turns.take()) is not None:
                trying = self._trying[trial]
                trying.begun = True
                try:
                    tried = await asyncio.wrap_future(self._thread.submit(self._ask, trial))
                except Exception as exc:
                    # Whatever it is, it belongs to the requests that wait for this trial.
                    trying.outcome.set_exception(exc)
                else:
                    if trying.kept:
                        self._keep(trial, tried)
                    trying.outcome.set_result(tried)
                finally:
                    del self._trying[trial]
        finally:
            self._trials = None

    def _keep(self, trial: GrammarTrial, tried: TriedGrammar | None) -> None:
        if tried is None:
            return
        self._outcomes[trial] = tried
        if len(self._outcomes) > self._config.cached:
            self._outcomes.popitem(last=False)

    def _ask(self, trial: GrammarTrial) -> TriedGrammar | None:
        """Returns the outcome of a trial; None if it takes too long. Raises Unavailable; blocks.

        Whoever kills the process, such as a kernel without memory, says nothing about the grammar: it is tried again.
        """
        for _ in range(TRIES - 1):
            with contextlib.suppress(_Killed):
                return self._ask_once(trial)
        try:
            return self._ask_once(trial)
        except _Killed:
            return TriedGrammar(trial.grammar, _TOO_MUCH)

    def _ask_once(self, trial: GrammarTrial) -> TriedGrammar | None:
        """Does what ``_ask`` does, but raises _Killed."""
        process = self._running()
        try:
            return _decoder.decode(process.ask(trial, self._config.compile_s))
        except ChildDied as exc:
            if self._closed:
                raise shutting_down() from exc
            ended, killed = process.ended(STOP_S), process.killed
            log.warning("a client's grammar was not tried to its end: %s", exc)
            self._end_process()
            if killed:
                raise _Killed from exc
            return TriedGrammar(trial.grammar, _TOO_MUCH) if ended else None

    @property
    def process_id(self) -> int | None:
        """The id of the process that tries grammars; None if there is none now."""
        process = self._process
        return None if process is None else process.pid

    def _running(self) -> AnsweringProcess:
        """Returns the process, which is started if there is none. Raises Unavailable if it does not start; blocks."""
        if self._process is not None and self._process.ended():
            self._end_process()
        tries = 0
        while self._process is None and not self._closed:
            tries += 1
            self._start(last=tries == TRIES)
        if self._process is None or self._closed:
            raise shutting_down()
        return self._process

    def _start(self, *, last: bool) -> None:
        """Starts the process. Raises Unavailable if it does not start, but not if it is killed before the last try."""
        try:
            self._process = AnsweringProcess("the process that tries grammars", self._command)
            self._process.ask(_FIRST, START_S)
        except (ChildDied, OSError) as exc:
            log.error("%s", exc)
            killed = self._process is not None and self._process.killed
            self._end_process()
            if last or not killed:
                raise Unavailable("grammars cannot be compiled on this node", code="no_grammars") from exc

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.reap(STOP_S)
            self._process = None


def _without_rows(refusal: str) -> str:
    """Returns the compiler's reason without the rows of the grammar, which its client has not written."""
    return _ROWS.split(_ROW_NUMBER.sub("", refusal), maxsplit=1)[0]


def _look_at(outcome: asyncio.Future[TriedGrammar | None]) -> None:
    """Takes note of an error for which no request waits any more, so that asyncio does not report it as lost."""
    if not outcome.cancelled():
        outcome.exception()
