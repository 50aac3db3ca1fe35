"""The registry registers, drops and expires nodes; the tests set its clock."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import msgspec
import pytest

from pdserve.errors import MalformedFrame
from pdserve.wire.discovery import (
    MAX_MET,
    Ack,
    Capacity,
    Deregister,
    NodeHeartbeat,
    NodeInfo,
    NodeLoad,
    Register,
    Role,
)
from pdserve_proxy.registry import registry as registry_module
from pdserve_proxy.registry.registry import MAX_HELD_BEATS, MAX_NODES, Registry
from pdserve_proxy.registry.snapshot import Pairing, Reachability, unpaired_roles
from tests.cpu_time import least_cpu_s
from tests.proxy.cluster import node_info

HEARTBEAT_S = 1.0
NODE = node_info("d0", Role.DECODE)


def registry(*nodes: NodeInfo) -> Registry:
    made = Registry(HEARTBEAT_S, missed_heartbeats=3)
    for node in nodes:
        assert made.handle(Register(node), now=0.0) == Ack(node.boot_id, True)
    return made


def node_at(control: str, role: Role = Role.PREFILL) -> NodeInfo:
    return msgspec.structs.replace(node_info("p0", role), control=control)


def names(of: Registry) -> list[str]:
    return [node.info.name for node in of.snapshot().nodes]


def test_a_node_is_dropped_after_exactly_three_missed_heartbeats() -> None:
    nodes = registry(NODE)
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=5.0)
    assert nodes.next_expiry() == 8.0
    assert nodes.expire(now=7.999) == ()
    assert names(nodes) == ["d0"]
    assert [node.info for node in nodes.expire(now=8.0)] == [NODE]
    assert names(nodes) == []
    assert nodes.next_expiry() is None


def test_a_heartbeat_changes_the_role_by_which_nodes_are_paired() -> None:
    infos = [node_at("tcp://127.0.0.1:1", Role.DECODE), node_info("d1", Role.DECODE), node_info("p1", Role.PREFILL)]
    switched, stays, prefill = infos
    nodes = registry(*infos)
    heartbeat = NodeHeartbeat(switched.boot_id, NodeLoad(running=2), Role.PREFILL)
    assert nodes.handle(heartbeat, now=0.5) == Ack(switched.boot_id, True, Role.PREFILL)
    now = msgspec.structs.replace(switched, role=Role.PREFILL)
    assert nodes.snapshot().pairings["m"] == (Pairing(stays, (now, prefill)),)
    assert nodes.handle(NodeHeartbeat(switched.boot_id, NodeLoad()), now=0.6) == Ack(switched.boot_id, True)
    assert nodes.node(switched.boot_id) == now, "a heartbeat without a role changes none"
    assert nodes.handle(Register(now), now=0.7) == Ack(switched.boot_id, True)
    nodes.handle(NodeHeartbeat(switched.boot_id, NodeLoad(), Role.DECODE), now=0.8)
    assert nodes.snapshot().pairings["m"] == (Pairing(switched, (prefill,)), Pairing(stays, (prefill,)))


def met_by(of: Registry, node: NodeInfo) -> list[str]:
    return sorted(target.name for target in of.to_meet(node.boot_id))


def test_nodes_meet_those_of_their_model_that_they_fetch_from() -> None:
    roles = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d2": Role.DECODE, "m0": Role.MIXED}
    of = {name: node_info(name, role, control=f"tcp://{name}:1") for name, role in roles.items()}
    nodes = registry(*of.values(), other := node_info("d1", Role.DECODE, fingerprint="another"), NODE)
    assert {name: met_by(nodes, node) for name, node in of.items()} == {
        "p0": ["d2", "m0"],
        "p1": ["d2", "m0"],
        "d2": ["m0", "p0", "p1"],
        "m0": ["p0", "p1"],
    }
    assert met_by(nodes, other) == [] and len(nodes.unmet) == 6
    nodes.handle(NodeHeartbeat(of["p1"].boot_id, NodeLoad(), Role.DECODE, met=True), now=0.5)
    assert met_by(nodes, of["p0"]) == ["d2", "m0", "p1"] and met_by(nodes, of["d2"]) == ["m0", "p0"]
    for node in of.values():
        nodes.handle(Deregister(node.boot_id), now=0.6)
        assert met_by(nodes, node) == []
    assert met_by(nodes, NODE) == [] and set(nodes.unmet) == {other.boot_id, NODE.boot_id}


def test_of_many_nodes_each_meets_a_few_and_is_met_by_as_many() -> None:
    def node(name: str, number: int, role: Role) -> NodeInfo:
        return node_info(name, role, boot_id=(number * 2**120).to_bytes(16, "big"), control="tcp://h:1")

    prefill = [node(f"p{number}", 8 * number, Role.PREFILL) for number in range(32)]
    decode = [node(f"d{number}", 4 * number + 1, Role.DECODE) for number in range(64)]
    nodes = registry(*prefill, *decode)
    chosen = [met_by(nodes, each) for each in decode]
    counts = Counter(itertools.chain.from_iterable(chosen))
    assert {len(each) for each in chosen} == {MAX_MET} and set(counts.values()) == {2 * MAX_MET}
    nodes.handle(Deregister(prefill[0].boot_id), now=0.5)
    changed = [before != met_by(nodes, each) for each, before in zip(decode, chosen, strict=True)]
    assert sum(changed) == 2 * MAX_MET


def test_a_model_is_ready_when_a_pair_of_its_nodes_has_met_or_has_nobody_to_meet() -> None:
    decode = node_info("d0", Role.DECODE, control="tcp://h:1")
    later, prefill = node_info("d1", Role.DECODE, control="tcp://h:2"), node_at("tcp://h:3")
    nodes = registry(decode, prefill)
    nodes.handle(NodeHeartbeat(decode.boot_id, NodeLoad(), met=True), now=0.1)
    assert nodes.snapshot().pairings and nodes.snapshot().ready_models == []
    nodes.handle(NodeHeartbeat(prefill.boot_id, NodeLoad(), met=True), now=0.1)
    assert nodes.snapshot().ready_models == ["m"]
    nodes.handle(Register(later), now=0.2)
    assert nodes.snapshot().ready_models == ["m"], "who joins later makes nobody wait"
    nodes.handle(Deregister(decode.boot_id), now=0.3)
    assert nodes.snapshot().ready_models == []
    nodes.handle(Deregister(prefill.boot_id), now=0.4)
    assert nodes.snapshot().ready_models == ["m"], "it computes its prompts by itself"
    assert registry(node_at("tcp://h:1", Role.MIXED)).snapshot().ready_models == ["m"]


def test_a_node_that_was_a_prefill_node_leaves_decode_nodes_that_serve_alone() -> None:
    switched = node_at("tcp://127.0.0.1:1")
    nodes = registry(switched)
    nodes.handle(NodeHeartbeat(switched.boot_id, NodeLoad(), Role.DECODE), now=0.5)
    decode = msgspec.structs.replace(switched, role=Role.DECODE)
    assert nodes.snapshot().pairings["m"] == (Pairing(decode, ()),)


def test_a_role_that_the_node_cannot_have_changes_nothing() -> None:
    nodes = registry(NODE)
    with pytest.raises(MalformedFrame, match="control address"):
        nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(), Role.PREFILL), now=0.5)
    assert nodes.node(NODE.boot_id) == NODE


def test_only_a_node_that_fell_silent_is_lost_until_it_registers_again() -> None:
    told: list[NodeInfo] = []
    silent, leaves = node_info("silent", Role.DECODE), node_info("leaves", Role.DECODE)
    restarted = node_info("restarted", Role.DECODE, "http://127.0.0.1:5")
    nodes = registry(silent, leaves, restarted)
    nodes.on_loss(told.append)
    nodes.handle(Deregister(leaves.boot_id), now=0.1)
    nodes.handle(Register(node_info("new", Role.DECODE, restarted.url)), now=0.1)
    assert (nodes.lost, told) == ((), [])
    nodes.expire(now=3.05)
    assert (nodes.lost, told) == ((silent.boot_id,), [silent])
    nodes.handle(Register(silent), now=3.06)
    assert nodes.lost == ()
    nodes.handle(Deregister(silent.boot_id), now=3.07)
    assert (nodes.lost, told) == ((), [silent])


def test_of_nodes_that_are_lost_only_the_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_LOST", 2)
    several = [node_info(f"d{number}", Role.DECODE) for number in range(3)]
    nodes = registry(*several)
    nodes.expire(now=3.0)
    assert nodes.lost == tuple(node.boot_id for node in several[1:])


def test_time_in_which_the_proxy_did_not_listen_counts_against_no_node() -> None:
    nodes = registry(NODE)
    nodes.extend_leases(60.0)
    assert nodes.next_expiry() == 63.0
    assert nodes.expire(now=62.999) == ()
    assert [node.info for node in nodes.expire(now=63.0)] == [NODE]


def test_what_was_forgiven_once_is_not_forgiven_again() -> None:
    nodes = registry(NODE)
    nodes.extend_leases(60.0)
    late = node_info("d1", Role.DECODE)
    nodes.handle(Register(late), now=61.0)
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=62.0)
    assert [node.info for node in nodes.expire(now=64.0)] == [late]
    assert nodes.next_expiry() == 65.0
    assert nodes.snapshot().nodes[0].seen_s == 62.0


def test_a_heartbeat_brings_the_load_and_renews_the_lease() -> None:
    nodes = registry(NODE)
    answer = nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(running=3, waiting=1)), now=2.9)
    assert answer == Ack(NODE.boot_id, True)
    assert nodes.expire(now=3.5) == ()
    assert nodes.snapshot().nodes[0].load == NodeLoad(running=3, waiting=1)


def test_a_heartbeat_of_a_stranger_is_told_so() -> None:
    assert registry().handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=0.0) == Ack(NODE.boot_id, False)


def test_goodbye_removes_at_once_and_twice_is_harmless() -> None:
    nodes = registry(NODE)
    assert nodes.handle(Deregister(NODE.boot_id), now=0.1) is None
    assert nodes.handle(Deregister(NODE.boot_id), now=0.2) is None
    assert names(nodes) == []


def test_a_restarted_process_replaces_the_one_before_it_on_its_url() -> None:
    before = node_info("d0", Role.DECODE, "http://127.0.0.1:5")
    after = node_info("d0", Role.DECODE, "http://127.0.0.1:5")
    nodes = registry(before, after)
    assert [node.info.boot_id for node in nodes.snapshot().nodes] == [after.boot_id]
    assert nodes.handle(NodeHeartbeat(before.boot_id, NodeLoad()), now=0.1) == Ack(before.boot_id, False)


def test_registering_again_keeps_place_and_load() -> None:
    nodes = registry(NODE, node_info("d1", Role.DECODE))
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(running=2)), now=0.5)
    nodes.handle(Register(NODE), now=1.0)
    assert names(nodes) == ["d0", "d1"]
    assert nodes.snapshot().nodes[0].load == NodeLoad(running=2)


def test_an_unreachable_node_serves_again_after_its_next_heartbeat() -> None:
    nodes = registry(node_info("p0", Role.PREFILL), NODE)
    nodes.mark_unreachable(NODE.boot_id)
    assert nodes.snapshot().nodes[1].state is Reachability.UNREACHABLE
    assert nodes.snapshot().pairings == {}
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=0.5)
    assert list(nodes.snapshot().pairings) == ["m"]


def beats_left_out(nodes: Registry) -> int:
    """Returns how many heartbeats it takes until a node that refuses now, and meanwhile, serves again."""
    nodes.mark_unreachable(NODE.boot_id)
    for beats in range(1, 100):
        nodes.mark_unreachable(NODE.boot_id)
        nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=0.5)
        if nodes.snapshot().nodes[0].state is Reachability.SERVING:
            return beats
    raise AssertionError("it never serves again")


def test_a_node_that_refuses_again_and_again_is_left_out_for_longer_until_it_has_served_for_a_while() -> None:
    nodes = registry(NODE)
    assert [beats_left_out(nodes) for _ in range(5)] == [1, 2, 4, 8, 8]
    for _ in range(MAX_HELD_BEATS):
        nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=0.6)
    assert [beats_left_out(nodes) for _ in range(2)] == [1, 2]
    nodes.mark_unreachable(NODE.boot_id)
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(), draining=True), now=0.7)
    assert nodes.draining == {NODE.boot_id}, "the answers of a node that drains move whether or not it refuses"
    nodes.handle(Deregister(NODE.boot_id), now=0.8)
    assert not nodes._refusals


def test_of_many_nodes_that_are_lost_together_it_is_told_once() -> None:
    nodes = registry(*(node_info(f"d{number}", Role.DECODE) for number in range(40)))
    told: list[int] = []
    nodes.on_change(lambda: told.append(len(nodes.snapshot().nodes)))
    nodes.expire(now=10.0)
    nodes.expire(now=11.0)
    assert told == [0]


def test_marking_a_node_that_has_just_gone_does_nothing() -> None:
    nodes = registry()
    nodes.mark_unreachable(NODE.boot_id)
    assert names(nodes) == []


def test_a_snapshot_does_not_change_under_its_reader() -> None:
    nodes = registry(node_info("p0", Role.PREFILL), NODE)
    held = nodes.snapshot()
    nodes.handle(Deregister(NODE.boot_id), now=0.1)
    nodes.expire(now=100.0)
    assert len(held.nodes) == 2
    assert held.pairings["m"][0].decode is held.nodes[1].info
    assert nodes.snapshot().nodes == ()


def test_a_snapshot_is_taken_once_per_change() -> None:
    nodes = registry(NODE)
    assert nodes.snapshot() is nodes.snapshot()
    before = nodes.snapshot()
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad()), now=0.5)
    assert nodes.snapshot() is not before


@pytest.mark.parametrize(
    ("node", "names_the_field"),
    [
        (node_info("evil\nname", Role.DECODE), "name"),
        (node_info("d0", Role.DECODE, "file:///etc/passwd"), "URL"),
        (node_info("d0", Role.DECODE, model="a\x00b"), "model"),
        (node_info("d0", Role.DECODE, fingerprint="a\nb"), "fingerprint"),
        (node_info("d0", Role.DECODE, "http://a:1\r\nx: y"), "url"),
        *[(node_at("ipc:///run/other", role), "control") for role in Role],
        (node_at(""), "control"),
    ],
)
def test_unusable_registrations_are_refused(node: NodeInfo, names_the_field: str) -> None:
    nodes = registry(NODE)
    with pytest.raises(MalformedFrame, match=names_the_field):
        nodes.handle(Register(node), now=0.0)
    assert names(nodes) == ["d0"]


def test_a_full_registry_takes_no_strangers_but_keeps_its_own() -> None:
    nodes = Registry(HEARTBEAT_S, missed_heartbeats=3, max_nodes=1)
    assert nodes.handle(Register(NODE), now=0.0) == Ack(NODE.boot_id, True)
    stranger = node_info("d1", Role.DECODE)
    assert nodes.handle(Register(stranger), now=0.0) == Ack(stranger.boot_id, False)
    assert nodes.handle(Register(NODE), now=0.1) == Ack(NODE.boot_id, True)
    assert names(nodes) == ["d0"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "http://:80",
        "http://a b:80",
        "http://a:b",
        "http://a:65536",
        "http://a:0",
        "http://user@a:80",
        "http://a:80?x=y",
        "http://a:80/?x=y",
        "http://a:80/#x",
        "http://a:80/\u00e9",
        "http://\u00e9:80",
        "http://..:80",
        "http://" + "a" * 64 + ":80",
        "http://[::1:80",
        "http://[zz]:80",
        "ftp://a:80",
        "HTTP:a",
    ],
)
def test_a_url_to_which_no_request_can_be_sent_is_refused(url: str) -> None:
    nodes = registry(NODE)
    with pytest.raises(MalformedFrame, match="URL"):
        nodes.handle(Register(msgspec.structs.replace(node_info("d1", Role.DECODE), url=url)), now=0.0)
    assert names(nodes) == ["d0"]


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:80", "https://node-7.pods.svc.cluster.local.:443", "http://[::1]:80", "http://a_b:1/base/path",
     "http://[fe80::1%eth0]:80", "http://a"],
)  # fmt: skip
def test_every_url_to_which_requests_can_be_sent_is_taken(url: str) -> None:
    assert names(registry(node_info("d0", Role.DECODE, url))) == ["d0"]


@pytest.mark.parametrize("role", [Role.DECODE, Role.MIXED])
@pytest.mark.parametrize("control", ["", "tcp://10.0.0.3:8200"])
def test_a_node_that_answers_clients_may_have_a_control_address(role: Role, control: str) -> None:
    """Such nodes of older versions have none."""
    assert names(registry(node_at(control, role))) == ["p0"]


def test_a_boot_id_belongs_to_one_process_as_long_as_it_is_known() -> None:
    thief = node_info("thief", Role.DECODE, boot_id=NODE.boot_id)
    nodes = registry(NODE, node_info("d1", Role.DECODE, thief.url))
    before = nodes.snapshot()
    with pytest.raises(MalformedFrame, match="boot id of d0"):
        nodes.handle(Register(thief), now=0.1)
    assert nodes.snapshot() is before
    nodes.handle(Deregister(NODE.boot_id), now=0.2)
    assert nodes.handle(Register(thief), now=0.3) == Ack(NODE.boot_id, True)
    assert names(nodes) == ["thief"], "it took over its URL"


def test_a_full_registry_takes_no_more_and_loses_none() -> None:
    nodes = Registry(HEARTBEAT_S, missed_heartbeats=3, max_nodes=2)
    several = [node_info(f"d{number}", Role.DECODE) for number in range(4)]
    known = [nodes.handle(Register(node), now=0.0) for node in several]
    assert known == [Ack(node.boot_id, number < 2) for number, node in enumerate(several)]
    assert names(nodes) == ["d0", "d1"]
    assert nodes.handle(NodeHeartbeat(several[2].boot_id, NodeLoad()), now=0.1) == Ack(several[2].boot_id, False)
    nodes.handle(Deregister(several[0].boot_id), now=0.2)
    assert nodes.handle(Register(several[2]), now=0.3) == Ack(several[2].boot_id, True)


def test_what_is_remembered_of_nodes_that_were_there_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_PREFILLED", 4)
    nodes = registry()
    for number in range(50):
        node = node_info(f"p{number}", Role.PREFILL, fingerprint=f"f{number}")
        nodes.handle(Register(node), now=0.0)
        nodes.handle(Deregister(node.boot_id), now=0.0)
    assert nodes.prefilled == {f"f{number}" for number in range(46, 50)}
    assert not nodes._nodes
    assert not nodes._at
    assert not nodes._heard_s


def test_the_work_for_nodes_grows_as_their_number_does() -> None:
    """Registering them, and pairing each decode node with the prefill nodes that fit it."""

    roles = (Role.PREFILL, Role.DECODE)
    several = [node_info(f"n{number}", roles[number % 2], model=f"m{number % 64}") for number in range(MAX_NODES)]

    def register(count: int) -> None:
        nodes = Registry(HEARTBEAT_S, missed_heartbeats=3)
        for node in several[:count]:
            nodes.handle(Register(node), now=0.0)
        nodes.snapshot()

    few, many = (least_cpu_s(functools.partial(register, count)) for count in (512, MAX_NODES))
    assert many < few * 24, "8 times as many; 64 times if each is compared with all"


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, float("nan"), float("inf"), "1", True, None])
def test_a_load_or_capacity_that_is_no_count_is_no_message(value: object) -> None:
    for kind, numbers in (
        (NodeLoad, {"running": value}),
        (Capacity, {**msgspec.structs.asdict(NODE.capacity), "max_running": value}),
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(numbers), type=kind)


def test_decode_nodes_serve_on_when_the_last_prefill_node_is_gone() -> None:
    registry = Registry(heartbeat_s=1.0, missed_heartbeats=3)
    prefill, decode = node_info("p", Role.PREFILL), node_info("d", Role.DECODE)
    registry.handle(Register(decode), 0.0)
    assert "m" not in registry.snapshot().pairings
    registry.handle(Register(prefill), 0.0)
    assert registry.snapshot().pairings["m"] == (Pairing(decode, (prefill,)),)
    registry.handle(Deregister(prefill.boot_id), 1.0)
    assert registry.snapshot().pairings["m"] == (Pairing(decode, ()),)


def test_a_decode_node_of_other_weights_does_not_inherit_that() -> None:
    registry = Registry(heartbeat_s=1.0, missed_heartbeats=3)
    prefill = node_info("p", Role.PREFILL, fingerprint="old")
    registry.handle(Register(prefill), 0.0)
    registry.handle(Deregister(prefill.boot_id), 1.0)
    registry.handle(Register(node_info("d", Role.DECODE, fingerprint="new")), 1.0)
    assert "m" not in registry.snapshot().pairings


def test_a_node_that_drains_is_known_and_gets_no_work_until_it_serves_again() -> None:
    prefill, decode = node_info("p", Role.PREFILL), node_info("d", Role.DECODE)
    nodes = registry(prefill, decode, NODE)
    changes: list[frozenset[bytes]] = []
    nodes.on_change(lambda: changes.append(nodes.draining))
    nodes.on_change(lambda: None)
    nodes.handle(NodeHeartbeat(decode.boot_id, NodeLoad(), draining=True), now=1.0)
    assert changes == [nodes.draining] == [frozenset({decode.boot_id})]
    assert nodes.snapshot().nodes[1].state is Reachability.DRAINING
    assert nodes.snapshot().pairings["m"] == (Pairing(NODE, (prefill,)),)
    nodes.handle(NodeHeartbeat(prefill.boot_id, NodeLoad(), draining=True), now=1.0)
    assert nodes.snapshot().pairings["m"] == (Pairing(NODE, ()),)
    nodes.mark_unreachable(decode.boot_id)
    assert decode.boot_id in nodes.draining
    nodes.handle(Register(decode), now=1.5)
    assert nodes.snapshot().nodes[1].state is Reachability.DRAINING
    nodes.handle(NodeHeartbeat(prefill.boot_id, NodeLoad()), now=2.0)
    nodes.handle(Deregister(decode.boot_id), now=2.0)
    assert nodes.draining == frozenset()
    assert nodes.snapshot().pairings["m"] == (Pairing(NODE, (prefill,)),)


def test_the_live_proxies_are_those_that_the_best_connected_node_is_registered_at() -> None:
    own, second, third = b"o" * 16, b"s" * 16, b"t" * 16
    nodes = Registry(HEARTBEAT_S, missed_heartbeats=3, own_id=own)
    other = node_info("d1", Role.DECODE)
    assert nodes.snapshot().live_proxies == 1
    for info in (NODE, other):
        nodes.handle(Register(info), now=0.0)
    assert nodes.snapshot().live_proxies == 1, "nothing was said yet"
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(), proxies=(own, second)), now=1.0)
    nodes.handle(NodeHeartbeat(other.boot_id, NodeLoad(), proxies=(own,)), now=1.0)
    assert nodes.snapshot().live_proxies == 2, "a node that cannot reach a proxy hides it from nobody"
    nodes.handle(NodeHeartbeat(other.boot_id, NodeLoad(), proxies=(second, third, third)), now=1.5)
    assert nodes.snapshot().live_proxies == 3, (
        "this proxy lives, though the node has not named it, and each counts once"
    )
    nodes.handle(Register(other), now=1.6)
    assert nodes.snapshot().live_proxies == 3, "a registration says nothing of proxies"
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(), proxies=(own, second)), now=4.0)
    nodes.expire(now=4.7)
    assert nodes.snapshot().live_proxies == 2, "what a silent node said is forgotten with it"
    nodes.handle(NodeHeartbeat(NODE.boot_id, NodeLoad(), proxies=()), now=5.0)
    assert nodes.snapshot().live_proxies == 1, "a node of an older version names none"


def test_nodes_that_no_node_of_the_other_role_fits_are_counted() -> None:
    """An upgrade changes the model's weights at one role before the other: the proxy pairs no misfits, and says so."""
    old_decode, old_prefill = node_info("d0", Role.DECODE), node_info("p0", Role.PREFILL)
    new_decode = msgspec.structs.replace(node_info("d1", Role.DECODE), fingerprint="new")
    new_prefill = msgspec.structs.replace(node_info("p1", Role.PREFILL), fingerprint="new")
    mixed = msgspec.structs.replace(node_info("m0", Role.MIXED), fingerprint="third")
    for nodes, wanted in (
        ((old_decode, old_prefill, mixed), {}),
        ((old_decode, old_prefill, new_decode), {Role.DECODE: 1}),
        ((old_decode, new_prefill, new_decode), {Role.DECODE: 1}),
        ((old_decode, new_prefill), {Role.DECODE: 1, Role.PREFILL: 1}),
        ((old_decode, old_prefill, new_decode, new_prefill), {}),
    ):
        assert unpaired_roles(registry(*nodes).snapshot()) == wanted
