"""A request with which two nodes were lost is refused for a while: it may be what killed them."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.config import RelayConfig
from pdserve.errors import InvalidRequest, PrefillLost
from pdserve_proxy.relay.suspects import MAX_SUSPECTS, Suspects
from tests.proxy.cluster import cluster, error_of, proxy_config
from tests.proxy.fake_node import Behaviour, Exchange
from tests.proxy.relay.journaling_nodes import complete, die_at_once, dies_at, nodes, ticket_in


def test_only_the_same_request_is_refused_and_only_for_a_while() -> None:
    now = 100.0
    suspects = Suspects(60.0, lambda: now)
    told = suspects.add("/v1/completions", b"{}", "first", "node a died; node b died")
    assert "two nodes were lost with this request, first: node a died; node b died" in told.message
    with pytest.raises(InvalidRequest, match=r"the request first, .*another 60 s, .*: node a died; node b") as caught:
        suspects.check("/v1/completions", b"{}")
    assert caught.value.code == "suspected_request"
    suspects.check("/v1/completions", b'{"seed": 1}')
    suspects.check("/v1/chat/completions", b"{}")
    now = 160.0
    suspects.check("/v1/completions", b"{}")


def test_the_list_is_bounded_and_can_be_off() -> None:
    suspects = Suspects(60.0, lambda: 0.0)
    for number in range(MAX_SUSPECTS + 1):
        suspects.add("/v1/completions", str(number).encode(), "id", "node")
    suspects.check("/v1/completions", b"0")
    with pytest.raises(InvalidRequest):
        suspects.check("/v1/completions", b"1")
    off = Suspects(0.0, lambda: 0.0)
    off.add("/v1/completions", b"", "id", "node")
    off.check("/v1/completions", b"")


@pytest.mark.parametrize("behaviours", [[die_at_once, die_at_once], [dies_at(2), die_at_once]])
async def test_a_request_that_kills_nodes_takes_two_along_and_no_third(behaviours: list[Behaviour]) -> None:
    async with cluster() as running, nodes(running, *behaviours, *[complete] * 8, count=4) as found:
        async with running.chat(stream=True) as response:
            assert b"[DONE]" not in await response.read()
        assert len(found.asked) == 2
        async with running.chat(stream=True) as response:
            assert response.status == 400
            error = error_of(await response.read())
        assert error["code"] == "suspected_request"
        assert len(found.asked) == 2
        async with running.chat(stream=True, seed=7) as response:
            assert b"[DONE]" in await response.read()


async def test_a_request_that_lost_one_node_may_come_again() -> None:
    config = dataclasses.replace(proxy_config(), relay=RelayConfig(resume_wait_s=0.0))
    async with cluster(config) as running, nodes(running, die_at_once, *[complete] * 4, count=2) as found:
        for _ in range(2):
            async with running.chat(stream=True) as response:
                assert b"[DONE]" in await response.read()
        assert len(found.asked) == 3


async def give_back(exchange: Exchange) -> None:
    """Does what a decode node does whose prefill node is lost with the request."""
    assert ticket_in(exchange.request).gives_back
    error = b'{"error": {"message": "prefill node p was lost with this request", "type": "server_error"}}'
    await exchange.answer(PrefillLost.status, error, connection="close")


async def die_after_the_prefill_node(exchange: Exchange) -> None:
    exchange.die()


@pytest.mark.parametrize("second", [give_back, die_after_the_prefill_node])
async def test_a_prefill_node_counts_among_the_two(second: Behaviour) -> None:
    """It is the decode node that says so, and the same node may be asked again: it is not lost."""
    async with cluster() as running, nodes(running, give_back, second, *[complete] * 4, count=1) as found:
        async with running.chat(stream=True) as response:
            assert response.status == 502
            error = error_of(await response.read())
        assert error["code"] == "upstream_lost"
        assert str(error["message"]).count("prefill node p was lost with this request") == (
            2 if second is give_back else 1
        )
        assert len(found.asked) == 2
        async with running.chat(stream=True) as response:
            assert response.status == 400
            assert "prefill node p" in str(error_of(await response.read())["message"])
        assert len(found.asked) == 2


async def test_a_request_whose_prefill_node_is_lost_is_asked_for_again_at_the_same_node() -> None:
    async with cluster() as running, nodes(running, give_back, complete, count=1) as found:
        async with running.chat(stream=True) as response:
            assert b"[DONE]" in await response.read()
        assert len(found.asked) == 2


async def test_a_stream_that_goes_on_survives_the_loss_of_one_prefill_node_and_not_of_two() -> None:
    for back, whole in ((1, True), (2, False)):
        behaviours = [dies_at(2), *[give_back] * back, complete]
        async with cluster() as running, nodes(running, *behaviours, *[complete] * 4, count=4) as found:
            async with running.chat(stream=True) as response:
                assert (b"[DONE]" in await response.read()) is whole
            assert len(found.asked) == 3
