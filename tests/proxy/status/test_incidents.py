"""What is kept of incidents is bounded, and what is alike becomes one."""

from __future__ import annotations

from itertools import count

from pdserve.wire.status import IncidentKind
from pdserve_proxy.recent import ALIKE_S, MAX_INCIDENTS, MAX_TEXT_CHARS, Incidents, last_incidents


def test_alike_incidents_in_a_row_become_one() -> None:
    now = 0.0
    incidents = Incidents(lambda: now)
    for number in range(200):
        incidents.add(IncidentKind.MOVED, "its answer goes on at d1", node="d0", request=f"r{number}")
        incidents.add(IncidentKind.MOVED, "its answer goes on at d2", node="d0", request=f"s{number}")
    assert [(one.text[-2:], one.count, one.request) for one in incidents.newest()] == [
        ("d1", 200, "r199"),
        ("d2", 200, "s199"),
    ]
    now = ALIKE_S + 1
    incidents.add(IncidentKind.MOVED, "its answer goes on at d1", node="d0")
    assert [one.count for one in incidents.newest()] == [200, 200, 1]


def test_the_last_ones_are_kept_and_long_texts_are_cut() -> None:
    incidents = Incidents(lambda: 1.0)
    for number in range(MAX_INCIDENTS + 5):
        incidents.add(IncidentKind.REQUEST_FAILED, f"{number} " + "x" * 1000)
    kept = incidents.newest()
    assert len(kept) == MAX_INCIDENTS
    assert kept[0].text.startswith("5 ")
    assert {len(one.text) for one in kept} == {MAX_TEXT_CHARS}


def test_incidents_of_several_processes_come_in_order() -> None:
    clock = count(1.0)
    one, other = Incidents(lambda: next(clock)), Incidents(lambda: next(clock))
    for incidents, text in ((one, "a"), (other, "b"), (one, "c")):
        incidents.add(IncidentKind.NODE_LOST, text)
    assert [found.text for found in last_incidents([one.newest(), other.newest()])] == ["a", "b", "c"]
