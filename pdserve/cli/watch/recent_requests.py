"""Chooses among the requests that a proxy remembers: the slowest ones, or those that the cluster failed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.wire.status import IncidentKind, SeenRequest
from pdserve_proxy.relay.seen_request import has_failed
from pdserve_proxy.status.report import StatusReport

_HEAD = ("request", "came at", "TTFT", "total", "outcome", "answer at", "prompt at")


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One request that has ended, as far as the proxy's status has it."""

    id: str
    came: float
    """Seconds since 1970; for a failure that only the incidents have, when it failed."""
    ttft_s: float | None = None
    total_s: float | None = None
    outcome: str = ""
    decode: str = ""
    prefill: str = ""
    why: str = ""
    """Why it failed, as the incidents have it."""


def slowest(report: StatusReport, count: int) -> list[RecentRequest]:
    """Returns the requests that took longest, the slowest first, of those that the status lists."""
    found = [_recent(one, report) for one in report.ended]
    return sorted(found, key=lambda one: one.total_s or 0.0, reverse=True)[:count]


def failed(report: StatusReport, count: int) -> list[RecentRequest]:
    """Returns the requests that the cluster failed last, the newest first.

    An incident names the last request that it happened to, which may have left the status's list since.
    """
    incidents = [one for one in report.incidents if one.kind is IncidentKind.REQUEST_FAILED and one.request]
    why = {one.request: one.text for one in incidents}
    listed = [_recent(one, report, why.get(one.id, "")) for one in report.ended if has_failed(one.status, one.outcome)]
    known = {one.id for one in listed}
    others = [
        RecentRequest(one.request, _unix_s(one.at_s, report), decode=one.node, why=one.text)
        for one in incidents
        if one.request not in known
    ]
    return sorted([*listed, *others], key=lambda one: one.came, reverse=True)[:count]


def _recent(one: SeenRequest, report: StatusReport, why: str = "") -> RecentRequest:
    first_s = one.prompt_done_s if one.first_token else None
    outcome = f"{one.outcome} {one.status}" if one.status else one.outcome
    return RecentRequest(
        one.id,
        _unix_s(one.arrived_s, report),
        None if first_s is None else first_s - one.arrived_s,
        None if one.ended_s is None else one.ended_s - one.arrived_s,
        outcome,
        one.decode,
        one.prefill,
        why,
    )


def _unix_s(at_s: float, report: StatusReport) -> float:
    return report.unix_s - (report.now_s - at_s)


def table(requests: Sequence[RecentRequest]) -> Iterator[str]:
    """Yields the lines of a table, with a line below each request that says why it failed."""
    rows = [_HEAD, *map(_row, requests)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, one in zip(rows, (None, *requests), strict=True):
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        if one is not None and one.why:
            yield f"    {one.why}"


def _row(one: RecentRequest) -> tuple[str, ...]:
    came = time.strftime("%H:%M:%S", time.localtime(one.came))
    return (one.id, came, _time(one.ttft_s), _time(one.total_s), one.outcome, one.decode or "-", one.prefill or "-")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
