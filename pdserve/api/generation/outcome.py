"""How a choice ends, as the API process sees it."""

from __future__ import annotations

import enum
from typing import cast

from pdserve.api.answers.openai_response import Finish
from pdserve.errors import DeadlineExceeded, Internal, InvalidRequest, PrefillLost, RequestError, Unavailable
from pdserve.wire.engine import FinishReason, RequestOutput


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
