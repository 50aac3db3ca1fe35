"""Says by a stream's last event whether its node ended it with an error. Nothing is parsed while a stream goes on."""

from __future__ import annotations

import msgspec

from pdserve_proxy.relay.relayed_request import RelayOutcome

LAST_BYTES = 2**16
"""So much of a last event is looked at. One of these says what a failed response had so far, which may be long."""
_ERROR_LINES = frozenset({b"event: error", b"event: response.failed"})
_CLIENTS_ERRORS = frozenset({"invalid_request_error", "invalid_prompt"})
"""The type of the client's own errors, and their code in a failed response."""


class _Error(msgspec.Struct):
    type: str | None = None
    code: str | None = None


class _FailedResponse(msgspec.Struct):
    error: _Error | None = None


class _ErrorEvent(msgspec.Struct):
    """What the error events of all routes have in common: each has one of these."""

    error: _Error | None = None
    response: _FailedResponse | None = None


_decoder = msgspec.json.Decoder(_ErrorEvent)


def last_event(events: bytes) -> bytes:
    """Returns the beginning of the last one of whole ``events``, without its end."""
    start = events.rfind(b"\n\n", 0, -2)
    start = 0 if start < 0 else start + 2
    return events[start : min(len(events) - 2, start + LAST_BYTES)]


def outcome_told(event: bytes) -> RelayOutcome | None:
    """Returns how a stream ended whose last event is this; None if it is no error event."""
    *fields, data = event.split(b"\n")
    if _ERROR_LINES.isdisjoint(fields):
        return None
    return RelayOutcome.REFUSED if _is_clients(data.removeprefix(b"data: ")) else RelayOutcome.UPSTREAM_FAILED


def _is_clients(data: bytes) -> bool:
    """Returns whether an error is the client's own. One that cannot be read counts as the node's."""
    try:
        told = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    error = told.error if told.response is None else told.response.error
    return error is not None and not _CLIENTS_ERRORS.isdisjoint((error.type, error.code))
