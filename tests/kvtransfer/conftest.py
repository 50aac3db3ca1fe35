"""Runs tests with both ways in which blocks move between engines on one host."""

from __future__ import annotations

import pytest

from tests.kvtransfer.rig import Engine


@pytest.fixture(params=[True, False], ids=["mapped", "not mapped"])
def mapped_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test once with mapped blocks and once without. Returns which, for programs that the test starts."""
    monkeypatch.setattr(Engine, "shares", request.param)
    return bool(request.param)
