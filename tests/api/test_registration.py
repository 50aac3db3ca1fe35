"""What a node tells one proxy, and when: without sockets. (With them: ``tests/proxy/test_discovery.py``.)"""

from __future__ import annotations

import asyncio

import pytest

from pdserve.api.proxy_link import MISSED_ACKS, Link, LinkState
from pdserve.api.registration import Registration
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Ack, Capacity, Heartbeat, Load, NodeInfo, Register, Role
from pdserve.wire.ids import new_id

NODE = NodeInfo(
    name="d0",
    boot_id=new_id(),
    role=Role.DECODE,
    url="http://127.0.0.1:1",
    control="",
    model="m",
    fingerprint="f",
    capacity=Capacity(max_running=1, num_blocks=1, block_size=1, max_model_len=1),
)
KNOWN = Ack(NODE.boot_id, True)
UNKNOWN = Ack(NODE.boot_id, False)


def link() -> Link:
    return Link(NODE, heartbeat_s=1.0, load=lambda: Load(running=7), now=0.0)


def test_it_registers_at_once_and_again_every_interval_until_acknowledged() -> None:
    to_proxy = link()
    assert to_proxy.tick(0.0) == Register(NODE)
    assert to_proxy.tick(0.5) is None
    assert to_proxy.tick(1.0) == Register(NODE)
    to_proxy.acknowledged(KNOWN, 1.1)
    assert to_proxy.state is LinkState.REGISTERED
    assert to_proxy.tick(1.5) is None
    assert to_proxy.tick(2.0) == Heartbeat(NODE.boot_id, Load(running=7))


def test_a_proxy_that_does_not_know_it_is_told_again_at_once() -> None:
    to_proxy = link()
    to_proxy.tick(0.0)
    to_proxy.acknowledged(KNOWN, 0.1)
    to_proxy.tick(1.0)
    to_proxy.acknowledged(UNKNOWN, 1.2)
    assert to_proxy.state is LinkState.ANNOUNCING
    assert to_proxy.due_s == 1.2
    assert to_proxy.tick(1.2) == Register(NODE)


def test_a_proxy_that_refuses_every_registration_is_not_flooded() -> None:
    to_proxy = link()
    to_proxy.tick(0.0)
    to_proxy.acknowledged(UNKNOWN, 0.1)
    assert to_proxy.tick(0.1) is None
    assert to_proxy.tick(1.0) == Register(NODE)


def test_after_silence_it_counts_as_unregistered() -> None:
    to_proxy = link()
    to_proxy.tick(0.0)
    to_proxy.acknowledged(KNOWN, 0.0)
    for second in range(1, MISSED_ACKS):
        assert isinstance(to_proxy.tick(float(second)), Heartbeat)
    assert to_proxy.tick(float(MISSED_ACKS)) == Register(NODE)
    assert to_proxy.state is LinkState.ANNOUNCING


def test_an_answer_about_an_earlier_boot_changes_nothing() -> None:
    to_proxy = link()
    to_proxy.tick(0.0)
    to_proxy.acknowledged(Ack(new_id(), True), 0.1)
    assert to_proxy.state is LinkState.ANNOUNCING


def test_a_new_connection_makes_an_unsent_message_due() -> None:
    to_proxy = link()
    to_proxy.tick(0.0)
    to_proxy.unsent(0.2)
    assert to_proxy.tick(0.2) == Register(NODE)


def test_an_address_that_is_none_is_a_configuration_error() -> None:
    registration = Registration(NODE, ("tcp//nonsense",), b"s", 1000, Load)
    with pytest.raises(ConfigError, match="tcp//nonsense"):
        asyncio.run(registration.run())


def test_the_same_proxy_named_twice_is_one() -> None:
    registration = Registration(NODE, ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1"), b"s", 1000, Load)
    assert list(registration.registered) == ["tcp://127.0.0.1:1"]


def test_it_stops_in_time_while_its_proxy_is_down() -> None:
    async def scenario() -> None:
        registration = Registration(NODE, ("tcp://127.0.0.1:1",), b"s", 20, Load)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await registration.run()
        assert not registration.registered["tcp://127.0.0.1:1"].is_set()

    asyncio.run(scenario())
