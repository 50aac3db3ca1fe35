"""Makes OpenTelemetry spans of a lane. Only a process that exports spans imports this.

A lane is a span, each of its phases is a child of that, and its moments are events. Chunks are events of their prompt's
``prefill``. Names of attributes are OpenTelemetry's where it has some (HTTP, generative AI), and else begin with
``pdserve.``. No attribute has anything of a prompt or an answer.

The spans are made when all is over, with the times and ids that were noted: nothing of OpenTelemetry runs beside a
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from pdserve.wire.timeline import Moment, Phase, PhaseKind, ProcessKind, RequestLane, new_span_id

Value = str | int | float | tuple[str, ...]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
_CALLS = (PhaseKind.ATTEMPT, PhaseKind.FETCH, PhaseKind.REUSE)
"""The phases in which another process works for this one."""
_FAILURES = frozenset(
    {
        *("error", "failed", "upstream_lost", "upstream_failed", "timed_out", "shut_down"),
        *("deadline", "lost", "unreachable"),
        *("misfit", "peer_lost", "lease_expired", "overloaded", "corrupt", "stalled"),
    }
)
_NO_PARENT = bytes(8)


@dataclass(frozen=True, slots=True)
class SpanMaker:
    """Makes the spans of one process."""

    resource: Resource
    scope: InstrumentationScope

    def spans(self, lane: RequestLane, unix_ns: int) -> Iterator[ReadableSpan]:
        """Yields the spans of a lane, which has a trace. ``unix_ns`` is what the monotonic clock lags behind 1970."""
        assert lane.trace is not None and lane.end_s is not None
        trace_id, own_id = lane.trace.trace_id, lane.span_id
        own = _context(trace_id, own_id)

        def at(seconds: float) -> int:
            return unix_ns + int(seconds * 1e9)

        chunks = [phase for phase in lane.phases if phase.kind is PhaseKind.CHUNK]
        has_prefill = any(phase.kind is PhaseKind.PREFILL for phase in lane.phases)
        chunk_events = [Event("chunk", _given(_chunk_attributes(chunk)), at(chunk.end_s)) for chunk in chunks]
        events = [
            Event(moment.kind.value, _given(_moment_attributes(moment)), at(moment.at_s)) for moment in lane.moments
        ]
        yield ReadableSpan(
            name=_name(lane),
            context=own,
            parent=None if lane.trace.span_id == _NO_PARENT else _context(trace_id, lane.trace.span_id, remote=True),
            resource=self.resource,
            attributes=_given(_lane_attributes(lane)),
            events=events if has_prefill else events + chunk_events,
            kind=SpanKind.INTERNAL if lane.process is ProcessKind.ENGINE else SpanKind.SERVER,
            status=_status(lane.outcome if lane.status < 500 else "failed"),
            start_time=at(lane.start_s),
            end_time=at(lane.end_s),
            instrumentation_scope=self.scope,
        )
        attempt_before: SpanContext | None = None
        for phase in lane.phases:
            if phase.kind is PhaseKind.CHUNK:
                continue
            context = _context(trace_id, phase.span_id or new_span_id())
            links = []
            if phase.kind is PhaseKind.ATTEMPT:
                if attempt_before is not None:
                    links.append(Link(attempt_before, {"pdserve.link": "previous_attempt"}))
                attempt_before = context
            yield ReadableSpan(
                name=phase.kind.value,
                context=context,
                parent=own,
                resource=self.resource,
                attributes=_given(_phase_attributes(lane, phase)),
                events=chunk_events if phase.kind is PhaseKind.PREFILL else (),
                links=links,
                kind=SpanKind.CLIENT if phase.kind in _CALLS else SpanKind.INTERNAL,
                status=_status(phase.outcome),
                start_time=at(phase.start_s),
                end_time=at(max(phase.start_s, phase.end_s)),
                instrumentation_scope=self.scope,
            )


def _name(lane: RequestLane) -> str:
    match lane.process:
        case ProcessKind.PROXY:
            return f"POST {lane.route}"
        case ProcessKind.API:
            return f"{_OPERATIONS.get(lane.route, 'answer')} {lane.model}"
        case ProcessKind.ENGINE:
            return "engine"
        case ProcessKind.PREFILL_ENGINE:
            return "prefill engine"


def _lane_attributes(lane: RequestLane) -> dict[str, Value | None]:
    attributes: dict[str, Value | None] = {
        "pdserve.request_id": lane.request_id,
        "pdserve.process": lane.process.value,
        "pdserve.node": lane.node,
        "pdserve.outcome": lane.outcome,
        "pdserve.left_out": lane.left_out,
        "gen_ai.request.model": lane.model,
        "gen_ai.usage.input_tokens": lane.prompt_tokens,
        "gen_ai.usage.output_tokens": lane.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": lane.cached_tokens,
    }
    if lane.process is ProcessKind.PROXY:
        attributes |= {"http.route": lane.route, "http.response.status_code": lane.status}
    if lane.process is ProcessKind.API:
        attributes |= {
            "gen_ai.operation.name": _OPERATIONS.get(lane.route),
            "gen_ai.provider.name": "pdserve",
            "gen_ai.response.model": lane.model,
            "gen_ai.response.finish_reasons": tuple(lane.outcome.split("+")),
            "pdserve.attempt": lane.attempt,
        }
    if lane.gaps is not None:
        attributes["pdserve.gaps.count"] = sum(lane.gaps.counts)
        attributes["pdserve.gaps.longest_ms"] = max((gap.seconds for gap in lane.gaps.longest), default=0.0) * 1000
    return attributes


def _phase_attributes(lane: RequestLane, phase: Phase) -> dict[str, Value | None]:
    """A decode phase has as many steps as tokens: steps have no spans of their own."""
    return {
        "pdserve.request_id": lane.request_id,
        "pdserve.peer": phase.node,
        "pdserve.prefill": phase.prefill,
        "pdserve.outcome": phase.outcome,
        "pdserve.tokens": phase.tokens,
        "pdserve.blocks": phase.blocks,
        "pdserve.bytes": phase.moved_bytes,
        "pdserve.tail_ms": None if phase.tail_s is None else phase.tail_s * 1000,
    }


def _chunk_attributes(chunk: Phase) -> dict[str, Value | None]:
    return {
        "pdserve.tokens": chunk.tokens,
        "pdserve.chunks": chunk.chunks or 1,
        "pdserve.duration_ms": (chunk.end_s - chunk.start_s) * 1000,
    }


def _moment_attributes(moment: Moment) -> dict[str, Value | None]:
    return {
        "pdserve.peer": moment.node,
        "pdserve.blocks": moment.blocks,
        "pdserve.gap_ms": None if moment.gap_s is None else moment.gap_s * 1000,
    }


def _given(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Returns the attributes that say something."""
    return {name: value for name, value in attributes.items() if value not in (None, "", 0)}


def _status(outcome: str) -> Status:
    failures = _FAILURES.intersection(outcome.split("+"))
    return Status(StatusCode.ERROR, min(failures)) if failures else Status(StatusCode.UNSET)


def _context(trace_id: bytes, span_id: bytes, *, remote: bool = False) -> SpanContext:
    return SpanContext(
        int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big"), remote, TraceFlags(TraceFlags.SAMPLED)
    )
