"""Tests which node changes its role, by looks at scripted loads."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from pdserve.wire.cache_groups import Keep
from pdserve.wire.discovery import Capacity, GroupCapacity, NodeInfo, NodeLoad, Role
from pdserve_proxy.registry.snapshot import Reachability, RegisteredNode
from pdserve_proxy.roles import Pressure, RoleDecider, RoleSwitch, Targets, pressure_of
from tests.proxy.cluster import node_info

TARGETS = Targets(ttft_s=1.0, itl_s=0.1, looks=3, rest_s=30.0)
IDLE = NodeLoad()
QUEUED = NodeLoad(running=1, queue_s=4.0)
SLOW = NodeLoad(running=4, step_s=0.2)
QUICK = NodeLoad(running=1, step_s=0.01)
WINDOWED = Capacity(
    4,
    16,
    16,
    256,
    (GroupCapacity("whole contexts", Keep.ALL, 16, 4096), GroupCapacity("window 64", Keep.WINDOW, 10, 4096, 64)),
)


def node(
    name: str,
    role: Role,
    load: NodeLoad,
    *,
    model: str = "m",
    state: Reachability = Reachability.SERVING,
) -> RegisteredNode:
    info = msgspec.structs.replace(
        node_info(name, role, model=model, boot_id=name.encode().ljust(16)), control="tcp://h:1"
    )
    return RegisteredNode(info, load, state, 0.0)


def prefill(load: NodeLoad, count: int = 1) -> list[RegisteredNode]:
    return [node(f"p{index}", Role.PREFILL, load) for index in range(count)]


def decode(load: NodeLoad, count: int = 2) -> list[RegisteredNode]:
    return [node(f"d{index}", Role.DECODE, load) for index in range(count)]


def decided(nodes: list[RegisteredNode], looks: int = 3, targets: Targets = TARGETS) -> RoleSwitch | None:
    """Returns what the last of so many equal looks decides; the ones before must decide nothing."""
    decider = RoleDecider(targets)
    for look in range(looks - 1):
        assert decider.decide(float(look), nodes) is None
    return decider.decide(float(looks), nodes)


def switched(switch: RoleSwitch | None) -> tuple[str, Role] | None:
    return None if switch is None else (switch.node.name, switch.role)


def test_prompts_that_wait_take_a_node_from_roomy_decode_nodes() -> None:
    switch = decided([*prefill(QUEUED), *decode(QUICK)])
    assert switched(switch) == ("d0", Role.PREFILL)
    assert str(switch) == (
        "d0 (http://d0.invalid:1) from decode to prefill: of their targets, prompts use 4.00 on 1 prefill nodes and "
        "answers 0.10 on 2 decode nodes"
    )


def test_slow_steps_take_a_node_from_roomy_prefill_nodes() -> None:
    assert switched(decided([*prefill(IDLE, 2), *decode(SLOW, 1)])) == ("p0", Role.DECODE)


def test_requests_that_wait_for_a_place_take_one_too() -> None:
    full = NodeLoad(running=4, waiting=9, queue_s=5.0, step_s=0.01)
    assert switched(decided([*prefill(IDLE, 2), *decode(full, 1)])) == ("p0", Role.DECODE)


def test_prompts_that_wait_at_decode_nodes_with_places_call_for_prefill_nodes() -> None:
    assert switched(decided([*prefill(IDLE), *decode(NodeLoad(running=1, queue_s=2.0, step_s=0.01))])) == (
        "d0",
        Role.PREFILL,
    )


@pytest.mark.parametrize(
    "nodes",
    [
        [*prefill(QUEUED), *decode(QUICK, 1)],
        [*prefill(IDLE, 1), *decode(SLOW, 2)],
        [*prefill(QUEUED, 2), *decode(SLOW, 2)],
        [*prefill(IDLE, 2), *decode(QUICK, 2)],
        [*prefill(QUEUED), node("m0", Role.MIXED, IDLE)],
        [*decode(SLOW, 3)],
        [*prefill(QUEUED, 3)],
        [*prefill(QUEUED), *decode(NodeLoad(running=2, step_s=0.07))],
        [*prefill(NodeLoad(queue_s=0.8), 2), *decode(QUICK)],
        [],
    ],
    ids=[
        "the last decode node",
        "the last prefill node",
        "both late",
        "nobody late",
        "no decode node",
        "decode nodes alone",
        "prefill nodes alone",
        "the others have no room",
        "late only soon",
        "nobody",
    ],
)
def test_roles_stay(nodes: list[RegisteredNode]) -> None:
    assert decided(nodes, looks=10) is None


def test_the_least_busy_node_goes() -> None:
    busy = [node(f"d{index}", Role.DECODE, NodeLoad(running=3 - index, step_s=0.01)) for index in range(3)]
    assert switched(decided([*prefill(QUEUED), *busy])) == ("d2", Role.PREFILL)


def test_nodes_that_cannot_switch_stay() -> None:
    able = node("able", Role.DECODE, IDLE)
    deaf = RegisteredNode(msgspec.structs.replace(able.info, name="deaf", control=""), IDLE, able.state, 0.0)
    assert switched(decided([*prefill(QUEUED), deaf, *decode(QUICK, 1)])) == ("d0", Role.PREFILL)
    assert decided([*prefill(QUEUED), deaf], looks=10) is None


@pytest.mark.parametrize("state", [Reachability.DRAINING, Reachability.UNREACHABLE])
def test_nodes_that_get_no_requests_do_not_count(state: Reachability) -> None:
    leaving = node("d9", Role.DECODE, QUICK, state=state)
    assert decided([*prefill(QUEUED), *decode(QUICK, 1), leaving], looks=10) is None


def test_a_node_that_took_no_command_is_not_asked_again() -> None:
    decider, nodes = RoleDecider(TARGETS), [*prefill(QUEUED), *decode(QUICK, 3)]
    names = []
    for look in range(200):
        switch = decider.decide(float(look), nodes)
        if switch is not None:
            names.append(switch.node.name)
            decider.failed(switch)
    assert names == ["d0", "d1", "d2"]


def test_looks_have_to_agree_in_a_row() -> None:
    decider = RoleDecider(TARGETS)
    late, fine = [*prefill(NodeLoad(queue_s=1.5)), *decode(QUICK)], [*prefill(IDLE), *decode(QUICK)]
    looks = [late, late, fine, fine, fine, late, late, late]
    assert [decider.decide(float(now), nodes) for now, nodes in enumerate(looks)] == [None] * len(looks)
    assert switched(decider.decide(9.0, late)) == ("d0", Role.PREFILL)


def test_one_odd_look_is_smoothed_away() -> None:
    decider = RoleDecider(TARGETS)
    calm = [*prefill(NodeLoad(queue_s=0.1)), *decode(QUICK)]
    for now in range(10):
        decider.decide(float(now), calm)
    assert decider.decide(10.0, [*prefill(NodeLoad(queue_s=1.5)), *decode(QUICK)]) is None
    assert decider.pressures()["m", "f"].prompts == pytest.approx(0.8)


def test_after_a_switch_the_group_rests_and_others_do_not() -> None:
    decider = RoleDecider(TARGETS)
    first = [*prefill(QUEUED), *decode(QUICK, 4)]
    other = [
        node("q0", Role.PREFILL, IDLE, model="n"),
        node("e0", Role.DECODE, QUICK, model="n"),
        node("e1", Role.DECODE, QUICK, model="n"),
    ]
    assert [decider.decide(float(now), first + other) is not None for now in range(3)] == [False, False, True]
    assert decider.pressures().keys() == {("n", "f")}
    other[0] = node("q0", Role.PREFILL, QUEUED, model="n")
    said = [switched(decider.decide(float(now), first + other)) for now in range(3, 9)]
    assert said.count(("e0", Role.PREFILL)) == 1
    assert said.count(None) == 5
    assert [decider.decide(float(now), first) is not None for now in (31, 32, 33, 34)] == [False, False, False, True]


def test_several_groups_that_want_to_switch_take_turns() -> None:
    decider = RoleDecider(TARGETS)
    nodes = [
        each
        for model in "mn"
        for each in (
            node(f"p-{model}", Role.PREFILL, QUEUED, model=model),
            node(f"d-{model}", Role.DECODE, QUICK, model=model),
            node(f"e-{model}", Role.DECODE, QUICK, model=model),
        )
    ]
    said = [switched(decider.decide(float(now), nodes)) for now in range(4)]
    assert said == [None, None, ("d-m", Role.PREFILL), ("d-n", Role.PREFILL)]


def test_pressures_are_means() -> None:
    decoding = [*decode(SLOW, 1), node("d1", Role.DECODE, IDLE)]
    assert pressure_of(prefill(NodeLoad(queue_s=0.5), 2), decoding, TARGETS) == Pressure(0.5, 1.0)


def test_what_is_known_of_nodes_that_are_gone_is_forgotten() -> None:
    decider = RoleDecider(TARGETS)
    for now in range(3):
        switch = decider.decide(float(now), [*prefill(QUEUED), *decode(QUICK)])
    assert switch is not None
    decider.failed(switch)
    decider.decide(3.0, [])
    assert decider == RoleDecider(TARGETS)


def test_a_decision_names_the_node_by_its_present_boot() -> None:
    nodes = [*prefill(QUEUED), *decode(QUICK)]
    switch = decided(nodes)
    assert switch is not None
    assert isinstance(switch.node, NodeInfo)
    assert switch.node in [each.info for each in nodes]


def test_decode_nodes_without_memory_are_late_and_not_roomy() -> None:
    scarce = NodeLoad(running=1, waiting=3, free_blocks=1, queue_s=5.0, step_s=0.01)
    assert switched(decided([*prefill(IDLE, 2), *decode(scarce, 2)])) == ("p0", Role.DECODE)
    assert decided([*prefill(QUEUED, 2), *decode(scarce, 2)], looks=10) is None


@pytest.mark.parametrize("left", [0, 1, 5])
def test_decode_nodes_whose_window_is_full_are_late_and_not_roomy(left: int) -> None:
    """A tenth of the window's ten blocks, or more, is room enough."""
    short = NodeLoad(running=1, waiting=3, free_blocks=16, queue_s=5.0, step_s=0.01, bounded_free_blocks=(left,))
    nodes = [
        dataclasses.replace(each, info=msgspec.structs.replace(each.info, capacity=WINDOWED))
        for each in [*prefill(IDLE, 2), *decode(short, 2)]
    ]
    assert switched(decided(nodes)) == (("d0", Role.PREFILL) if left else ("p0", Role.DECODE))


@pytest.mark.parametrize(("left", "wanted"), [(Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.DECODE)])
def test_a_role_whose_last_node_is_gone_gets_another_at_once_and_once(left: Role, wanted: Role) -> None:
    decider = RoleDecider(TARGETS)
    gone, kept = node("x", wanted, QUICK), [node(f"k{index}", left, QUICK) for index in range(3)]
    assert decider.decide(0.0, [gone, *kept]) is None
    said = [switched(decider.decide(float(now), kept)) for now in range(1, 10)]
    assert said == [("k0", wanted)] + [None] * 8
    assert decider.decide(50.0, [node("k0", wanted, QUICK), *kept[1:]]) is None


def test_proxies_that_restore_a_role_at_once_choose_the_same_node() -> None:
    """Each has heard the nodes in another order, and with other loads."""
    loads = [IDLE, QUICK, SLOW]
    chosen = set()
    for turn in range(3):
        left = [node(f"d{index}", Role.DECODE, loads[(index + turn) % 3]) for index in (0, 1, 2)]
        decider = RoleDecider(TARGETS)
        decider.decide(0.0, [*prefill(QUICK), *left])
        chosen.add(switched(decider.decide(1.0, [*left[turn:], *left[:turn]])))
    assert chosen == {("d0", Role.PREFILL)}


def test_the_next_node_restores_a_role_if_the_first_takes_no_command() -> None:
    decider = RoleDecider(TARGETS)
    kept = decode(QUICK, 3)
    decider.decide(0.0, [*prefill(QUICK), *kept])
    switch = decider.decide(1.0, kept)
    assert switched(switch) == ("d0", Role.PREFILL)
    assert switch is not None
    decider.failed(switch)
    assert switched(decider.decide(2.0, kept)) == ("d1", Role.PREFILL)


def test_a_mixed_node_does_the_work_of_a_role_whose_last_node_is_gone() -> None:
    decider = RoleDecider(TARGETS)
    left = [*decode(QUICK, 3), node("x0", Role.MIXED, QUICK)]
    decider.decide(0.0, [*prefill(QUICK), *left])
    assert [decider.decide(float(now), left) for now in range(1, 10)] == [None] * 9


def test_the_only_node_left_keeps_its_role() -> None:
    decider = RoleDecider(TARGETS)
    decider.decide(0.0, [*prefill(QUICK), *decode(QUICK, 1)])
    assert [decider.decide(float(now), decode(QUICK, 1)) for now in range(1, 10)] == [None] * 9


def test_a_constant_load_does_not_move_a_node_back_and_forth() -> None:
    """One prefill node is late for these prompts; so is one decode node for these answers."""
    nodes = {
        1: [*prefill(NodeLoad(queue_s=1.2)), *decode(NodeLoad(running=2, step_s=0.055))],
        2: [*prefill(NodeLoad(queue_s=0.3), 2), *decode(NodeLoad(running=3, step_s=0.11), 1)],
    }
    decider, prefilling, moves = RoleDecider(TARGETS), 2, 0
    for now in range(500):
        switch = decider.decide(float(now), nodes[prefilling])
        if switch is not None:
            prefilling += 1 if switch.role is Role.PREFILL else -1
            moves += 1
    assert moves <= 1


def test_the_group_rests_after_a_change_that_another_has_made() -> None:
    decider = RoleDecider(TARGETS)
    late = [*prefill(QUEUED), *decode(QUICK, 3)]
    assert [decider.decide(float(now), late) for now in range(2)] == [None] * 2
    changed = [*prefill(QUEUED), node("d0", Role.PREFILL, QUEUED), *decode(QUICK, 3)[1:]]
    said = [now for now in range(2, 40) if decider.decide(float(now), changed) is not None]
    assert said == [34]  # it changed at 2, rests until 32, and takes three looks
