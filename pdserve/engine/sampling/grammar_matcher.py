"""Says which tokens the grammar of one answer lets it go on with.

A *mask* names all of these tokens. To ask about one token takes a tenth of the time, or far less with a large grammar.

The state is a function of the answer's tokens, which are only ever appended to. So it stays right when a request is
preempted, and is made anew from the tokens where another node goes on with the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.grammars.compiling import CompiledGrammar, trouble

TokenBits = npt.NDArray[np.uint8]
"""One bit for each token of the vocabulary, the first in the lowest bit of the first byte."""


MASKS_S = 0.5
MASK_S = 0.01
"""The masks of an answer may take ``MASKS_S`` of processor time, and this for each token. Usual ones take a hundredth
of it. Of an ambiguous grammar, a mask may take a second, in which all other answers wait."""


class GrammarMatcher:
    """The state of one answer's grammar."""

    __slots__ = ("_left_s", "_matcher", "_now", "_num_read", "_num_tokens", "failure")

    def __init__(
        self, compiled: CompiledGrammar, answer: Sequence[int] = (), now: Callable[[], float] = time.thread_time
    ) -> None:
        """``answer`` has the tokens that the answer begins with.

        ``now`` is the thread's clock, which stands still while other threads run.
        """
        self._now = now
        self._matcher, self._num_tokens = compiled.matcher.deep_copy(), compiled.num_tokens
        self._num_read = 0
        self._left_s = MASKS_S
        self.failure: str | None = None
        """Why the answer cannot go on; None while it can."""
        self._read(answer)

    def allows(self, answer: Sequence[int], token_id: int) -> bool:
        """Returns whether the token may follow ``answer``. If the answer cannot go on, ``open_bits`` says why.

        Where the grammar leaves one text to write next, ``open_bits`` names only the first of the tokens that the
        tokenizer would write it with. Any other token that writes some of this text is allowed as well. Where it leaves
        nothing to write, only ``open_bits`` knows that the answer may end.
        """
        began = self._now()
        self._read(answer)
        if self.failure is not None or self._left_s < 0 or token_id >= self._num_tokens:
            return False
        allowed = self._matcher.validate_tokens([token_id]) == 1
        self._left_s -= self._now() - began
        if allowed:
            # For another token, the mask is made next.
            self._left_s += MASK_S
        return allowed

    def open_bits(self, answer: Sequence[int], vocab_size: int) -> TokenBits:
        """Returns the tokens that may follow ``answer``. There are none once ``failure`` says why.

        An end-of-sequence token is among them exactly where the grammar lets the answer end.
        """
        bits, began = np.zeros(-(-vocab_size // 8), np.uint8), self._now()
        self._read(answer)
        if self.failure is not None:
            return bits
        if self._left_s < 0:
            self.failure = "the answer cannot go on by its grammar: it is too much work, perhaps by ambiguous rules"
            return bits
        computed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(bits)]
        self._left_s += MASK_S - (self._now() - began)
        if self._matcher.is_error():
            if "satisfy the grammar" in self._matcher.get_error():
                self.failure = "the tokens that the answer begins with do not fit its grammar"
            else:
                self.failure = f"the answer cannot go on by its grammar: {trouble(self._matcher)}"
            return bits
        bits[: len(computed)] = computed
        if vocab_size % 8:
            bits[-1] &= (1 << vocab_size % 8) - 1
        if not bits.any():
            self.failure = "the model has no token that the grammar allows here"
        return bits

    def _read(self, answer: Sequence[int]) -> None:
        new = answer[self._num_read :]
        self._num_read = len(answer)
        if new and self.failure is None and not self._matcher.consume_tokens(list(new)):
            if "satisfy the grammar" in self._matcher.get_error():
                self.failure = "the tokens that the answer begins with do not fit its grammar"
            else:
                self.failure = f"the answer cannot go on by its grammar: {trouble(self._matcher)}"
