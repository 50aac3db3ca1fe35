"""One choice's token ids to the text that its client may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.api.detokenizer import Detokenizer
from pdserve.api.outcome import Outcome, outcome_of
from pdserve.api.stop_strings import StopStrings
from pdserve.wire.engine import FinishReason, RequestOutput


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice."""

    choice: int
    text: str
    token_ids: Sequence[int]
    outcome: Outcome | None
    """Set once, on the last one."""


class ChoiceText:
    """Detokenizer, stop strings and stop tokens of one choice."""

    def __init__(
        self, choice: int, detokenizer: Detokenizer, stop_strings: StopStrings, shown_stop_ids: frozenset[int]
    ) -> None:
        """``shown_stop_ids`` are the stop tokens whose text belongs to the answer."""
        self._choice = choice
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._shown_stop_ids = shown_stop_ids

    def add(self, output: RequestOutput) -> Delta:
        """``outcome`` is ``STOP`` also when a stop string was found, with the engine still at work on the choice."""
        ids = output.new_token_ids
        text = self._stop_strings.add(self._detokenizer.add(self._shown(ids, output.finish)))
        if output.finish is not None and not self._stop_strings.found:
            text += self._stop_strings.add(self._detokenizer.flush())
            text += self._stop_strings.flush()
        outcome = outcome_of(output.finish) if output.finish else None
        if self._stop_strings.found:
            outcome = Outcome.STOP
        return Delta(self._choice, text, ids, outcome)

    def _shown(self, token_ids: list[int], finish: FinishReason | None) -> list[int]:
        if finish is FinishReason.STOP and token_ids and token_ids[-1] not in self._shown_stop_ids:
            return token_ids[:-1]
        return token_ids
