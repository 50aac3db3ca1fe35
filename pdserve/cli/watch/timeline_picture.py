"""Draws the timeline of a request as lines of text: a row for each phase, on one axis of time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.wire.timeline import Gaps, Moment, MomentKind, Phase, PhaseKind, ProcessKind, RequestLane, Timeline

LABEL_CELLS = 26
TEXT_CELLS = 34
MIN_BAR_CELLS = 20

_PROCESSES = {
    ProcessKind.PROXY: "proxy",
    ProcessKind.API: "API process",
    ProcessKind.ENGINE: "engine",
    ProcessKind.PREFILL_ENGINE: "prefill engine",
}
_WENT_ON = (MomentKind.RESUMED, MomentKind.MOVED)


@dataclass(frozen=True, slots=True)
class Marks:
    """What the picture is drawn with."""

    bar: str = "█"
    half: str = "▓"
    gap: str = "░"
    moment: str = "▲"


UNICODE = Marks()
ASCII = Marks("#", "=", ".", "^")


def picture(timeline: Timeline, width: int, marks: Marks = UNICODE) -> Iterator[str]:
    """Yields the lines of the picture, which are ``width`` cells wide if that is enough for it."""
    cells = max(MIN_BAR_CELLS, width - LABEL_CELLS - TEXT_CELLS)
    axis = _Axis(max(timeline.duration_s, 1e-6), cells, marks)
    yield _headline(timeline)
    yield f"{'':{LABEL_CELLS}}{_scale(timeline.duration_s, cells)}"
    for lane in timeline.lanes:
        yield _lane_title(lane)
        yield from _rows(lane, axis)
    if timeline.silent:
        yield f"No answer from {', '.join(timeline.silent)}: what they did is missing."


@dataclass(frozen=True, slots=True)
class _Axis:
    duration_s: float
    cells: int
    marks: Marks

    def cell(self, at_s: float) -> int:
        return min(self.cells - 1, max(0, int(at_s / self.duration_s * self.cells)))

    def spans(self, parts: Iterable[tuple[float, float, str]]) -> str:
        """Returns a row with each part drawn in its mark; one that is too short for a cell has one, too."""
        row = [" "] * self.cells
        for start_s, end_s, mark in parts:
            first, last = self.cell(start_s), self.cell(end_s)
            # The cell in which the next part begins is that part's.
            for cell in range(first, max(first + 1, last)):
                row[cell] = mark
        return "".join(row)


def _headline(timeline: Timeline) -> str:
    first = timeline.lanes[0]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timeline.began))
    state = f"{first.outcome or '-'} {first.status or ''}".strip() if timeline.finished else "under way"
    tokens = max(timeline.lanes, key=lambda lane: lane.output_tokens)
    # An answer that went on elsewhere has more: each node counts its own tokens, and the first one may be gone.
    went_on = any(moment.kind in _WENT_ON for lane in timeline.lanes for moment in lane.moments)
    counts = f"{tokens.prompt_tokens} + {'at least ' if went_on else ''}{tokens.output_tokens} tokens"
    return f"{timeline.request_id}: {state} in {_time(timeline.duration_s)}, {counts}, {first.model or '-'}, {began}"


def _scale(duration_s: float, cells: int) -> str:
    middle, end = _time(duration_s / 2), _time(duration_s)
    half = cells // 2
    return f"{'0':{half}}{middle:{max(1, cells - half - len(end))}}{end}"


def _lane_title(lane: RequestLane) -> str:
    name = f"{lane.node} {_PROCESSES[lane.process]}".strip()
    notes = []
    if lane.clock_error_s:
        notes.append(f"±{_time(lane.clock_error_s)}")
    if lane.end_s is None:
        notes.append("under way")
    elif lane.outcome and lane.process is not ProcessKind.PROXY:
        notes.append(lane.outcome)
    if lane.cached_tokens:
        notes.append(f"{lane.cached_tokens} tokens cached")
    if lane.drafts:
        notes.append(f"{lane.accepted_drafts} of {lane.drafts} drafts accepted")
    if lane.left_out:
        notes.append(f"{lane.left_out} more not recorded")
    return f"{name} ({', '.join(notes)})" if notes else name


def _rows(lane: RequestLane, axis: _Axis) -> Iterator[str]:
    marks = axis.marks
    chunks = [phase for phase in lane.phases if phase.kind is PhaseKind.CHUNK]
    for phase in lane.phases:
        if phase.kind is PhaseKind.CHUNK:
            continue
        bar = axis.spans([(phase.start_s, phase.end_s, marks.bar)])
        yield _row(f"{phase.kind.value} {_peers(phase)}", bar, _phase_text(phase))
        if phase.kind is PhaseKind.PREFILL and chunks:
            yield _chunk_row(chunks, axis)
    if chunks and all(phase.kind is not PhaseKind.PREFILL for phase in lane.phases):
        yield _chunk_row(chunks, axis)
    by_kind: dict[str, list[Moment]] = defaultdict(list)
    for moment in lane.moments:
        by_kind[moment.kind.value].append(moment)
    for kind, moments in by_kind.items():
        bar = axis.spans([(moment.at_s, moment.at_s, marks.moment) for moment in moments])
        yield _row(kind.replace("_", " "), bar, _moments_text(moments))
    if lane.gaps is not None:
        gaps = [(gap.start_s, gap.start_s + gap.seconds, marks.gap) for gap in lane.gaps.longest]
        yield _row("longest gaps", axis.spans(gaps), _gaps_text(lane.gaps))


def _chunk_row(chunks: Sequence[Phase], axis: _Axis) -> str:
    both = (axis.marks.bar, axis.marks.half)
    bar = axis.spans((chunk.start_s, chunk.end_s, both[index % 2]) for index, chunk in enumerate(chunks))
    count = sum(max(1, chunk.chunks) for chunk in chunks)
    return _row("chunks", bar, f"{count}, {sum(chunk.tokens for chunk in chunks)} tokens")


def _row(label: str, bar: str, text: str) -> str:
    label = label.strip()
    return f"  {label[: LABEL_CELLS - 3]:{LABEL_CELLS - 2}}{bar} {text}".rstrip()


def _peers(phase: Phase) -> str:
    return phase.node if phase.prefill in ("", "-") else f"{phase.node}, {phase.prefill}"


def _phase_text(phase: Phase) -> str:
    seconds = phase.end_s - phase.start_s
    parts = [_time(seconds)]
    if phase.kind is PhaseKind.DECODE and phase.tokens:
        parts.append(f"{phase.tokens} tokens, {_time(seconds / phase.tokens)} each")
    elif phase.tokens:
        parts.append(f"{phase.tokens} tokens")
    if phase.blocks:
        parts.append(f"{phase.blocks} blocks")
    if phase.moved_bytes:
        parts.append(f"{phase.moved_bytes / 2**20:.1f} MiB")
    if phase.tail_s is not None:
        parts.append(f"tail {_time(phase.tail_s)}")
    if phase.outcome not in ("", "ok", "landed", "done"):
        parts.append(phase.outcome)
    return ", ".join(parts)


def _moments_text(moments: Sequence[Moment]) -> str:
    first = moments[0]
    parts = [_time(first.at_s)] if len(moments) == 1 else [f"{len(moments)} times from {_time(first.at_s)}"]
    if blocks := sum(moment.blocks for moment in moments):
        parts.append(f"{blocks} blocks")
    nodes = dict.fromkeys(moment.node for moment in moments if moment.node)
    if nodes:
        parts.append(", ".join(nodes))
    if gap_s := sum(moment.gap_s or 0.0 for moment in moments):
        parts.append(f"nothing for {_time(gap_s)}")
    return ", ".join(parts)


def _gaps_text(gaps: Gaps) -> str:
    longest = max(gap.seconds for gap in gaps.longest)
    return f"of {sum(gaps.counts)}, the longest {_time(longest)}"


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"
