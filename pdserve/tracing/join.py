"""Puts the lanes of several machines together to one request's timeline, on the clock of the machine that asks.

No wall clock is compared. A node says what its monotonic clock showed as it answered. That moment lies between the
question and the answer, so the two clocks' difference is known to half of the time that both took on their way. Clocks
drift apart by some microseconds a second, which is much less for as long as lanes are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from pdserve.wire.timeline import Gaps, ProcessKind, RecalledLanes, RequestLane, Timeline

SLACK_S = 0.001
"""By so much clocks of one machine may seem to differ."""


def on_our_clock(recalled: RecalledLanes, asked_s: float, answered_s: float) -> list[RequestLane]:
    """Returns a node's lanes in the times of our clock, by which it was ``asked`` and has ``answered``."""
    way_s = max(0.0, answered_s - asked_s - recalled.taken_s)
    difference_s = answered_s - way_s / 2 - recalled.now_s
    return [msgspec.structs.replace(_moved(lane, difference_s), clock_error_s=way_s / 2) for lane in recalled.lanes]


def joined_timeline(
    request_id: str, lanes: Sequence[RequestLane], now_s: float, unix_s: float, silent: Iterable[str] = ()
) -> Timeline | None:
    """Returns the timeline of the newest request with this id; None if there is no lane of it.

    ``lanes`` are on one clock, which shows ``now_s`` as the time is ``unix_s``.
    """
    if not lanes:
        return None
    proxies = [lane for lane in lanes if lane.process is ProcessKind.PROXY]
    if proxies:
        proxy = max(proxies, key=lambda lane: lane.start_s)
        others = [lane for lane in lanes if lane.process is not ProcessKind.PROXY and _belongs(lane, proxy)]
        chosen = [proxy, *sorted(others, key=lambda lane: lane.start_s)]
    else:
        chosen = _newest_request(sorted(lanes, key=lambda lane: lane.start_s))
    begin_s = chosen[0].start_s
    ends = [now_s if lane.end_s is None else lane.end_s for lane in (chosen[:1] if proxies else chosen)]
    return Timeline(
        request_id=request_id,
        began=unix_s - (now_s - begin_s),
        duration_s=max(ends) - begin_s,
        finished=all(lane.end_s is not None for lane in chosen),
        lanes=tuple(_without_spans(_moved(lane, -begin_s)) for lane in chosen),
        silent=tuple(silent),
    )


def _newest_request(lanes: list[RequestLane]) -> list[RequestLane]:
    """Returns the lanes of the newest of the requests that ``lanes`` are of, by their beginnings. No proxy tells it.

    Of one request, each attempt has a higher number than the one before, and other lanes begin behind its first one.
    """
    first: RequestLane | None = None
    attempt = -1
    for lane in lanes:
        if lane.process is ProcessKind.API:
            if lane.attempt <= attempt or first is None:
                first = lane
            attempt = lane.attempt
    if first is None:
        return lanes
    from_s = first.start_s - first.clock_error_s - SLACK_S
    return [lane for lane in lanes if lane is first or lane.start_s >= from_s - lane.clock_error_s]


def _belongs(lane: RequestLane, proxy: RequestLane) -> bool:
    """Returns whether a node's lane is of the proxy's request, and not of another one with the same id."""
    error_s = lane.clock_error_s + SLACK_S
    if lane.start_s < proxy.start_s - error_s:
        return False
    return proxy.end_s is None or lane.start_s <= proxy.end_s + error_s


def _moved(lane: RequestLane, by_s: float) -> RequestLane:
    replace, gaps = msgspec.structs.replace, lane.gaps
    if gaps is not None:
        gaps = Gaps(gaps.counts, tuple(replace(gap, start_s=gap.start_s + by_s) for gap in gaps.longest))
    return replace(
        lane,
        start_s=lane.start_s + by_s,
        end_s=None if lane.end_s is None else lane.end_s + by_s,
        phases=tuple(replace(p, start_s=p.start_s + by_s, end_s=p.end_s + by_s) for p in lane.phases),
        moments=tuple(replace(moment, at_s=moment.at_s + by_s) for moment in lane.moments),
        gaps=gaps,
    )


def _without_spans(lane: RequestLane) -> RequestLane:
    """Returns the lane without what only the export of spans needs."""
    replace = msgspec.structs.replace
    return replace(lane, trace=None, span_id=b"", phases=tuple(replace(p, span_id=b"") for p in lane.phases))
