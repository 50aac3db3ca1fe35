"""Writes one log line for each client request when it is over."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from pdserve.api.answers.openai_response import Finish
from pdserve.errors import DeadlineExceeded, Internal, InvalidRequest, PrefillLost, RequestError, Unavailable
from pdserve.tracing.timeline import GapNotes, TimelineNotes
from pdserve.wire.engine import FinishReason, RequestOutput, RequestReport
from pdserve.wire.timeline import MomentKind, TimelinePart

log = logging.getLogger("pdserve.request")


class ChoiceOutcome(enum.Enum):
    """``STOP``, ``LENGTH`` and ``TOOL_CALLS`` are answers; the others are not, and are never shown as one."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    """A stop of an answer that calls functions."""
    DEADLINE = "deadline"
    ERROR = "error"
    ABORT = "abort"
    """The client went away, or another choice of its request failed."""

    @property
    def is_answer(self) -> bool:
        return self in _ANSWERS

    @property
    def finish(self) -> Finish:
        """The ``finish_reason`` that the client reads. Only an answer has one."""
        return cast("Finish", self.value)


_ANSWERS = (ChoiceOutcome.STOP, ChoiceOutcome.LENGTH, ChoiceOutcome.TOOL_CALLS)
_OUTCOMES = {
    FinishReason.STOP: ChoiceOutcome.STOP,
    FinishReason.LENGTH: ChoiceOutcome.LENGTH,
    FinishReason.DEADLINE: ChoiceOutcome.DEADLINE,
    FinishReason.REFUSED: ChoiceOutcome.ERROR,
    FinishReason.PREFILL_LOST: ChoiceOutcome.ERROR,
    FinishReason.ERROR: ChoiceOutcome.ERROR,
}


def outcome_of(reason: FinishReason) -> ChoiceOutcome:
    """Returns the outcome of a choice that the engine ended for ``reason``."""
    return _OUTCOMES[reason]


def shutting_down() -> Unavailable:
    """Returns the error for requests that a drain cuts short. Another node can take them at once."""
    return Unavailable("this node is shutting down", code="shutting_down", retry_after_s=1)


def failure_of(output: RequestOutput) -> RequestError | None:
    """Returns the client's error if the engine's output is no answer."""
    if output.finish is FinishReason.DEADLINE:
        return DeadlineExceeded(
            "the request's deadline passed before its answer was complete", code="deadline_exceeded"
        )
    if output.finish is FinishReason.REFUSED:
        return InvalidRequest(output.error or "the request's parameters leave no token", code="no_token_left")
    if output.finish is FinishReason.PREFILL_LOST:
        return PrefillLost(f"prefill node {output.error} was lost with this request", param=output.error)
    if output.finish is FinishReason.ERROR:
        return Internal(output.error or "the engine failed on this request", code="engine_error")
    return None


@dataclass(frozen=True, slots=True)
class NodeNotes:
    """What an API process notes of one client request, and where its part of the timeline goes."""

    part: TimelineNotes
    model: str
    route: str
    keep: Callable[[TimelinePart], None]
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
        """The tokens of the complete answer so far, whichever node has generated them."""
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


def keep_part(record: RequestRecord, now: float) -> None:
    """Makes the request's part of its timeline, if it is noted, and stores it."""
    notes = record.notes
    if notes is None:
        return
    if record.first_token is not None:
        notes.part.moment(MomentKind.FIRST_TOKEN, record.first_token)
    notes.keep(
        notes.part.part(
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
