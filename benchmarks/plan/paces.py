"""The pace of a machine that others use: profiles at another pace, and the mean of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from pdserve.engine.placement.step_cost import StepParts
from pdserve.errors import PlanError
from pdserve.plan.profile import FrontCost, NodeSpeed, PaceProbe, Profile, TransferCost


def probe_of(profile: Profile, nodes: int) -> PaceProbe:
    """Returns the probe of each of so many nodes on one machine. Raises PlanError if the profile has none."""
    if (probe := profile.speed(nodes).probe) is None:
        raise PlanError("the profile has no probe, which tells the machine's pace; `pdserve plan profile` measures one")
    return probe


def pace_of(now: PaceProbe, before: PaceProbe) -> float:
    """Returns how many times as long as ``before`` it takes now: the geometric mean of both ratios."""
    return math.sqrt(now.prompt_s / before.prompt_s * now.step_s / before.step_s)


def slower(profile: Profile, factor: float) -> Profile:
    """Returns the profile of a machine on which all takes ``factor`` times as long."""
    return msgspec.structs.replace(
        profile,
        speeds=tuple(slower_speed(speed, factor) for speed in profile.speeds),
        transfer=profile.transfer and profile.transfer.times(factor),
        front=profile.front.times(factor),
    )


def slower_speed(speed: NodeSpeed, factor: float) -> NodeSpeed:
    """Returns the speed of a node that takes ``factor`` times as long."""
    return msgspec.structs.replace(
        speed,
        steps=speed.steps.times(factor),
        beside=speed.beside.times(factor),
        probe=speed.probe and speed.probe.times(factor),
    )


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Returns the mean of several profiles of one model on one machine: chance counts less in it than in each.

    A machine that others use is faster in one profile than in the next, so each counts at the mean of their paces.
    Raises PlanError if one has no probe, or does not know as many nodes as the last one.
    """
    newest = profiles[-1]
    factors = {speed.nodes: _to_mean_pace(profiles, speed.nodes) for speed in newest.speeds}
    # The way of a request was measured with the first speed, transfers with the last one.
    first, last = factors[newest.speeds[0].nodes], factors[newest.speeds[-1].nodes]
    transfers = [
        profile.transfer.times(factor) for profile, factor in zip(profiles, last, strict=True) if profile.transfer
    ]
    return msgspec.structs.replace(
        newest,
        speeds=tuple(
            _mean_speed(
                [slower_speed(profile.speed(nodes), factor) for profile, factor in zip(profiles, found, strict=True)]
            )
            for nodes, found in factors.items()
        ),
        transfer=TransferCost.mean(transfers) if newest.transfer else None,
        front=FrontCost.mean([profile.front.times(factor) for profile, factor in zip(profiles, first, strict=True)]),
    )


def _to_mean_pace(profiles: Sequence[Profile], nodes: int) -> list[float]:
    """Returns what brings the times of each profile to the mean of their paces."""
    probes = [probe_of(profile, nodes) for profile in profiles]
    mean = PaceProbe.mean(probes)
    return [pace_of(mean, probe) for probe in probes]


def _mean_speed(speeds: Sequence[NodeSpeed]) -> NodeSpeed:
    return msgspec.structs.replace(
        speeds[-1],
        steps=StepParts.mean([speed.steps for speed in speeds]),
        beside=StepParts.mean([speed.beside for speed in speeds]),
        spread=_mean_quantiles([speed.spread for speed in speeds]),
        spread_beside=_mean_quantiles([speed.spread_beside for speed in speeds]),
        probe=PaceProbe.mean([speed.probe for speed in speeds if speed.probe is not None]),
    )


def _mean_quantiles(spreads: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Returns the mean of each quantile, of the spreads that have as many as the last one."""
    alike = [spread for spread in spreads if len(spread) == len(spreads[-1])]
    return tuple(map(fmean, zip(*alike, strict=True)))
