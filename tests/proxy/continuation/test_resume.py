"""A stream whose node is lost goes on at another node, and its client sees nothing of that."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import re
from typing import Any

import pytest

from pdserve.config import AdmissionConfig, ProxyConfig, Switch
from pdserve.control.journal import DONE_ENTRY, cut
from pdserve.errors import PrefillLost
from pdserve.http.guard import HALF_CLOSED_S
from pdserve.http.tls import Trust
from pdserve.wire.discovery import NodeInfo, Register, Role
from pdserve.wire.ids import new_id
from pdserve.wire.status import IncidentKind
from pdserve_proxy.continuation import losses, resume, turns
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.relay.dispatch import NodeRequest, TicketSigner
from pdserve_proxy.relay.event_stream import MAX_EVENT_BYTES
from pdserve_proxy.relay.relay import Relay, StreamedResponse
from pdserve_proxy.requests.request_body import read_body
from pdserve_proxy.routing.attempts import Attempts
from tests.proxy.cluster import SECRET, Cluster, cluster, error_of, eventually, heard, metric, node_info, proxy_config
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode, answer_ok
from tests.proxy.journaling_nodes import (
    ANSWER,
    SHOWN,
    answer_up_to,
    begin_and_die,
    complete,
    die_at_once,
    dies_at,
    fails_at,
    hangs_at,
    nodes,
    refuses,
    split,
    ticket_in,
)
from tests.proxy.shared_proxy import SharedProxy
from tests.terms import made_terms

COMPLETIONS = "/v1/completions"
ERROR = b"event: error\ndata: "


def config(*, base: ProxyConfig | None = None, **relay: Any) -> ProxyConfig:
    base = base or proxy_config()
    return dataclasses.replace(base, relay=dataclasses.replace(base.relay, **relay))


NO_WAIT = config(resume_wait_s=0.05)


async def ask(running: Cluster, **fields: object) -> bytes:
    async with running.chat(stream=True, **fields) as response:
        assert response.status == 200
        return await response.read()


def shown(count: int) -> bytes:
    """Returns the first events of the answer as a client gets them."""
    return cut(b"".join(ANSWER[:count]))[0]


def broken(body: bytes, count: int) -> object:
    """Returns the code of the error event that follows the answer's first events."""
    begin = shown(count) + ERROR
    assert body.startswith(begin)
    return error_of(body[len(begin) :])["code"]


async def resumes(running: Cluster, outcome: str) -> float:
    return await metric(running, f'pdserve_proxy_resumes_total{{outcome="{outcome}"}}')


async def nothing_is_left(running: Cluster) -> None:
    async def none() -> bool:
        return (
            await metric(running, "pdserve_proxy_requests_in_flight") == 0
            and await metric(running, "pdserve_proxy_journal_bytes") == 0
        )

    await eventually(none, "nothing is left of the requests")


@pytest.mark.parametrize("more", [b"", ANSWER[-1][:-1], b":0 10", b":0 105\ndata: {"])
@pytest.mark.parametrize("end", range(1, len(ANSWER)))
async def test_the_stream_goes_on_wherever_its_node_dies(proxy: SharedProxy, end: int, more: bytes) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(end, more), complete) as asked:
        headers = {"x-request-id": "req-7"}
        async with running.http.post("/v1/completions", json={"model": "m", "stream": True}, headers=headers) as got:
            assert await got.read() == SHOWN
        first, second = asked.tickets
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.terms.answer == second.terms.answer is not None
        assert first.terms.resume is None
        assert {ticket.terms.prompt.request_id for ticket in (first, second)} == {"req-7"}
        assert split(asked.asked[1]) == (asked.asked[0].body, cut(b"".join(ANSWER[:end]))[1])
        assert await resumes(running, "resumed") == 1
        assert await metric(running, 'pdserve_proxy_resume_gap_seconds_count{kind="lost"}') == 1
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 1
        assert await metric(running, "pdserve_proxy_relayed_bytes_total") == len(SHOWN)
        await nothing_is_left(running)


async def test_the_node_that_goes_on_may_ask_the_prefill_nodes_of_the_attempts_before(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running:
        prefill = [node_info(f"p{number}", Role.PREFILL) for number in range(2)]
        await running.add(*prefill)
        behaviours = (dies_at(1), dies_at(2), complete)
        async with nodes(running, *behaviours, role=Role.DECODE) as asked:
            assert await ask(running) == SHOWN
        first, second, third = asked.tickets
        assert first.terms.holders == ()
        assert second.terms.holders == first.terms.prefill
        # Those of the newest attempt come first, and each is named once.
        assert third.terms.holders[: len(second.terms.prefill)] == second.terms.prefill
        assert set(third.terms.holders) == {*first.terms.prefill, *second.terms.prefill}


async def test_every_node_that_goes_on_takes_the_blocks_of_the_same_owner() -> None:
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=("a-key-of-a-client-0",)))
    async with cluster(config) as running, nodes(running, dies_at(1), dies_at(2), complete) as asked:
        headers = {"authorization": "Bearer a-key-of-a-client-0"}
        async with running.http.post("/v1/completions", json={"model": "m", "stream": True}, headers=headers) as got:
            assert await got.read() == SHOWN
        first, second, third = asked.tickets
        assert first.terms.cache_owner == second.terms.cache_owner == third.terms.cache_owner != b""


async def test_no_lost_prefill_node_is_asked() -> None:
    async with cluster() as running:
        async with heard(node_info("p0", Role.PREFILL), running.addresses.control) as silent:

            async def die_when_the_prefill_node_is_gone(exchange: Exchange) -> None:
                await answer_up_to(exchange, 3)
                silent.set()

                async def gone() -> bool:
                    return "p0" not in await running.instances()

                await eventually(gone, "the prefill node is gone")
                exchange.die()

            async with nodes(running, die_when_the_prefill_node_is_gone, complete, role=Role.DECODE) as asked:
                assert await ask(running) == SHOWN
        first, second = asked.tickets
        assert [target.name for target in first.terms.prefill] == ["p0"]
        assert (second.terms.prefill, second.terms.holders) == ((), ())


async def test_a_whole_answer_is_enough_whatever_its_node_does_then(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(len(ANSWER)), complete) as asked:
        assert await ask(running) == SHOWN
        assert len(asked.asked) == 1
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 1


@pytest.mark.parametrize("end", [1, 3, len(ANSWER) - 1])
async def test_a_stream_that_ends_too_early_in_good_order_goes_on(proxy: SharedProxy, end: int) -> None:
    async def end_early(exchange: Exchange) -> None:
        await answer_up_to(exchange, end, more=b"data: half")
        await exchange.finish()

    async with proxy.cluster() as running, nodes(running, end_early, complete):
        assert await ask(running) == SHOWN


async def test_a_stream_that_its_node_ends_with_an_error_is_over(proxy: SharedProxy) -> None:
    error = ERROR + b'{"error": {"message": "m", "type": "t", "param": null, "code": "c"}}\n\n'

    async def fail(exchange: Exchange) -> None:
        await answer_up_to(exchange, 2, more=error)
        await exchange.finish()

    async with proxy.cluster() as running, nodes(running, fail, complete) as asked:
        assert await ask(running) == shown(2) + error
        assert len(asked.asked) == 1
        await nothing_is_left(running)


async def test_several_entries_in_one_chunk_and_chunks_that_end_within_an_entry(proxy: SharedProxy) -> None:
    data = b"".join(ANSWER[:5])

    async def die(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for start in range(0, len(data), 7):
            await exchange.chunk(data[start : start + 7])
        exchange.die()

    async def rest_at_once(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(b"".join(ANSWER[split(exchange.request)[1].count(b"\n") :]))
        await exchange.finish()

    async with proxy.cluster() as running, nodes(running, die, rest_at_once) as asked:
        assert await ask(running) == SHOWN
        assert split(asked.asked[1])[1] == cut(data)[1]


@pytest.mark.parametrize("falls_silent", [True, False])
async def test_a_node_that_hangs_is_left_and_nothing_of_what_it_still_says_is_relayed(falls_silent: bool) -> None:
    left = asyncio.Event()

    async def hang(exchange: Exchange) -> None:
        await answer_up_to(exchange, 2)
        await exchange.gone()
        left.set()

    async def go_on(exchange: Exchange) -> None:
        await left.wait()  # the old connection is closed before the new request is sent
        await complete(exchange)

    wanted = config(idle_timeout_s=600.0 if falls_silent else 0.3)
    async with (
        FakeNode(hang) as stuck,
        FakeNode(go_on) as other,
        cluster(wanted) as running,
        heard(node_info("stuck", Role.MIXED, stuck.url), running.addresses.control) as silent,
    ):
        asked = asyncio.create_task(ask(running))
        await eventually(lambda: bool(stuck.requests), "the node has it")
        await running.add(node_info("other", Role.MIXED, other.url))
        if falls_silent:
            silent.set()
        assert await asked == SHOWN
        async with running.http.get("/status") as response:
            status = await response.json()
        told = [one["text"] for one in status["report"]["incidents"] if one["kind"] == IncidentKind.RESUMED.value]
        why = "silent for 1 s after its heartbeats ended" if falls_silent else "silent for 0.3 s"
        assert told == [f"its answer goes on at other: {why}"]
        # The client got nothing from the last byte on, and not only since the loss was noticed.
        gap_s = await metric(running, 'pdserve_proxy_resume_gap_seconds_sum{kind="lost"}')
        assert gap_s > (0.99 if falls_silent else 0.29)


async def test_a_stream_is_resumed_as_often_as_its_nodes_say_something(proxy: SharedProxy) -> None:
    behaviours = [dies_at(1), dies_at(2), dies_at(4), dies_at(6), complete]
    async with proxy.cluster() as running, nodes(running, *behaviours, count=2) as asked:
        assert await ask(running) == SHOWN
        assert [ticket.attempt for ticket in asked.tickets] == [0, 1, 2, 3, 4]
        assert len({ticket.terms.answer for ticket in asked.tickets}) == 1
        assert [ticket.node for ticket in asked.tickets[:2]] * 2 == [ticket.node for ticket in asked.tickets[:4]]
        assert await resumes(running, "resumed") == 4


@pytest.mark.parametrize("journal_mib", [64, 0])
async def test_a_stream_that_its_node_ends_with_an_error_is_not_counted_as_answered(journal_mib: int) -> None:
    """Also if its journal had no room."""
    async with cluster(config(journal_mib=journal_mib)) as running, nodes(running, fails_at(2), complete) as asked:
        assert broken(await ask(running), 2) == "no_room"
        assert len(asked.asked) == 1
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="upstream_failed"}') == 1
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 0
        await nothing_is_left(running)


async def test_a_stream_is_not_resumed_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "MAX_RESUMES_OF_ONE", 2)
    behaviours = [dies_at(1), dies_at(2), dies_at(3), complete]
    async with cluster() as running, nodes(running, *behaviours) as asked:
        assert broken(await ask(running), 3) == "upstream_lost"
        assert len(asked.asked) == 3
        assert (await resumes(running, "resumed"), await resumes(running, "failed")) == (2, 1)


@pytest.mark.parametrize("second", [die_at_once, begin_and_die, dies_at(2, ANSWER[2][:-1])])
async def test_a_stream_with_which_two_nodes_in_a_row_were_lost_goes_to_no_third(
    proxy: SharedProxy, second: Behaviour
) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(2), second, complete) as asked:
        assert broken(await ask(running), 2) == "upstream_lost"
        assert len(asked.asked) == 2
        assert await resumes(running, "failed") == 1
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="upstream_lost"}') == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("answer", [refuses(400), refuses(404), refuses(500), refuses(504), answer_ok])
async def test_an_answer_that_no_other_node_would_improve_ends_the_stream(
    proxy: SharedProxy, answer: Behaviour
) -> None:
    async with proxy.cluster() as running, nodes(running, dies_at(2), answer, complete) as asked:
        assert broken(await ask(running), 2) == "upstream_lost"
        assert len(asked.asked) == 2
        assert await resumes(running, "failed") == 1


async def test_nodes_that_do_not_take_it_are_passed_over(proxy: SharedProxy) -> None:
    behaviours = [dies_at(2), refuses(503), refuses(401), complete]
    async with proxy.cluster() as running, nodes(running, *behaviours) as asked:
        assert await ask(running) == SHOWN
        assert [ticket.attempt for ticket in asked.tickets] == [0, 1, 2, 3]
        assert len({ticket.node for ticket in asked.tickets}) == 4


async def test_a_node_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "RETRY_AFTER_S", 0.05)
    behaviours = [dies_at(2), refuses(503), refuses(503), complete]
    async with cluster() as running, nodes(running, *behaviours, count=2) as asked:
        assert await ask(running) == SHOWN
        lost, *others = [ticket.node for ticket in asked.tickets]
        assert len(set(others)) == 1
        assert lost not in others


async def test_a_node_that_cannot_be_reached_is_passed_over(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, FakeNode() as gone:
        await gone.stop()
        async with nodes(running, dies_at(2), complete) as asked:
            # Of three nodes that take turns, this one is chosen once in two requests.
            await running.add(node_info("gone", Role.MIXED, gone.url))
            asked.behaviours = [dies_at(2), complete] * 3
            for _ in range(3):
                assert await ask(running) == SHOWN


async def test_a_stream_waits_for_a_node_that_comes(proxy: SharedProxy) -> None:
    async with FakeNode(complete) as late, proxy.cluster() as running, nodes(running, dies_at(3)) as asked:
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: bool(asked.asked), "the first node has it")
        await running.add(node_info("late", Role.MIXED, late.url))
        assert await waiting == SHOWN


async def test_without_another_node_it_ends_when_the_wait_is_over() -> None:
    async with cluster(NO_WAIT) as running, nodes(running, dies_at(3), complete, count=1) as asked:
        assert broken(await ask(running), 3) == "upstream_lost"
        assert len(asked.asked) == 1  # the lost node lives on, and is not asked
        assert await resumes(running, "no_node") == 1
        assert await metric(running, 'pdserve_proxy_resume_gap_seconds_count{kind="lost"}') == 0
        await nothing_is_left(running)


@pytest.mark.parametrize(
    "unfit",
    [
        {"fingerprint": "another"},
        {"formats": "another"},
        {"model": "another"},
        {"max_model_len": 128},
    ],
)
async def test_only_a_node_that_can_go_on_exactly_is_asked(unfit: dict[str, Any]) -> None:
    go_on = asyncio.Event()

    async def die(exchange: Exchange) -> None:
        await answer_up_to(exchange, 3)
        await go_on.wait()
        exchange.die()

    async with FakeNode(complete) as other, cluster(NO_WAIT) as running, nodes(running, die) as asked:
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: bool(asked.asked), "the first node has it")
        info = node_info("unfit", Role.MIXED, other.url, **unfit)
        async with heard(info, running.addresses.control):
            go_on.set()
            assert broken(await waiting, 3) == "upstream_lost"
        assert other.requests == []


async def test_switched_off_everything_is_as_if_there_were_no_journals() -> None:
    event = b"data: {}\n\n"

    async def die(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(event)
        exchange.die()

    async with cluster(config(resume=Switch.OFF)) as running, nodes(running, die, complete) as asked:
        assert error_of((await ask(running)).removeprefix(event + ERROR))["code"] == "upstream_lost"
        (ticket,) = asked.tickets
        assert (ticket.terms.answer, ticket.terms.resume) == (None, None)
        assert await resumes(running, "not_resumable") == 0


async def test_a_stream_without_entries_ends_with_its_node(proxy: SharedProxy) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(cut(ANSWER[0])[0])
        exchange.die()

    async with proxy.cluster() as running, nodes(running, die, complete) as asked:
        assert broken(await ask(running), 1) == "upstream_lost"
        assert len(asked.asked) == 1
        assert await resumes(running, "not_resumable") == 1


async def test_what_is_no_completion_has_no_identity(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, answer_ok) as asked:
        async with running.http.post("/tokenize", json={"model": "m"}) as response:
            assert response.status == 200
        assert asked.tickets[0].terms.answer is None


async def test_an_answer_in_one_piece_begins_again_with_the_same_identity(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, die_at_once, answer_ok) as asked:
        async with running.chat() as response:
            assert await response.read() == b'{"ok": true}'
        first, second = asked.tickets
        assert first.terms.answer == second.terms.answer is not None
        assert (first.terms.resume, second.terms.resume) == (None, None)


async def test_so_many_are_resumed_at_a_time_and_the_others_wait_for_their_turn() -> None:
    go_on, resuming, most = asyncio.Event(), 0, 0

    async def behave(exchange: Exchange) -> None:
        nonlocal resuming, most
        if ticket_in(exchange.request).terms.resume is None:
            await dies_at(1)(exchange)
            return
        resuming += 1
        most = max(most, resuming)
        await go_on.wait()
        resuming -= 1
        await complete(exchange)

    async with cluster(config(max_resumes=2)) as running, nodes(running, *[behave] * 10, count=2) as asked:
        waiting = [asyncio.create_task(ask(running)) for _ in range(5)]
        await eventually(lambda: resuming == 2 and len(asked.asked) == 7, "two are resumed and the others wait")
        go_on.set()
        assert await asyncio.gather(*waiting) == [SHOWN] * 5
        assert most == 2


async def gives_back(exchange: Exchange) -> None:
    error = b'{"error": {"message": "prefill node p was lost with this request", "param": "p"}}'
    await exchange.answer(PrefillLost.status, error)


@pytest.mark.parametrize(("stuck", "turn_s"), [(hangs_at(1), 0.05), (gives_back, 600.0)])
async def test_a_node_that_stands_still_does_not_keep_the_others_waiting(
    stuck: Behaviour, turn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it the decode node or the prefill node, which never says whether it lives."""
    monkeypatch.setattr(turns, "MAX_TURN_S", turn_s)
    monkeypatch.setattr(losses, "LOOK_S", 600.0)
    async with (
        FakeNode(Exchange.gone) as prefill,
        cluster(config(max_resumes=1, idle_timeout_s=600.0)) as running,
        nodes(running, dies_at(1), stuck, dies_at(1), complete, role=Role.DECODE, count=4) as asked,
    ):
        await running.add(node_info("p", Role.PREFILL, prefill.url))
        held = asyncio.create_task(ask(running))
        await eventually(lambda: len(asked.asked) == 2, "the first one has a turn")
        async with asyncio.timeout(20):
            assert await ask(running) == SHOWN
        assert not held.done()
        held.cancel()
        await asyncio.wait([held])


async def test_a_stream_waits_for_its_turn_until_its_deadline() -> None:
    async def behave(exchange: Exchange) -> None:
        await (dies_at(1) if ticket_in(exchange.request).terms.resume is None else hangs_at(1))(exchange)

    wanted = config(base=proxy_config(timeout_s=0.6), max_resumes=1, resume_wait_s=0.1)
    async with cluster(wanted) as running, nodes(running, *[behave] * 4, count=2) as asked:
        for body in await asyncio.gather(ask(running), ask(running)):
            assert broken(body, 1) == "deadline_exceeded"
        # The second may get its turn in the moment in which the deadline of the first one passes.
        assert len(asked.asked) in (3, 4)
        await nothing_is_left(running)


async def test_a_stream_without_a_node_to_go_to_takes_no_turn() -> None:
    wanted = config(max_resumes=1, resume_wait_s=60.0)
    async with (
        FakeNode(dies_at(1)) as lonely,
        cluster(wanted) as running,
        nodes(running, dies_at(1), complete),
        heard(
            node_info("lonely", Role.MIXED, lonely.url, model="other"),
            running.addresses.control,
        ),
    ):
        stuck = asyncio.create_task(ask(running, model="other"))
        await eventually(lambda: bool(lonely.requests), "the only node of its model has it, and dies")
        assert await ask(running) == SHOWN
        assert not stuck.done()
        stuck.cancel()
        await asyncio.wait([stuck])


async def test_many_busy_nodes_are_asked_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "RETRY_AFTER_S", 0.05)
    behaviours = [dies_at(2), *[refuses(503)] * 20, complete]
    async with cluster() as running, nodes(running, *behaviours, count=8):
        assert await ask(running) == SHOWN
        assert await resumes(running, "resumed") == 1


@pytest.mark.parametrize("second", [None, hangs_at(2)])
async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind(
    proxy: SharedProxy, second: Behaviour | None
) -> None:
    behaviours = [dies_at(2)] if second is None else [dies_at(2), second]
    async with proxy.cluster() as running, nodes(running, *behaviours) as asked:
        async with running.chat(stream=True) as response:
            assert await response.content.readexactly(len(shown(2))) == shown(2)
            await eventually(lambda: len(asked.asked) == len(behaviours), "the nodes have it")
            response.close()
        async with asyncio.timeout(5 + 2 * HALF_CLOSED_S):
            await nothing_is_left(running)
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="client_gone"}') == 1
        assert [await resumes(running, outcome) for outcome in ("resumed", "no_node", "failed")] == [0, 0, 0]
        for node in asked.made:
            await eventually(lambda node=node: not node._connections, "its connection is closed")


@pytest.mark.parametrize("stops", [False, True])
async def test_a_stream_that_is_cut_short_ends_no_second_time_if_its_client_has_all_of_it(stops: bool) -> None:
    """The end of the body is still on its way."""
    wanted = config(base=proxy_config(drain_s=0.2) if stops else proxy_config(timeout_s=0.4))
    async with cluster(wanted) as running, nodes(running, hangs_at(len(ANSWER))):
        async with running.chat(stream=True) as response:
            assert await response.content.readexactly(len(SHOWN)) == SHOWN
            if stops:
                running.stop.set()
            assert await response.read() == b""
        if not stops:
            assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="ok"}') == 1
            await nothing_is_left(running)


async def test_a_stream_that_breaks_in_the_middle_of_a_long_last_event_is_not_whole() -> None:
    """The entry of such an event is there before its end."""
    beginning = DONE_ENTRY + b"data: " + b"x" * (MAX_EVENT_BYTES + 2**16)
    async with cluster(NO_WAIT) as running, nodes(running, dies_at(len(ANSWER) - 1, more=beginning)):
        body = await ask(running)
        assert body.startswith(shown(len(ANSWER) - 1) + b"data: xxx")
        assert json.loads(body.partition(b"\n\n" + ERROR)[2])["error"]["code"] == "upstream_lost"
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="upstream_lost"}') == 1


@pytest.mark.parametrize("second", [None, hangs_at(2)])
async def test_the_deadline_ends_a_stream_that_is_being_resumed(second: Behaviour | None) -> None:
    behaviours = [dies_at(2)] if second is None else [dies_at(2), second]
    wanted = config(base=proxy_config(timeout_s=0.4))
    async with cluster(wanted) as running, nodes(running, *behaviours):
        assert broken(await ask(running), 2) == "deadline_exceeded"
        assert await resumes(running, "failed") == 1
        assert await metric(running, 'pdserve_proxy_outcomes_total{outcome="timed_out"}') == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("second", [None, hangs_at(2)])
async def test_a_proxy_that_stops_ends_a_stream_that_is_being_resumed(second: Behaviour | None) -> None:
    behaviours = [dies_at(2)] if second is None else [dies_at(2), second]
    wanted = config(base=proxy_config(drain_s=0.2))
    async with cluster(wanted) as running, nodes(running, *behaviours) as asked:
        waiting = asyncio.create_task(ask(running))
        await eventually(lambda: len(asked.asked) == len(behaviours), "the nodes have it")
        running.stop.set()
        assert broken(await waiting, 2) == "shutting_down"


async def test_a_stream_that_is_resumed_meets_its_deadline_later_as_any_other() -> None:
    wanted = config(base=proxy_config(timeout_s=0.5))
    async with cluster(wanted) as running, nodes(running, dies_at(2), hangs_at(4)):
        assert broken(await ask(running), 4) == "deadline_exceeded"
        assert await resumes(running, "resumed") == 1


async def test_a_stream_whose_journal_does_not_fit_is_not_resumed() -> None:
    large = "a" * 2**15
    go_on = asyncio.Event()

    async def behave(exchange: Exchange) -> None:
        if ticket_in(exchange.request).terms.resume is not None:
            await complete(exchange)
            return
        await answer_up_to(exchange, 1)
        await go_on.wait()
        exchange.die()

    async with cluster(config(journal_mib=1)) as running, nodes(running, *[behave] * 10, count=2):
        async with running.chat(stream=True, user=large) as huge, running.chat(stream=True) as small:
            assert 0 < await metric(running, "pdserve_proxy_journal_bytes") < 2**15
            go_on.set()
            assert await small.read() == SHOWN
            assert broken(await huge.read(), 1) == "upstream_lost"
        assert await resumes(running, "resumed") == 1
        assert await resumes(running, "not_resumable") == 1
        assert await metric(running, 'pdserve_proxy_journals_dropped_total{reason="budget"}') == 1
        await nothing_is_left(running)


@pytest.mark.parametrize("end", [3, len(ANSWER)])
async def test_a_stream_without_a_journal_that_breaks_off_does_not_look_complete(end: int) -> None:
    """A node that drains ends its streams in good order, and leaves the error event to the proxy."""

    async def end_early(exchange: Exchange) -> None:
        await answer_up_to(exchange, end, pause=True)
        await exchange.finish()

    wanted = config(base=proxy_config(max_body_bytes=2**22), journal_mib=1)
    async with cluster(wanted) as running, nodes(running, end_early, complete) as asked:
        large = b'{"model": "m", "stream": true, "user": "%b"}' % (b"a" * 2**21)
        async with running.http.post("/v1/completions", data=io.BytesIO(large)) as response:
            body = await response.read()
        assert body == SHOWN if end == len(ANSWER) else broken(body, end) == "upstream_lost"
        assert len(asked.asked) == 1
        assert await metric(running, 'pdserve_proxy_journals_dropped_total{reason="budget"}') == 1
        assert await resumes(running, "not_resumable") == (end < len(ANSWER))


async def test_the_log_says_from_where_to_where(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pdserve_proxy.continuation.resume"):
        async with cluster() as running, nodes(running, dies_at(3), complete):
            assert await ask(running) == SHOWN
    (line,) = [record.getMessage() for record in caplog.records if " resumed " in record.getMessage()]
    assert re.fullmatch(
        r"request_id=[0-9a-f]{32} resumed from=n[01] to=n[01] events=3 gap_s=\d+\.\d{3}: the connection ended", line
    )


async def test_the_load_is_where_the_stream_is() -> None:
    behaviours = [dies_at(1), hangs_at(2)]

    async def behave(exchange: Exchange) -> None:
        await behaviours.pop(0)(exchange)

    async with FakeNode(behave) as one, FakeNode(behave) as other:
        attempts, wanted = Attempts(), proxy_config()
        registry = Registry(1.0, 3, watcher=attempts)
        decode = [node_info(name, Role.DECODE, node.url) for name, node in (("one", one), ("other", other))]
        prefill = node_info("p", Role.PREFILL)
        for info in (*decode, prefill):
            registry.handle(Register(info), 0.0)

        def load(info: NodeInfo) -> int:
            return attempts.load(info.boot_id)

        tickets, counts = TicketSigner(SECRET, new_id()), RequestCounts()
        task = asyncio.current_task()
        assert task is not None
        async with Relay(wanted, registry, attempts, tickets, counts, Trust()) as made:
            with made.begin(task, "r", COMPLETIONS) as relayed:
                terms = made_terms(answer=made.new_identity(COMPLETIONS))
                call = NodeRequest(COMPLETIONS, read_body(b'{"model": "m", "stream": true}'), None, terms)
                response = await made.forward(relayed, call)
                assert isinstance(response, StreamedResponse)
                assert response.body.first + await response.body.next(lambda _: False) == shown(2)
                assert counts.resumes["resumed"] == 1
                # The prompt is computed again: the prefill node has nothing to do with it any more.
                assert sorted(load(info) for info in decode) == [0, 1]
                assert load(prefill) == 0
                assert counts.journals.taken_bytes > 0
            assert [load(info) for info in decode] == [0, 0]
            assert counts.journals.taken_bytes == 0


@pytest.mark.parametrize(("other", "count", "second"), [(1, 3, 2), (2, 3, 1), (1, 2, 1)])
async def test_a_node_with_the_same_kernels_goes_on_if_there_is_one(other: int, count: int, second: int) -> None:
    async with cluster() as running, nodes(running, dies_at(2), complete, count=count, kernels={other: "o"}) as asked:
        assert await ask(running) == SHOWN
        assert [number for number, node in enumerate(asked.made) if node.requests] == [0, second]
