"""Fixtures of the relay's tests."""

from __future__ import annotations

import pytest

from pdserve.http.guard import GuardedHttp


@pytest.fixture(autouse=True)
def silent_clients_are_looked_for_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has left in the middle of a silent stream is cut off after this time, and not after a second."""
    monkeypatch.setattr(GuardedHttp, "half_closed_s", 0.2)
