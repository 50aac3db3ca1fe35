"""Makes the figures by which prompts are placed, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from pdserve.engine.placement.placement_rule import LocalMeasures, PromptSize, RemoteMeasures

TOKENS = st.integers(0, 100_000)
RATES = st.floats(10, 1e6)
SECONDS = st.floats(0, 10)
PROMPTS = st.builds(
    PromptSize,
    missing_tokens=st.integers(1, 100_000),
    cached_tokens=TOKENS,
    queued_tokens=TOKENS,
    streams=st.integers(0, 500),
    leaving_tokens=TOKENS,
    waited_s=SECONDS,
    may_wait=st.booleans(),
)
HERES = st.builds(LocalMeasures, RATES, st.floats(0, 1), st.integers(8, 4096))
THERES = st.builds(
    RemoteMeasures,
    tokens_per_s=RATES,
    queued_tokens=st.floats(0, 1e6),
    late_s=SECONDS,
    overhead_s=SECONDS,
    cached_share=st.floats(0, 1),
    bytes_per_token=st.floats(1, 1e6),
    bytes_per_s=st.floats(1e6, 1e11),
    held_share=st.floats(0, 1),
    streams=st.integers(0, 100),
)
