"""Records each request when it has ended: in the numbers that ``/metrics`` shows, and in one line of the access log.

The numbers are plain integers, and become Prometheus metrics when ``/metrics`` is read: each of Prometheus's own
counters takes a lock and four calls to add to, and every request adds to six.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from pdserve.errors import RequestError
from pdserve.metrics import BucketCounts, seconds_to
from pdserve.wire.status import IncidentKind
from pdserve_proxy.continuation.journal import JournalBudget
from pdserve_proxy.recent import Incidents, RecentCounts
from pdserve_proxy.records.node_counts import NodeCounts
from pdserve_proxy.records.relay_record import RelayRecord
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay.outcomes import MoveOutcome, MoveReason, RelayOutcome, ResumeOutcome, has_failed
from pdserve_proxy.relay.relayed_request import RelayedRequest
from pdserve_proxy.routing.attempts import Attempts

# The log keeps the name that operators have set levels for, whatever the module is called.
log = logging.getLogger("pdserve_proxy.requests")

GAP_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)
MAX_RECENT = 1024
"""The number of ended requests that are remembered, some 500 bytes each."""
UNEXPECTED_ANSWER = "upstream_invalid"
"""The code of the error for a node's answer that is none."""
OTHER_ROUTES = "other"
"""The label under which errors outside the relayed routes are counted."""
CLIENT_GONE = 499
"""The status of a request whose client has left."""
STATUSES = (200, CLIENT_GONE, *sorted({error.status for error in RequestError.__subclasses__()}))
"""The statuses of most requests."""


class GapKind(enum.Enum):
    """Why an answer went on at another node."""

    LOST = "lost"
    MOVED = "moved"


class RequestCounts(Collector):
    """The counts of the requests of one process, as a Prometheus collector.

    One thread counts and collects.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        """No request takes longer than ``timeout_s``."""
        self.nodes = NodeCounts(timeout_s)
        self._registry: RegistryView | None = None
        self._attempts = Attempts()
        self.under_way: dict[RelayedRequest, None] = {}
        """The requests that have not ended, in the order in which they came."""
        self.incidents = Incidents()
        self.recent: deque[RelayRecord] = deque(maxlen=MAX_RECENT)
        """The last requests that have ended, without those that were refused before they had a node."""
        self.ended_lately = RecentCounts()
        """How many of these requests have ended in each of the last steps of time."""
        self.retries = 0
        self.relayed_bytes = 0
        self.requests: Counter[tuple[str, int]] = Counter()
        """The number of requests that have ended, by route and status."""
        self.outcomes = {outcome.value: 0 for outcome in RelayOutcome}
        self.resumes = {outcome.value: 0 for outcome in ResumeOutcome}
        self.journals = JournalBudget(0, 0)
        """The budget of the relay's journals, which the relay puts here."""
        self._first_bytes = BucketCounts(seconds_to(timeout_s))
        self._moves = {reason: dict.fromkeys(MoveOutcome, 0) for reason in MoveReason}
        self._gaps = {kind: BucketCounts(GAP_BOUNDS_S) for kind in GapKind}

    def watch(self, registry: RegistryView, attempts: Attempts) -> None:
        """Shows the nodes of ``registry``, also those that have had no request."""
        self._registry, self._attempts = registry, attempts

    def expect(self, routes: Iterable[str]) -> None:
        """Shows these routes from the start with each status that their requests may end with."""
        for route in (*sorted(routes), OTHER_ROUTES):
            for status in STATUSES:
                self.requests.setdefault((route, status), 0)

    @property
    def ended_requests(self) -> int:
        return sum(self.requests.values())

    def began(self, relayed: RelayedRequest) -> None:
        self.under_way[relayed] = None

    def retried(self) -> None:
        self.retries += 1

    def resume_ended(self, outcome: ResumeOutcome, gap_s: float | None = None) -> None:
        """Counts an attempt to resume a stream; if it was resumed, with the time in which its client got nothing."""
        self.resumes[outcome] += 1
        if gap_s is not None:
            self._gaps[GapKind.LOST].observe(gap_s)

    def move_ended(self, reason: MoveReason, outcome: MoveOutcome, gap_s: float | None = None) -> None:
        """Counts an answer that was to move; if it left its node, with the time in which its client got nothing."""
        self._moves[reason][outcome] += 1
        if gap_s is not None:
            self._gaps[GapKind.MOVED].observe(gap_s)

    def ended(self, relayed: RelayedRequest, record: RelayRecord) -> None:
        """Counts ``relayed``, which has ended and leaves ``record``, and writes its line in the access log."""
        assert relayed.outcome is not None
        self.under_way.pop(relayed, None)
        self.requests[relayed.path, relayed.status] += 1
        self.relayed_bytes += relayed.relayed_bytes
        self.outcomes[relayed.outcome] += 1
        if (first_byte_at_s := relayed.first_byte_at_s) is not None:
            self._first_bytes.observe(first_byte_at_s - relayed.started_s)
        if relayed.answered_by is not None:
            self.nodes.answered(relayed.answered_by, relayed.node_first_byte_s)
        failed = has_failed(relayed.status, relayed.outcome)
        if relayed.route is not None or failed:
            self.recent.append(record)
            assert relayed.ended_s is not None
            self.ended_lately.add(relayed.ended_s)
        if failed:
            self._note_failure(relayed)
        if log.isEnabledFor(logging.INFO):  # the line's fields cost more than all the counting
            _write_line(relayed)

    def _note_failure(self, relayed: RelayedRequest) -> None:
        assert relayed.outcome is not None
        if relayed.error is not None and relayed.error.code == UNEXPECTED_ANSWER:
            text = "the node gave an unexpected answer"  # what the client is told quotes it
        elif relayed.error is not None:
            text = relayed.error.message
        elif relayed.outcome is RelayOutcome.FAILED:
            text = "a defect of the proxy; its log has the details"
        elif relayed.outcome is RelayOutcome.UPSTREAM_FAILED:
            text = "the node ended its answer with an error"
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
        yield _counter("pdserve_proxy_outcomes", "How generation requests ended.", self.outcomes)
        yield GaugeMetricFamily(
            "pdserve_proxy_requests_in_flight", "Generation requests that have not ended.", len(self.under_way)
        )
        yield CounterMetricFamily(
            "pdserve_proxy_upstream_retries", "Attempts that went to another decode node than the first.", self.retries
        )
        yield CounterMetricFamily(
            "pdserve_proxy_relayed_bytes", "Body bytes that were relayed to clients.", self.relayed_bytes
        )
        yield self._first_bytes.family(
            "pdserve_proxy_time_to_first_byte_seconds", "From a request's arrival to the first body byte from its node."
        )
        yield _counter("pdserve_proxy_resumes", "Answers whose node was lost, by what became of them.", self.resumes)
        for reason, name, what in (
            (MoveReason.DRAIN, "pdserve_proxy_moves", "Answers whose node drained"),
            (MoveReason.BLOCKS, "pdserve_proxy_block_moves", "Answers whose node ran out of blocks"),
        ):
            moves = {outcome.value: count for outcome, count in self._moves[reason].items()}
            yield _counter(name, f"{what}, by what became of them.", moves)
        gaps = HistogramMetricFamily(
            "pdserve_proxy_resume_gap_seconds",
            "From a node's loss, or from its last event before a move, to what the next node says of an answer.",
            labels=["kind"],
        )
        for kind, durations in self._gaps.items():
            durations.add_to(gaps, kind.value)
        yield gaps
        yield GaugeMetricFamily(
            "pdserve_proxy_journal_bytes",
            "Memory taken for what answers can be resumed from.",
            self.journals.taken_bytes,
        )
        dropped = {reason.value: count for reason, count in self.journals.dropped.items()}
        yield _counter(
            "pdserve_proxy_journals_dropped", "Answers that could not be resumed any more.", dropped, "reason"
        )
        yield from self.nodes.collect(self._under_way())

    def _under_way(self) -> Counter[str]:
        """Returns the requests of this process at each registered node, by the node's name."""
        under_way: Counter[str] = Counter()
        if self._registry is not None:
            for node in self._registry.snapshot().nodes:
                under_way[node.info.name] += self._attempts.under_way(node.info.boot_id)
        return under_way


def _counter(name: str, documentation: str, counts: Mapping[str, int], label: str = "outcome") -> Metric:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _write_line(relayed: RelayedRequest) -> None:
    assert relayed.outcome is not None
    assert relayed.ended_s is not None
    first_byte_s = relayed.first_byte_s
    log.info(
        "request_id=%s route=%s decode=%s prefill=%s status=%d first_byte_s=%s total_s=%.3f bytes=%d outcome=%s",
        relayed.request_id,
        relayed.path,
        relayed.decode_name,
        relayed.prefill_name,
        relayed.status,
        "-" if first_byte_s is None else f"{first_byte_s:.3f}",
        relayed.ended_s - relayed.started_s,
        relayed.relayed_bytes,
        relayed.outcome.value,
    )
