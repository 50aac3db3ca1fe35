"""Says which tokens the grammar of one answer lets it go on with.

A *mask* names all of these tokens. To ask about one token takes a tenth of the time, or far less with a large grammar.

The state is a function of the answer's tokens, which are only ever appended to. So it stays right when a request is
preempted, and is made anew from the tokens where another node goes on with the answer.

A step asks the ``quick`` form of the grammar, whose bounds it can wait for. A question beyond them goes to the
``GrammarWorker``, and ``GrammarWaits`` is raised: the answer gets no token from this step, and is in no step until its
matcher is not ``awaited`` any more. What was worked out is stored, so the same question is then answered at once. The
token is the same as if the step had waited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from pdserve.grammars.compiling import CompiledGrammar, trouble

TokenBits = npt.NDArray[np.uint8]
"""One bit for each token of the vocabulary, the first in the lowest bit of the first byte."""

MASKS_S = 2.0
MASK_S = 0.01
"""The masks of a client's request, of all its prompts and answers together, may take ``MASKS_S`` of processor time, and
this for each token. Usual ones take a hundredth of it, those of an ambiguous grammar up to half a second."""
HEAVY_S = 0.01
"""A grammar for which a step had to wait for so long is asked nothing more within steps."""
READ_AT_ONCE = 256
"""So many tokens are read before other threads get a turn."""

Question: TypeAlias = tuple[int, int | None]
"""The number of the answer's tokens, and the token that may follow them, or None for the mask."""

_MISFIT = "the tokens that the answer begins with do not fit its grammar"


class GrammarWaits(Exception):
    """A question is being worked out beside the steps."""


class GrammarBudget:
    """The processor time that the grammar of one client's request may still take."""

    def __init__(self) -> None:
        self.left_s = MASKS_S
        self._changing = threading.Lock()

    def spend(self, seconds: float, earned: float = 0.0) -> None:
        """Takes the time of a question. ``earned`` is what its answer adds.

        What earlier tokens left over is not saved up for later ones.
        """
        with self._changing:
            self.left_s = min(self.left_s - seconds + earned, MASKS_S)


class Reader(Protocol):
    """How a matcher of llguidance is used, and the clock that says how long that takes."""

    def read(self, matcher: LLMatcher, token_id: int) -> bool:
        """Lets a matcher read a token. Returns whether the token fits."""

    def mask(self, matcher: LLMatcher) -> bytes:
        """Returns the mask of a matcher."""

    def now(self) -> float:
        """Returns the processor time of the thread, which stands still while other threads run."""


class Worker(Reader, Protocol):
    """Works out questions beside the steps."""

    def ask(self, matcher: GrammarMatcher, work: Callable[[], None]) -> None:
        """Has ``work`` done in another thread. Then ``matcher`` is not ``awaited`` any more."""


class AtOnce:
    """The ``Reader`` of a step, which waits for what it asks."""

    def __init__(self, now: Callable[[], float] = time.thread_time) -> None:
        self.now = now

    def read(self, matcher: LLMatcher, token_id: int) -> bool:
        return matcher.consume_token(token_id)

    def mask(self, matcher: LLMatcher) -> bytes:
        return matcher.compute_bitmask()


AT_ONCE = AtOnce()


class GrammarMatcher:
    """The state of one answer's grammar. Only the worker uses it while it is ``awaited``."""

    __slots__ = (
        *("_ahead", "_budget", "_compiled", "_worker", "_quick", "_quick_read", "_reader"),
        *("_complete", "_complete_read", "_worked_out"),
        *("agrees", "awaited", "client", "failure", "is_over", "took_s"),
    )

    def __init__(
        self,
        compiled: CompiledGrammar,
        answer: Sequence[int] = (),
        *,
        budget: GrammarBudget | None = None,
        worker: Worker | None = None,
        client: bytes = b"",
        is_over: Callable[[], bool] = lambda: False,
        reader: Reader = AT_ONCE,
    ) -> None:
        """``answer`` has the tokens that the answer begins with.

        Without a ``worker``, every question is answered at once.

        ``client`` is whose turn it is with the worker, which does nothing any more once ``is_over``.
        """
        self._reader = reader
        self._compiled, self._budget, self._worker = compiled, budget or GrammarBudget(), worker
        self._quick = None if compiled.quick is None else compiled.quick.deep_copy()
        self._complete: LLMatcher | None = None
        """Made from all of the answer's tokens as soon as the quick one has given up."""
        self._ahead: tuple[int, int, LLMatcher] | None = None
        """The complete form after the token at this place, if that token is the next one."""
        self._quick_read = self._complete_read = 0
        self._worked_out: dict[Question, bytes | bool] = {}
        """What the worker has worked out for the next token."""
        self.client, self.is_over = client, is_over
        self.awaited = False
        """Whether a question is being worked out."""
        self.failure: str | None = None
        """Why the answer cannot go on; None while it can."""
        self.took_s = 0.0
        """The processor time that the last question has taken of the step."""
        self.agrees = True
        """Whether the last token that was asked for was allowed: the next one is then likely to be, too."""
        self._read_quick(answer)

    @property
    def is_heavy(self) -> bool:
        """Whether each question goes to the worker."""
        return self._quick is None or self._compiled.quick is None

    @property
    def left_s(self) -> float:
        """The processor time that the client's request may still take for its grammar."""
        return self._budget.left_s

    def allows(self, answer: Sequence[int], token_id: int, aside: bool = False) -> bool:
        """Returns whether the token may follow ``answer``. If the answer cannot go on, ``open_bits`` says why.

        Where the grammar leaves one text to write next, ``open_bits`` names only the first of the tokens that the
        tokenizer would write it with. Any other token that writes some of this text is allowed as well. Where it leaves
        nothing to write, only ``open_bits`` knows that the answer may end.

        Raises GrammarWaits where a step cannot wait for that; ``aside``, also where it could.
        """
        self.took_s = 0.0
        if self.failure is not None or self._budget.left_s < 0 or token_id >= self._compiled.num_tokens:
            return False
        self.agrees = allowed = bool(self._answer(answer, token_id, aside))
        if allowed:
            # For another token, the mask is made next.
            self._budget.spend(0.0, MASK_S)
        return allowed

    def open_bits(self, answer: Sequence[int], vocab_size: int, aside: bool = False) -> TokenBits:
        """Returns the tokens that may follow ``answer``. There are none once ``failure`` says why.

        An end-of-sequence token is among them exactly where the grammar lets the answer end.

        Raises GrammarWaits where a step cannot wait for that; ``aside``, also where it could.
        """
        bits = np.zeros(-(-vocab_size // 8), np.uint8)
        self.took_s = 0.0
        if self.failure is None and self.left_s < 0:
            self.failure = "the answer cannot go on by its grammar: it is too much work, perhaps by ambiguous rules"
        computed = b"" if self.failure is not None else self._answer(answer, None, aside)
        if self.failure is not None or isinstance(computed, bool):
            return bits
        self._budget.spend(0.0, MASK_S)
        named = np.frombuffer(computed, np.uint8)[: len(bits)]
        bits[: len(named)] = named
        if vocab_size % 8:
            bits[-1] &= (1 << vocab_size % 8) - 1
        if not bits.any():
            self.failure = "the model has no token that the grammar allows here"
        return bits

    # ------------------------------------------------------------ questions

    def _answer(self, answer: Sequence[int], token_id: int | None, aside: bool) -> bytes | bool:
        """Returns a mask, or whether a token is allowed. Returns False if ``failure`` says why it does not go on."""
        found = None
        if self._worked_out or self._quick is None or not answer:
            found = self._known(len(answer), token_id)
        if found is None and not (aside or self.is_heavy):
            began = self._reader.now()
            found = self._ask_quick(answer, token_id)
            self._note_time(began)
        if found is not None:
            return found
        if self._worker is None:
            began = self._reader.now()
            found = self._ask_complete(answer, token_id, self._reader)
            self._note_time(began)
            return found
        worker, tokens = self._worker, list(answer)
        self.awaited = True
        worker.ask(self, lambda: self._work_out(tokens, token_id, worker))
        raise GrammarWaits

    def _known(self, num_tokens: int, token_id: int | None) -> bytes | bool | None:
        """Returns the answer to a question if it was worked out, or follows from what was; None otherwise."""
        known = self._worked_out.get((num_tokens, token_id))
        if known is not None:
            return known
        mask = self._worked_out.get((num_tokens, None), self._compiled.first_bits if num_tokens == 0 else b"")
        if token_id is None:
            return mask or None
        # What is not in the mask may be allowed all the same.
        named = isinstance(mask, bytes) and mask and mask[token_id // 8] >> token_id % 8 & 1
        return True if named and self.is_heavy else None

    def _work_out(self, answer: Sequence[int], token_id: int | None, reader: Reader) -> None:
        """Answers a question for the worker, and stores what it has found for the step that asks again."""
        if self.left_s < 0:
            return
        began = reader.now()
        found = None if self.is_heavy else self._ask_quick(answer, token_id)
        if found is None:
            found = self._ask_complete(answer, token_id, reader)
        self._worked_out = {known: value for known, value in self._worked_out.items() if known[0] == len(answer)}
        self._worked_out[len(answer), token_id] = found
        self._budget.spend(reader.now() - began)

    def _note_time(self, began: float) -> None:
        self.took_s = self._reader.now() - began
        self._budget.spend(self.took_s)
        if self.took_s > HEAVY_S:
            self._compiled.quick = None

    def _ask_quick(self, answer: Sequence[int], token_id: int | None) -> bytes | bool | None:
        """Returns None if that is too much for the quick form, or the answer does not fit it."""
        if self._quick_read < len(answer):
            self._read_quick(answer)
        quick, found = self._quick, None
        if quick is not None:
            found = quick.compute_bitmask() if token_id is None else quick.validate_tokens([token_id]) == 1
            if quick.is_error():
                self._quick = found = None
        return found

    def _read_quick(self, answer: Sequence[int]) -> None:
        for start in range(self._quick_read, len(answer), READ_AT_ONCE):
            if self._quick is not None and not self._quick.consume_tokens(list(answer[start : start + READ_AT_ONCE])):
                self._quick = None
        self._quick_read = len(answer)

    def _ask_complete(self, answer: Sequence[int], token_id: int | None, reader: Reader) -> bytes | bool:
        complete = self._read_complete(answer, reader)
        if complete is None:
            return False
        if token_id is not None:
            ahead = complete.deep_copy()
            fits = reader.read(ahead, token_id)
            if fits:
                self._ahead = (len(answer), token_id, ahead)
            return fits
        computed = reader.mask(complete)
        if complete.is_error():
            self.failure = self._why(complete)
            return False
        return computed

    def _read_complete(self, answer: Sequence[int], reader: Reader) -> LLMatcher | None:
        """Returns the complete form after these tokens; None if they do not fit, for which ``failure`` is."""
        if self._complete is None:
            self._complete, self._quick = self._compiled.matcher.deep_copy(), None
        for place in range(self._complete_read, len(answer)):
            if self._ahead is not None and self._ahead[:2] == (place, answer[place]):
                self._complete = self._ahead[2]
            elif not reader.read(self._complete, answer[place]):
                self.failure = self._why(self._complete)
                return None
            self._ahead = None
        self._complete_read = len(answer)
        return self._complete

    @staticmethod
    def _why(matcher: LLMatcher) -> str:
        if "satisfy the grammar" in matcher.get_error():
            return _MISFIT
        return f"the answer cannot go on by its grammar: {trouble(matcher)}"
