"""Asks the grammars of one step's rows, for a few milliseconds in all.

What would take longer goes to the ``GrammarWorker``, and the rows that ask are left without a token: their answers go
on in a later step. Rows are asked first whose clients' requests have taken the least time for their grammars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from contextlib import suppress

from pdserve.engine.sampling.grammar_matcher import GrammarWaits, TokenBits
from pdserve.engine.sampling.logit_rules import grammar_bits
from pdserve.engine.sampling.sampling_row import SamplingRow

STEP_S = 0.005
"""The processor time that grammars may take of a step. It is enough for 100 usual masks."""


class GrammarStep:
    """What the grammars of a step's rows say."""

    def __init__(self, rows: Sequence[SamplingRow], vocab_size: int, eos_token_ids: Set[int]) -> None:
        self._rows, self._vocab_size, self._eos_token_ids = rows, vocab_size, eos_token_ids
        self._left_s = STEP_S
        self.masks: dict[int, TokenBits] = {}
        """The masks of the rows that were asked for one. At least one token is left by each."""
        self.without_token: set[int] = set()
        """The rows that can have no token: now, where their matchers are ``awaited``, and otherwise at all."""

    def has_time(self, index: int) -> bool:
        """Returns whether the row's mask can be made now that may turn out not to be needed."""
        matcher = self._rows[index].matcher
        return matcher is not None and not matcher.awaited and not matcher.is_heavy and self._left_s > STEP_S / 2

    def make_masks(self, indices: Iterable[int]) -> None:
        """Makes the masks of these rows, or adds the rows to those ``without_token``."""
        for index in self._in_turn(indices):
            matcher, bits = self._rows[index].matcher, None
            if matcher is not None and not matcher.awaited:
                with suppress(GrammarWaits):
                    bits = grammar_bits(self._rows[index], self._vocab_size, self._eos_token_ids, self._is_over)
                self._left_s -= matcher.took_s
            if bits is None:
                self.without_token.add(index)
            else:
                self.masks[index] = bits

    def rejected(self, tokens: dict[int, int]) -> list[int]:
        """Returns the rows whose grammars do not allow these tokens, beside the rows that are now ``without_token``."""
        return sorted(index for index in self._in_turn(tokens) if not self._allows(index, tokens[index]))

    def _allows(self, index: int, token: int) -> bool:
        """Returns True for a row that has to wait as well."""
        row, matcher = self._rows[index], self._rows[index].matcher
        if matcher is None or matcher.awaited:
            self.without_token.add(index)
            return True
        try:
            return matcher.allows(row.token_ids[row.num_prompt_tokens :], token, self._is_over)
        except GrammarWaits:
            self.without_token.add(index)
            return True
        finally:
            self._left_s -= matcher.took_s

    @property
    def _is_over(self) -> bool:
        return self._left_s <= 0

    def _in_turn(self, indices: Iterable[int]) -> Iterable[int]:
        def left_s(index: int) -> float:
            matcher = self._rows[index].matcher
            return 0.0 if matcher is None else matcher.left_s

        return sorted(indices, key=left_s, reverse=True)
