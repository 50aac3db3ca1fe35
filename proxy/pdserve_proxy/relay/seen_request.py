"""Makes of a relayed request what those who watch the cluster see."""

from __future__ import annotations

from pdserve.wire.status import RequestStage, SeenRequest
from pdserve_proxy.relay.relayed_request import RelayedRequest, RelayOutcome, RelayPhase

LOWEST_FAILURE = 500
"""The lowest status of an answer that is a failure of the cluster's. What the client got wrong has a lower one."""
_FAILURES = frozenset({RelayOutcome.UPSTREAM_LOST, RelayOutcome.TIMED_OUT, RelayOutcome.SHUT_DOWN, RelayOutcome.FAILED})


def has_failed(status: int, outcome: str) -> bool:
    """Returns whether the cluster, and not the client, is why a request that ended so has no whole answer."""
    return status >= LOWEST_FAILURE or outcome in _FAILURES


def stage_of(relayed: RelayedRequest) -> RequestStage:
    if relayed.outcome is not None:
        return RequestStage.ENDED
    if relayed.phase is RelayPhase.RESUMING:
        return RequestStage.RESUMING
    if relayed.sent_s is None:
        return RequestStage.QUEUED
    return RequestStage.PROMPT if relayed.prompt_done_s is None else RequestStage.ANSWER


def seen(relayed: RelayedRequest) -> SeenRequest:
    route, outcome = relayed.route, relayed.outcome
    return SeenRequest(
        relayed.request_id,
        relayed.path,
        stage_of(relayed),
        relayed.started_s,
        "" if route is None else route.decode.name,
        route.prefill[0].name if route is not None and route.prefill else "",
        relayed.sent_s,
        relayed.prompt_done_s,
        relayed.tells_first_token,
        relayed.pauses,
        relayed.attempts,
        None if outcome is None else relayed.ended_s,
        "" if outcome is None else outcome.value,
        relayed.status,
    )
