"""Makes placements for engines in tests."""

from __future__ import annotations

from pdserve.config import Batching, Disaggregation, SchedulerConfig, TargetsConfig, TransferConfig
from pdserve.engine.placement.latency_targets import LatencyTargets
from pdserve.engine.placement.placement import Placement
from pdserve.engine.placement.step_cost import StepCost
from pdserve.wire.discovery import Role

BYTES_PER_TOKEN = 20_000.0


def make_placement(
    block_size: int,
    disaggregation: Disaggregation = Disaggregation.ALWAYS,
    step_cost: StepCost | None = None,
    *,
    max_num_batched_tokens: int = 256,
    target_ttft_ms: float = 0.0,
    target_itl_ms: float = 0.0,
    role: Role = Role.PREFILL,
    kind: type[Placement] = Placement,
    batching: Batching = Batching.CONTINUOUS,
) -> Placement:
    """Returns a placement that, by default, sends a prompt that lacks more than one block to a prefill node.

    By default steps have no ITL target, as on a prefill node.
    """
    step_cost = step_cost or StepCost()
    return kind(
        step_cost,
        TransferConfig(disaggregation=disaggregation),
        SchedulerConfig(max_num_batched_tokens=max_num_batched_tokens, batching=batching),
        block_size,
        BYTES_PER_TOKEN,
        LatencyTargets(TargetsConfig(target_ttft_ms, target_itl_ms), step_cost, role, batching),
    )
