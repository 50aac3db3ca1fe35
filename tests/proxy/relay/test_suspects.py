"""A request with which two nodes were lost is refused for a while: it may be what killed them."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.config import RelayConfig
from pdserve.errors import InvalidRequest
from pdserve_proxy.relay.suspects import MAX_SUSPECTS, Suspects
from tests.proxy.cluster import cluster, error_of, proxy_config
from tests.proxy.fake_node import Behaviour
from tests.proxy.relay.journaling_nodes import complete, die_at_once, dies_at, nodes


def test_only_the_same_request_is_refused_and_only_for_a_while() -> None:
    now = 100.0
    suspects = Suspects(60.0, lambda: now)
    suspects.add("/v1/completions", b"{}", "first", "decode-1")
    with pytest.raises(InvalidRequest, match=r"two nodes were lost with the request first, .*another 60 s") as caught:
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
