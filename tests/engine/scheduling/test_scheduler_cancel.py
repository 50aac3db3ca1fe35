"""Tests what cancelled requests cost those that come after them: no chunk of a prompt, and no block."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from pdserve.engine.request import Request, Status
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_model import answer, talkative
from tests.engine.fake_transfer import Wire
from tests.terms import change_terms

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


# ---------------------------------------------------------------- blocks

PROMPT = [30] * 10
SEEDS = [talkative(PROMPT, 20)] * 2


class Pair:
    """A decode node with few places and blocks, a prefill node, and a wire on which late blocks stay in quarantine."""

    def __init__(self) -> None:
        self.wire = Wire(Random(1))
        self.decode = FakeEngine(thread=self.wire.decode, num_blocks=16, max_num_seqs=2, overlap=True)
        self.prefill = FakeEngine(thread=self.wire.prefill)

    def ask(self, *, remote: bool = False, holders: int = 0, local_id: int = 0) -> Request:
        return self.decode.add(local_id, PROMPT, 20, SEEDS, remote=remote, holders=holders)

    def turn(self, share: float = 1.0) -> None:
        self.decode.step()
        self.prefill.step()
        self.wire.deliver(self.prefill.model, self.decode.model, share)


def waiting(pair: Pair) -> Request:
    return pair.ask()


def ordered(pair: Pair) -> Request:
    request = pair.ask(remote=True)
    pair.decode.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    return request


def with_blocks_in_flight(pair: Pair) -> Request:
    request = pair.ask(remote=True)
    for _ in range(3):
        pair.turn(share=0.0)
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    assert request.num_generated_tokens == 1
    return request


def landed_without_a_place(pair: Pair) -> Request:
    pair.decode.add(10, [40] * 5, 20, [talkative([40] * 5, 20)])
    request = ordered(pair)
    pair.decode.add(11, [41] * 5, 20, [talkative([41] * 5, 20)])
    for _ in range(6):
        pair.turn()
    assert request.status is Status.WAITING
    assert request.prompt_is_computed
    return request


def asking_a_holder(pair: Pair) -> Request:
    request = pair.ask(holders=1)
    pair.decode.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    return request


def failed_with_some_blocks(pair: Pair) -> Request:
    request = pair.ask(remote=True)
    change_terms(request, prefill=request.targets[:1])
    for _ in range(3):
        pair.turn(share=0.3)
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    pair.wire.lose()
    pair.decode.connector.poll(pair.decode.scheduler, pair.decode.now)
    assert request.transfer is None and request.block_table
    return request


def preempted(pair: Pair) -> Request:
    request = pair.ask()
    for _ in range(5):
        pair.turn()
    pair.decode.scheduler._preempt(request)
    return request


def with_a_copy_to_come(pair: Pair) -> Request:
    request = pair.ask()
    pair.turn()
    assert all(member.status is Status.RUNNING for member in (request, *request.children))
    return request


@pytest.mark.parametrize("expires", [False, True], ids=["aborted", "at its deadline"])
@pytest.mark.parametrize(
    "reach",
    [
        waiting,
        ordered,
        with_blocks_in_flight,
        landed_without_a_place,
        asking_a_holder,
        failed_with_some_blocks,
        preempted,
        with_a_copy_to_come,
    ],
)
def test_a_request_that_ends_in_any_state_gives_every_block_back(
    reach: Callable[[Pair], Request], expires: bool
) -> None:
    pair = Pair()
    family = [request := reach(pair), *request.children]
    if expires:
        for member in family:
            member.deadline = pair.decode.now
    else:
        for member in family:
            pair.decode.scheduler.abort(member)
    pair.decode.add(20, [50] * 9, 6, [talkative([50] * 9, 6)])
    for _ in range(60):
        pair.turn(share=0.5)
    assert pair.decode.outputs[20] == answer([50] * 9, talkative([50] * 9, 6), 6, 64)
    assert pair.decode.idle
    assert pair.prefill.idle
    assert pair.decode.blocks.num_quarantined == 0
