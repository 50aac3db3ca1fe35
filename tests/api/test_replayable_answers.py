"""A client that asks again gets what it lacks of its answer, and nobody else gets any of it."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from pdserve.api.replay.answer_log import MAX_READERS, OVERHEAD_BYTES, SMALL_BYTES, ReplayableAnswer
from pdserve.api.replay.replayable_answers import SHARE, ReplayableAnswers, ReplayLimits
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.api.routes.completions import RequestBody
from pdserve.control.journal import JOURNALED_ANSWER, cut, digest
from pdserve.errors import Gone, TooManyRequests, Unavailable
from pdserve.http.request import PIECE_BYTES, HttpRequest
from pdserve.wire.replay import REPLAY_HEADER, read_event_id, read_replay
from pdserve.wire.terms import AnswerIdentity, EventPlace, Keep, Resume
from tests.api.node import WAIT_S
from tests.api.stepped_node import ANSWER, Reply, SteppedNode, stepped_node
from tests.api.test_resumed_answers import CHAT, MESSAGES, PLAIN, TEXT, events_of, journal_of, words
from tests.proxy.cluster import eventually

LIMITS = ReplayLimits(answers=8, memory_bytes=2**20, keep_s=60.0)
CLIENT = b"client"
KEEP = Keep(b"k" * 16, b"o" * 16, b"b" * 16)
ID = re.compile(rb"(?m)^id: (.*)\n")


def place(event: bytes) -> EventPlace:
    found = ID.search(event)
    assert found is not None
    event_id = read_event_id(found[1].decode())
    assert event_id is not None
    assert event_id.key == KEEP.key
    return event_id.place


def keep(after: EventPlace | None = None, **changed: bytes) -> Keep:
    return Keep(**{"key": KEEP.key, "owner": KEEP.owner, "body": KEEP.body, **changed}, after=after)


async def ask(node: SteppedNode, body: dict[str, Any], wanted: Keep, path: str = TEXT) -> Reply:
    return await node.ask(path, json.dumps(body).encode(), node.ticket(answer=ANSWER, keep=wanted))


def replayed(reply: Reply) -> tuple[bytes, bytes]:
    """Returns the entries of the events that a replay leaves out, and what follows them."""
    replay = read_replay(reply.headers[REPLAY_HEADER])
    assert replay is not None
    assert replay.answer == ANSWER
    return reply.body[: replay.journal_bytes], reply.body[replay.journal_bytes :]


def with_colons(journal: bytes) -> bytes:
    return b"".join([b":%b\n" % line for line in journal.splitlines()])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {**PLAIN, "n": 2, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 6, "stream": True, "model": PLAIN["model"]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 6, "stream": True, "model": PLAIN["model"]}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "stream": True, "model": PLAIN["model"]}),
    ],
    ids=["text", "chat", "messages", "responses"],
)
async def test_a_stream_is_replayed_behind_every_event_and_with_the_journal_of_those_before(
    path: str, body: dict[str, Any], tokenizer: Tokenizer
) -> None:
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        plain = await node.begin(path, body)
        first = await ask(node, body, KEEP, path)
        assert REPLAY_HEADER not in first.headers
        assert ID.sub(b"", first.body) == plain.body, "ids are all that is added"
        events = events_of(first.body)
        assert [place(event).events for event in events] == list(range(1, len(events) + 1))
        computed = len(node.engine.opened)
        for count in range(len(events) + 1):
            after = place(events[count - 1]) if count else None
            entries, rest = replayed(await ask(node, body, keep(after), path))
            assert entries == with_colons(journal_of(events[:count]))
            assert rest == b"".join(events[count:])
        assert len(node.engine.opened) == computed, "nothing is computed twice"


async def test_an_answer_in_one_piece_is_sent_again(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "stream": False}
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        first, again = await ask(node, body, KEEP), await ask(node, body, KEEP)
        assert first.status == again.status == 200
        assert first.body == again.body
        assert len(node.engine.opened) == 1


async def test_what_a_client_left_is_computed_on_and_read_by_several_at_once(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "max_tokens": 200}
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        left = asyncio.create_task(ask(node, body, KEEP))
        await eventually(lambda: bool(node.engine.opened), "the request at the engine")
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        one, other = await asyncio.gather(ask(node, body, KEEP), ask(node, body, KEEP))
        assert one.body == other.body
        assert cut(ID.sub(b"", replayed(one)[1]))[0].endswith(b"data: [DONE]\n\n")
        assert len(node.engine.opened) == 1
        assert node.replayable.replayed == 2


async def test_others_get_nothing_and_neither_does_another_request(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        events = events_of((await ask(node, PLAIN, KEEP)).body)
        last = place(events[-2])
        stolen = await ask(node, PLAIN, keep(last, owner=b"x" * 16))
        assert (stolen.status, stolen.error["code"]) == (410, "answer_not_kept")
        assert (await ask(node, PLAIN, keep(owner=b"x" * 16))).status == 422
        reused = await ask(node, PLAIN, keep(body=b"x" * 16))
        assert (reused.status, reused.error["code"]) == (422, "idempotency_key_reused")
        assert (await ask(node, PLAIN, keep(last, body=b"x" * 16))).status == 422
        for unknown in (EventPlace(last.tag, 999), EventPlace("0000" if last.tag != "0000" else "1111", 3)):
            assert (await ask(node, PLAIN, keep(unknown))).status == 410
        assert (await ask(node, PLAIN, keep(last, key=b"x" * 16))).status == 410
        assert len(node.engine.opened) == 1
        assert replayed(await ask(node, PLAIN, keep(last)))[1] == events[-1], "its owner still has it"


async def test_an_answer_that_another_node_began_goes_on_under_its_numbers(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        events = events_of((await ask(node, PLAIN, KEEP)).body)
        journal = journal_of(events[:3])
        resume = Resume(len(journal), digest(journal))
        rest = await node.resume(TEXT, PLAIN, journal, resume=resume, keep=KEEP)
        later = events_of(rest.body)
        assert [place(event).events for event in later] == list(range(4, len(events) + 1))
        assert place(later[0]).tag != place(events[0]).tag
        shown = replayed(await ask(node, PLAIN, keep(place(events[2]))))[1]
        assert shown == rest.body, "behind the last event of the node before"
        entries, shown = replayed(await ask(node, PLAIN, keep(place(later[0]))))
        assert entries == with_colons(journal_of([*events[:3], later[0]]))
        assert shown == b"".join(later[1:])
        for gone in (place(events[1]), place(events[4])):
            assert (await ask(node, PLAIN, keep(gone))).status == 410, "events that the node before has put together"
        computed = len(node.engine.opened)
        assert len(events_of((await ask(node, PLAIN, KEEP)).body)) == len(events), "from the beginning, it is made anew"
        assert len(node.engine.opened) == computed + 1


@pytest.mark.parametrize("engine", [{"fail_after": 2}, {"lost_after": 2}, {"fail_after": 0}])
async def test_a_failed_answer_is_not_kept(engine: dict[str, Any], tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS, **engine) as node:
        for turn in range(1, 3):
            await ask(node, PLAIN, KEEP)
            assert len(node.engine.opened) == turn
            assert len(node.replayable) == 0
            assert node.replayable.taken_bytes == 0


async def test_a_request_that_is_none_is_refused_as_without_a_key(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        reply = await ask(node, {**PLAIN, "temperature": "hot"}, KEEP)
        assert (reply.status, reply.error["param"]) == (400, "temperature")
        assert len(node.replayable) == 0
        assert (await ask(node, PLAIN, keep(body=b"x" * 16))).status == 200, "the key is free again"


async def test_a_node_that_keeps_nothing_answers_without_ids(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        assert b"\nid: " not in (await ask(node, PLAIN, KEEP)).body
        assert (await ask(node, PLAIN, keep(EventPlace("0000", 1)))).status == 410


# ---------------------------------------------------------------------- the bounds


@dataclass
class Client:
    """A client of a log, which reads when the test lets it."""

    label: str = "again"
    got: bytearray = field(default_factory=bytearray)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    largest: int = 0
    """The size of the largest piece that was written at once."""

    def write(self, data: bytes) -> bool:
        self.got += data
        self.largest = max(self.largest, len(data))
        return self.reads.is_set()

    async def begin(self, status: int, headers: dict[str, str], data: bytes, *, more: bool) -> None:
        self.write(data)

    async def drain(self) -> None:
        await self.reads.wait()

    async def respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.got += body
        self.ended = True

    async def send(self, data: bytes, *, more: bool) -> None:
        self.got += data
        self.ended = not more


def follow(
    answer: ReplayableAnswer, client: Client, after: EventPlace | None = None, *, first: bool = True
) -> asyncio.Task[None]:
    return asyncio.create_task(answer.follow(cast("HttpRequest", client), after, first=first))


def begin(
    table: ReplayableAnswers, number: int, owner: bytes = b"o" * 16, event: bytes = b"x"
) -> ReplayableAnswer | None:
    """Begins an answer of one event."""

    async def produce(answer: ReplayableAnswer) -> None:
        await answer.begin(200, {}, b"data: %b\n\n" % event, more=False)

    wanted = Keep(number.to_bytes(16, "big"), owner, b"b" * 16)
    return table.open(wanted, AnswerIdentity(bytes(16), 1), "r", TEXT, CLIENT, produce)


def forever(table: ReplayableAnswers, number: int, client: bytes = CLIENT) -> ReplayableAnswer:
    """Begins an answer that never says anything."""

    async def produce(answer: ReplayableAnswer) -> None:
        await asyncio.Event().wait()

    answer = table.open(Keep(bytes([number]) * 16, b"o" * 16, b"b" * 16), ANSWER, "r", TEXT, client, produce)
    assert answer is not None
    return answer


async def computed(answer: ReplayableAnswer | None) -> None:
    """Waits until ``answer`` is over."""
    assert answer is not None
    if answer.task is not None:
        await asyncio.wait([answer.task], timeout=WAIT_S)
    assert answer.over


async def test_ten_thousand_keys_take_no_more_than_the_bounds() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=20, memory_bytes=2**18, keep_s=60.0))
    for number in range(10_000):
        await computed(begin(table, number, event=b"x" * 10_000))
        assert len(table) <= 20
        assert table.taken_bytes <= 2**18
    assert len(table) >= 10
    table.drain()
    assert (len(table), table.taken_bytes) == (0, 0)


async def test_many_answers_of_one_owner_push_out_its_own() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=10, memory_bytes=2**20, keep_s=60.0))
    mine = begin(table, 0, owner=b"m" * 16)
    await computed(mine)
    for number in range(1, 1000):
        await computed(begin(table, number))
    assert mine is not None
    assert table.find(mine.keep, resumed=False) is mine
    table.drain()


async def test_answers_that_are_under_way_are_not_pushed_out() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=2, memory_bytes=2**20, keep_s=60.0))
    going = forever(table, 1), forever(table, 2)
    assert begin(table, 3) is None
    table.discard(going[0])
    assert begin(table, 3) is not None
    table.drain()


async def leave_all(answers: list[ReplayableAnswer]) -> None:
    """Has a client read each of ``answers``, and leave."""
    clients = [follow(answer, Client()) for answer in answers]
    await asyncio.sleep(0)
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)


def is_given_up(answer: ReplayableAnswer) -> bool:
    return answer.task is None


async def test_few_places_are_taken_by_answers_that_nobody_reads_for_one_client_and_for_all() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=64, memory_bytes=2**20, keep_s=60.0, unread_places=4))
    mine = [forever(table, number) for number in range(4)]
    await leave_all([*mine, *(forever(table, 4 + number) for number in range(4))])
    assert len(table) == 4
    await leave_all([forever(table, 10 + number, b"other") for number in range(3)])
    assert len(table) == 7, "another client has places of its own"
    third = [forever(table, 20 + number, b"third") for number in range(3)]
    await leave_all(third)
    assert len(table) == 8, "and all together have twice as many as one"
    await eventually(lambda: sum(map(is_given_up, mine)) == 2, "that who has most gives two up")
    assert is_given_up(mine[0]), "the oldest ones"
    assert not any(map(is_given_up, third)), "not who came last"
    table.drain()
    assert (len(table), table.taken_bytes) == (0, 0)


async def test_an_answer_counts_as_many_places_as_it_takes_also_if_its_client_leaves_before_they_are_known() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=64, memory_bytes=2**20, keep_s=60.0, unread_places=4))
    left = asyncio.Event()

    async def produce(answer: ReplayableAnswer) -> None:
        await left.wait()
        answer.describe(journaled=True, events=0, entries=b"", places=5)
        await asyncio.Event().wait()

    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, produce)
    assert answer is not None
    await leave_all([answer])
    assert len(table) == 1
    left.set()
    await eventually(lambda: not len(table), "that it is given up")
    await leave_all([forever(table, number) for number in range(4)])
    assert len(table) == 4, "its places are free again"
    table.drain()


async def test_a_client_that_comes_back_takes_its_answer_out_of_what_nobody_reads() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=64, memory_bytes=2**20, keep_s=60.0, unread_places=1))
    answer = forever(table, 1)
    await leave_all([answer])
    reader = follow(answer, Client(), first=False)
    await asyncio.sleep(0)
    await leave_all([forever(table, 2)])
    assert len(table) == 2
    reader.cancel()
    await asyncio.wait([reader])
    assert len(table) == 1, "this one is the second that nobody reads"
    table.drain()


async def test_a_reader_gets_small_pieces_and_no_more_before_it_has_taken_them() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=2**26, keep_s=60.0))
    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, producing(5000, []))
    await computed(answer)
    assert answer is not None
    assert answer.size > 20 * PIECE_BYTES
    client = Client()
    reader = follow(answer, client, first=False)
    for _ in range(100):
        await asyncio.sleep(0)
    assert 0 < len(client.got) <= 3 * PIECE_BYTES
    client.reads.set()
    await asyncio.wait_for(reader, WAIT_S)
    assert client.got.count(b"data: ") == 5001
    assert client.largest <= PIECE_BYTES + 1_100
    table.drain()


async def test_the_journal_of_what_a_client_has_goes_out_in_small_pieces_and_its_copies_count() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=2**24, keep_s=60.0))
    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, journaling(5000))
    await computed(answer)
    assert answer is not None
    taken = table.taken_bytes
    first = Client()
    first.reads.set()
    await asyncio.wait_for(follow(answer, first), WAIT_S)
    last = place(events_of(bytes(first.got))[4999])
    slow = Client()
    reader = follow(answer, slow, last, first=False)
    for _ in range(100):
        await asyncio.sleep(0)
    assert table.taken_bytes > taken + 10 * PIECE_BYTES
    assert len(slow.got) <= 2 * PIECE_BYTES
    slow.reads.set()
    await asyncio.wait_for(reader, WAIT_S)
    assert slow.got.count(b":0 7 ") == 5000
    assert slow.largest <= PIECE_BYTES
    assert table.taken_bytes == taken
    table.drain()


async def test_copies_of_the_journal_for_clients_that_read_nothing_do_not_hold_the_answer_up() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=2**24, keep_s=60.0))
    goes_on = asyncio.Event()

    async def produce(answer: ReplayableAnswer) -> None:
        await journaling(4500, over=False)(answer)
        await goes_on.wait()
        await journaling(100)(answer)

    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, produce)
    assert answer is not None
    first = Client()
    first.reads.set()
    readers = [follow(answer, first)]
    await eventually(lambda: first.got.count(b":0 7 ") == 4500, "what is there")
    last = place(events_of(bytes(first.got))[-1])
    readers += [follow(answer, Client(), last, first=False) for _ in range(3)]
    await asyncio.sleep(0)
    assert table.taken_bytes > table.share_bytes > answer.size
    goes_on.set()
    await asyncio.wait_for(readers[0], WAIT_S)
    assert first.ended
    for reader in readers[1:]:
        reader.cancel()
    await asyncio.wait(readers)
    table.drain()
    assert table.taken_bytes == 0


async def test_an_answer_goes_on_when_copies_for_other_clients_take_no_memory_any_more() -> None:
    memory = 2**22
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=memory, keep_s=60.0))
    other, written = forever(table, 1), list[int]()
    table.grew(other, memory)
    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, producing(400, written))
    assert answer is not None
    reader = follow(answer, Client())
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(written) < 400, "it waits: it is not small, and memory is short"
    table.grew(other, -memory)
    await computed(answer)
    assert len(written) == 400
    reader.cancel()
    await asyncio.wait([reader])
    table.drain()


async def test_so_many_connections_may_read_one_answer_and_others_are_told_so() -> None:
    table = ReplayableAnswers(LIMITS)
    answer = forever(table, 1)
    readers = [follow(answer, Client(), first=not number) for number in range(MAX_READERS)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="read this answer already"):
        await answer.follow(cast("HttpRequest", Client()), None)
    readers.pop().cancel()
    await asyncio.sleep(0)
    readers.append(follow(answer, Client(), first=False))
    await asyncio.sleep(0)
    assert len(answer.readers) == MAX_READERS
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    table.drain()


async def test_an_answer_given_up_in_its_last_step_is_forgotten() -> None:
    table = ReplayableAnswers(LIMITS)

    async def produce(answer: ReplayableAnswer) -> None:
        table.discard(answer)
        await answer.begin(200, {}, b"data: x\n\n", more=False)

    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, produce)
    assert answer is not None
    assert answer.task is not None
    await asyncio.wait([answer.task], timeout=WAIT_S)
    for number in range(3 * LIMITS.answers):
        await computed(begin(table, number))
    assert len(table) == LIMITS.answers, "what is gone is not what makes room"
    table.drain()
    assert table.taken_bytes == 0


async def test_a_client_that_asks_again_holds_no_body_while_it_reads(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "max_tokens": 200}
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        first = asyncio.create_task(ask(node, body, KEEP))
        await eventually(lambda: bool(node.engine.opened), "the request at the engine")
        again = asyncio.create_task(ask(node, body, KEEP))
        await eventually(lambda: node.replayable.replayed == 1, "the second reader")
        held = [one for one in gc.get_objects() if type(one) is RequestBody and one.last(2**20)]
        assert not held
        await asyncio.gather(first, again)


async def test_events_behind_an_id_need_no_body(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), limits=LIMITS) as node:
        events = events_of((await ask(node, PLAIN, KEEP)).body)
        again = await node.ask(TEXT, b"", node.ticket(answer=ANSWER, keep=keep(place(events[-2]))))
        assert replayed(again)[1] == events[-1]
        unknown = await node.ask(TEXT, b"", node.ticket(answer=ANSWER, keep=keep(EventPlace("0000", 1), key=b"x" * 16)))
        assert (unknown.status, unknown.error["code"]) == (410, "answer_not_kept")


async def test_an_answer_is_given_up_when_nobody_asks_for_it_in_time() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=2**20, keep_s=0.01))
    going, over = forever(table, 1), begin(table, 2)
    reader, task = follow(going, Client()), going.task
    await computed(over)
    await asyncio.sleep(0)
    reader.cancel()
    assert task is not None
    await asyncio.wait([task], timeout=WAIT_S)
    assert task.cancelled()
    await eventually(lambda: not len(table), "the end of its time")
    assert table.taken_bytes == 0


@pytest.mark.parametrize("drains", [True, False])
async def test_an_answer_that_leaves_its_node_ends_with_its_connection(drains: bool) -> None:
    table = ReplayableAnswers(LIMITS)

    async def produce(answer: ReplayableAnswer) -> None:
        await answer.begin(200, {}, b":0 1\ndata: x\n\n", more=True)
        if not drains:
            answer.write(b":move 912\n\n")
        await asyncio.Event().wait()

    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, produce)
    assert answer is not None
    client = Client()
    client.reads.set()
    reader = follow(answer, client)
    await eventually(lambda: b"data: x" in client.got and (drains or b":move 912\n\n" in client.got), "all it said")
    if drains:
        table.drain()
        assert len(table) == 1, "who reads it reads on"
    reader.cancel()
    await asyncio.wait([reader])
    assert (len(table), table.taken_bytes) == (0, 0)


def producing(events: int, written: list[int]) -> Any:
    async def produce(answer: ReplayableAnswer) -> None:
        await asyncio.sleep(0)  # so that it has its reader
        await answer.begin(200, {}, b"data: x\n\n", more=True)
        for number in range(events):
            written.append(number)
            if not answer.write(b"data: %b\n\n" % (b"x" * 1000)):
                await answer.drain()
        await answer.send(b"", more=False)

    return produce


async def test_a_slow_reader_holds_its_own_answer_up_and_takes_bounded_memory() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=2**20, keep_s=60.0))
    written: list[int] = []
    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, producing(1000, written))
    assert answer is not None
    slow = Client()
    reader = follow(answer, slow)
    for _ in range(3000):
        await asyncio.sleep(0)
    assert len(written) < 1000
    assert answer.size <= 2**20 // SHARE + 2_000
    slow.reads.set()
    await asyncio.wait_for(reader, WAIT_S)
    assert slow.ended
    assert slow.got.count(b"data: ") == 1001
    with pytest.raises(Unavailable):
        await answer.follow(cast("HttpRequest", Client()), None)
    first = read_event_id(bytes(slow.got)[4:].partition(b"\n")[0].decode())
    assert first is not None
    with pytest.raises(Gone):
        await answer.follow(cast("HttpRequest", Client()), first.place)
    late = Client()
    late.reads.set()
    await answer.follow(cast("HttpRequest", late), EventPlace(first.place.tag, 1000))
    assert late.got.count(b"data: ") == 1
    table.drain()


async def test_slow_readers_of_one_client_do_not_stop_the_answers_of_others() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=64, memory_bytes=2**20, keep_s=60.0))
    slow = []
    for number in range(16):
        keys = Keep(bytes([number]) * 16, b"s" * 16, b"b" * 16)
        made = table.open(keys, ANSWER, "r", TEXT, CLIENT, producing(1000, []))
        assert made is not None
        slow.append(follow(made, Client()))
    for _ in range(500):
        await asyncio.sleep(0)
    assert table.overdrawn
    assert table.taken_bytes <= 2**20 + 17 * (SMALL_BYTES + OVERHEAD_BYTES)
    client = Client()
    client.reads.set()
    other = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, producing(500, []))
    assert other is not None
    await asyncio.wait_for(follow(other, client), WAIT_S)
    assert client.ended
    for reader in slow:
        reader.cancel()
    await asyncio.wait(slow)
    table.drain()
    assert table.taken_bytes == 0


def journaling(events: int, *, whole: bool = False, over: bool = True) -> Any:
    """Writes an answer that is nearly all journal; the end of one if it has begun."""

    async def produce(answer: ReplayableAnswer) -> None:
        await asyncio.sleep(0)  # so that it has its reader
        if not answer.answered:
            answer.describe(journaled=True, events=0, entries=b"")
            await answer.begin(200, {"content-type": JOURNALED_ANSWER} if whole else {}, b"", more=True)
        line = b":0 %b\n" % (b"7 " * 100)
        for _ in range(events):
            if whole:
                await answer.send(line, more=True)
            elif not answer.write(line + b"data: x\n\n"):
                await answer.drain()
        if over:
            await answer.send(b'{"status":200,"headers":{}}\n{}' if whole else b"data: [DONE]\n\n", more=False)

    return produce


@pytest.mark.parametrize("whole", [False, True])
async def test_an_answer_that_is_too_long_to_be_kept_comes_to_its_end_and_is_not_kept(whole: bool) -> None:
    table = ReplayableAnswers(ReplayLimits(answers=8, memory_bytes=2**20, keep_s=60.0))
    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, journaling(2000, whole=whole))
    assert answer is not None
    client = Client()
    client.reads.set()
    await asyncio.wait_for(follow(answer, client), WAIT_S)
    assert client.ended
    assert client.got.count(b":0 7 ") == 2000
    assert len(table) == 0
    assert table.taken_bytes == 0


async def test_a_long_answer_goes_on_when_others_take_no_memory_any_more() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=64, memory_bytes=2**20, keep_s=60.0))
    slow = []
    for number in range(16):
        made = table.open(
            Keep(bytes([number]) * 16, b"s" * 16, b"b" * 16), ANSWER, "r", TEXT, CLIENT, producing(1000, [])
        )
        assert made is not None
        slow.append(follow(made, Client()))
    for _ in range(500):
        await asyncio.sleep(0)
    assert table.overdrawn
    client = Client()
    client.reads.set()
    other = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, journaling(1000))
    assert other is not None
    await asyncio.wait_for(follow(other, client), WAIT_S)
    assert client.ended
    for reader in slow:
        reader.cancel()
    await asyncio.wait(slow)
    table.drain()
    assert table.taken_bytes == 0


async def test_one_large_answer_leaves_those_of_others_alone() -> None:
    table = ReplayableAnswers(ReplayLimits(answers=64, memory_bytes=2**20, keep_s=60.0))
    for number in range(8):
        begin(table, number)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(table) == 8

    async def produce(answer: ReplayableAnswer) -> None:
        await asyncio.sleep(0)
        await answer.respond(200, {}, bytes(2**20))

    large = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, produce)
    assert large is not None
    client = Client()
    await asyncio.wait_for(follow(large, client), WAIT_S)
    assert client.ended
    assert len(table) == 8
    table.drain()


async def test_a_node_that_gives_a_request_up_before_it_begins_lets_another_one_take_it() -> None:
    table = ReplayableAnswers(LIMITS)
    answer = forever(table, 1)
    reader = follow(answer, Client())
    await asyncio.sleep(0)
    assert answer.task is not None
    answer.task.cancel()
    with pytest.raises(Unavailable):
        await reader


async def test_journaled_answers_in_one_piece_are_replayed_with_the_journal_of_the_node_before() -> None:
    table = ReplayableAnswers(LIMITS)

    async def produce(answer: ReplayableAnswer) -> None:
        answer.describe(journaled=True, events=1, entries=b"0 1 2\n")
        await answer.begin(200, {"content-type": JOURNALED_ANSWER}, b":0 3\n:move 5\n", more=True)
        await answer.send(b'{"status":200,"headers":{}}\n{}', more=False)

    answer = table.open(KEEP, ANSWER, "r", TEXT, CLIENT, produce)
    assert answer is not None
    first, again = Client(), Client()
    first.reads.set()
    again.reads.set()
    await asyncio.gather(follow(answer, first), follow(answer, again, first=False))
    end = b':0 3\n{"status":200,"headers":{}}\n{}'
    assert bytes(first.got).replace(b":move 5\n", b"") == end
    assert bytes(again.got).replace(b":move 5\n", b"") == b":0 1 2\n" + end
    table.drain()
