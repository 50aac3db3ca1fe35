"""Makes the lanes of the engine's requests: what happened to each, and when. The API process gets them."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.engine.request import Request
from pdserve.tracing.lane_notes import LaneNotes
from pdserve.wire.engine import Recorded
from pdserve.wire.timeline import MomentKind, Phase, PhaseKind, ProcessKind, RequestLane


class LaneRecorder:
    """Notes the requests of one engine, and gives the lanes of those that have ended.

    Of a client request with many prompts only the first one is noted: the others go the same way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: list[RequestLane] = []

    def begin(self, request: Request) -> None:
        if request.serves_push or request.local_id == request.group_id:
            process = ProcessKind.PREFILL_ENGINE if request.serves_push else ProcessKind.ENGINE
            prompt = request.terms.prompt
            request.notes = LaneNotes(process, prompt.request_id, request.arrived, prompt.trace)

    def end(self, request: Request, outcome: str) -> None:
        """Makes the lane of a request that has ended, if it is noted."""
        notes, request.notes = request.notes, None
        if notes is not None:
            self._ended.append(_lane(request, notes, self._clock(), outcome))

    def take(self) -> Recorded | None:
        """Returns the lanes since the last call, or None if there is none."""
        if not self._ended:
            return None
        recorded, self._ended = Recorded(self._ended), []
        return recorded


def _lane(request: Request, notes: LaneNotes, now: float, outcome: str) -> RequestLane:
    first_token_at = request.facts.first_token_at
    admitted = request.facts.admitted
    notes.add(Phase(kind=PhaseKind.QUEUE, start_s=request.arrived, end_s=now if admitted is None else admitted))
    if notes.chunks_from_s is not None:
        notes.add(
            Phase(
                kind=PhaseKind.PREFILL,
                start_s=notes.chunks_from_s,
                end_s=now if first_token_at is None else max(notes.chunks_from_s, first_token_at),
                tokens=request.num_prompt_tokens - request.facts.cached_tokens,
            )
        )
    generated = request.num_generated_tokens - request.num_emitted_tokens
    if first_token_at is not None:
        notes.moment(MomentKind.FIRST_TOKEN, first_token_at)
        if generated > 1:
            start_s = max(first_token_at, notes.fetched_at_s)
            notes.add(Phase(kind=PhaseKind.DECODE, start_s=min(start_s, now), end_s=now, tokens=generated - 1))
    return notes.lane(
        now,
        outcome=notes.outcome or outcome,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.facts.cached_tokens,
        output_tokens=0 if request.serves_push else generated,
    )
