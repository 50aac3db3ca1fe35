"""Tests that a living peer is lost in the end if it does not finish a send, or takes nothing that is sent to it.

Time and network are those of ``test_any_order``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdserve_kvtransfer.pieces import index_of
from tests.kvtransfer.transfers.test_any_order import LEASE_S, Asked, Node, World, world

LAST = 2
"""The index of the block that does not land."""
BOUND_S = 3 * LEASE_S


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with world(1, 1, monkeypatch) as world_:
        yield world_


def live(made: World, seconds: float, *never_give_up: Node) -> None:
    """Lets time pass, in which engines ping and hear each other. Leases of those that never give up do not expire."""
    end = made.now + seconds
    while made.now < end:
        made.now = min(made.now + LEASE_S / 6, end)
        for node in never_give_up:
            node.side.renew_leases(made.now)
        for pick in (0, 1, 2, 3) * 3:
            made.net.deliver_up(pick)
            made.turn(pick)
            made.net.deliver_down(pick)


def fetch(made: World, pick: int) -> Asked:
    made.fetch(pick)
    live(made, 0.01)
    return list(made.asked.values())[-1]


def stick(made: World) -> Asked:
    """Returns a cancelled fetch of decode engine 0, whose last block is accepted and does not land."""
    asked = fetch(made, 0)
    at = len(made.pushed) - 1
    link = made.nodes[0].transports[0].links[-1]
    link.holds = lambda label: index_of(label) == LAST
    for _ in range(LAST + 1):
        made.push(at)
    live(made, 0.01)
    made.cancel(at)
    live(made, 0.01)
    assert asked.quarantined == {asked.order.block_ids[LAST]}
    return asked


def lands(made: World, asked: Asked) -> None:
    at = list(made.pushed).index(asked.order.transfer_id)
    for _ in range(4):
        made.push(at)
        live(made, 0.01)
    assert asked.ended
    assert not asked.quarantined


def test_a_prefill_engine_that_never_finishes_a_block_is_lost_and_the_block_is_free(made: World) -> None:
    other = fetch(made, 2)
    asked = stick(made)
    decode, prefill = made.nodes[0], made.nodes[2]
    live(made, BOUND_S * 0.9, prefill)
    assert asked.quarantined, "an honest peer has some time"
    live(made, BOUND_S * 0.2, prefill)
    assert not asked.quarantined
    assert decode.local.stats.quarantined_blocks == 0
    assert decode.local.stats.leases_expired_receiving == 0
    lands(made, other)
    lands(made, fetch(made, 0))
    made.settle()
    made.check()
    assert decode.local.stats.transfers_received == 2


def test_a_decode_engine_that_never_takes_a_block_is_lost_and_the_block_is_free(made: World) -> None:
    other = fetch(made, 1)
    asked = stick(made)
    decode, prefill = made.nodes[0], made.nodes[2]
    live(made, BOUND_S * 0.9, decode)
    assert not made.pushed[asked.order.transfer_id].ended, "an honest peer has some time"
    live(made, BOUND_S * 0.2, decode)
    assert made.pushed[asked.order.transfer_id].ended
    assert prefill.local.stats.leases_expired_sending == 0
    lands(made, other)
    assert prefill.local.stats.transfers_sent == 1
    made.settle()
    made.check()


def test_while_other_blocks_move_on_the_link_a_slow_peer_is_not_lost(made: World) -> None:
    asked = stick(made)
    for _ in range(3):
        fetch(made, 0)
        at = len(made.pushed) - 1
        for _ in range(LAST):
            made.push(at)
            live(made, BOUND_S * 0.8)
            assert asked.quarantined
    assert not made.pushed[asked.order.transfer_id].ended
    live(made, BOUND_S * 0.3)
    assert not asked.quarantined
    assert made.pushed[asked.order.transfer_id].ended


def test_time_in_which_this_process_did_not_listen_does_not_count(made: World) -> None:
    asked = stick(made)
    live(made, 3 * BOUND_S, made.nodes[0], made.nodes[2])
    assert asked.quarantined
    assert not made.pushed[asked.order.transfer_id].ended


def test_blocks_that_wait_here_to_be_read_are_not_given_up(made: World) -> None:
    """A process that was stopped has not read what came meanwhile."""
    asked = fetch(made, 0)
    decode, at = made.nodes[0], len(made.pushed) - 1
    link = decode.transports[0].links[-1]
    link.holds = lambda label: index_of(label) == LAST
    for _ in range(4):
        made.push(at)
        live(made, 0.01)
    live(made, 3 * BOUND_S, decode, made.nodes[2])
    link.holds = lambda label: False
    live(made, 0.1)
    assert asked.ended
    assert decode.local.stats.transfers_received == 1


def test_a_block_that_lands_in_time_keeps_the_link(made: World) -> None:
    asked = stick(made)
    live(made, BOUND_S * 0.9)
    (link,) = made.nodes[0].transports[0].links
    link.holds = lambda label: False
    live(made, BOUND_S * 2)
    assert not asked.quarantined
    assert made.pushed[asked.order.transfer_id].ended
    assert made.links() == [*made.nodes[0].transports[0].links, *made.nodes[2].transports[0].links]
    lands(made, fetch(made, 0))
