"""Tests the tables of cases themselves."""

from __future__ import annotations

from collections import Counter

from tests.attacks.bodies import body_cases
from tests.attacks.frames import BYTES, UCX_BYTES, frame_cases
from tests.attacks.heads import head_cases

ENOUGH = 300


def test_there_are_enough_cases() -> None:
    http = [*body_cases(), *head_cases()]
    frames = list(frame_cases())
    assert len(http) >= ENOUGH
    assert len(http) + len(frames) + 3 * len(BYTES) + len(UCX_BYTES) >= 3 * ENOUGH


def test_no_case_hides_another() -> None:
    http = [case.name for case in (*body_cases(), *head_cases())]
    names = Counter([*http, *(case.name for case in frame_cases())])
    assert not [name for name, count in names.items() if count > 1]
