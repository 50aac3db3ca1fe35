"""A prefill node answers a request itself where it has nothing to prefill and less to do than the decode node."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import FEW_PROMPTS, PrefillAnswers
from pdserve.wire.discovery import Capacity, ComputeCores, NodeInfo, Role
from pdserve_proxy.routing.router import NodeWork, answers_itself
from tests.proxy.cluster import node_info

PREFILL, DECODE = (node_info(role.value, role, answers="a") for role in (Role.PREFILL, Role.DECODE))
IDLE, BUSY = NodeWork(PREFILL, 0, 0, 0.0, 0.0), NodeWork(DECODE, 3, 0, 0.0, 0.0)


def on_machine(node: NodeInfo, machine: str, *cores: int) -> NodeInfo:
    return msgspec.structs.replace(node, compute=ComputeCores(machine, cores, len(cores)))


@pytest.mark.parametrize("choice", [PrefillAnswers.AUTO, PrefillAnswers.ON])
def test_an_idle_prefill_node_answers_where_the_decode_node_is_busy(choice: PrefillAnswers) -> None:
    assert answers_itself(choice, IDLE, BUSY, 1)
    assert not answers_itself(PrefillAnswers.OFF, IDLE, BUSY, 1)


@given(
    st.integers(0, 64), st.integers(0, 64), st.integers(0, 3), st.sampled_from([0.0, 0.2]), st.sampled_from([0.2, 0.4])
)
def test_it_does_so_only_without_prompts_and_with_less_to_do(
    ours: int, theirs: int, prompts: int, queue_s: float, share: float
) -> None:
    wanted = not prompts and not queue_s and share < FEW_PROMPTS and ours < min(theirs, 4)
    prefill = NodeWork(PREFILL, ours, prompts, queue_s, share)
    assert answers_itself(PrefillAnswers.ON, prefill, NodeWork(DECODE, theirs, 0, 0.0, 0.0), 1) is wanted


@given(st.integers(0, 64), st.integers(0, 64))
def test_requests_that_come_one_after_the_other_leave_both_with_as_much_to_do(ours: int, theirs: int) -> None:
    roomy = msgspec.structs.replace(PREFILL.capacity, max_running=1000)
    prefill, decode = (msgspec.structs.replace(node, capacity=roomy) for node in (PREFILL, DECODE))
    for _ in range(200):
        at_decode = NodeWork(decode, theirs, 0, 0.0, 0.0)
        if answers_itself(PrefillAnswers.ON, NodeWork(prefill, ours, 0, 0.0, 0.0), at_decode, 1):
            ours += 1
        else:
            theirs += 1
    assert ours in (theirs, theirs - 1)


def test_nodes_of_different_sizes_compare_by_the_shares_of_their_batches() -> None:
    large = msgspec.structs.replace(DECODE, capacity=msgspec.structs.replace(DECODE.capacity, max_running=1000))
    assert not answers_itself(PrefillAnswers.ON, NodeWork(PREFILL, 2, 0, 0.0, 0.0), NodeWork(large, 3, 0, 0.0, 0.0), 1)


def test_by_default_nodes_on_the_cores_of_one_machine_keep_to_their_roles() -> None:
    prefill, decode = on_machine(PREFILL, "m", 0), on_machine(DECODE, "m", 1)
    for choice, wanted in ((PrefillAnswers.AUTO, False), (PrefillAnswers.ON, True)):
        assert answers_itself(choice, NodeWork(prefill, 0, 0, 0.0, 0.0), NodeWork(decode, 3, 0, 0.0, 0.0), 1) is wanted
    elsewhere = NodeWork(on_machine(DECODE, "another", 0), 3, 0, 0.0, 0.0)
    assert answers_itself(PrefillAnswers.AUTO, NodeWork(prefill, 0, 0, 0.0, 0.0), elsewhere, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": Role.MIXED},
        {"answers": ""},
        {"answers": "b"},
        {"capacity": Capacity(16, 10**6, 8, 10)},
        {"capacity": msgspec.structs.replace(PREFILL.capacity, num_blocks=1)},
    ],
)
def test_a_node_that_might_refuse_what_the_decode_node_takes_only_prefills(changes: dict[str, object]) -> None:
    other = msgspec.structs.replace(PREFILL, **changes)
    assert not answers_itself(PrefillAnswers.ON, NodeWork(other, 0, 0, 0.0, 0.0), BUSY, 1)


def test_it_takes_no_more_answers_at_a_time_than_it_has_places_for() -> None:
    waiting = NodeWork(DECODE, 40, 0, 0.0, 0.0)
    for running, answers in ((0, 4), (3, 1), (0, 5), (4, 1)):
        prefill = NodeWork(PREFILL, running, 0, 0.0, 0.0)
        assert answers_itself(PrefillAnswers.ON, prefill, waiting, answers) is (running + answers <= 4)
