"""Requests at a node that fell silent end or move; those at a node that was dropped for another reason go on."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from pdserve.config import RelayConfig, WorkersConfig
from pdserve.wire.discovery import Role
from pdserve_proxy.relay import attempt_rule
from pdserve_proxy.upstream import node_connection
from tests.proxy.cluster import (
    cluster,
    error_of,
    eventually,
    heard,
    metric,
    node_info,
    proxy_config,
    registered,
    ticket_of,
)
from tests.proxy.fake_node import DONE, EVENTS, Exchange, FakeNode, answer_ok

# Far above what a test takes: a request that waits for one of these ends with another error than is asserted.
PATIENT = dataclasses.replace(
    proxy_config(timeout_s=20.0), relay=RelayConfig(idle_timeout_s=600.0, connect_timeout_s=600.0)
)


async def hang(exchange: Exchange) -> None:
    await exchange.gone()


async def begin_and_hang(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.chunk(EVENTS[0])
    await exchange.gone()


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_request_at_a_node_that_falls_silent_is_answered_by_another(workers: int) -> None:
    config = dataclasses.replace(PATIENT, workers=WorkersConfig(workers))
    async with (
        FakeNode(hang) as stuck,
        FakeNode() as other,
        cluster(config) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        await running.known_to_all()
        asked = [asyncio.create_task(running.ask()) for _ in range(8)]
        await eventually(lambda: len(stuck.requests) == len(asked), "the node has them")
        await running.add(node_info("other", Role.MIXED, other.url))
        silent.set()
        assert await asyncio.gather(*asked) == [(200, b'{"ok": true}')] * len(asked)
        assert len(other.requests) == len(asked)
        assert ticket_of(other).attempt == 1
        assert await metric(running, "pdserve_proxy_upstream_retries_total") == len(asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_for_a_node_that_comes_after_the_loss(stream: bool) -> None:
    async with (
        FakeNode(hang) as stuck,
        FakeNode() as other,
        cluster(PATIENT) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        asked = asyncio.create_task(running.ask(stream=stream))
        await eventually(lambda: bool(stuck.requests), "the node has it")
        silent.set()
        await running.dropped("stuck")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asked), 0.2)
        await running.add(node_info("other", Role.MIXED, other.url))
        assert await asked == (200, b'{"ok": true}')
        assert ticket_of(other).attempt == 1


@pytest.mark.parametrize(
    ("wait_s", "timeout_s", "error"), [(0.0, 20.0, (502, "upstream_lost")), (600.0, 2.0, (504, "deadline_exceeded"))]
)
async def test_without_another_node_it_ends_when_the_wait_or_its_time_is_over(
    wait_s: float, timeout_s: float, error: tuple[int, str]
) -> None:
    config = proxy_config(timeout_s=timeout_s)
    config = dataclasses.replace(config, relay=dataclasses.replace(PATIENT.relay, resume_wait_s=wait_s))
    async with (
        FakeNode(hang) as stuck,
        cluster(config) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        asked = asyncio.create_task(running.ask())
        await eventually(lambda: bool(stuck.requests), "the node has it")
        silent.set()
        status, body = await asked
        assert (status, error_of(body)["code"]) == error
        assert await metric(running, "pdserve_proxy_requests_in_flight") == 0


async def test_a_node_that_was_busy_is_asked_again_after_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_rule, "RETRY_AFTER_S", 0.05)
    refused = 0

    async def refuse_or_die(exchange: Exchange) -> None:
        nonlocal refused
        refused += 1
        if refused == 1:
            await exchange.answer(503, b'{"error": {"message": "busy"}}')
        elif refused == 2:
            exchange.die()
        else:
            await answer_ok(exchange)

    async with FakeNode(refuse_or_die) as one, FakeNode(refuse_or_die) as two, cluster(PATIENT) as running:
        await running.add(node_info("one", Role.MIXED, one.url), node_info("two", Role.MIXED, two.url))
        assert await running.ask() == (200, b'{"ok": true}')
        assert sorted([len(one.requests), len(two.requests)]) == [1, 2]


async def test_a_stream_that_waits_for_its_first_event_moves_to_another_node() -> None:
    async def begin_only(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.gone()

    async def stream(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(DONE)
        await exchange.finish()

    async with (
        FakeNode(begin_only) as stuck,
        FakeNode(stream) as other,
        cluster(PATIENT) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        asked = asyncio.create_task(running.ask(stream=True))
        await eventually(lambda: bool(stuck.requests), "the node has it")
        await running.add(node_info("other", Role.MIXED, other.url))
        silent.set()
        assert await asked == (200, DONE)


async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    async with (
        FakeNode(begin_and_hang) as stuck,
        FakeNode() as other,
        cluster(PATIENT) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        await running.add(node_info("other", Role.PREFILL, other.url, fingerprint="another"))
        asked = asyncio.create_task(running.ask(stream=True))
        await eventually(lambda: bool(stuck.requests), "the node has it")
        silent.set()
        status, body = await asked
        assert status == 200
        assert error_of(body.removeprefix(EVENTS[0] + b"event: error\ndata: "))["code"] == "upstream_lost"


async def test_a_stream_that_goes_on_shows_that_its_node_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network carries requests but no heartbeats."""
    monkeypatch.setattr(node_connection, "SUSPECTED_S", 0.4)

    dropped = asyncio.Event()

    async def flow(exchange: Exchange) -> None:
        await exchange.begin_stream()
        after = 0
        while after < 10:  # Ten events take longer than a silence may.
            await exchange.chunk(EVENTS[0])
            await asyncio.sleep(0.1)
            after += dropped.is_set()
        await exchange.chunk(DONE)
        await exchange.finish()

    async with (
        FakeNode(flow) as node,
        cluster(PATIENT) as running,
        heard(node_info("x", Role.MIXED, node.url), running.addresses.control) as silent,
    ):
        asked = asyncio.create_task(running.ask(stream=True))
        await eventually(lambda: bool(node.requests), "the node has it")
        silent.set()
        await running.dropped("x")
        dropped.set()
        status, body = await asked
        assert status == 200
        assert body.endswith(EVENTS[0] + DONE)


@pytest.mark.parametrize("workers", [1, 2])
async def test_what_runs_at_a_node_that_says_goodbye_goes_on(workers: int) -> None:
    go_on = asyncio.Event()

    async def answer_late(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_ok(exchange)

    config = dataclasses.replace(PATIENT, workers=WorkersConfig(workers))
    async with FakeNode(answer_late) as node, FakeNode() as other, cluster(config) as running:
        async with registered(node_info("leaving", Role.MIXED, node.url), running.addresses.control):
            await running.known_to_all()
            asked = asyncio.create_task(running.ask())
            await eventually(lambda: bool(node.requests), "the node has it")
        await running.dropped("leaving")
        # A node is lost after it was dropped: the requests at other nodes go on.
        async with heard(node_info("lost", Role.MIXED, other.url), running.addresses.control) as silent:
            silent.set()
            await running.dropped("lost")
        go_on.set()
        assert await asked == (200, b'{"ok": true}')
        assert (len(node.requests), other.requests) == (1, [])


async def test_what_runs_goes_on_when_another_process_takes_over_the_url() -> None:
    go_on = asyncio.Event()

    async def answer_late(exchange: Exchange) -> None:
        await go_on.wait()
        await answer_ok(exchange)

    async with FakeNode(answer_late) as node, cluster(PATIENT) as running:
        async with heard(node_info("before", Role.MIXED, node.url), running.addresses.control) as silent:
            asked = asyncio.create_task(running.ask())
            await eventually(lambda: bool(node.requests), "the node has it")
            silent.set()
            await running.add(node_info("after", Role.MIXED, node.url))
            assert await running.instances() == ["after"]
        go_on.set()
        assert await asked == (200, b'{"ok": true}')


async def test_a_lost_node_that_registers_again_gets_new_requests_and_not_those_it_lost() -> None:
    answers = [hang, answer_ok]

    async def hang_once(exchange: Exchange) -> None:
        await answers.pop(0)(exchange)

    config = dataclasses.replace(PATIENT, relay=dataclasses.replace(PATIENT.relay, resume_wait_s=2.0))
    async with FakeNode(hang_once) as node, FakeNode() as other, cluster(config) as running:
        info = node_info("back", Role.MIXED, node.url)
        async with heard(info, running.addresses.control) as silent:
            asked = asyncio.create_task(running.ask())
            await eventually(lambda: bool(node.requests), "the node has it")
            silent.set()
            await running.dropped("back")
        async with registered(info, running.addresses.control):
            status, body = await asked
            assert (status, error_of(body)["code"]) == (502, "upstream_lost")
            assert await running.ask() == (200, b'{"ok": true}')
        assert (len(node.requests), other.requests) == (2, [])
