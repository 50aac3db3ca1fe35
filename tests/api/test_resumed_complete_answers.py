"""An answer in one piece has a journal if it takes long, and another node that goes on with it gives the same bytes."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdserve.api.answers import answer, text_generation
from pdserve.api.answers.answer import CompleteAnswer
from pdserve.api.answers.text_generation import ChoiceText, TextDelta
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.control.journal import AnswerHead, AnswerReader, cut_move_lines, parse
from pdserve.wire.engine import RequestOutput
from tests.api.node import MODEL
from tests.api.stepped_node import MOVE_TOKENS, Reply, stepped_node
from tests.api.test_resumed_answers import BODIES, CHAT, MESSAGES, TEXT, UNFIT, alphabet, words
from tests.examples import examples

JSON = {"content-type": "application/json"}
PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "x", "seed": 5, "ignore_eos": True, "max_tokens": 6}
ROUTES = st.sampled_from(
    [
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "logprob_token_ids": [40, 41, 42]}),
        (TEXT, {"prompt": "x"}),
        (TEXT, {"prompt": ["x", "y"], "echo": True}),
        (TEXT, {"prompt": [[7], [8]], "logprobs": 1}),
    ]
)

slow = patch.object(answer, "JOURNAL_INTERVAL_S", 0.0)
"""While it is entered, every answer takes long."""


def read(reply: Reply) -> tuple[list[bytes], AnswerHead | None, bytes]:
    """Returns the lines of the journal, and the answer."""
    assert reply.status == 200
    if not reply.body.startswith((b":", b'{"status"')):
        return [], AnswerHead(200, JSON), reply.body
    reader = AnswerReader(2**20)
    entries = reader.feed(reply.body)
    return entries.replace(b":", b"").splitlines(keepends=True), reader.head, reader.body()


few_at_a_time = patch.object(text_generation, "TURN_TOKENS", 2)
"""While it is entered, no more of the tokens from another node become text at once."""


@few_at_a_time
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(route=ROUTES, fields=BODIES, group=st.integers(1, 3))
@example(route=(TEXT, {"prompt": "x"}), fields={"max_tokens": 9, "stop": ["l"], "seed": 3}, group=3)
def test_every_prefix_can_be_resumed(
    route: tuple[str, dict[str, Any]], fields: dict[str, Any], group: int, tokenizer: Tokenizer
) -> None:
    path, prompt = route
    body = {"model": MODEL, **prompt, **fields, "stream_options": None}

    async def scenario() -> None:
        async with (
            stepped_node(tokenizer, alphabet(tokenizer), group) as first,
            stepped_node(tokenizer, alphabet(tokenizer), group) as second,
        ):
            unbroken = await first.begin(path, body)
            assert unbroken.body.startswith(b"{"), "a short answer has no journal"
            answer = (AnswerHead(200, JSON), unbroken.body)
            with slow:
                journal, *whole = read(await first.begin(path, body))
                assert tuple(whole) == answer
                for count in range(len(journal) + 1):
                    has = journal[:count]
                    more, *whole = read(await second.resume(path, body, b"".join(has)))
                    assert tuple(whole) == answer, f"after {count}"
                    again = await second.resume(path, body, b"".join(has + more))
                    assert tuple(read(again)[1:]) == answer, f"after {count} and {len(more)} of the node that resumes"

    asyncio.run(scenario())


@few_at_a_time
async def test_the_tokens_of_another_node_become_text_in_turns(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, add = [], ChoiceText.add

    def note(text: ChoiceText, output: RequestOutput) -> TextDelta:
        turns.append(len(output.new_token_ids))
        return add(text, output)

    monkeypatch.setattr(ChoiceText, "add", note)
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        resumed = await node.resume(TEXT, PLAIN, b"0 33 33 33 33 33\n")
    assert json.loads(resumed.body)["usage"]["completion_tokens"] == 6
    assert turns == [2, 2, 2]


@slow
async def test_the_journal_has_all_tokens_but_those_that_come_with_the_answer(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        journal, _, whole = read(await node.begin(TEXT, {**PLAIN, "return_token_ids": True}))
    token_ids = json.loads(whole)["choices"][0]["token_ids"]
    assert b"".join(journal) == b"".join(b"0 %d\n" % token_id for token_id in token_ids[:-1])


@slow
async def test_the_journal_has_log_probabilities_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        journal, _, whole = read(await node.begin(TEXT, {**PLAIN, "logprobs": 1}))
    shown = json.loads(whole)["choices"][0]["logprobs"]
    read_back = parse(b"".join(journal), 1, 2**20).choices[0]
    assert len(read_back.logprobs) == len(read_back.token_ids) > 1
    assert [each.chosen for each in read_back.logprobs] == shown["token_logprobs"][: len(read_back.logprobs)]


@pytest.mark.parametrize(
    ("fields", "journal"),
    [
        ({"logprobs": 1}, b"0 33\n"),
        ({}, b"0 33 [[-0.5,1,[]]]\n"),
        ({"logprobs": 1}, b"0 33 [[-0.5,1,[]]]\n0 33\n"),
        ({"logprobs": 1}, b"0 33 [[-0.5,1,[[33,-0.5],[34,-1.5]]]]\n"),
        ({"logprobs": 1, "stream": True}, b"0 33 [[-0.5,1,[]]]\n"),
    ],
    ids=["none", "not asked for", "of some", "of more", "of a stream"],
)
async def test_log_probabilities_that_the_request_does_not_have(
    fields: dict[str, Any], journal: bytes, tokenizer: Tokenizer
) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(TEXT, {**PLAIN, **fields}, journal)
    assert (reply.status, reply.error["code"]) == (400, "bad_journal")


@slow
async def test_a_proxy_that_knows_no_journals_gets_none(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        assert (await node.begin(TEXT, PLAIN, None)).body.startswith(b'{"id"')


@slow
async def test_the_headers_of_the_answer_come_with_it(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        _, head, _ = read(await node.begin(TEXT, {**PLAIN, "unheard_of": 1}))
    assert head == AnswerHead(200, {**JSON, "x-pdserve-ignored": "unheard_of"})


@slow
async def test_a_request_that_fails_behind_its_journal_has_its_own_status(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), fail_after=3) as node:
        journal, head, whole = read(await node.begin(TEXT, PLAIN))
    assert len(journal) == 3
    assert head == AnswerHead(500, JSON)
    assert json.loads(whole)["error"]["code"] == "engine_error"


@slow
async def test_a_node_that_fails_leaves_the_answer_to_another(tokenizer: Tokenizer) -> None:
    async with (
        stepped_node(tokenizer, words(tokenizer), lost_after=3) as lost,
        stepped_node(tokenizer, words(tokenizer)) as node,
    ):
        journal, head, whole = read(await lost.begin(TEXT, PLAIN))
        assert (len(journal), head, whole) == (3, None, b"")
        resumed = read(await node.resume(TEXT, PLAIN, b"".join(journal)))
        assert resumed[1:] == read(await node.begin(TEXT, PLAIN))[1:]


@slow
async def test_a_defect_behind_the_journal_is_the_answers_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node would have it too."""

    def fail(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(CompleteAnswer, "completion", fail)
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        _, head, whole = read(await node.begin(TEXT, PLAIN))
    assert head == AnswerHead(500, JSON)
    assert b"ValueError" not in whole


async def test_an_answer_that_is_over_already_is_only_put_together(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        with slow:
            journal, _, whole = read(await node.begin(TEXT, {**PLAIN, "max_tokens": 5}))
        shown = json.loads(whole)["choices"][0]["text"]
        last = tokenizer.encode(shown, add_special_tokens=False)[-1]
        resumed = await node.resume(TEXT, {**PLAIN, "max_tokens": 5}, b"".join([*journal, b"0 %d\n" % last]))
    assert resumed.body == whole


@pytest.mark.parametrize(
    ("journal", "why"),
    [*UNFIT.values(), (b"0.\n", "has an end"), (b"done\n", "has an end"), (b"usage\n", "has an end")],
)
async def test_a_journal_of_another_request(journal: bytes, why: str, tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(TEXT, PLAIN, journal)
        assert (reply.status, reply.error["code"]) == (400, "bad_journal")
        assert why in reply.error["message"] or "has an end" in reply.error["message"]
        assert not node.engine.opened


async def test_a_wish_for_room_stands_between_two_entries(tokenizer: Tokenizer) -> None:
    async with (
        stepped_node(tokenizer, alphabet(tokenizer)) as calm,
        stepped_node(tokenizer, alphabet(tokenizer), move_at=3) as crowded,
    ):
        with slow:
            unbroken, wished = (await calm.begin(TEXT, PLAIN)).body, (await crowded.begin(TEXT, PLAIN)).body
    head = wished.index(b"{")
    entries, tokens = cut_move_lines(wished[:head])
    assert (entries + wished[head:], tokens) == (unbroken, MOVE_TOKENS)
