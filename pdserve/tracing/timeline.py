"""Notes what one process does for a request, and joins what several machines noted to its timeline.

When the request has ended, a process makes its part of the timeline out of its notes. A note costs a call and a small
object. There is none for a token: the tokens' gaps are counted where the API process times them anyway.

Timelines are on the clock of the machine that asks, and no wall clock is compared. A node says what its monotonic clock
showed as it answered. That moment lies between the question and the answer, so the two clocks' difference is known to
half of the time that both took on their way. Clocks drift apart by some microseconds a second, which is much less for
as long as timelines are stored.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

import msgspec

from pdserve.wire.timeline import (
    Gap,
    Gaps,
    Moment,
    MomentKind,
    Phase,
    PhaseKind,
    ProcessKind,
    RecalledParts,
    Timeline,
    TimelinePart,
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


class TimelineNotes:
    """The notes about one request. ``part`` may be called while it is under way."""

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
        """``trace`` has the span that the part hangs from."""
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
        """What hangs from this part's own span."""
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

    def part(
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
    ) -> TimelinePart:
        """Returns the part so far. Open phases end now; of a request that has not ``ended`` they stay open."""
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
        return TimelinePart(
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


SLACK_S = 0.001
"""By so much clocks of one machine may seem to differ."""


def on_our_clock(recalled: RecalledParts, asked_s: float, answered_s: float) -> list[TimelinePart]:
    """Returns a node's parts in the times of our clock, by which it was ``asked`` and has ``answered``."""
    way_s = max(0.0, answered_s - asked_s - recalled.taken_s)
    difference_s = answered_s - way_s / 2 - recalled.now_s
    return [msgspec.structs.replace(_moved(part, difference_s), clock_error_s=way_s / 2) for part in recalled.parts]


def joined_timeline(
    request_id: str, parts: Sequence[TimelinePart], now_s: float, unix_s: float, silent: Iterable[str] = ()
) -> Timeline | None:
    """Returns the timeline of the newest request with this id; None if there is no part of it.

    ``parts`` are on one clock, which shows ``now_s`` as the time is ``unix_s``.
    """
    if not parts:
        return None
    proxies = [part for part in parts if part.process is ProcessKind.PROXY]
    if proxies:
        proxy = max(proxies, key=lambda part: part.start_s)
        others = [part for part in parts if part.process is not ProcessKind.PROXY and _belongs(part, proxy)]
        chosen = [proxy, *sorted(others, key=lambda part: part.start_s)]
    else:
        chosen = _newest_request(sorted(parts, key=lambda part: part.start_s))
    begin_s = chosen[0].start_s
    ends = [now_s if part.end_s is None else part.end_s for part in (chosen[:1] if proxies else chosen)]
    return Timeline(
        request_id=request_id,
        began=unix_s - (now_s - begin_s),
        duration_s=max(ends) - begin_s,
        finished=all(part.end_s is not None for part in chosen),
        parts=tuple(_without_spans(_moved(part, -begin_s)) for part in chosen),
        silent=tuple(silent),
    )


def _newest_request(parts: list[TimelinePart]) -> list[TimelinePart]:
    """Returns the parts of the newest of the requests that ``parts`` are of, by their beginnings. No proxy tells it.

    Of one request, each attempt has a higher number than the one before, and other parts begin behind its first one.
    """
    first: TimelinePart | None = None
    attempt = -1
    for part in parts:
        if part.process is ProcessKind.API:
            if part.attempt <= attempt or first is None:
                first = part
            attempt = part.attempt
    if first is None:
        return parts
    from_s = first.start_s - first.clock_error_s - SLACK_S
    return [part for part in parts if part is first or part.start_s >= from_s - part.clock_error_s]


def _belongs(part: TimelinePart, proxy: TimelinePart) -> bool:
    """Returns whether a node's part is of the proxy's request, and not of another one with the same id."""
    error_s = part.clock_error_s + SLACK_S
    if part.start_s < proxy.start_s - error_s:
        return False
    return proxy.end_s is None or part.start_s <= proxy.end_s + error_s


def _moved(part: TimelinePart, by_s: float) -> TimelinePart:
    replace, gaps = msgspec.structs.replace, part.gaps
    if gaps is not None:
        gaps = Gaps(gaps.counts, tuple(replace(gap, start_s=gap.start_s + by_s) for gap in gaps.longest))
    return replace(
        part,
        start_s=part.start_s + by_s,
        end_s=None if part.end_s is None else part.end_s + by_s,
        phases=tuple(replace(p, start_s=p.start_s + by_s, end_s=p.end_s + by_s) for p in part.phases),
        moments=tuple(replace(moment, at_s=moment.at_s + by_s) for moment in part.moments),
        gaps=gaps,
    )


def _without_spans(part: TimelinePart) -> TimelinePart:
    """Returns the part without what only the export of spans needs."""
    replace = msgspec.structs.replace
    return replace(part, trace=None, span_id=b"", phases=tuple(replace(p, span_id=b"") for p in part.phases))
