"""Marks one row of a test's parameters as nightly: it shows no more than the other rows do, or takes minutes."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: object) -> Any:
    """Returns a row that only ``make test-all`` tries."""
    return pytest.param(*values, marks=pytest.mark.nightly)
