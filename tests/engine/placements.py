"""Makes placements for engines in tests."""

from __future__ import annotations

from pdserve.config import Disaggregation, SchedulerConfig, TransferConfig
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost

BYTES_PER_TOKEN = 20_000.0


def make_placement(
    block_size: int,
    disaggregation: Disaggregation = Disaggregation.ALWAYS,
    step_cost: StepCost | None = None,
    *,
    stall_weight: float = 2.0,
    max_step_tokens: int = 256,
) -> Placement:
    """Returns a placement that, by default, sends a prompt that lacks more than one block to a prefill node."""
    return Placement(
        step_cost or StepCost(),
        TransferConfig(disaggregation=disaggregation, stall_weight=stall_weight),
        SchedulerConfig(max_step_tokens=max_step_tokens),
        block_size,
        BYTES_PER_TOKEN,
    )
