"""Says by a stream's last event whether its node ended it with an error. Nothing is parsed while a stream goes on."""

from __future__ import annotations

import msgspec

from pdserve_proxy.relay.complete_events import BEGINNING_BYTES
from pdserve_proxy.relay.relayed_request import RelayOutcome

_ERROR_LINES = frozenset({b"event: error", b"event: response.failed"})
_CLIENTS_ERRORS = frozenset({"invalid_request_error", "invalid_prompt"})
"""The type of the client's own errors, and their code in a failed response."""
_LATE_ERRORS = frozenset({"timeout_error", "deadline_exceeded"})
"""The type of the error of a request that is past its time, and its code, which is all that ``/v1/responses`` has."""


class _Error(msgspec.Struct):
    type: str | None = None
    code: str | None = None


class _FailedResponse(msgspec.Struct):
    error: _Error | None = None


class _ErrorEvent(msgspec.Struct):
    """What the error events of all routes have in common: each has one of these."""

    code: str | None = None
    error: _Error | None = None
    response: _FailedResponse | None = None


_decoder = msgspec.json.Decoder(_ErrorEvent)


def last_event(events: bytes) -> bytes:
    """Returns the beginning of the last one of whole ``events``, without its end."""
    start = events.rfind(b"\n\n", 0, -2)
    start = 0 if start < 0 else start + 2
    return events[start : min(len(events) - 2, start + BEGINNING_BYTES)]


def outcome_told(event: bytes) -> RelayOutcome | None:
    """Returns how a stream ended whose last event is this; None if it is no error event."""
    *fields, data = event.split(b"\n")
    if _ERROR_LINES.isdisjoint(fields):
        return None
    names = _names_of(data.removeprefix(b"data: "))
    if not _CLIENTS_ERRORS.isdisjoint(names):
        return RelayOutcome.REFUSED
    return RelayOutcome.UPSTREAM_FAILED if _LATE_ERRORS.isdisjoint(names) else RelayOutcome.TIMED_OUT


def _names_of(data: bytes) -> tuple[str | None, ...]:
    """Returns the type and codes of an error. One that cannot be read has none, and so counts as the node's."""
    try:
        told = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ()
    error = told.error if told.response is None else told.response.error
    return (told.code,) if error is None else (told.code, error.type, error.code)
