"""Tests the profile file, and that its form of a step's time is the one that engines learn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.placement.step_cost import StepCost
from pdserve.errors import PlanError
from pdserve.plan.profile import NodeSpeed, PaceProbe, Profile, read_profile, write_profile
from tests.examples import examples
from tests.plan.profiles import PARTS, profile_of


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_profile(profile_of(), tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile_of()


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
