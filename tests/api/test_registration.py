"""Tests without sockets what a node tells one proxy, and when.

``tests/proxy/registry/test_discovery.py`` tests it with sockets.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdserve.api.node.proxy_link import JITTER, MISSED_ACKS, ProxyLink, RegistrationState
from pdserve.api.node.registration import Registration
from pdserve.control.frame import Opened, Opener, Purpose, Sealer
from pdserve.errors import ConfigError, WrongReceiver
from pdserve.wire.discovery import (
    Ack,
    Capacity,
    FromProxy,
    NodeHeartbeat,
    NodeHello,
    NodeInfo,
    NodeLoad,
    ProxyRefusal,
    ProxyWelcome,
    Register,
    Role,
)
from pdserve.wire.ids import new_id
from pdserve.wire.version import SPOKEN

NODE = NodeInfo(
    protocol=SPOKEN.newest,
    oldest_protocol=SPOKEN.oldest,
    name="d0",
    boot_id=new_id(),
    role=Role.DECODE,
    url="http://127.0.0.1:1",
    control="",
    model="m",
    fingerprint="f",
    capacity=Capacity(max_running=1, num_blocks=1, block_size=1, max_model_len=1),
)
PROXY = new_id()
HEARTBEAT = NodeHeartbeat(NODE.boot_id, NodeLoad(running=7))
REGISTER = Register(NODE)


class Proxy:
    """The proxy's end of a link."""

    def __init__(self, link: ProxyLink, boot_id: bytes = PROXY) -> None:
        self.link = link
        self.boot_id = boot_id

    def send(self, message: FromProxy, now: float, *, named: bool = True) -> None:
        self.link.answered(Opened(message, self.boot_id, named), now)

    def ack(self, known: bool, now: float, *, named: bool = True) -> None:
        self.send(Ack(NODE.boot_id, known), now, named=named)

    def welcome(self, hello: NodeHello, now: float, heartbeat_ms: int = 1000) -> None:
        self.send(ProxyWelcome(NODE.boot_id, hello.nonce, SPOKEN.newest, SPOKEN.oldest, heartbeat_ms), now)

    def register(self, now: float, heartbeat_ms: int = 1000) -> None:
        self.welcome(greeting(self.link, now), now, heartbeat_ms)
        assert self.link.tick(now) == (REGISTER,)
        self.ack(True, now)
        assert self.link.state is RegistrationState.REGISTERED


@pytest.fixture
def link() -> ProxyLink:
    """Returns a link without jitter, so that times are exact."""
    return linked(lambda: 0.0)


def linked(chance: Callable[[], float] | None, node: NodeInfo = NODE) -> ProxyLink:
    return ProxyLink(node, heartbeat_s=1.0, load=lambda: NodeLoad(running=7), now=0.0, chance=chance)


@pytest.fixture
def proxy(link: ProxyLink) -> Proxy:
    return Proxy(link)


def greeting(link: ProxyLink, now: float) -> NodeHello:
    """Returns the greeting that the link sends now."""
    (hello,) = link.tick(now)
    assert isinstance(hello, NodeHello)
    return hello


def test_it_greets_every_interval_and_registers_once_it_knows_the_proxy(link: ProxyLink, proxy: Proxy) -> None:
    first = greeting(link, 0.0)
    assert link.tick(0.5) == ()
    second = greeting(link, 1.0)
    assert second.nonce != first.nonce
    proxy.welcome(second, 1.1)
    assert link.tick(1.1) == (REGISTER,)
    proxy.ack(True, 1.2)
    assert link.state is RegistrationState.REGISTERED
    assert link.tick(1.5) == ()
    assert link.tick(2.1) == (HEARTBEAT,)


def test_the_proxy_says_how_often_it_wants_to_hear_of_it(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0, heartbeat_ms=200)
    assert link.tick(0.2) == (HEARTBEAT,)
    assert link.tick(0.3) == ()
    proxy.ack(True, 0.35)
    assert link.tick(0.4) == (HEARTBEAT,)
    assert [len(link.tick(at)) for at in (0.61, 0.82)] == [1, 1]
    assert greeting(link, 1.03), "it greets after three of its intervals"


def test_nodes_that_register_together_do_not_beat_together_and_none_beats_late() -> None:
    firsts, gaps = [], []
    for _ in range(100):
        node = msgspec.structs.replace(NODE, boot_id=new_id())
        link = linked(None, node)
        (hello,) = link.tick(0.0)
        assert isinstance(hello, NodeHello)
        welcome = ProxyWelcome(node.boot_id, hello.nonce, SPOKEN.newest, SPOKEN.oldest, 1000)
        link.answered(Opened(welcome, PROXY, True), 0.0)
        assert len(link.tick(0.0)) == 1
        beats = [0.0]
        for _ in range(4):
            link.answered(Opened(Ack(node.boot_id, True), PROXY, True), beats[-1])
            beats.append(link.due_s)
            assert isinstance(link.tick(beats[-1])[0], NodeHeartbeat)
        firsts.append(beats[1])
        gaps += [later - earlier for earlier, later in itertools.pairwise(beats[1:])]
    firsts.sort()
    assert all(0.0 <= at_s <= 1.0 for at_s in firsts)
    assert max(later - earlier for earlier, later in itertools.pairwise([0.0, *firsts, 1.0])) < 0.3
    assert all(1.0 - JITTER <= gap_s <= 1.0 + 1e-9 for gap_s in gaps)
    assert len({round(gap_s, 6) for gap_s in gaps}) > len(gaps) / 2


def test_a_drain_is_told_at_once_and_in_every_heartbeat(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    assert link.tick(0.5) == ()
    link.drain(0.6)
    draining = msgspec.structs.replace(HEARTBEAT, draining=True)
    assert link.tick(0.6) == (draining,)
    link.drain(0.7)
    assert link.tick(0.7) == ()
    proxy.ack(True, 0.7)
    assert link.tick(1.6) == (draining,)


@pytest.mark.parametrize("new", [{"met": True}, {"role": Role.MIXED}], ids=str)
def test_what_is_new_before_the_registration_is_answered_is_told_at_once_after_it(
    link: ProxyLink, proxy: Proxy, new: dict[str, Any]
) -> None:
    """A proxy names the nodes to meet before it answers the registration that it answers with them."""
    proxy.welcome(greeting(link, 0.0), 0.0)
    assert link.tick(0.0) == (REGISTER,)
    if "met" in new:
        link.met(0.1)
    else:
        link.announce(new["role"], 0.1)
    assert link.tick(0.1) == ()
    proxy.ack(True, 0.2)
    assert link.tick(0.2) == (msgspec.structs.replace(HEARTBEAT, **new),)


def test_a_node_that_registers_again_while_it_drains_says_so_at_once(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    link.drain(0.6)
    draining = msgspec.structs.replace(HEARTBEAT, draining=True)
    assert link.tick(0.6) == (draining,)
    proxy.ack(False, 0.7)
    proxy.register(0.8)
    assert link.tick(0.8) == (draining,)
    proxy.ack(True, 0.9)
    assert link.tick(0.9) == ()


def test_only_the_answer_to_its_latest_greeting_names_the_proxy(link: ProxyLink, proxy: Proxy) -> None:
    late = greeting(link, 0.0)
    hello = greeting(link, 1.0)
    proxy.welcome(late, 1.1)
    proxy.send(ProxyWelcome(new_id(), hello.nonce, SPOKEN.newest, SPOKEN.oldest, 1000), 1.1)
    proxy.send(ProxyWelcome(NODE.boot_id, hello.nonce, SPOKEN.newest, SPOKEN.oldest, 1000), 1.1, named=False)
    assert link.state is RegistrationState.GREETING
    proxy.welcome(hello, 1.2)
    assert link.tick(1.2) == (REGISTER,)
    proxy.welcome(hello, 1.3)
    assert link.tick(1.3) == ()


def test_what_it_says_after_the_greeting_is_for_that_proxy_alone(link: ProxyLink, proxy: Proxy) -> None:
    sealer = Sealer(b"s", Purpose.DISCOVERY, NODE.boot_id)
    proxy.register(0.0)
    frame = link.seal(sealer, HEARTBEAT)
    for receiver, there in ((PROXY, HEARTBEAT), (new_id(), None)):
        opener: Opener[NodeHeartbeat] = Opener(b"s", Purpose.DISCOVERY, NodeHeartbeat, receiver=receiver)
        if there is None:
            with pytest.raises(WrongReceiver):
                opener.open(frame)
        else:
            assert opener.open(frame) == there


def test_a_proxy_that_does_not_know_it_is_greeted_at_once(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    link.tick(1.0)
    proxy.ack(False, 1.2)
    assert link.due_s == 1.2
    greeting(link, 1.2)


def test_a_proxy_in_the_place_of_another_is_greeted_at_once(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    Proxy(link, new_id()).ack(False, 0.2)
    assert link.state is RegistrationState.GREETING
    greeting(link, 0.2)


def test_another_proxys_acknowledgement_counts_for_nothing(link: ProxyLink, proxy: Proxy) -> None:
    other = Proxy(link, new_id())
    proxy.welcome(greeting(link, 0.0), 0.0)
    link.tick(0.0)
    other.ack(True, 0.1)
    proxy.ack(True, 0.1, named=False)
    assert link.state is not RegistrationState.REGISTERED
    proxy.ack(True, 0.2)
    for second in range(1, MISSED_ACKS):
        other.ack(True, second)
        assert link.tick(second + 0.1) == (HEARTBEAT,)
    greeting(link, MISSED_ACKS + 0.2)


def test_a_proxy_that_refuses_every_registration_is_not_flooded(link: ProxyLink, proxy: Proxy) -> None:
    proxy.welcome(greeting(link, 0.0), 0.0)
    link.tick(0.0)
    proxy.ack(False, 0.1)
    assert link.tick(0.1) == ()
    greeting(link, 1.0)


def test_after_silence_it_counts_as_unregistered(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    for second in range(1, MISSED_ACKS):
        assert link.tick(float(second)) == (HEARTBEAT,)
    greeting(link, float(MISSED_ACKS))
    assert link.state is RegistrationState.GREETING


def test_a_node_that_was_stopped_does_not_take_its_proxy_for_silent(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    assert link.tick(1.0) == (HEARTBEAT,)
    proxy.ack(True, 1.0)
    assert link.tick(60.0) == (HEARTBEAT,), "nothing was sent for a minute, so nothing could be answered"
    proxy.ack(True, 60.1)
    assert link.state is RegistrationState.REGISTERED


def test_an_answer_about_an_earlier_boot_changes_nothing(link: ProxyLink, proxy: Proxy) -> None:
    greeting(link, 0.0)
    proxy.send(Ack(new_id(), True), 0.1)
    assert link.state is RegistrationState.GREETING


def test_a_new_connection_makes_an_unsent_message_due(link: ProxyLink) -> None:
    greeting(link, 0.0)
    link.unsent(0.2)
    greeting(link, 0.2)


def test_a_refusal_is_kept_until_the_proxy_takes_it(link: ProxyLink, proxy: Proxy) -> None:
    greeting(link, 0.0)
    proxy.send(ProxyRefusal(NODE.boot_id, "the url must be http://"), 0.1)
    assert link.refusal == "the url must be http://"
    proxy.register(1.0)
    assert link.refusal == ""


def test_a_proxy_that_speaks_no_common_version_is_named_and_not_registered_at(link: ProxyLink, proxy: Proxy) -> None:
    hello = greeting(link, 0.0)
    proxy.send(ProxyWelcome(NODE.boot_id, hello.nonce, SPOKEN.newest + 2, SPOKEN.newest + 1, 1000), 0.1)
    assert link.refusal.startswith(f"protocol is {SPOKEN} here and {SPOKEN.newest + 1} to {SPOKEN.newest + 2} there")
    assert link.tick(0.1) == ()


def test_a_proxy_of_a_newer_minor_version_is_registered_at(link: ProxyLink, proxy: Proxy) -> None:
    hello = greeting(link, 0.0)
    proxy.send(ProxyWelcome(NODE.boot_id, hello.nonce, SPOKEN.newest + 1, SPOKEN.newest, 1000), 0.1)
    assert link.tick(0.1) == (REGISTER,)


def test_a_new_role_is_told_at_once_and_known_when_the_proxy_says_so(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    link.announce(Role.PREFILL, 0.2)
    assert link.tick(0.2) == (NodeHeartbeat(NODE.boot_id, NodeLoad(running=7), Role.PREFILL),)
    proxy.ack(True, 0.21)
    known = [link.known_role]
    proxy.send(Ack(NODE.boot_id, True, Role.PREFILL), 0.22)
    known.append(link.known_role)
    assert known == [None, Role.PREFILL], "the first one answered an earlier heartbeat"
    assert link.tick(1.3) == (NodeHeartbeat(NODE.boot_id, NodeLoad(running=7), Role.PREFILL),), "later ones name it too"
    link.announce(Role.PREFILL, 1.4)
    assert (link.tick(1.4), link.known_role) == ((), Role.PREFILL), "the proxy has it already"


def test_a_node_that_is_registered_again_has_its_present_role(link: ProxyLink, proxy: Proxy) -> None:
    proxy.register(0.0)
    link.announce(Role.PREFILL, 0.2)
    link.tick(0.2)
    proxy.ack(False, 0.3)
    proxy.welcome(greeting(link, 0.3), 0.4)
    (register,) = link.tick(0.4)
    assert isinstance(register, Register)
    assert register.node.role is Role.PREFILL


async def test_an_address_that_is_none_is_a_configuration_error() -> None:
    registration = Registration(NODE, ("tcp//nonsense",), b"s", 1000, NodeLoad)
    with pytest.raises(ConfigError, match="tcp//nonsense"):
        await registration.run()


def test_the_same_proxy_named_twice_is_one() -> None:
    registration = Registration(NODE, ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1"), b"s", 1000, NodeLoad)
    assert list(registration.registered) == ["tcp://127.0.0.1:1"]


async def test_it_stops_in_time_while_its_proxy_is_down() -> None:
    registration = Registration(NODE, ("tcp://127.0.0.1:1",), b"s", 20, NodeLoad)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await registration.run()
    assert not registration.registered["tcp://127.0.0.1:1"].is_set()
