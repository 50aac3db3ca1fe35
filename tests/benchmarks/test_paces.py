"""Tests profiles of a machine at several paces, and their mean."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.plan.paces import mean_profile, pace_of, probe_of, slower, slower_speed
from pdserve.errors import PlanError
from pdserve.plan.profile import NodeSpeed, Profile, TransferCost
from tests.plan.profiles import PARTS, profile_of


def test_a_machine_of_half_the_speed_takes_twice_as_long_for_everything() -> None:
    profile, slow = profile_of(slower_beside=1.5), slower(profile_of(slower_beside=1.5), 2.0)
    for speed, found in zip(profile.speeds, slow.speeds, strict=True):
        assert found.steps == speed.steps.times(2.0) and found.beside == speed.beside.times(2.0)
        assert found.spread == speed.spread
        assert pace_of(probe_of(slow, speed.nodes), probe_of(profile, speed.nodes)) == pytest.approx(2.0)
    assert profile.transfer is not None and slow.transfer is not None
    assert slow.transfer.seconds(10_000_000) == pytest.approx(2 * profile.transfer.seconds(10_000_000))
    assert slow.front.seconds(100) == pytest.approx(2 * profile.front.seconds(100))
    assert (slow.cache, slow.model) == (profile.cache, profile.model)


def test_profiles_of_two_paces_have_a_mean_of_the_pace_between_them() -> None:
    """What differs besides the pace is averaged: one has transfers of 2 ms, the other none."""
    one, slow = profile_of(slower_beside=1.5), slower(profile_of(slower_beside=1.5), 3.0)
    slow = msgspec.structs.replace(slow, transfer=TransferCost(fixed_s=0.0, byte_s=3e-9))
    mean = mean_profile([one, slow])
    for speed, found in zip(one.speeds, mean.speeds, strict=True):
        assert found.steps.step_s(4, 1000, 100) == pytest.approx(speed.steps.times(2.0).step_s(4, 1000, 100))
        assert found.beside.step_s(4, 1000, 100) == pytest.approx(speed.beside.times(2.0).step_s(4, 1000, 100))
        assert pace_of(probe_of(mean, speed.nodes), probe_of(one, speed.nodes)) == pytest.approx(2.0)
    assert mean.transfer is not None
    assert mean.transfer.fixed_s == pytest.approx(0.002) and mean.transfer.byte_s == pytest.approx(2e-9)
    assert mean.front.request_s == pytest.approx(0.006)
    assert mean_profile([one]).speeds[1].steps.step_s(1, 1, 1) == pytest.approx(one.speeds[1].steps.step_s(1, 1, 1))


def test_each_speed_of_a_mean_has_a_pace_of_its_own() -> None:
    """A node alone has become three times as slow, each of two nodes has not: the one's pace is not the other's."""
    one = profile_of()
    alone, dividing = one.speeds
    later = msgspec.structs.replace(one, speeds=(slower_speed(alone, 3.0), dividing), front=one.front.times(3.0))
    mean = mean_profile([one, later])
    assert mean.speeds[0].steps.step_s(4, 1000, 100) == pytest.approx(2 * alone.steps.step_s(4, 1000, 100))
    assert mean.speeds[1].steps.step_s(4, 1000, 100) == pytest.approx(dividing.steps.step_s(4, 1000, 100))
    assert mean.front.request_s == pytest.approx(2 * one.front.request_s)
    assert mean.transfer is not None and one.transfer is not None
    assert mean.transfer.fixed_s == pytest.approx(one.transfer.fixed_s)


def test_a_mean_has_the_mean_of_each_quantile_of_spreads_that_have_as_many() -> None:
    def spread(*times: float) -> Profile:
        speed = msgspec.structs.replace(profile_of().speeds[0], spread=times)
        return msgspec.structs.replace(profile_of(), speeds=(speed,))

    (found,) = mean_profile([spread(1.0), spread(0.8, 1.2), spread(0.6, 1.4)]).speeds
    assert found.spread == pytest.approx((0.7, 1.3)) and found.spread_beside == ()


def test_a_profile_of_fewer_nodes_has_no_part_in_a_mean_of_two() -> None:
    alone = msgspec.structs.replace(profile_of(), speeds=profile_of().speeds[:1])
    with pytest.raises(PlanError, match="says nothing of 2 nodes"):
        mean_profile([alone, profile_of()])


def test_a_profile_without_a_probe_has_no_pace() -> None:
    unprobed = msgspec.structs.replace(profile_of(), speeds=(NodeSpeed(nodes=1, steps=PARTS, beside=PARTS),))
    with pytest.raises(PlanError, match="no probe, which tells the machine's pace"):
        mean_profile([unprobed])
