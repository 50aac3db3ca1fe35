"""A client that asks again finds the node that keeps its answer, whichever proxy it asks."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AsyncExitStack

import msgspec
import pytest

from pdserve.config import AdmissionConfig
from pdserve.control.journal import cut
from pdserve.errors import InvalidRequest
from pdserve.wire.discovery import Role
from pdserve.wire.replay import REPLAY_HEADER, Replay, event_id_start, read_event_id, read_replay
from pdserve.wire.terms import AnswerIdentity, EventPlace, Keep
from pdserve_proxy.relayed_routes import MAX_KEY_CHARS, wanted_keep
from tests.proxy.cluster import Cluster, cluster, error_of, metric, node_info, proxy_config, registered
from tests.proxy.fake_node import Exchange, FakeNode
from tests.proxy.journaling_nodes import ANSWER, SHOWN, complete, nodes, refuses, split, ticket_in
from tests.proxy.shared_proxy import SharedProxy

ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"
BODY = b'{"model": "m", "prompt": "p", "stream": true}'
EVENT_ID = (event_id_start(b"k" * 16, "0a1b") + b"7").decode()


async def ask(running: Cluster, **headers: str) -> tuple[int, bytes]:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    fields["content-type"] = "application/json"
    async with running.http.post("/v1/completions", data=BODY, headers=fields) as response:
        return response.status, await response.read()


def test_a_key_names_one_answer_of_one_owner_and_one_request() -> None:
    def keep(key: str | None = "k", last: str | None = None, owner: str = "o", body: bytes = b"b") -> Keep | None:
        return wanted_keep(key, last, owner, "/v1/completions", body)

    assert keep(None) is None
    assert keep() == keep() == keep(last="")
    named, other_owner, other_body = keep(), keep(owner="p"), keep(body=b"c")
    assert named is not None
    assert other_owner is not None
    assert other_body is not None
    assert named.after is None
    assert named.key not in (other_owner.key, getattr(keep("l"), "key", None))
    assert (named.key, named.owner) == (other_body.key, other_body.owner)
    assert named.body != other_body.body
    assert named.owner != other_owner.owner
    one, two = keep(None, ""), keep(None, "")
    assert one is not None
    assert two is not None
    assert one.key != two.key, "without a key, each request has an answer of its own"
    event_id = (event_id_start(named.key, "0a1b") + b"7").decode()
    again = msgspec.structs.replace(named, after=EventPlace("0a1b", 7))
    assert keep(None, event_id) == keep("k", event_id) == again
    with pytest.raises(InvalidRequest, match="another answer"):
        keep("l", event_id)


@pytest.mark.parametrize("key", ["", "é", "x" * (MAX_KEY_CHARS + 1), "a\tb"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="Idempotency-Key"):
        wanted_keep(key, None, "o", "/v1/completions", b"")


@pytest.mark.parametrize("last", ["7", "x" * 1000, EVENT_ID.upper(), EVENT_ID + "\n", EVENT_ID + "0" * 9, " "])
def test_an_event_id_that_no_node_wrote_is_refused(last: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        wanted_keep(None, last, "o", "/v1/completions", b"")


def test_ids_and_replays_are_read_as_they_are_written() -> None:
    read = read_event_id(EVENT_ID)
    assert read is not None
    assert (read.key, read.place) == (b"k" * 16, EventPlace("0a1b", 7))
    replay = Replay(AnswerIdentity(bytes(range(16)), 1_700_000_000), 12)
    assert read_replay(replay.header()) == replay
    assert read_replay(None) is read_replay("nonsense") is None


async def test_two_proxies_send_a_key_to_the_same_node_whatever_their_policies_would_do() -> None:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(cluster()) for _ in range(2)]
        made = [await stack.enter_async_context(FakeNode(complete)) for _ in range(4)]
        for number, node in enumerate(made):
            info = node_info(f"n{number}", Role.MIXED, node.url)
            await stack.enter_async_context(registered(info, first.addresses.control, second.addresses.control))
        for turn in range(6):
            before = [len(node.requests) for node in made]
            for running in (first, second):
                assert (await ask(running, idempotency_key=f"key {turn}"))[0] == 200
            assert sorted(len(node.requests) - count for node, count in zip(made, before, strict=True)) == [0, 0, 0, 2]
        keeps = {ticket_in(request).terms.keep for node in made for request in node.requests}
        assert len(keeps) == 6, "both proxies name an answer alike"


async def test_a_request_that_says_nothing_of_keys_is_not_kept(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, complete) as made:
        assert (await ask(running))[0] == 200
        assert made.tickets[0].terms.keep is None


async def test_owners_of_keys_are_told_apart() -> None:
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=(ALICE, BOB)))
    async with cluster(config) as running, nodes(running, complete, complete, count=1) as made:
        for key in (ALICE, BOB):
            assert (await ask(running, authorization=f"Bearer {key}", idempotency_key="the same"))[0] == 200
        alice, bob = (ticket.terms.keep for ticket in made.tickets)
        assert alice is not None
        assert bob is not None
        assert alice.key != bob.key
        assert alice.owner != bob.owner


async def test_other_nodes_are_asked_where_one_does_not_have_the_answer(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, refuses(410), complete) as made:
        status, body = await ask(running, last_event_id=EVENT_ID)
        assert (status, body) == (200, SHOWN)
        assert [ticket.terms.keep and ticket.terms.keep.after for ticket in made.tickets] == [EventPlace("0a1b", 7)] * 2
    async with proxy.cluster() as running, nodes(running, refuses(410), refuses(410)) as made:
        status, body = await ask(running, last_event_id=EVENT_ID)
        assert status == 410, "the last node's own answer"
        assert json.loads(body) == {"error": {"message": "no"}}
        assert len(made.asked) == 2
        assert await metric(running, 'pdserve_proxy_node_failures_total{kind="refused",node="n0"}') == 0


@pytest.mark.parametrize("statuses", [(503, 410), (410, 503)])
async def test_an_answer_is_not_said_to_be_gone_where_a_node_could_not_be_asked(
    proxy: SharedProxy, statuses: tuple[int, int]
) -> None:
    async with proxy.cluster() as running, nodes(running, *map(refuses, statuses)) as made:
        status, _ = await ask(running, last_event_id=EVENT_ID)
        assert status == 503
        assert len(made.asked) == 2


async def test_keys_of_any_size_are_refused_before_a_node_hears_of_them(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, complete) as made:
        status, body = await ask(running, idempotency_key="x" * 1000)
        assert (status, error_of(body)["code"]) == (400, "invalid_idempotency_key")
        status, body = await ask(running, last_event_id="17")
        assert (status, error_of(body)["code"]) == (400, "invalid_last_event_id")
        assert not made.asked


@pytest.mark.parametrize("cut_at", [1, 9, 1000])
async def test_another_node_goes_on_with_a_replayed_answer_as_if_the_proxy_had_seen_it_all(
    proxy: SharedProxy, cut_at: int
) -> None:
    """The node that replays sends the entries of what its client has, in any pieces, and then it dies."""
    identity = AnswerIdentity(b"i" * 16, 1_600_000_000)
    entries = b"".join(event.partition(b"\n")[0] + b"\n" for event in ANSWER[:3])

    async def replay_and_die(exchange: Exchange) -> None:
        await exchange.begin_stream(**{REPLAY_HEADER: Replay(identity, len(entries)).header()})
        data = entries + ANSWER[3]
        for start in range(0, len(data), cut_at):
            await exchange.chunk(data[start : start + cut_at])
        exchange.die()

    async with proxy.cluster() as running, nodes(running, replay_and_die, complete) as made:
        status, body = await ask(running, last_event_id=EVENT_ID)
        assert status == 200
        assert body == cut(b"".join(ANSWER[3:]))[0]
        assert split(made.asked[1])[1] == cut(b"".join(ANSWER[:4]))[1]
        goes_on = made.tickets[1]
        assert goes_on.terms.answer == identity
        assert goes_on.terms.keep is not None
        assert goes_on.terms.keep.after is None, "this node keeps what follows, and is asked for nothing"


async def test_a_place_in_an_answer_is_looked_for_without_the_body(proxy: SharedProxy) -> None:
    async with proxy.cluster() as running, nodes(running, *[refuses(410)] * 3, complete) as made:
        assert (await ask(running, last_event_id=EVENT_ID))[0] == 200
        assert [request.body for request in made.asked] == [b""] * 4
    async with proxy.cluster() as running, nodes(running, complete) as made:
        assert (await ask(running, idempotency_key="a new one"))[0] == 200
        assert made.asked[0].body == BODY, "a request that may be computed has one"
