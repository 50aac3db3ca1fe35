"""``--roles auto`` commands nodes by the loads that they tell, over real sockets; only the loads are made up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from pdserve.api.node.commands import CommandGate
from pdserve.api.node.registration import Registration
from pdserve.config import RoleChoice, RolesConfig, WorkersConfig
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, CommandResult, SetRole
from pdserve.wire.discovery import NodeInfo, NodeLoad, Role
from tests.proxy.cluster import (
    HEARTBEAT_MS,
    SECRET,
    Cluster,
    cancelled,
    cluster,
    eventually,
    metric,
    node_info,
    proxy_config,
)
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode

QUEUED = NodeLoad(running=1, queue_s=4.0)
SLOW = NodeLoad(running=4, step_s=0.2)
QUICK = NodeLoad(running=1, step_s=0.01)
AUTO = RolesConfig(RoleChoice.AUTO, interval_ms=20, looks=3, rest_s=0.2)


class SwitchingNode:
    """A node whose load a test sets. It carries out commands as nodes do, or fails at them in its own way."""

    def __init__(self, name: str, role: Role, load: NodeLoad, *, fails: Behaviour | None = None) -> None:
        self.name = name
        self.role = role
        self.load = load
        self.fails = fails
        self.commands: list[SetRole] = []
        self._info = msgspec.structs.replace(node_info(name, role), control="tcp://127.0.0.1:1")
        self._gate = CommandGate(SECRET, self._info.boot_id)

    @asynccontextmanager
    async def registered(self, control: str) -> AsyncIterator[None]:
        async with FakeNode(self._answer) as server:
            info: NodeInfo = msgspec.structs.replace(self._info, url=server.url)
            self.server = server
            self._registration = Registration(info, (control,), SECRET, HEARTBEAT_MS, lambda: self.load)
            task = asyncio.create_task(self._registration.run())
            try:
                await self._registration.registered[control].wait()
                yield
            finally:
                await cancelled(task)

    async def _answer(self, exchange: Exchange) -> None:
        assert exchange.request.path == COMMAND_PATH
        command = self._gate.admit(exchange.request.headers[COMMAND_HEADER])
        assert isinstance(command, SetRole)
        self.commands.append(command)
        if self.fails is not None:
            await self.fails(exchange)
            return
        before, self.role = self.role, command.role
        uninformed = await self._registration.announce(command.role, 5.0)
        await exchange.answer(200, msgspec.json.encode(CommandResult(command.role, before, False, uninformed)))


@asynccontextmanager
async def controlled(nodes: list[SwitchingNode], workers: int = 1) -> AsyncIterator[Cluster]:
    """Runs a proxy with ``--roles auto`` and these nodes."""
    config = dataclasses.replace(proxy_config(), roles=AUTO, workers=WorkersConfig(workers))
    async with cluster(config) as running:
        for node in nodes:
            await running.nodes.enter_async_context(node.registered(running.addresses.control))

        async def loads_are_known() -> bool:
            async with running.http.get("/instances") as response:
                known = {entry["name"]: entry["load"]["running"] for entry in await response.json()}
            return known == {node.name: node.load.running for node in nodes}

        await eventually(loads_are_known, "every node has told its load")
        yield running


async def roles(http: aiohttp.ClientSession) -> dict[str, str]:
    async with http.get("/instances") as response:
        return {entry["name"]: entry["role"] for entry in await response.json()}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.integration)])
async def test_a_node_goes_where_it_is_needed_and_comes_back(workers: int) -> None:
    prefill, first, second = nodes = [
        SwitchingNode("p0", Role.PREFILL, NodeLoad()),
        SwitchingNode("d0", Role.DECODE, QUICK),
        SwitchingNode("d1", Role.DECODE, NodeLoad(running=2, step_s=0.01)),
    ]
    async with controlled(nodes, workers) as running:
        # Not before: the proxy might choose while it knows the load of one decode node only.
        prefill.load = QUEUED

        async def are(**wanted: str) -> None:
            async def so() -> bool:
                return await roles(running.http) == wanted

            await eventually(so, f"roles are {wanted}")

        await are(p0="prefill", d0="prefill", d1="decode")
        prefill.load, first.load, second.load = NodeLoad(running=1, queue_s=0.1), NodeLoad(), SLOW
        await are(p0="prefill", d0="decode", d1="decode")
        first.load = second.load = QUICK
        pressure = 'pdserve_proxy_role_pressure{fingerprint="f",model="m",side="%s"}'

        async def calm() -> bool:
            return 0 < await metric(running, pressure % "answers") < 0.12

        await eventually(calm, "several looks at roomy nodes")
        assert [len(node.commands) for node in nodes] == [0, 2, 0]
        assert await metric(running, 'pdserve_proxy_role_switches_total{outcome="done",role="prefill"}') == 1
        assert await metric(running, 'pdserve_proxy_role_switches_total{outcome="done",role="decode"}') == 1
        assert 0 < await metric(running, pressure % "prompts") < 0.6


async def refuse(exchange: Exchange) -> None:
    await exchange.answer(503, b"no")


async def drop(exchange: Exchange) -> None:
    exchange.die()


async def drop_behind_the_head(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(b'{"role": ')
    exchange.die()


async def answer_without_end(exchange: Exchange) -> None:
    await exchange.begin_stream()
    while True:
        await exchange.chunk(b" " * 2**14)


@pytest.mark.parametrize("fails", [refuse, drop, drop_behind_the_head, answer_without_end])
async def test_a_node_that_fails_is_left_alone_and_another_one_goes(fails: Behaviour) -> None:
    nodes = [
        SwitchingNode("p0", Role.PREFILL, NodeLoad()),
        SwitchingNode("d0", Role.DECODE, QUICK, fails=fails),
        SwitchingNode("d1", Role.DECODE, NodeLoad(running=2, step_s=0.01)),
    ]
    async with controlled(nodes) as running:
        # Not before: the proxy might choose while it knows the load of one decode node only.
        nodes[0].load = QUEUED
        await eventually(lambda: nodes[2].role is Role.PREFILL, "the other node went")
        assert nodes[1].commands == [SetRole(Role.PREFILL)]
        failed = 'pdserve_proxy_role_switches_total{outcome="failed",role="prefill"}'
        assert await metric(running, failed) == 1


async def test_a_node_that_cannot_be_reached_is_left_alone_and_another_one_goes() -> None:
    nodes = [
        SwitchingNode("p0", Role.PREFILL, NodeLoad()),
        SwitchingNode("d0", Role.DECODE, QUICK),
        SwitchingNode("d1", Role.DECODE, NodeLoad(running=2, step_s=0.01)),
    ]
    async with controlled(nodes):
        await nodes[1].server.stop()
        nodes[0].load = QUEUED
        await eventually(lambda: nodes[2].role is Role.PREFILL, "the other node went")
        assert nodes[1].commands == []
