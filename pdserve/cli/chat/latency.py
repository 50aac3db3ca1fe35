"""The line after an answer: how long it took, its tokens, the nodes that computed it, and whether it moved."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.cli.chat.server import Answer
from pdserve.wire.timeline import MomentKind, Phase, PhaseKind, ProcessKind, RequestLane, Timeline

_LANDED = "landed"
_WENT_ON = {MomentKind.RESUMED: "resumed at {} after its node was lost", MomentKind.MOVED: "moved to {}"}


def latency_line(answer: Answer, timeline: Timeline | None) -> str:
    """Returns the line. What the server has not said is not in it."""
    return "; ".join(part for part in (_times(answer), _nodes(timeline), *_moves(timeline)) if part)


def _times(answer: Answer) -> str:
    parts = []
    if answer.first_s:
        parts.append(f"TTFT {_time(answer.first_s - answer.began_s)}")
    decode_s, tokens = answer.last_s - answer.first_s, answer.completion_tokens
    if tokens is not None and tokens > 1 and decode_s > 0:
        parts.append(f"{(tokens - 1) / decode_s:.1f} tok/s")
    elif answer.first_s:
        parts.append(f"{_time(answer.last_s - answer.began_s)} in all")
    if answer.prompt_tokens is not None and tokens is not None:
        parts.append(f"{answer.prompt_tokens} prompt + {tokens} answer tokens")
    if answer.finish == "length":
        parts.append("cut off at the most tokens that it may have")
    return ", ".join(parts)


def _nodes(timeline: Timeline | None) -> str:
    if timeline is None:
        return ""
    answered = list(dict.fromkeys(phase.node for phase in _attempts(timeline)))
    if not answered:
        return ""
    last, went_on = answered[-1], any(_moves(timeline))
    # A node that goes on with an answer has computed nothing of its prompt, or has done so again.
    first = answered[0] if went_on else last
    engines = [lane for lane in timeline.lanes if lane.process is ProcessKind.ENGINE and lane.node == first]
    prefill = [
        phase.node
        for lane in engines[:1]
        for phase in lane.phases
        if phase.kind is PhaseKind.FETCH and phase.outcome == _LANDED
    ]
    cached = max((lane.cached_tokens for lane in engines[:1]), default=0)
    notes = f" ({cached} tokens were cached)" if cached else ""
    where = f"prompt at {prefill[0]}{notes}, answer at {last}" if prefill else f"answer at {last}{notes}"
    tried = "" if went_on or len(answered) == 1 else f", after a try at {', '.join(answered[:-1])}"
    return where + tried


def _attempts(timeline: Timeline) -> list[Phase]:
    phases = [phase for lane in _proxies(timeline) for phase in lane.phases if phase.kind is PhaseKind.ATTEMPT]
    return sorted(phases, key=lambda phase: phase.start_s)


def _proxies(timeline: Timeline) -> list[RequestLane]:
    return [lane for lane in timeline.lanes if lane.process is ProcessKind.PROXY]


def _moves(timeline: Timeline | None) -> Iterator[str]:
    if timeline is None:
        return
    for lane in _proxies(timeline):
        for moment in lane.moments:
            if words := _WENT_ON.get(moment.kind):
                pause = f", with a pause of {_time(moment.gap_s)}" if moment.gap_s is not None else ""
                yield words.format(moment.node) + pause


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
