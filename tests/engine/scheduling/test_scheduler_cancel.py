"""Tests what cancelled prompts cost the requests that come after them, counted in chunks."""

from __future__ import annotations

from random import Random

import pytest

from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_model import answer
from tests.engine.fake_transfer import Wire

CHUNK = 16
LONG = 10
NEXT = [30] * (2 * CHUNK + 3)
CHUNKS_OF_NEXT = 3
MAX_LEN = 120


@pytest.mark.parametrize("computed", [0, 1, 3, 7, 20])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 20])
def test_ten_cancelled_long_prompts_cost_the_next_one_no_chunk(computed: int, max_num_seqs: int) -> None:
    """Only the step that is under way when they are cancelled still computes them."""
    wire = Wire(Random(0))
    decode, prefill = (
        FakeEngine(thread=thread, num_blocks=400, max_num_seqs=places, max_num_batched_tokens=CHUNK, max_len=MAX_LEN)
        for thread, places in ((wire.decode, 20), (wire.prefill, max_num_seqs))
    )

    long = [decode.add(local_id, [40 + local_id] * 100, remote=True) for local_id in range(LONG)]
    decode.step()
    for _ in range(computed):
        assert prefill.step().work
        wire.deliver(prefill.model, decode.model, 0.7)
        decode.step()
    for request in long:
        decode.scheduler.abort(request)
    decode.add(LONG, NEXT, remote=True)
    decode.step()

    for _ in range(CHUNKS_OF_NEXT):
        (work,) = prefill.step().work
        assert work.request.token_ids[: len(NEXT)] == NEXT
    for _ in range(30):
        wire.deliver(prefill.model, decode.model, 1.0)
        decode.step()
        prefill.step()
    assert decode.outputs[LONG] == answer(NEXT, 0, 4, MAX_LEN)
    assert decode.idle
    assert prefill.idle
