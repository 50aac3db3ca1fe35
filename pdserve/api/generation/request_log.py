"""Writes one log line for each client request when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.api.generation.outcome import ChoiceOutcome
from pdserve.tracing.lane_notes import GapNotes, LaneNotes
from pdserve.wire.engine import RequestReport
from pdserve.wire.timeline import MomentKind, RequestLane

log = logging.getLogger("pdserve.request")


@dataclass(frozen=True, slots=True)
class NodeNotes:
    """What an API process notes of one client request, and where its lane goes."""

    lane: LaneNotes
    model: str
    route: str
    keep: Callable[[RequestLane], None]
    gaps: GapNotes = field(default_factory=GapNotes)


@dataclass(slots=True)
class RequestRecord:
    """What is known of one client request. Its times are those of ``time.monotonic``."""

    request_id: str
    node: str
    """The name of this node, which decodes."""
    arrived: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    """The tokens that this node has generated."""
    first_token: float | None = None
    last_token: float | None = None
    outcomes: list[ChoiceOutcome] = field(default_factory=list)
    """The outcomes of the choices that are over."""
    reports: list[RequestReport] = field(default_factory=list)
    """The engine's reports. There is none for a choice that the API process ended (stop string, abort)."""
    resumed_tokens: int | None = None
    """The tokens of the answer that the client had from other nodes; None if this node began the answer."""
    notes: NodeNotes | None = None
    """What is noted of the request for its timeline; None if nothing is."""

    @property
    def answer_tokens(self) -> int:
        """The tokens of the whole answer so far, whichever node has generated them."""
        return self.output_tokens + (self.resumed_tokens or 0)

    @property
    def cached_tokens(self) -> int:
        return sum(report.cached_tokens for report in self.reports)

    @property
    def reused_tokens(self) -> int:
        return sum(report.reused_tokens for report in self.reports)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot_s(self) -> float | None:
        """The mean time of an output token after the first, over all choices."""
        if self.first_token is None or self.last_token is None or self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


def log_request(record: RequestRecord, now: float) -> None:
    """Writes the line. Unknown values are ``-``."""
    reports = record.reports
    prefill = "+".join(sorted({report.prefill_node or record.node for report in reports})) or "-"
    source = "+".join(sorted({report.prefill_source.value for report in reports})) or "-"
    reason = "+".join(sorted({report.placed.value for report in reports if report.placed is not None})) or "-"
    finish = _outcomes(record) or "-"
    log.info(
        "request_id=%s prefill=%s source=%s reason=%s decode=%s prompt=%d cached=%d output=%d "
        "queue_ms=%s prefill_ms=%s ttft_ms=%s tpot_ms=%s total_ms=%s "
        "prompt_tok_s=%s output_tok_s=%s total_tok_s=%s finish=%s%s",
        record.request_id,
        prefill,
        source,
        reason,
        record.node,
        record.prompt_tokens,
        record.cached_tokens,
        record.output_tokens,
        _ms(max((report.queue_s for report in reports), default=None)),
        _ms(max((report.prefill_s for report in reports), default=None)),
        _ms(record.ttft_s),
        _ms(record.tpot_s),
        _ms(now - record.arrived),
        _rate(record.prompt_tokens, record.ttft_s),
        _rate(1, record.tpot_s),
        _rate(record.prompt_tokens + record.output_tokens, now - record.arrived),
        finish,
        "" if record.resumed_tokens is None else f" resumed={record.resumed_tokens} reused={record.reused_tokens}",
    )


def keep_lane(record: RequestRecord, now: float) -> None:
    """Makes the request's lane, if it is noted, and keeps it."""
    notes = record.notes
    if notes is None:
        return
    if record.first_token is not None:
        notes.lane.moment(MomentKind.FIRST_TOKEN, record.first_token)
    notes.keep(
        notes.lane.lane(
            now,
            node=record.node,
            model=notes.model,
            route=notes.route,
            outcome=_outcomes(record),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=record.output_tokens,
            gaps=notes.gaps.summary(),
        )
    )


def _outcomes(record: RequestRecord) -> str:
    return "+".join(sorted({outcome.value for outcome in record.outcomes}))


def _rate(tokens: int, seconds: float | None) -> str:
    return f"{tokens / seconds:.1f}" if seconds else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
