"""What a proxy remembers of one relayed request: a single small object, of which a timeline is made on demand.

Every request leaves one behind, and there are many. So it holds the times that the request has noted anyway, the few
things that are unusual, and nothing that a client or a node has sent.
"""

from __future__ import annotations

import time

import msgspec

from pdserve.tracing.timeline import MAX_MOMENTS, MAX_PHASES
from pdserve.wire.status import RequestProgress
from pdserve.wire.timeline import (
    Moment,
    MomentKind,
    Phase,
    PhaseKind,
    ProcessKind,
    TimelinePart,
    TraceContext,
    new_span_id,
)
from pdserve_proxy.routing.router import Route


class Detours:
    """What is unusual about one request: attempts that are over before it is, and moments beside its first byte."""

    def __init__(self) -> None:
        self.attempts: list[Phase] = []
        self.moments: list[Moment] = []
        self.left_out = 0

    def add_attempt(self, attempt: Phase) -> None:
        if len(self.attempts) < MAX_PHASES:
            self.attempts.append(attempt)
        else:
            self.left_out += 1

    def add_moment(self, moment: Moment) -> None:
        if len(self.moments) < MAX_MOMENTS:
            self.moments.append(moment)
        else:
            self.left_out += 1


class RequestSpan(msgspec.Struct, frozen=True, gc=False):
    """The span of a request whose trace this process exports."""

    parent: TraceContext
    """What it hangs from."""
    span_id: bytes
    attempt_id: bytes
    """The span of the attempt that has begun last."""


# Nothing in it refers back to it, so the collector need not look for cycles.
class RelayRecord(RequestProgress, frozen=True, kw_only=True):
    """One request. Times are seconds on the monotonic clock."""

    read_s: float | None = None
    """When its body was there; None before that."""
    admitted_s: float | None = None
    attempt_began_s: float | None = None
    """When the attempt began that is under way, or was so at the end."""
    first_byte_at_s: float | None = None
    nodes: Route | None = None
    """The nodes of the last attempt that has begun."""
    resuming: bool = False
    detours: Detours | None = None
    span: RequestSpan | None = None

    def part(self) -> TimelinePart:
        """Returns what happened so far."""
        now_s = time.monotonic() if self.ended_s is None else self.ended_s
        detours, span = self.detours or Detours(), self.span
        phases = [*self._phases(now_s), *detours.attempts]
        moments = list(detours.moments)
        if self.first_byte_at_s is not None:
            moments.append(Moment(kind=MomentKind.FIRST_BYTE, at_s=self.first_byte_at_s))
        return TimelinePart(
            request_id=self.request_id,
            process=ProcessKind.PROXY,
            start_s=self.arrived_s,
            end_s=self.ended_s,
            model="" if self.nodes is None else self.nodes.decode.model,
            route=self.path,
            status=self.status,
            outcome=self.outcome,
            phases=tuple(sorted(phases, key=lambda phase: phase.start_s)),
            moments=tuple(sorted(moments, key=lambda moment: moment.at_s)),
            left_out=detours.left_out,
            trace=None if span is None else span.parent,
            span_id=b"" if span is None else span.span_id,
        )

    def _phases(self, now_s: float) -> list[Phase]:
        """Returns the phases but the attempts that are over. One that is under way ends now."""
        phases = [self._phase(PhaseKind.READ, self.arrived_s, now_s if self.read_s is None else self.read_s)]
        if self.read_s is not None:
            admitted_s = now_s if self.admitted_s is None else self.admitted_s
            phases.append(self._phase(PhaseKind.QUEUE, self.read_s, admitted_s))
        if self.attempt_began_s is not None and self.nodes is not None:
            span_id = b"" if self.span is None else self.span.attempt_id
            phases.append(attempt_phase(self.nodes, self.attempt_began_s, now_s, self.outcome, span_id))
        return phases

    def _phase(self, kind: PhaseKind, start_s: float, end_s: float) -> Phase:
        return Phase(kind=kind, start_s=start_s, end_s=end_s, span_id=b"" if self.span is None else new_span_id())


def attempt_phase(route: Route, start_s: float, end_s: float, outcome: str, span_id: bytes = b"") -> Phase:
    """Returns the phase of an attempt at the nodes of ``route``."""
    prefill = route.prefill[0].name if route.prefill else "-"
    return Phase(
        kind=PhaseKind.ATTEMPT,
        start_s=start_s,
        end_s=end_s,
        node=route.decode.name,
        prefill=prefill,
        outcome=outcome,
        span_id=span_id,
    )
