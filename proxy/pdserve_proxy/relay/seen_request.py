"""Makes of a relayed request what those who watch the cluster see."""

from __future__ import annotations

from pdserve.wire.status import RequestStage, SeenRequest
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayOutcome, RelayPhase

LOWEST_FAILURE = 500
"""The lowest status of an answer that is a failure of the cluster's. What the client got wrong has a lower one."""
_FAILURES = frozenset({RelayOutcome.UPSTREAM_LOST, RelayOutcome.TIMED_OUT, RelayOutcome.SHUT_DOWN, RelayOutcome.FAILED})

# These have names of their own because look-ups on the enums' classes would be most of what a request costs here.
_ENDED, _OK = RequestStage.ENDED, RelayOutcome.OK
_RESUMING = RelayPhase.RESUMING


def has_failed(status: int, outcome: str) -> bool:
    """Returns whether the cluster, and not the client, is why a request that ended so has no whole answer."""
    return status >= LOWEST_FAILURE or (outcome is not _OK and outcome in _FAILURES)


def stage_of(relayed: RelayedRequest) -> RequestStage:
    if relayed.outcome is not None:
        return _ENDED
    if relayed.phase is _RESUMING:
        return RequestStage.RESUMING
    if relayed.sent_s is None:
        return RequestStage.QUEUED
    return RequestStage.PROMPT if relayed.prompt_done_s is None else RequestStage.ANSWER


def seen(relayed: RelayedRequest) -> SeenRequest:
    route, outcome = relayed.route, relayed.outcome
    decode = prefill = ""
    if route is not None:
        decode = route.decode.name
        if route.prefill:
            prefill = route.prefill[0].name
    return SeenRequest(
        relayed.request_id,
        relayed.path,
        stage_of(relayed) if outcome is None else _ENDED,
        relayed.started_s,
        decode,
        prefill,
        relayed.sent_s,
        relayed.prompt_done_s,
        relayed.tells_first_token,
        relayed.pauses,
        relayed.attempts,
        None if outcome is None else relayed.ended_s,
        "" if outcome is None else outcome,
        relayed.status,
    )
