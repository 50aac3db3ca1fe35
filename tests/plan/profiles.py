"""Profiles for tests: a machine that is easy to compute with."""

from __future__ import annotations

from pdserve.engine.placement.step_cost import StepParts
from pdserve.plan.profile import VERSION, CacheGeometry, FrontCost, NodeSpeed, PaceProbe, Profile, TransferCost

PARTS = StepParts(
    batch=0.010,
    request=0.001,
    context_token=0.0,
    chunk_alone=0.004,
    chunk_beside=0.002,
    prompt_token=0.0005,
    prompt_token_read=1e-7,
)
CACHE = CacheGeometry(block_size=16, num_blocks=4096, block_bytes=368_640, max_num_seqs=64, max_num_batched_tokens=256)


def profile_of(parts: StepParts = PARTS, cache: CacheGeometry = CACHE, slower_beside: float = 1.0) -> Profile:
    """Returns a profile of one node, and of two that make each other ``slower_beside`` times as slow."""
    probe = PaceProbe(prompt_s=0.2, step_s=0.02)
    speeds = (
        NodeSpeed(nodes=1, steps=parts, beside=parts, probe=probe),
        NodeSpeed(nodes=2, steps=parts, beside=parts.times(slower_beside), probe=probe.times(1.5)),
    )
    return Profile(
        version=VERSION,
        model="test",
        machine="test machine",
        cores=2,
        measured="2026-01-01 00:00",
        speeds=speeds,
        transfer=TransferCost(fixed_s=0.002, byte_s=1e-9),
        front=FrontCost(request_s=0.003, token_s=0.0),
        cache=cache,
    )
