"""Records each request when it has ended: in the numbers that ``/metrics`` shows, and in one line of the access log.

The numbers are plain integers, and become Prometheus metrics when ``/metrics`` is read: each of Prometheus's own
counters takes a lock and four calls to add to, and every request adds to six.
"""

from __future__ import annotations

import enum
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pdserve.wire.status import IncidentKind, SeenRequest
from pdserve_proxy.incidents import Incidents
from pdserve_proxy.relay.journal import JournalBudget
from pdserve_proxy.relay.relayed_request import MoveOutcome, MoveReason, RelayedRequest, RelayOutcome, ResumeOutcome
from pdserve_proxy.relay.seen_request import has_failed, seen

# The log keeps the name that operators have set levels for, whatever the module is called.
log = logging.getLogger("pdserve_proxy.requests")

FIRST_BYTE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)
MAX_RECENT = 1024
"""The number of ended requests that are remembered, some 400 bytes each."""
OTHER_ROUTES = "other"
"""The label under which errors outside the relayed routes are counted."""


class GapKind(enum.Enum):
    """Why an answer went on at another node."""

    LOST = "lost"
    MOVED = "moved"


class RequestCounts(Collector):
    """The counts of the requests of one process, as a Prometheus collector.

    One thread counts and collects.
    """

    def __init__(self) -> None:
        self.under_way: dict[RelayedRequest, None] = {}
        """The requests that have not ended, in the order in which they came."""
        self.incidents = Incidents()
        self.recent: deque[SeenRequest] = deque(maxlen=MAX_RECENT)
        """The last requests that have ended, without those that were refused before they had a node."""
        self.retries = 0
        self.relayed_bytes = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        """The number of requests that have ended, by route and status."""
        self.outcomes = {outcome.value: 0 for outcome in RelayOutcome}
        self.resumes = {outcome.value: 0 for outcome in ResumeOutcome}
        self.journals = JournalBudget(0, 0)
        """The budget of the relay's journals, which the relay puts here."""
        self._first_bytes = _Durations(FIRST_BYTE_BOUNDS_S)
        self._moves = {reason: dict.fromkeys(MoveOutcome, 0) for reason in MoveReason}
        self._gaps = {kind: _Durations(GAP_BOUNDS_S) for kind in GapKind}

    def began(self, relayed: RelayedRequest) -> None:
        self.under_way[relayed] = None

    def retried(self) -> None:
        self.retries += 1

    def resume_ended(self, outcome: ResumeOutcome, gap_s: float | None = None) -> None:
        """Counts an attempt to resume a stream; if it was resumed, with the time in which its client got nothing."""
        self.resumes[outcome] += 1
        if gap_s is not None:
            self._gaps[GapKind.LOST].add(gap_s)

    def move_ended(self, reason: MoveReason, outcome: MoveOutcome, gap_s: float | None = None) -> None:
        """Counts an answer that was to move; if it left its node, with the time in which its client got nothing."""
        self._moves[reason][outcome] += 1
        if gap_s is not None:
            self._gaps[GapKind.MOVED].add(gap_s)

    def ended(self, relayed: RelayedRequest) -> None:
        """Counts ``relayed``, which has ended, and writes its line in the access log."""
        assert relayed.outcome is not None
        self.under_way.pop(relayed, None)
        self.requests[relayed.path, relayed.status] += 1
        self.relayed_bytes += relayed.relayed_bytes
        self.outcomes[relayed.outcome] += 1
        if relayed.first_byte_s is not None:
            self._first_bytes.add(relayed.first_byte_s)
        failed = has_failed(relayed.status, relayed.outcome)
        if relayed.route is not None or failed:
            self.recent.append(seen(relayed))
        if failed:
            self._note_failure(relayed)
        if log.isEnabledFor(logging.INFO):  # the line's fields cost more than all the counting
            _write_line(relayed)

    def _note_failure(self, relayed: RelayedRequest) -> None:
        assert relayed.outcome is not None
        if relayed.error is not None:
            text = relayed.error.message
        elif relayed.outcome is RelayOutcome.FAILED:
            text = "a defect of the proxy; its log has the details"
        else:
            text = f"the node answered with status {relayed.status}"
        node = "" if relayed.route is None else relayed.decode_name
        self.incidents.add(IncidentKind.REQUEST_FAILED, text, node=node, request=relayed.request_id)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "pdserve_proxy_requests", "Client requests that ended.", labels=["route", "status"]
        )
        for (route, status), count in self.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        outcomes = CounterMetricFamily("pdserve_proxy_outcomes", "How generation requests ended.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        yield GaugeMetricFamily(
            "pdserve_proxy_requests_in_flight", "Generation requests that have not ended.", len(self.under_way)
        )
        yield CounterMetricFamily(
            "pdserve_proxy_upstream_retries", "Attempts that went to another decode node than the first.", self.retries
        )
        yield CounterMetricFamily(
            "pdserve_proxy_relayed_bytes", "Body bytes that were relayed to clients.", self.relayed_bytes
        )
        yield self._first_bytes.histogram(
            "pdserve_proxy_time_to_first_byte_seconds", "From a request's arrival to the first body byte from its node."
        )
        resumes = CounterMetricFamily(
            "pdserve_proxy_resumes", "Answers whose node was lost, by what became of them.", labels=["outcome"]
        )
        for outcome, count in self.resumes.items():
            resumes.add_metric([outcome], count)
        yield resumes
        yield self._moves_for(MoveReason.DRAIN, "pdserve_proxy_moves", "Answers whose node drained")
        yield self._moves_for(MoveReason.ROOM, "pdserve_proxy_room_moves", "Answers whose node ran out of blocks")
        gaps = HistogramMetricFamily(
            "pdserve_proxy_resume_gap_seconds",
            "From a node's loss, or from its last event before a move, to what the next node says of an answer.",
            labels=["kind"],
        )
        for kind, durations in self._gaps.items():
            gaps.add_metric([kind.value], list(durations.buckets()), durations.sum_s)
        yield gaps
        yield GaugeMetricFamily(
            "pdserve_proxy_journal_bytes",
            "Memory taken for what answers can be resumed from.",
            self.journals.taken_bytes,
        )
        dropped = CounterMetricFamily(
            "pdserve_proxy_journals_dropped", "Answers that could not be resumed any more.", labels=["reason"]
        )
        for reason, count in self.journals.dropped.items():
            dropped.add_metric([reason.value], count)
        yield dropped

    def _moves_for(self, reason: MoveReason, name: str, what: str) -> Metric:
        family = CounterMetricFamily(name, f"{what}, by what became of them.", labels=["outcome"])
        for outcome, count in self._moves[reason].items():
            family.add_metric([outcome.value], count)
        return family


class _Durations:
    """The counts of a histogram of times."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.sum_s += seconds

    def histogram(self, name: str, documentation: str) -> HistogramMetricFamily:
        return HistogramMetricFamily(name, documentation, buckets=list(self.buckets()), sum_value=self.sum_s)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Returns Prometheus's cumulative buckets: each counts what the buckets below it count too."""
        within = 0
        for bound, count in zip((*self._bounds_s, float("inf")), self._counts, strict=True):
            within += count
            yield "+Inf" if bound == float("inf") else str(bound), within


def _write_line(relayed: RelayedRequest) -> None:
    assert relayed.outcome is not None
    log.info(
        "request_id=%s route=%s decode=%s prefill=%s status=%d first_byte_s=%s total_s=%.3f bytes=%d outcome=%s",
        relayed.request_id,
        relayed.path,
        relayed.decode_name,
        relayed.prefill_name,
        relayed.status,
        "-" if relayed.first_byte_s is None else f"{relayed.first_byte_s:.3f}",
        relayed.total_s,
        relayed.relayed_bytes,
        relayed.outcome.value,
    )
