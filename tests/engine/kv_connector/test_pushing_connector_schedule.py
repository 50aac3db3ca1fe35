"""Tests when blocks of a prompt leave before the whole prompt is computed."""

from __future__ import annotations

import pytest

from pdserve.config import OVERLAP_FROM_TOKENS, KvOverlap
from pdserve.engine.kv_connector.prompt_pusher import PushSchedule


@pytest.mark.parametrize(
    ("overlap", "tokens", "early"),
    [
        (KvOverlap.ON, 1, True),
        (KvOverlap.OFF, 100_000, False),
        (KvOverlap.AUTO, OVERLAP_FROM_TOKENS - 1, False),
        (KvOverlap.AUTO, OVERLAP_FROM_TOKENS, True),
    ],
)
def test_the_switch_and_the_length_decide(overlap: KvOverlap, tokens: int, early: bool) -> None:
    assert PushSchedule(overlap).early(tokens) is early
