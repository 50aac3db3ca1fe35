"""How a choice ends, as the API sees it."""

from __future__ import annotations

import enum

from pdserve.errors import DeadlineExceeded, Internal, RequestError, Unavailable
from pdserve.wire.engine import FinishReason, RequestOutput


class ChoiceOutcome(enum.Enum):
    """``STOP`` and ``LENGTH`` are answers; the others are not, and are never shown as one."""

    STOP = "stop"
    LENGTH = "length"
    DEADLINE = "deadline"
    ERROR = "error"
    ABORT = "abort"
    """The client went away, or another choice of its request failed."""


_OUTCOMES = {
    FinishReason.STOP: ChoiceOutcome.STOP,
    FinishReason.LENGTH: ChoiceOutcome.LENGTH,
    FinishReason.DEADLINE: ChoiceOutcome.DEADLINE,
    FinishReason.ERROR: ChoiceOutcome.ERROR,
}


def outcome_of(reason: FinishReason) -> ChoiceOutcome:
    return _OUTCOMES[reason]


def shutting_down() -> Unavailable:
    """For requests that a drain cuts short: another node can take them at once."""
    return Unavailable("this node is shutting down", code="shutting_down", retry_after_s=1)


def failure_of(output: RequestOutput) -> RequestError | None:
    """The client's error, where the engine's output is no answer."""
    if output.finish is FinishReason.DEADLINE:
        return DeadlineExceeded(
            "the request's deadline passed before its answer was complete", code="deadline_exceeded"
        )
    if output.finish is FinishReason.ERROR:
        return Internal(output.error or "the engine failed on this request", code="engine_error")
    return None
