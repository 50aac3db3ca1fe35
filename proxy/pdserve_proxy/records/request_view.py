"""Makes of the record of a relayed request what those who watch the cluster see."""

from __future__ import annotations

from pdserve.wire.status import RequestStage, SeenRequest
from pdserve_proxy.records.relay_record import RelayRecord
from pdserve_proxy.relay.outcomes import RelayOutcome
from pdserve_proxy.relay.relayed_request import RelayedRequest

LOWEST_FAILURE = 500
"""The lowest status of an answer that is a failure of the cluster's. What the client got wrong has a lower one."""
_FAILURES = frozenset(
    {
        RelayOutcome.UPSTREAM_LOST,
        RelayOutcome.UPSTREAM_FAILED,
        RelayOutcome.TIMED_OUT,
        RelayOutcome.SHUT_DOWN,
        RelayOutcome.FAILED,
    }
)

# These have names of their own because look-ups on the enums' classes would be most of what a request costs here.
_ENDED, _OK = RequestStage.ENDED, RelayOutcome.OK


def has_failed(status: int, outcome: str) -> bool:
    """Returns whether the cluster, and not the client, is why a request that ended so has no complete answer."""
    return status >= LOWEST_FAILURE or (outcome is not _OK and outcome in _FAILURES)


def stage_of(request: RelayRecord | RelayedRequest) -> RequestStage:
    if request.ended_s is not None:
        return _ENDED
    if request.resuming:
        return RequestStage.RESUMING
    if request.sent_s is None:
        return RequestStage.QUEUED
    return RequestStage.PROMPT if request.prompt_done_s is None else RequestStage.ANSWER


def request_view(record: RelayRecord) -> SeenRequest:
    route = record.route
    decode = prefill = ""
    if route is not None:
        decode = route.decode.name
        if route.prefill:
            prefill = route.prefill[0].name
    return SeenRequest(
        record.request_id,
        record.path,
        stage_of(record),
        record.started_s,
        decode,
        prefill,
        record.sent_s,
        record.prompt_done_s,
        record.tells_first_token,
        record.pauses,
        record.attempts,
        record.ended_s,
        record.outcome,
        record.status,
    )
