"""Tests in virtual time that two nodes that divide a machine are never worse by their targets than one mixed node.

What takes turns on the real machine, with its noise, ``benchmarks goodput`` measures. Of each table, the loads that lie
between others are nightly.
"""

from __future__ import annotations

import pytest

from pdserve.plan.profile import read_profile
from pdserve.plan.sizing import PlanTargets
from tests.nightly import nightly
from tests.plan.serving import AVX2_PROFILE, PROFILE, Served, at_rate, read_shape, to_clients

MACHINE, SLOW_MACHINE = read_profile(PROFILE), read_profile(AVX2_PROFILE)
TTFT_S = 0.7


@pytest.mark.parametrize(
    ("rate", "itl_s"),
    [
        nightly(1.8, 0.017),
        nightly(1.8, 0.025),
        nightly(1.8, 0.043),
        nightly(2.8, 0.017),
        nightly(2.8, 0.025),
        (2.8, 0.043),
    ],
)
def test_at_a_rate_auto_serves_as_many_within_targets_as_the_better_of_the_others(rate: float, itl_s: float) -> None:
    targets = PlanTargets(TTFT_S, itl_s)
    mixed, always, auto = (at_rate(MACHINE, rate, system, targets) for system in ("mixed", "always", "auto"))
    assert auto.good_per_s >= 0.97 * max(mixed.good_per_s, always.good_per_s)


@pytest.mark.parametrize(
    ("clients", "itl_s", "least"), [(1, 0.017, 1.0), nightly(4, 0.017, 0.97), nightly(4, 0.043, 0.97), (8, 0.043, 0.97)]
)
def test_auto_serves_clients_about_as_well_as_the_better_of_the_others(
    clients: int, itl_s: float, least: float
) -> None:
    """Their requests differ: alike ones fall into step, and no prompt meets another one."""
    targets = PlanTargets(TTFT_S, itl_s)
    mixed, always, auto = (
        to_clients(MACHINE, clients, system, targets, spread=0.3) for system in ("mixed", "always", "auto")
    )
    assert auto.good_per_s >= least * max(mixed.good_per_s, always.good_per_s)


@pytest.mark.parametrize(
    ("shape", "ttft_s", "itl_s", "least"),
    [
        nightly("256/64", 0.9, 0.0155, 1.3),
        nightly("64/256", 0.29, 0.015, 0.97),
        ("1024/32", 5.6, 0.0222, 0.95),
        nightly("mix", 1.27, 0.0158, 1.0),
    ],
    ids=str,
)
def test_on_a_slower_machine_a_tight_target_is_kept_as_often_as_by_the_others(
    shape: str, ttft_s: float, itl_s: float, least: float
) -> None:
    """With prompts of 1,024 tokens the shortest chunk breaks the target, so most are left to the prefill node."""
    targets = PlanTargets(ttft_s, itl_s)
    mixed, always, auto = (
        to_clients(SLOW_MACHINE, 4, system, targets, spread=0.3, shape=read_shape(shape))
        for system in ("mixed", "always", "auto")
    )
    assert auto.good_per_s >= least * max(mixed.good_per_s, always.good_per_s)


@pytest.mark.parametrize("clients", [nightly(1), nightly(4), nightly(8), 16])
def test_where_nothing_is_told_clients_get_as_many_tokens_as_from_one_mixed_node(clients: int) -> None:
    mixed, auto = (_untold(clients, system, 0.017) for system in ("mixed", "auto"))
    assert auto.tokens_per_s >= 0.97 * mixed.tokens_per_s


@pytest.mark.parametrize(
    ("clients", "itl_s", "least"),
    [nightly(1, 0.017, 1.0), (4, 0.017, 1.0), nightly(4, 0.043, 0.8), nightly(8, 0.043, 0.75)],
)
def test_where_nothing_is_told_auto_keeps_streams_steady_at_the_cost_of_some_first_tokens(
    clients: int, itl_s: float, least: float
) -> None:
    """With a loose target, a mixed node that stops its streams for each prompt has more good answers."""
    mixed, always, auto = (_untold(clients, system, itl_s) for system in ("mixed", "always", "auto"))
    assert auto.good_per_s >= least * max(mixed.good_per_s, always.good_per_s)
    assert auto.itl_p99_s / auto.itl_s < 0.5 * mixed.itl_p99_s / mixed.itl_s or clients == 1


@pytest.mark.parametrize(
    ("rate", "itl_s"), [nightly(1.8, 0.017), nightly(1.8, 0.043), nightly(2.8, 0.017), (2.8, 0.043)]
)
def test_where_nothing_is_told_auto_serves_a_rate_about_as_well_as_the_better_of_the_others(
    rate: float, itl_s: float
) -> None:
    targets = PlanTargets(TTFT_S, itl_s)
    mixed, always, auto = (
        at_rate(MACHINE, rate, system, targets, told=False) for system in ("mixed", "always", "auto")
    )
    assert auto.good_per_s >= 0.93 * max(mixed.good_per_s, always.good_per_s)


def _untold(clients: int, system: str, itl_s: float) -> Served:
    return to_clients(MACHINE, clients, system, PlanTargets(TTFT_S, itl_s), told=False, spread=0.5)
