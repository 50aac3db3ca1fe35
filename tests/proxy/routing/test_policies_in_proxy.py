"""A running proxy gives each policy the prompts, the loads in heartbeats, and its own requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from pdserve.config import RegistryConfig, RoutingConfig, RoutingPolicy
from pdserve.wire.discovery import NodeLoad, Role
from tests.proxy.cluster import Cluster, cluster, eventually, node_info, proxy_config, registered
from tests.proxy.fake_node import Exchange, FakeNode

OFTEN_MS, NEVER_MS = 50, 60_000
BY_LOAD = [RoutingPolicy.LEAST_LOADED, RoutingPolicy.TWO_CHOICES]


@dataclass
class HoldingNode:
    """A node that holds each request whose prompt is ``hold`` until ``let_go`` is set."""

    served: int = 0
    held: int = 0
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, exchange: Exchange) -> None:
        if b"hold" in exchange.request.body:
            self.held += 1
            await self.let_go.wait()
        else:
            self.served += 1
        await exchange.answer(200, b"{}")


@dataclass
class Pair:
    running: Cluster
    holding: tuple[HoldingNode, HoldingNode]

    async def ask(self, prompt: str) -> None:
        async with self.running.http.post("/v1/completions", json={"prompt": prompt}) as response:
            assert response.status == 200
            await response.read()

    async def served(self, prompt: str, times: int) -> tuple[int, int]:
        """Returns how many of ``times`` requests, one after the other, went to each node."""
        before = [node.served for node in self.holding]
        for _ in range(times):
            await self.ask(prompt)
        one, two = (node.served - count for node, count in zip(self.holding, before, strict=True))
        return one, two


@asynccontextmanager
async def two_nodes(policy: RoutingPolicy, heartbeat_ms: int = NEVER_MS, busy: int = 0) -> AsyncIterator[Pair]:
    """Nodes whose heartbeats say that the first one has ``busy`` requests of other proxies, and the other none."""
    holding = HoldingNode(), HoldingNode()
    config = dataclasses.replace(
        proxy_config(),
        routing=RoutingConfig(policy),
        registry=RegistryConfig(control_port=0, heartbeat_ms=4 * heartbeat_ms),
    )
    async with FakeNode(holding[0]) as first, FakeNode(holding[1]) as second, cluster(config) as running:
        control = running.addresses.control
        nodes = [node_info(name, Role.MIXED, at.url, max_running=64) for name, at in (("1", first), ("2", second))]
        async with (
            registered(nodes[0], control, heartbeat_ms=heartbeat_ms, load=NodeLoad(running=busy)),
            registered(nodes[1], control, heartbeat_ms=heartbeat_ms, load=NodeLoad()),
        ):
            yield Pair(running, holding)


async def test_round_robin_goes_in_turn_whatever_is_asked() -> None:
    async with two_nodes(RoutingPolicy.ROUND_ROBIN, OFTEN_MS, busy=9) as pair:
        assert await pair.served("the same", 8) == (4, 4)


@pytest.mark.parametrize("policy", BY_LOAD)
async def test_a_policy_by_load_knows_the_requests_that_are_under_way_here(policy: RoutingPolicy) -> None:
    # No heartbeat comes meanwhile.
    async with two_nodes(policy) as pair:
        held = [asyncio.create_task(pair.ask("hold"))]
        await eventually(lambda: sum(node.held for node in pair.holding) == 1, "it is at a node")
        free = 1 - [node.held for node in pair.holding].index(1)
        assert (await pair.served("quick", 8))[free] == 8
        held.append(asyncio.create_task(pair.ask("hold")))
        await eventually(lambda: [node.held for node in pair.holding] == [1, 1], "one at each")
        for node in pair.holding:
            node.let_go.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize("policy", BY_LOAD)
async def test_a_policy_by_load_knows_what_heartbeats_tell(policy: RoutingPolicy) -> None:
    async with two_nodes(policy, OFTEN_MS, busy=50) as pair:

        async def heard() -> bool:
            async with pair.running.http.get("/instances") as response:
                return sorted(node["load"]["running"] for node in await response.json()) == [0, 50]

        await eventually(heard, "the first heartbeats")
        assert await pair.served("x", 8) == (0, 8)


async def test_prefix_affinity_knows_the_prompts() -> None:
    async with two_nodes(RoutingPolicy.PREFIX_AFFINITY) as pair:
        prompts = [f"conversation {number}: " + "and so on, " * 100 for number in range(24)]
        places = [await pair.served(prompt, 4) for prompt in prompts]
        assert set(places) == {(4, 0), (0, 4)}, "each prompt has its node, and not all the same"
