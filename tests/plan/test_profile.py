"""Tests the profile file, and that its form of a step's time is the one that engines learn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.placement.step_cost import StepCost
from pdserve.errors import PlanError
from pdserve.plan.profile import (
    NodeSpeed,
    PaceProbe,
    Profile,
    TransferCost,
    mean_profile,
    read_profile,
    write_profile,
)
from tests.examples import examples
from tests.plan.profiles import PARTS, profile_of


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_profile(profile_of(), tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile_of()


def test_a_machine_of_half_the_speed_takes_twice_as_long_for_everything() -> None:
    profile, slow = profile_of(slower_beside=1.5), profile_of(slower_beside=1.5).times(2.0)
    for speed, slower in zip(profile.speeds, slow.speeds, strict=True):
        assert slower.steps == speed.steps.times(2.0) and slower.beside == speed.beside.times(2.0)
        assert slower.spread == speed.spread
        assert slow.probe(speed.nodes).pace(profile.probe(speed.nodes)) == pytest.approx(2.0)
    assert profile.transfer is not None and slow.transfer is not None
    assert slow.transfer.seconds(10_000_000) == pytest.approx(2 * profile.transfer.seconds(10_000_000))
    assert slow.front.seconds(100) == pytest.approx(2 * profile.front.seconds(100))
    assert (slow.cache, slow.model) == (profile.cache, profile.model)


@settings(max_examples=examples(50))
@given(st.integers(0, 64), st.integers(0, 10_000), st.integers(0, 512), st.integers(0, 4096))
def test_an_engine_that_has_learnt_the_parts_estimates_what_the_profile_says(
    rows: int, context_tokens: int, prompt_tokens: int, prompt_context: int
) -> None:
    learnt = StepCost.of(PARTS, 256)
    assert learnt.estimate_s(rows, context_tokens, prompt_tokens, prompt_context=prompt_context) == pytest.approx(
        PARTS.step_s(rows, context_tokens, prompt_tokens, prompt_context)
    )
    assert learnt.decoding_known and learnt.rate_known


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"version": 99}, "version 99"),
        ({"speeds": []}, "no speeds"),
        ({"cache": {"block_size": 0}}, "block_size of 0"),
        ({"transfer": {"byte_s": -1.0}}, "negative times"),
        ({"unknown": 1}, "unknown"),
        ({"version": 1, "probe": {}}, "version 1, and this pdserve reads version 2"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_what_is_wrong(
    tmp_path: Path, changes: dict[str, object], wrong: str
) -> None:
    content = msgspec.json.decode(msgspec.json.encode(profile_of()))
    for name, value in changes.items():
        content[name] = {**content.get(name, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(PlanError, match=wrong):
        read_profile(path)


def test_a_probe_takes_time(tmp_path: Path) -> None:
    speeds = (NodeSpeed(nodes=1, steps=PARTS, beside=PARTS, probe=PaceProbe(prompt_s=0.1, step_s=0.0)),)
    write_profile(msgspec.structs.replace(profile_of(), speeds=speeds), tmp_path / "profile.json")
    with pytest.raises(PlanError, match="a probe that takes no time"):
        read_profile(tmp_path / "profile.json")


def test_profiles_of_two_paces_have_a_mean_of_the_pace_between_them() -> None:
    """What differs besides the pace is averaged: one has transfers of 2 ms, the other none."""
    one, slow = profile_of(slower_beside=1.5), profile_of(slower_beside=1.5).times(3.0)
    slow = msgspec.structs.replace(slow, transfer=TransferCost(fixed_s=0.0, byte_s=3e-9))
    mean = mean_profile([one, slow])
    for speed, found in zip(one.speeds, mean.speeds, strict=True):
        assert found.steps.step_s(4, 1000, 100) == pytest.approx(speed.steps.times(2.0).step_s(4, 1000, 100))
        assert found.beside.step_s(4, 1000, 100) == pytest.approx(speed.beside.times(2.0).step_s(4, 1000, 100))
        assert mean.probe(speed.nodes).pace(one.probe(speed.nodes)) == pytest.approx(2.0)
    assert mean.transfer is not None
    assert mean.transfer.fixed_s == pytest.approx(0.002) and mean.transfer.byte_s == pytest.approx(2e-9)
    assert mean.front.request_s == pytest.approx(0.006)
    assert mean_profile([one]).speeds[1].steps.step_s(1, 1, 1) == pytest.approx(one.speeds[1].steps.step_s(1, 1, 1))


def test_each_speed_of_a_mean_has_a_pace_of_its_own() -> None:
    """A node alone has become three times as slow, each of two nodes has not: the one's pace is not the other's."""
    one = profile_of()
    alone, dividing = one.speeds
    later = msgspec.structs.replace(one, speeds=(alone.times(3.0), dividing), front=one.front.times(3.0))
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


@pytest.mark.parametrize("part", ["batch", "prompt_token"])
@pytest.mark.parametrize("seconds", [-1.0, 1e999])
def test_no_part_of_a_step_is_negative_or_endless(tmp_path: Path, part: str, seconds: float) -> None:
    wrong: Profile = profile_of(msgspec.structs.replace(PARTS, **{part: seconds}))
    path = tmp_path / "profile.json"
    write_profile(wrong, path)
    with pytest.raises(PlanError, match=r"where|not a profile"):
        read_profile(path)


def test_a_missing_file_and_an_unmeasured_layout_say_what_would_be_right(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the profile"):
        read_profile(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="two are the most"):
        profile_of().speed(3)
    alone = msgspec.structs.replace(profile_of(), speeds=profile_of().speeds[:1])
    with pytest.raises(PlanError, match="--nodes 2"):
        alone.speed(2)
