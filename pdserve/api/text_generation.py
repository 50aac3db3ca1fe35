"""One client request while it runs: engine outputs in, text deltas out, with its timing, log line and metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdserve.api.choice_text import ChoiceText, Delta
from pdserve.api.generation import ChoiceOutput, Generation
from pdserve.api.metrics import NodeMetrics
from pdserve.api.outcome import Outcome, failure_of
from pdserve.api.request_log import RequestRecord, log_request
from pdserve.errors import RequestError
from pdserve.wire.engine import RequestReport


class TextGeneration:
    """Owned by the HTTP request: ``close`` must be called on every path, and may be called again."""

    def __init__(
        self, generation: Generation, choices: Sequence[ChoiceText], record: RequestRecord, metrics: NodeMetrics
    ) -> None:
        self._generation = generation
        self._choices = dict(enumerate(choices))
        self._last_token: dict[int, float] = {}
        self._record = record
        self._metrics = metrics
        self._closed = False
        self.failure: RequestError | None = None
        """Why there will be no answer, as soon as that is known."""

    @property
    def done(self) -> bool:
        """Every choice has an answer."""
        return not self._choices

    @property
    def record(self) -> RequestRecord:
        return self._record

    async def next(self) -> list[Delta]:
        """What the steps since the last call have added. Raises ``failure``, after all text before it was returned."""
        if self.failure is not None:
            raise self.failure
        items = await self._generation.wait()
        now = time.monotonic()
        deltas = [delta for item in items if (delta := self._take(item, now)) is not None]
        return deltas if self.failure is None else deltas + self._held()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._generation.close()
        for choice in list(self._choices):
            self._end_choice(choice, Outcome.ABORT, None)
        now = time.monotonic()
        first = self._record.first_token
        self._metrics.request_ended(now - self._record.arrived, None if first is None else now - first)
        log_request(self._record, now)

    def _take(self, item: ChoiceOutput, now: float) -> Delta | None:
        choice = self._choices.get(item.choice)
        if choice is None:
            return None
        delta = choice.add(item.output)
        if delta.token_ids:
            self._time_tokens(item.choice, len(delta.token_ids), now)
        if delta.outcome is not None:
            self._end(item, delta.outcome)
        return delta

    def _end(self, item: ChoiceOutput, outcome: Outcome) -> None:
        if item.output.finish is None:
            self._generation.end_choice(item.choice)
        self._end_choice(item.choice, outcome, item.output.report)
        if outcome not in (Outcome.STOP, Outcome.LENGTH) and self.failure is None:
            self.failure = self._generation.failure or failure_of(item.output)
            self._generation.close()

    def _held(self) -> list[Delta]:
        """What the choices that end with another one's failure have not shown yet."""
        return [delta for choice in self._choices.values() if (delta := choice.break_off()).text]

    def _time_tokens(self, choice: int, count: int, now: float) -> None:
        record = self._record
        last = self._last_token.get(choice)
        if last is not None:
            self._metrics.next_tokens(now - last, count)
        elif record.first_token is None:
            record.first_token = now
            self._metrics.first_token(now - record.arrived)
        self._last_token[choice] = record.last_token = now
        record.output_tokens += count

    def _end_choice(self, choice: int, outcome: Outcome, report: RequestReport | None) -> None:
        del self._choices[choice]
        self._record.outcomes.append(outcome)
        if report is not None:
            self._record.reports.append(report)
        self._metrics.choice_ended(outcome, report)
