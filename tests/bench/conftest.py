"""Fixtures of the benchmarks' tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick of matrix products multiplies small matrices: a test does not look at how fast that is."""
    monkeypatch.setattr("pdserve.bench.engine.parts._SIDE", {"cpu": 64, "cuda": 64})
