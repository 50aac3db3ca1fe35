"""Tells the simulation of every state into which a transfer comes, at the moment when its session changes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from lab.simulation.machine.virtual_time import SimProcess, present_process
from pdserve_kvtransfer.fetch.session import FetchSession, FetchState
from pdserve_kvtransfer.push.session import PushSession, PushState

TransferState: TypeAlias = FetchState | PushState


class _WatchedState:
    """Takes the place of an attribute."""

    def __init__(self, entered: Callable[[SimProcess, TransferState], None]) -> None:
        self._entered = entered

    def __get__(self, session: Any, owner: type) -> TransferState:
        return session.__dict__["state"]  # type: ignore[no-any-return]

    def __set__(self, session: Any, state: TransferState) -> None:
        session.__dict__["state"] = state
        self._entered(present_process(), state)


@contextmanager
def watched_transfers(entered: Callable[[SimProcess, TransferState], None]) -> Iterator[None]:
    """Calls ``entered`` with each new state of a session, and the process that has the session."""
    sessions: tuple[type, ...] = (FetchSession, PushSession)
    for session in sessions:
        session.state = _WatchedState(entered)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for session in sessions:
            del session.state  # type: ignore[attr-defined]
