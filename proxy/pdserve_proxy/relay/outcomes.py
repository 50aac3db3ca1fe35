"""How relayed requests end, and what becomes of those whose node is lost or left."""

from __future__ import annotations

import enum

from pdserve.errors import DeadlineExceeded, RequestError, Unavailable


class RelayOutcome(enum.StrEnum):
    OK = "ok"
    CLIENT_GONE = "client_gone"
    UPSTREAM_LOST = "upstream_lost"
    UPSTREAM_FAILED = "upstream_failed"
    """Its node ended the stream with an error event, which tells of no fault of the client's."""
    REFUSED = "refused"
    """The proxy answered with an error, because of the request itself or because no node could take it.

    Or its node ended the stream with an error event that tells of a fault of the client's.
    """
    TIMED_OUT = "timed_out"
    SHUT_DOWN = "shut_down"
    FAILED = "failed"
    """A defect of the proxy ended the request."""


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
_OK = RelayOutcome.OK
"""A name of its own: a look-up on the enum's class would be most of what ``has_failed`` costs."""


def has_failed(status: int, outcome: str) -> bool:
    """Returns whether the cluster, and not the client, is why a request that ended so has no complete answer."""
    return status >= LOWEST_FAILURE or (outcome is not _OK and outcome in _FAILURES)


class ResumeOutcome(enum.StrEnum):
    """What became of a stream whose node was lost."""

    RESUMED = "resumed"
    NO_NODE = "no_node"
    """There was no turn or no node for it in time."""
    NOT_RESUMABLE = "not_resumable"
    """There was no complete journal of it."""
    FAILED = "failed"


class MoveReason(enum.StrEnum):
    """Why an answer is to go on at another node though its own has it."""

    DRAIN = "drain"
    """Its node drains."""
    BLOCKS = "blocks"
    """Its node runs out of blocks, and another one has some."""


class MoveOutcome(enum.StrEnum):
    """What became of an answer that was to go on at another node."""

    MOVED = "moved"
    ENDED = "ended"
    """It ended, or its client left, before another node went on with it."""
    STAYED = "stayed"
    """It stays at its node: it has no complete journal, or no other node takes it."""


class CutReason(enum.Enum):
    """Why the proxy cut a request short."""

    DEADLINE = "deadline"
    SHUTDOWN = "shutdown"

    @property
    def error(self) -> RequestError:
        if self is CutReason.DEADLINE:
            return DeadlineExceeded("the request took longer than it may", code="deadline_exceeded")
        return Unavailable("the proxy is shutting down", code="shutting_down", retry_after_s=1)

    @property
    def outcome(self) -> RelayOutcome:
        return RelayOutcome.TIMED_OUT if self is CutReason.DEADLINE else RelayOutcome.SHUT_DOWN
