"""The simulation's own checks: what goes wrong in a process or in the scenario is a violation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lab.simulation import engine_program
from lab.simulation.checks import counters
from lab.simulation.cluster import Node, simulate
from lab.simulation.machine.network import Network
from lab.simulation.machine.virtual_time import Events, SimLoop, SimProcess
from lab.simulation.plan import Fault, FaultKind, Plan, PlannedRequest, Shape
from lab.simulation.run import LIMIT_S, Run, run_plan
from pdserve.api.node.server import NodeServer
from pdserve.errors import PdserveError
from pdserve_proxy import server as proxy_server


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop(Events())
    yield loop
    loop.close()


async def _crash(*_: Any, **__: Any) -> None:
    await asyncio.sleep(1.0)
    raise RuntimeError("a defect")


def _fail(_: Run) -> None:
    raise RuntimeError("a defect")


async def _refuse(*_: Any, **__: Any) -> None:
    raise PdserveError("a wrong setting")


async def _end(*_: Any, **__: Any) -> int:
    await asyncio.sleep(1.0)
    return 0


def _finds(plan: Plan, *texts: str) -> None:
    violations = run_plan(1, plan).violations
    for text in texts:
        assert any(text in violation for violation in violations), violations


@pytest.mark.integration
def test_a_proxy_that_crashes_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_server, "run", _crash)
    _finds(Plan(), "proxy fails: RuntimeError: a defect", "the proxy ended by itself with 1")


@pytest.mark.integration
def test_a_proxy_that_ends_before_it_is_told_to_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_server, "run", _end)
    _finds(Plan(), "the proxy ended by itself with 0")


@pytest.mark.integration
def test_a_node_that_crashes_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeServer, "run", _crash)
    _finds(Plan(), "decode1.1 fails: RuntimeError: a defect", "decode1.1 ended by itself with 1")


@pytest.mark.integration
def test_a_node_that_gives_up_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeServer, "run", _refuse)
    _finds(Plan(), "prefill0.1 ended by itself with 1")


_WITHOUT_MEMORY = Plan(
    requests=(PlannedRequest(0.15, tuple(range(3, 23)), 12),), faults=(Fault(0.1, FaultKind.NO_MEMORY, 0, 0.7),)
)


@pytest.mark.integration
def test_an_engine_that_is_refused_memory_fails_and_its_node_says_why() -> None:
    result = run_plan(1, _WITHOUT_MEMORY)
    assert result.violations == ()
    assert any("prefill0.1's engine failed: MemoryError" in line for line in result.lines)
    assert any("prefill0.1 fails: EngineError: MemoryError: no memory is left" in line for line in result.lines)


@pytest.mark.integration
def test_a_node_that_does_not_say_why_its_engine_failed_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_program, "_report_failure", lambda *_: None)
    said = "prefill0.1 ended for want of memory, and said: "
    assert any(said in violation for violation in run_plan(1, _WITHOUT_MEMORY).violations)


@pytest.mark.integration
@pytest.mark.parametrize("kind", [FaultKind.KILL_ENGINE, FaultKind.NO_MEMORY])
def test_a_node_that_ends_as_if_all_were_well_is_a_violation(kind: FaultKind, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = NodeServer.run

    async def end_well(self: NodeServer) -> int:
        with suppress(PdserveError):
            return await serve(self)
        return 0

    monkeypatch.setattr(NodeServer, "run", end_well)
    faults = (replace(_WITHOUT_MEMORY.faults[0], kind=kind),)
    _finds(replace(_WITHOUT_MEMORY, faults=faults), "prefill0.1 ended by itself with 0")


@pytest.mark.integration
def test_a_node_that_does_not_drain_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "drain", lambda self: None)
    _finds(Plan(faults=(Fault(0.1, FaultKind.DRAIN, 0, 0.1),)), "prefill0.1 has to end and does not")


@pytest.mark.integration
def test_a_scenario_that_fails_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_at_rest", _fail)
    _finds(Plan(), "the run itself failed in _fail: RuntimeError: a defect")


@pytest.mark.integration
def test_the_exception_of_a_task_that_refers_to_itself_is_a_violation() -> None:
    async def scenario() -> None:
        async def fail() -> None:
            assert circle
            raise RuntimeError("a defect")

        circle: list[Any] = []
        circle.append(asyncio.get_running_loop().create_task(fail()))
        await asyncio.sleep(1.0)

    with simulate(1, Shape()) as cluster:
        cluster.run(scenario(), LIMIT_S)
        assert len(cluster.violations) == 1
        assert "a defect" in cluster.violations[0]


def test_a_way_is_open_when_all_its_blocks_are_over(loop: SimLoop) -> None:
    network = Network(loop, Random(1), delay_s=0.1)
    network.block("a", "b")
    network.block("a", "b")
    network.block("b", "a")
    network.open("a", "b")
    assert network.is_blocked("a", "b")
    network.open("a", "b")
    assert not network.is_blocked("a", "b")
    assert network.is_blocked("b", "a")


def test_a_process_goes_on_when_all_its_stops_are_over(loop: SimLoop) -> None:
    process = SimProcess(loop, "one", "a")
    process.stop()
    process.stop()
    process.go_on()
    assert not process.running
    process.go_on()
    assert process.running


@pytest.mark.integration
def test_a_metric_that_is_gone_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "AT_REST", counters.AT_REST | {"pdserve_gone"})
    _finds(Plan(), "does not show pdserve_gone")
