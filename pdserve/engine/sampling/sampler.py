"""Samples the next token of each request, and reports log probabilities where they are asked for.

A token is a function of the request's logits, its parameters, its tokens so far, its seed and the token's position, and
of nothing else: it is the same alone or in a batch, on a prefill or a decode node. (The logits themselves can differ
with the batch by rounding: below 1e-4 in fp32, with which no answer was seen to change, and in bf16 by enough to change
a close choice.) Log probabilities are by the model's own distribution.

A parameter that no request sets costs nothing: a greedy row takes part in one ``max`` over all rows.

A model that was asked for JSON writes JSON nearly everywhere. So a row with a grammar mostly gets a token as if it had
none, of which its grammar is then asked (``proposes``). Only where it says no, all of its tokens have to be known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from contextlib import suppress

import torch

from pdserve.engine.sampling.filters import cuts_any
from pdserve.engine.sampling.grammar_matcher import GrammarWaits, TokenBits
from pdserve.engine.sampling.logit_rules import closes_tokens, grammar_bits
from pdserve.engine.sampling.logprobs import PendingReports
from pdserve.engine.sampling.sampling_row import SamplingRow
from pdserve.engine.sampling.token_choice import TokenChoice, is_drawn
from pdserve.wire.sampling_params import SampledToken, TokenLogprobs
from pdserve_kernels.host_copies import to_device

STEP_S = 0.005
"""The processor time that grammars may take of a step. It is enough for 100 usual masks."""


class GrammarTime:
    """The processor time that grammars may still take of a step."""

    def __init__(self) -> None:
        self.left_s = STEP_S


class GrammarStep:
    """Asks the grammars of one step's rows, for a few milliseconds in all.

    What would take longer goes to the ``GrammarWorker``, and the rows that ask are left without a token: their answers
    go on in a later step. Rows are asked first whose clients' requests have taken the least time for their grammars.
    """

    def __init__(
        self, rows: Sequence[SamplingRow], vocab_size: int, eos_token_ids: Set[int], time: GrammarTime | None = None
    ) -> None:
        self._rows, self._vocab_size, self._eos_token_ids = rows, vocab_size, eos_token_ids
        self._time = time or GrammarTime()
        self.masks: dict[int, TokenBits] = {}
        """The masks of the rows that were asked for one. At least one token is left by each."""
        self.without_token: set[int] = set()
        """The rows that can have no token: now, where their matchers are ``awaited``, and otherwise at all."""

    def has_time(self, index: int) -> bool:
        """Returns whether the row's mask can be made now that may turn out not to be needed."""
        matcher = self._rows[index].matcher
        return matcher is not None and not matcher.awaited and not matcher.is_heavy and self._time.left_s > STEP_S / 2

    def make_masks(self, indices: Iterable[int]) -> None:
        """Makes the masks of these rows, or adds the rows to those ``without_token``."""
        for index in self._in_turn(indices):
            matcher, bits = self._rows[index].matcher, None
            if matcher is not None and not matcher.awaited:
                with suppress(GrammarWaits):
                    bits = grammar_bits(self._rows[index], self._vocab_size, self._eos_token_ids, self._is_over)
                self._time.left_s -= matcher.took_s
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
            self._time.left_s -= matcher.took_s

    @property
    def _is_over(self) -> bool:
        return self._time.left_s <= 0

    def _in_turn(self, indices: Iterable[int]) -> Iterable[int]:
        def left_s(index: int) -> float:
            matcher = self._rows[index].matcher
            return 0.0 if matcher is None else matcher.left_s

        return sorted(indices, key=left_s, reverse=True)


def sample(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Set[int] = frozenset(),
    sources: Sequence[int] | None = None,
    time: GrammarTime | None = None,
) -> list[SampledToken | None]:
    """Returns one token a row, or None where the logits are not finite, or the row's grammar leaves no token.

    A row whose matcher is ``awaited`` has no token either: it can have one in a later step.

    ``logits`` is fp32 ``[rows, vocab_size]`` and is not changed. Several rows may be sampled from the same logits:
    ``sources`` then says from which each is. ``min_tokens`` forbids ``eos_token_ids`` as well as a request's own stop
    tokens. Grammars take their time from ``time``, or from a step's of its own.
    """
    sources = range(len(rows)) if sources is None else sources
    if any(row.sampling.grammar is not None for row in rows):
        choice = _chosen_by_grammars(
            logits, rows, sources, GrammarStep(rows, logits.shape[-1], eos_token_ids, time), eos_token_ids
        )
    else:
        choice = TokenChoice.of_best(logits, rows, sources, eos_token_ids)
        choice.choose(choice.left(range(len(rows))), {})
    reports = reports_of(range(len(rows)), logits, rows, sources, choice)
    return [
        SampledToken(token, reports.get(index)) if choice.finite[index] else None
        for index, token in enumerate(choice.tokens)
    ]


def _chosen_by_grammars(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    sources: Sequence[int],
    grammars: GrammarStep,
    eos_token_ids: Set[int],
) -> TokenChoice:
    on_gpu = logits.device.type != "cpu"
    constrained = [index for index, row in enumerate(rows) if row.sampling.grammar is not None]
    proposing = {index for index in constrained if proposes(rows[index])}
    # A GPU may still compute the logits meanwhile.
    early = {index for index in proposing if on_gpu and grammars.has_time(index)}
    grammars.make_masks(index for index in constrained if index in early or index not in proposing)
    choice = TokenChoice.of_best(logits, rows, sources, eos_token_ids)
    choice.drop(grammars.without_token)
    masks = {index: bits for index, bits in grammars.masks.items() if index not in proposing}
    choice.choose(choice.left(range(len(rows))), masks)
    choose_instead(choice, grammars, proposing)
    return choice


def choose_instead(choice: TokenChoice, grammars: GrammarStep, proposing: Iterable[int]) -> None:
    """Asks the grammars of these rows for their tokens, and chooses others where they say no."""
    rejected = grammars.rejected({index: choice.tokens[index] for index in choice.left(proposing)})
    grammars.make_masks(index for index in rejected if index not in grammars.masks)
    choice.drop(grammars.without_token)
    choice.choose(choice.left(rejected), grammars.masks, again=True)


def proposes(row: SamplingRow) -> bool:
    """Returns whether the token of a row with a grammar is first chosen without the grammar.

    If the grammar allows that token, it is the answer's, and otherwise one is drawn among those that the grammar
    allows. The chances of each are the same as if it had been drawn among those at first. Where the distribution is
    cut by its best tokens, or tokens are forbidden besides, they would not be: the grammar comes before these.
    """
    return not (is_drawn(row.sampling) and cuts_any(row.sampling)) and not closes_tokens(row)


def reports_of(
    indices: Iterable[int],
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    sources: Sequence[int],
    choice: TokenChoice,
) -> dict[int, TokenLogprobs]:
    """Returns the reports of those of these rows that have a token and ask for one."""
    asking = choice.left(index for index in indices if rows[index].sampling.logprobs is not None)
    if not asking:
        return {}
    (chosen,) = to_device([[choice.tokens[index] for index in asking]], logits.device)
    own_sources = [sources[index] for index in asking]
    reports = PendingReports(logits, [rows[index] for index in asking], own_sources, chosen.long())
    return dict(zip(asking, reports.read(), strict=True))
