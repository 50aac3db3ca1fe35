"""Tests what a kubelet concludes from the answers of probes."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.deploy_containers.stand_in.health import Health, ProbeKind, restart_pause_s
from lab.deploy_containers.stand_in.made_manifests import container
from lab.deploy_containers.stand_in.manifests import Container


def health(**changes: Any) -> Health:
    return Health(msgspec.convert(container() | changes, Container))


def state(made: Health) -> tuple[bool, bool]:
    return made.started, made.ready


def test_the_other_probes_are_asked_once_the_startup_probe_has_succeeded() -> None:
    made = health()
    assert [kind for kind in ProbeKind if made.asks(kind)] == [ProbeKind.STARTUP]
    made.answered(ProbeKind.STARTUP, False)
    assert state(made) == (False, False)
    made.answered(ProbeKind.STARTUP, True)
    assert state(made) == (True, False)
    assert [kind for kind in ProbeKind if made.asks(kind)] == [ProbeKind.LIVENESS, ProbeKind.READINESS]


def test_a_container_that_never_starts_is_killed_after_so_many_failures_in_a_row() -> None:
    made = health()
    for _ in range(2):
        made.answered(ProbeKind.STARTUP, False)
    assert not made.must_restart
    made.answered(ProbeKind.STARTUP, False)
    assert made.must_restart


def test_a_success_between_failures_begins_the_count_anew() -> None:
    made = health()
    made.answered(ProbeKind.STARTUP, True)
    for good in (False, True, False):
        made.answered(ProbeKind.LIVENESS, good)
    assert not made.must_restart
    made.answered(ProbeKind.LIVENESS, False)
    assert made.must_restart


def test_readiness_comes_and_goes_and_kills_nothing() -> None:
    made = health()
    made.answered(ProbeKind.STARTUP, True)
    made.answered(ProbeKind.READINESS, True)
    assert state(made) == (True, True)
    made.answered(ProbeKind.READINESS, False)
    assert state(made) == (True, True)
    made.answered(ProbeKind.READINESS, False)
    assert state(made) == (True, False)
    assert not made.must_restart


def test_without_probes_a_container_is_ready_when_it_runs() -> None:
    assert health(startupProbe=None, readinessProbe=None).ready
    started = health(readinessProbe=None)
    assert state(started) == (False, False)
    started.answered(ProbeKind.STARTUP, True)
    assert state(started) == (True, True)


def test_the_pause_before_a_restart_grows_to_a_bound() -> None:
    pauses = [restart_pause_s(restarts) for restarts in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[2], pauses[-1]) == (0, 10, 20, 300)
