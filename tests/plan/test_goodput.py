"""Tests in virtual time that two nodes that divide a machine are never worse by their targets than one mixed node.

What takes turns on the real machine, with its noise, ``pdserve bench goodput`` measures.
"""

from __future__ import annotations

import msgspec
import pytest

from pdserve.config import Disaggregation, TargetsConfig
from pdserve.engine.placement.step_parts import StepParts
from pdserve.plan.cluster import ClusterShape, live
from pdserve.plan.load import Lengths, poisson_load
from pdserve.plan.prediction import PlanTargets
from pdserve.plan.profile import NodeSpeed
from tests.plan.profiles import profile_of

ALONE = StepParts(
    batch=0.0082,
    request=0.00062,
    context_token=1.8e-6,
    chunk_alone=0.004,
    chunk_beside=0.0,
    prompt_token=0.00055,
    prompt_token_read=5.4e-7,
)
"""About those of 135 million weights on two cores, as `pdserve plan profile` has measured them."""
BORROWING = StepParts(
    batch=0.0066,
    request=0.00065,
    context_token=1.8e-6,
    chunk_alone=0.0116,
    chunk_beside=0.0,
    prompt_token=0.00051,
    prompt_token_read=4.8e-7,
)
BESIDE = StepParts(
    batch=0.0104,
    request=0.00103,
    context_token=4.4e-6,
    chunk_alone=0.0129,
    chunk_beside=0.0,
    prompt_token=0.00102,
    prompt_token_read=9.9e-7,
)
"""Those of a node that has one of the cores, while its neighbour sleeps and while it computes."""
MACHINE = msgspec.structs.replace(
    profile_of(),
    speeds=(NodeSpeed(nodes=1, steps=ALONE, beside=ALONE), NodeSpeed(nodes=2, steps=BORROWING, beside=BESIDE)),
)
MIXED, PAIR = ClusterShape(mixed=1), ClusterShape(prefill=1, decode=1, nodes_per_machine=2)
TTFT_S = 0.7


def goodput(shape: ClusterShape, rate: float, itl_s: float, disaggregation: Disaggregation) -> float:
    """Returns the good answers a second, in the mean of three loads."""
    targets, good, seconds = PlanTargets(TTFT_S, itl_s, 90), 0, 0.0
    for seed in range(3):
        load = poisson_load(rate, 200, Lengths.of([(256, 256, 1)]), Lengths.of([(64, 64, 1)]), seed)
        own = TargetsConfig(target_ttft_ms=TTFT_S * 1e3, target_itl_ms=itl_s * 1e3)
        good += sum(map(targets.good, live(MACHINE, shape, load, own, disaggregation).answers))
        seconds += load[-1].at_s
    return good / seconds


@pytest.mark.parametrize("itl_s", [0.017, 0.025, 0.043])
@pytest.mark.parametrize("rate", [1.8, 2.8])
def test_auto_serves_as_many_within_targets_as_the_better_of_the_others(rate: float, itl_s: float) -> None:
    mixed = goodput(MIXED, rate, itl_s, Disaggregation.NEVER)
    always = goodput(PAIR, rate, itl_s, Disaggregation.ALWAYS)
    assert goodput(PAIR, rate, itl_s, Disaggregation.AUTO) >= 0.97 * max(mixed, always)
