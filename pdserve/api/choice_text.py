"""One choice's token ids to the text that its client may see."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.api.detokenizer import Detokenizer
from pdserve.api.outcome import Outcome, outcome_of
from pdserve.api.shown_tokens import ShownToken, ShownTokens
from pdserve.api.stop_strings import StopStrings
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.sampling import TokenLogprobs


class Delta(msgspec.Struct, frozen=True, gc=False):
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
        """``outcome`` is ``STOP`` also when a stop string was found, with the engine still at work on the choice.

        Tokens after a stop string are not part of the answer, and not of the delta.
        """
        token_ids, finish, logprobs = output.new_token_ids, output.finish, output.logprobs
        if finish is None and logprobs is None and not self._stop_strings.wanted:
            return Delta(self._choice, self._detokenizer.add(token_ids), token_ids, None)
        shown = self._shown(token_ids, finish)
        if self._stop_strings.wanted:
            text, read = self._until_stop(shown, logprobs)
            if self._stop_strings.found:
                token_ids = token_ids[:read]
        else:
            text = self._detokenize(shown, logprobs)
        if finish is not None and not self._stop_strings.found:
            text += self._rest()
        outcome = Outcome.STOP if self._stop_strings.found else outcome_of(finish) if finish else None
        self._num_chars += len(text)
        return Delta(self._choice, text, token_ids, outcome, self._reported(over=outcome is not None))

    def break_off(self) -> Delta:
        """What was held back, of an answer that will not be complete."""
        text = self._rest()
        self._num_chars += len(text)
        return Delta(self._choice, text, (), None, self._reported(over=True))

    def _until_stop(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> tuple[str, int]:
        """The text up to the first stop string, and how many tokens it took to find that.

        One by one, so that what is an answer's does not depend on how many tokens come at once.
        """
        text = ""
        for index, token_id in enumerate(token_ids):
            piece = self._detokenize([token_id], None if logprobs is None else logprobs[index : index + 1])
            text += self._stop_strings.add(piece, may_end=self._num_tokens >= self._min_tokens)
            self._num_tokens += 1
            if self._stop_strings.found:
                return text, index + 1
        return text, len(token_ids)

    def _rest(self) -> str:
        may_end = self._num_tokens > self._min_tokens
        return self._stop_strings.add(self._detokenizer.flush(), may_end=may_end) + self._stop_strings.flush()

    def _reported(self, *, over: bool) -> list[ShownToken]:
        tokens = self._shown_tokens.take(self._num_chars)
        if over:
            tokens += self._shown_tokens.take_last(self._num_chars, cut=self._stop_strings.found)
        return tokens

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
