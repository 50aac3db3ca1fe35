"""One choice's token ids to the text that its client may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.api.detokenizer import Detokenizer
from pdserve.api.outcome import Outcome, outcome_of
from pdserve.api.shown_tokens import ShownToken, ShownTokens
from pdserve.api.stop_strings import StopStrings
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice."""

    choice: int
    text: str
    token_ids: Sequence[int]
    outcome: Outcome | None
    """Set once, on the last one."""
    tokens: Sequence[ShownToken] = ()
    """Those that ``text`` is made of, with their log probabilities, if the request asked for them."""


class ChoiceText:
    """Detokenizer, stop strings and stop tokens of one choice."""

    def __init__(
        self,
        choice: int,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        shown_stop_ids: frozenset[int],
        min_tokens: int = 0,
    ) -> None:
        """``shown_stop_ids`` are the stop tokens whose text belongs to the answer.

        No stop string ends with the text of the first ``min_tokens`` tokens.
        """
        self._choice = choice
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._shown_stop_ids = shown_stop_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_chars = 0
        self._shown_tokens = ShownTokens()

    def add(self, output: RequestOutput) -> Delta:
        """``outcome`` is ``STOP`` also when a stop string was found, with the engine still at work on the choice."""
        shown = self._shown(output.new_token_ids, output.finish)
        early = max(self._min_tokens - self._num_tokens, 0)
        text = ""
        if early:
            text += self._stop_strings.add(self._detokenize(shown[:early], output.logprobs), may_end=False)
        late_logprobs = None if output.logprobs is None else output.logprobs[early:]
        text += self._stop_strings.add(self._detokenize(shown[early:], late_logprobs))
        self._num_tokens += len(shown)
        if output.finish is not None and not self._stop_strings.found:
            may_end = self._num_tokens > self._min_tokens
            text += self._stop_strings.add(self._detokenizer.flush(), may_end=may_end)
            text += self._stop_strings.flush()
        outcome = outcome_of(output.finish) if output.finish else None
        if self._stop_strings.found:
            outcome = Outcome.STOP
        self._num_chars += len(text)
        tokens = self._shown_tokens.take(self._num_chars)
        if outcome is not None:
            tokens += self._shown_tokens.take_last(self._num_chars, cut=self._stop_strings.found)
        return Delta(self._choice, text, output.new_token_ids, outcome, tokens)

    def _detokenize(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> str:
        if logprobs is None:
            return self._detokenizer.add(token_ids)
        pieces = []
        # One more log probability than tokens, where the last token is not shown.
        for token_id, own in zip(token_ids, logprobs, strict=False):
            piece = self._detokenizer.add((token_id,))
            self._shown_tokens.add(token_id, own, piece)
            pieces.append(piece)
        return "".join(pieces)

    def _shown(self, token_ids: list[int], finish: FinishReason | None) -> list[int]:
        if finish is FinishReason.STOP and token_ids and token_ids[-1] not in self._shown_stop_ids:
            return token_ids[:-1]
        return token_ids
