"""Notes what one process does for one request, until the request has ended and its lane is made of that.

A note costs a call and a small object. There is none for a token: the tokens' gaps are counted where the API process
times them anyway.
"""

from __future__ import annotations

from bisect import insort

import msgspec

from pdserve.wire.timeline import (
    Gap,
    Gaps,
    Moment,
    MomentKind,
    Phase,
    PhaseKind,
    ProcessKind,
    RequestLane,
    TraceContext,
    new_span_id,
)

MAX_PHASES = 96
MAX_MOMENTS = 64
LONGEST_GAPS = 5
GAP_BUCKETS = 18
"""The last bucket has the gaps above 65 s."""


class _OpenPhase(msgspec.Struct, gc=False):
    start_s: float
    node: str
    prefill: str
    tokens: int
    span_id: bytes


class LaneNotes:
    """The notes about one request. ``lane`` may be called while it is under way."""

    __slots__ = (
        "_last_chunk",
        "_left_out",
        "_moments",
        "_open",
        "_phases",
        "attempt",
        "chunks_from_s",
        "fetched_at_s",
        "outcome",
        "process",
        "request_id",
        "span_id",
        "start_s",
        "trace",
    )

    def __init__(
        self,
        process: ProcessKind,
        request_id: str,
        start_s: float,
        trace: TraceContext | None = None,
        *,
        attempt: int = 0,
    ) -> None:
        """``trace`` has the span that the lane hangs from."""
        self.process = process
        self.request_id = request_id
        self.start_s = start_s
        self.trace = trace if trace is not None and trace.sampled else None
        self.span_id = b"" if self.trace is None else new_span_id()
        self.attempt = attempt
        self.outcome = ""
        """How the request ends, if somebody knows it better than the one who ends it."""
        self.chunks_from_s: float | None = None
        """When the first chunk of the prompt began here."""
        self.fetched_at_s = 0.0
        """When the last fetch ended."""
        self._open: dict[PhaseKind, _OpenPhase] = {}
        self._phases: list[Phase] = []
        self._last_chunk = -1
        self._moments: list[Moment] = []
        self._left_out = 0

    @property
    def context(self) -> TraceContext | None:
        """What hangs from this lane's own span."""
        return None if self.trace is None else self.trace.child(self.span_id)

    def begin(self, kind: PhaseKind, now: float, *, node: str = "", prefill: str = "", tokens: int = 0) -> None:
        """Begins a phase. One of the same kind that is open ends."""
        if kind in self._open:
            self.end(kind, now)
        self._open[kind] = _OpenPhase(now, node, prefill, tokens, b"" if self.trace is None else new_span_id())

    def context_of(self, kind: PhaseKind) -> TraceContext | None:
        """What hangs from the span of an open phase; None if nobody exports it."""
        phase = self._open.get(kind)
        return None if phase is None or self.trace is None else self.trace.child(phase.span_id)

    def is_open(self, kind: PhaseKind) -> bool:
        return kind in self._open

    def end(
        self,
        kind: PhaseKind,
        now: float,
        outcome: str = "",
        *,
        tokens: int = 0,
        blocks: int = 0,
        moved_bytes: int = 0,
        tail_s: float | None = None,
    ) -> None:
        """Ends a phase, if it is open."""
        phase = self._open.pop(kind, None)
        if phase is None:
            return
        if kind is PhaseKind.FETCH:
            self.fetched_at_s = now
        self.add(
            Phase(
                kind=kind,
                start_s=phase.start_s,
                end_s=now,
                node=phase.node,
                prefill=phase.prefill,
                outcome=outcome,
                tokens=tokens or phase.tokens,
                blocks=blocks,
                moved_bytes=moved_bytes,
                tail_s=tail_s,
                span_id=phase.span_id,
            )
        )

    def add(self, phase: Phase) -> None:
        """Notes a phase that is over."""
        if len(self._phases) < MAX_PHASES:
            self._phases.append(phase)
        else:
            self._left_out += 1

    def chunk(self, start_s: float, end_s: float, tokens: int) -> None:
        """Notes a step that computed so many tokens of the prompt."""
        if self.chunks_from_s is None:
            self.chunks_from_s = start_s
        if len(self._phases) < MAX_PHASES - 16 or self._last_chunk < 0:
            self._last_chunk = len(self._phases)
            self.add(Phase(kind=PhaseKind.CHUNK, start_s=start_s, end_s=end_s, tokens=tokens))
            return
        if self._last_chunk < len(self._phases):
            last = self._phases[self._last_chunk]
            self._phases[self._last_chunk] = msgspec.structs.replace(
                last, end_s=end_s, tokens=last.tokens + tokens, chunks=max(1, last.chunks) + 1
            )

    def moment(
        self, kind: MomentKind, now: float, *, node: str = "", blocks: int = 0, gap_s: float | None = None
    ) -> None:
        if len(self._moments) < MAX_MOMENTS:
            self._moments.append(Moment(kind=kind, at_s=now, node=node, blocks=blocks, gap_s=gap_s))
        else:
            self._left_out += 1

    def lane(
        self,
        now: float,
        *,
        ended: bool = True,
        node: str = "",
        model: str = "",
        route: str = "",
        status: int = 0,
        outcome: str = "",
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        output_tokens: int = 0,
        drafts: int = 0,
        accepted_drafts: int = 0,
        gaps: Gaps | None = None,
    ) -> RequestLane:
        """Returns the lane so far. Open phases end now; of a request that has not ``ended`` they stay open."""
        open_phases = self._open
        if ended:
            for kind in tuple(open_phases):
                self.end(kind, now)
            phases = self._phases
        else:
            phases = [
                *self._phases,
                *(
                    Phase(kind=kind, start_s=phase.start_s, end_s=now, node=phase.node, prefill=phase.prefill)
                    for kind, phase in open_phases.items()
                ),
            ]
        return RequestLane(
            request_id=self.request_id,
            process=self.process,
            start_s=self.start_s,
            end_s=now if ended else None,
            node=node,
            model=model,
            route=route,
            status=status,
            outcome=outcome,
            attempt=self.attempt,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            drafts=drafts,
            accepted_drafts=accepted_drafts,
            gaps=gaps,
            phases=tuple(sorted(phases, key=lambda phase: phase.start_s)),
            moments=tuple(self._moments),
            left_out=self._left_out,
            trace=self.trace,
            span_id=self.span_id,
        )


class GapNotes:
    """Counts the pauses between the tokens of one client request, and keeps the longest ones."""

    __slots__ = ("_counts", "_floor_s", "_longest")

    def __init__(self) -> None:
        self._counts = [0] * GAP_BUCKETS
        self._longest: list[tuple[float, float]] = []
        self._floor_s = -1.0
        """Shorter gaps are not among the longest."""

    def note(self, gap_s: float, now: float) -> None:
        """Counts a gap that has just ended."""
        bucket = int(gap_s * 1000).bit_length()
        self._counts[bucket if bucket < GAP_BUCKETS else -1] += 1
        if gap_s > self._floor_s:
            insort(self._longest, (gap_s, now - gap_s))
            if len(self._longest) > LONGEST_GAPS:
                del self._longest[0]
                self._floor_s = self._longest[0][0]

    def summary(self) -> Gaps | None:
        """Returns the gaps; None if there was none."""
        used = max((index + 1 for index, count in enumerate(self._counts) if count), default=0)
        if not used:
            return None
        longest = sorted((start_s, seconds) for seconds, start_s in self._longest)
        return Gaps(tuple(self._counts[:used]), tuple(Gap(start_s, seconds) for start_s, seconds in longest))
