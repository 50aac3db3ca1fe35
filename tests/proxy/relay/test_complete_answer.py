"""An answer in one piece whose node is lost behind its journal goes on at another node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.control.journal import JOURNALED_ANSWER, MAX_LINE_BYTES, AnswerHead, entry
from pdserve.http.guard import HALF_CLOSED_S
from pdserve.wire.discovery import Role
from pdserve_proxy.continuation import resume
from tests.proxy.cluster import Cluster, cluster, error_of, eventually, heard, metric, node_info, proxy_config
from tests.proxy.continuation.test_resume import NO_WAIT, config, nothing_is_left, resumes
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode, stream_events
from tests.proxy.journaling_nodes import begin_and_die, die_at_once, nodes, refuses, split
from tests.proxy.shared_proxy import SharedProxy

LINES = [entry(choice, [100 + choice]) for choice in (0, 1, 0, 0)]
HEAD = AnswerHead(200, {"content-type": "application/json", "x-pdserve-ignored": "a", "server": "s"})
BODY = b'{"text": "{\\n:0 7"}'
PARTS = [*LINES, HEAD.encode(), BODY]
"""What a node sends of its answer."""
JOURNAL = b"".join(LINES).replace(b":", b"")


async def answer_up_to_part(exchange: Exchange, end: int | None = None, *, more: bytes = b"") -> None:
    """Begins a journaled answer, and sends what its journal lacks, up to part number ``end``, and ``more``."""
    journal = split(exchange.request)[1]
    assert JOURNAL.startswith(journal)
    await exchange.begin_stream(content_type=JOURNALED_ANSWER)
    for part in PARTS[journal.count(b"\n") : end]:
        await exchange.chunk(part)
    if more:
        await exchange.chunk(more)


async def complete(exchange: Exchange) -> None:
    await answer_up_to_part(exchange)
    await exchange.finish()


async def answer_soon(exchange: Exchange) -> None:
    """The rest of the answer takes this node so little time that it writes no journal."""
    await exchange.answer(200, BODY, x_pdserve_ignored="a")


def dies_at(end: int, more: bytes = b"") -> Behaviour:
    async def die(exchange: Exchange) -> None:
        await answer_up_to_part(exchange, end, more=more)
        exchange.die()

    return die


def hangs_at(end: int) -> Behaviour:
    async def hang(exchange: Exchange) -> None:
        await answer_up_to_part(exchange, end)
        await exchange.gone()

    return hang


async def code(running: Cluster) -> tuple[int, object]:
    status, body = await running.ask()
    return status, error_of(body)["code"]


async def test_a_client_gets_nothing_but_the_answer(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, complete):
        headers = {"x-request-id": "req-7"}
        async with running.http.post("/v1/completions", json={"model": "m"}, headers=headers) as got:
            assert (got.status, await got.read()) == (200, BODY)
            assert got.headers["x-request-id"] == "req-7"
            assert (got.headers["content-type"], got.headers["x-pdserve-ignored"]) == ("application/json", "a")
            assert not {"server", "transfer-encoding"} & got.headers.keys()
            assert int(got.headers["content-length"]) == len(BODY)
        assert await metric(running, "pdserve_proxy_relayed_bytes_total") == len(BODY)
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("last", [complete, answer_soon])
@pytest.mark.parametrize("more", [b"", b":0 10", b'{"status":200'])
@pytest.mark.parametrize("end", range(1, len(PARTS)))
async def test_the_answer_goes_on_wherever_its_node_dies(
    proxy: SharedProxy, end: int, more: bytes, last: Behaviour
) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(end, more), last) as asked:
        assert await running.ask() == (200, BODY)
        first, second = asked.tickets
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.terms.answer == second.terms.answer is not None
        body, journal = split(asked.asked[1])
        assert body == asked.asked[0].body
        assert journal == JOURNAL[: len(journal)]
        assert journal.count(b"\n") == min(end, len(LINES))
        assert await resumes(running, "resumed") == 1
        assert await metric(running, "pdserve_proxy_upstream_retries_total") == 0
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("end", [1, len(LINES)])
async def test_an_answer_that_ends_too_early_in_good_order_goes_on(proxy: SharedProxy, end: int) -> None:
    """As that of a node that drains."""

    async def end_early(exchange: Exchange) -> None:
        await answer_up_to_part(exchange, end)
        await exchange.finish()

    async with proxy.cluster() as running, nodes(running, end_early, complete):
        assert await running.ask() == (200, BODY)


async def test_an_answer_is_resumed_as_often_as_its_nodes_say_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_RESUMES_OF_ONE", 3)
    behaviours = [dies_at(1), dies_at(2), dies_at(4), complete]
    async with cluster() as running, nodes(running, *behaviours, count=2) as asked:
        assert await running.ask() == (200, BODY)
        assert [ticket.attempt for ticket in asked.tickets] == [0, 1, 2, 3]
        asked.behaviours = [*behaviours, dies_at(1), dies_at(2), dies_at(3), dies_at(4)]
        assert await code(running) == (502, "upstream_lost")
        assert (await resumes(running, "resumed"), await resumes(running, "failed")) == (6, 1)
        await nothing_is_left(running)


@pytest.mark.parametrize("second", [die_at_once, begin_and_die, dies_at(2, b":0 1")])
async def test_an_answer_with_which_two_nodes_in_a_row_were_lost_goes_to_no_third(
    proxy: SharedProxy, second: Behaviour
) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(2), second, complete) as asked:
        assert await code(running) == (502, "upstream_lost")
        assert len(asked.asked) == 2
        assert await resumes(running, "failed") == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("answer", [refuses(400), refuses(500), refuses(504), stream_events])
async def test_an_answer_that_no_other_node_would_improve_is_the_end(proxy: SharedProxy, answer: Behaviour) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(2), answer, complete) as asked:
        assert (await code(running))[0] == 502
        assert len(asked.asked) == 2
        assert await resumes(running, "failed") == 1


async def test_nodes_that_do_not_take_it_are_passed_over(proxy: SharedProxy) -> None:
    behaviours = [dies_at(2), refuses(503), refuses(401), complete]
    async with proxy.cluster() as running, nodes(running, *behaviours) as asked:
        assert await running.ask() == (200, BODY)
        assert len({ticket.node for ticket in asked.tickets}) == 4


async def test_without_another_node_it_ends_when_the_wait_is_over() -> None:
    async with cluster(NO_WAIT) as running, nodes(running, dies_at(3), complete, count=1) as asked:
        assert await code(running) == (502, "upstream_lost")
        assert len(asked.asked) == 1
        assert await resumes(running, "no_node") == 1
        await nothing_is_left(running)


async def test_where_no_node_can_go_on_another_one_begins_again() -> None:
    """A node of another context length may answer the request, and cannot go on with the answer."""
    go_on = asyncio.Event()

    async def die(exchange: Exchange) -> None:
        await answer_up_to_part(exchange, 3)
        await go_on.wait()
        exchange.die()

    async with FakeNode(complete) as other, cluster(NO_WAIT) as running, nodes(running, die) as asked:
        waiting = asyncio.create_task(running.ask())
        await eventually(lambda: bool(asked.asked), "the first node has it")
        info = node_info("unfit", Role.MIXED, other.url, max_model_len=128)
        async with heard(info, running.addresses.control):
            go_on.set()
            assert await waiting == (200, BODY)
        assert [split(request)[1] for request in other.requests] == [b""]
        assert await metric(running, "pdserve_proxy_upstream_retries_total") == 1


async def test_a_request_whose_journal_does_not_fit_begins_again() -> None:
    wanted = config(base=proxy_config(max_body_bytes=2**22), journal_mib=1)
    async with cluster(wanted) as running, nodes(running, dies_at(3), complete) as asked:
        async with running.chat(user="a" * 2**16) as response:
            assert await response.read() == BODY
        assert [ticket.terms.resume for ticket in asked.tickets] == [None, None]
        assert await metric(running, 'pdserve_proxy_journals_dropped_total{reason="budget"}') == 2
        assert await resumes(running, "not_resumable") == 1
        assert await metric(running, "pdserve_proxy_upstream_retries_total") == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("first", [complete, dies_at(2)])
async def test_an_error_behind_the_journal_is_the_answer(proxy: SharedProxy, first: Behaviour) -> None:
    failed = AnswerHead(500, {"content-type": "application/json", "x-should-retry": "false"})

    async def fail(exchange: Exchange) -> None:
        await answer_up_to_part(exchange, len(LINES), more=failed.encode() + b'{"error": {}}')
        await exchange.finish()

    behaviours = [fail] if first is complete else [first, fail, complete]
    async with proxy.cluster() as running, nodes(running, *behaviours) as asked, running.chat() as response:
        assert (response.status, await response.read()) == (500, b'{"error": {}}')
        assert response.headers["x-should-retry"] == "false"
        assert len(asked.asked) == min(len(behaviours), 2)


async def test_a_node_that_gives_it_back_behind_the_journal_is_passed_over(proxy: SharedProxy) -> None:
    busy = AnswerHead(503, {"content-type": "application/json"})

    async def give_back(exchange: Exchange) -> None:
        await answer_up_to_part(exchange, 2, more=busy.encode() + b"{}")
        await exchange.finish()

    async with proxy.cluster() as running, nodes(running, give_back, complete) as asked:
        assert await running.ask() == (200, BODY)
        assert [ticket.terms.resume for ticket in asked.tickets] == [None, None]


@pytest.mark.parametrize(
    "data", [b"data: x\n", b'{"status":200}\n', b'{"status":200,"headers":{}}\nx', b":" * (MAX_LINE_BYTES + 1)]
)
@pytest.mark.parametrize("resumed", [False, True])
async def test_what_is_no_such_answer(proxy: SharedProxy, data: bytes, resumed: bool) -> None:
    async def speak(exchange: Exchange) -> None:
        await exchange.begin_stream(content_type=JOURNALED_ANSWER)
        await exchange.chunk(data)
        await exchange.finish()

    behaviours = [dies_at(2), speak] if resumed else [speak]
    async with proxy.cluster() as running, nodes(running, *behaviours, complete) as asked:
        assert await code(running) == (502, "upstream_invalid")
        assert len(asked.asked) == len(behaviours)
        await nothing_is_left(running)


@pytest.mark.parametrize("behaviours", [[hangs_at(2)], [dies_at(2)], [dies_at(2), hangs_at(3)]])
async def test_the_deadline_ends_it(behaviours: list[Behaviour]) -> None:
    wanted = config(base=proxy_config(timeout_s=0.4))
    async with cluster(wanted) as running, nodes(running, *behaviours):
        assert await code(running) == (504, "deadline_exceeded")
        await nothing_is_left(running)


@pytest.mark.parametrize("behaviours", [[hangs_at(2)], [dies_at(2)], [dies_at(2), hangs_at(3)]])
async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(proxy: SharedProxy, behaviours: list[Any]) -> None:
    async with proxy.cluster() as running, nodes(running, *behaviours) as asked:
        waiting = asyncio.create_task(running.ask())
        await eventually(lambda: len(asked.asked) == len(behaviours), "the nodes have it")
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(5 + 2 * HALF_CLOSED_S):
            await nothing_is_left(running)
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1
        for node in asked.made:
            await eventually(lambda node=node: not node._connections, "its connection is closed")


@pytest.mark.parametrize("ends", [True, False], ids=["heartbeats too", "the answer alone"])
async def test_a_node_that_falls_silent_is_left(ends: bool) -> None:
    async with (
        FakeNode(hangs_at(2)) as stuck,
        FakeNode(complete) as other,
        cluster(config(idle_timeout_s=600.0 if ends else 0.3)) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        waiting = asyncio.create_task(running.ask())
        await eventually(lambda: bool(stuck.requests), "the node has it")
        await running.add(node_info("other", Role.MIXED, other.url))
        if ends:
            silent.set()
        assert await waiting == (200, BODY)
        assert await resumes(running, "resumed") == 1
