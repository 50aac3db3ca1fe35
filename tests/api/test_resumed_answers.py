"""An answer that another node goes on with is the answer of one node, byte for byte."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdserve.api.generation.engine_client import EngineState
from pdserve.api.generation.generation import Generation
from pdserve.api.requests.preparing import INLINE_BYTES
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.control.journal import cut, cut_move_blocks, digest
from pdserve.http.errors import ENGINE_GONE_HEADER
from pdserve.wire.discovery import NodeInfo, Register, Role
from pdserve.wire.terms import TICKET_HEADER, AnswerIdentity, PrefillTarget, Prepared, Resume, decode_prepared
from tests.api.behaviour import REPLY_TEXT, SPLIT_TEXT, Behaviour
from tests.api.node import MODEL, WAIT_S, NodeUnderTest, scripted_node
from tests.api.plain_http import send
from tests.api.scripted_engine import EOS, GATE
from tests.api.stepped_node import ANSWER, MAX_BODY_BYTES, MOVE_TOKENS, VOCAB_SIZE, SteppedNode, stepped_node
from tests.api.test_server import FakeProxy, config
from tests.examples import examples

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def alphabet(tokenizer: Tokenizer) -> list[int]:
    """Words, parts of characters, and sometimes the end."""
    words, parts = (tokenizer.encode(text, add_special_tokens=False) for text in (REPLY_TEXT, SPLIT_TEXT))
    return [*words, *parts, 1, EOS]


def events_of(stream: bytes) -> list[bytes]:
    """The events, each with the entry before it."""
    *events, rest = stream.split(b"\n\n")
    assert not rest
    return [event + b"\n\n" for event in events]


def choice_of(event: bytes) -> str:
    """The number of the choice that the event belongs to; for others the word in its entry."""
    found = re.match(rb":([a-z]+|[0-9]+)", event)
    assert found is not None
    return found[1].decode()


def by_choice(events: Sequence[bytes]) -> dict[str, list[bytes]]:
    """The events of each choice. Choices that a node goes on with take turns in another order."""
    grouped: dict[str, list[bytes]] = {}
    for event in events:
        grouped.setdefault(choice_of(event), []).append(event)
    return grouped


def journal_of(events: Sequence[bytes]) -> bytes:
    return cut(b"".join(events))[1]


BODIES = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 8),
        "seed": st.integers(0, 999),
        "n": st.integers(1, 2),
        "stop": st.sampled_from([[], ["Hello"], [", w", "are"], ["\ufffd"], ["ld! H", "l"]]),
        "stop_token_ids": st.sampled_from([[], [28], [33, 17]]),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "min_tokens": st.integers(0, 1),
        "return_token_ids": st.booleans(),
        "stream_options": st.sampled_from([None, {"include_usage": True}]),
    }
)
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


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(route=ROUTES, fields=BODIES, group=st.integers(1, 3))
@example(route=(TEXT, {"prompt": "x"}), fields={"max_tokens": 9, "stop": ["l"], "seed": 3}, group=3)
@example(
    route=(TEXT, {"prompt": "y"}),
    fields={"max_tokens": 2, "stop": ["\ufffd"], "seed": 173, "min_tokens": 1, "skip_special_tokens": False},
    group=1,
)
def test_every_prefix_can_be_resumed(
    route: tuple[str, dict[str, Any]], fields: dict[str, Any], group: int, tokenizer: Tokenizer
) -> None:
    path, prompt = route
    body = {"model": MODEL, "stream": True, **prompt, **fields}

    async def scenario() -> None:
        async with (
            stepped_node(tokenizer, alphabet(tokenizer), group) as first,
            stepped_node(tokenizer, alphabet(tokenizer), group) as second,
        ):
            whole = await first.begin(path, body)
            assert whole.status == 200
            events = events_of(whole.body)
            assert choice_of(events[-1]) == "done"
            if "logprobs" not in body:
                # With log probabilities, a token's text and its id wait for them.
                assert cut(whole.body)[0] == await without_journal(first, path, body), "entries are all that is added"
            for count in range(len(events) + 1):
                rest = await second.resume(path, body, journal_of(events[:count]))
                assert rest.status == 200
                assert by_choice(events[:count] + events_of(rest.body)) == by_choice(events), f"after {count}"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [28]},
        {"stop_token_ids": [28], "include_stop_str_in_output": True},
        {"stop": ["lo<|im_end"], "skip_special_tokens": False},
        {"stop": ["lo<|im_end"], "skip_special_tokens": False, "ignore_eos": True},
        {"stop": ["lo"], "min_tokens": 1},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_a_stop_token_that_is_not_shown_ends_no_stop_string(fields: dict[str, Any], tokenizer: Tokenizer) -> None:
    """The client has the text before it, of which a stop string was held back; its text would complete that."""
    stop_token = EOS if "skip_special_tokens" in fields else 28
    script = [*tokenizer.encode("Hello", add_special_tokens=False), stop_token, 28]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "stop": ["lo,"], "stream": True, **fields}
    async with stepped_node(tokenizer, (), script=script) as node:
        events = events_of((await node.begin(TEXT, body)).body)
        for count in range(len(events) + 1):
            rest = await node.resume(TEXT, body, journal_of(events[:count]))
            assert events[:count] + events_of(rest.body) == events, f"after {count}"


async def without_journal(node: SteppedNode, path: str, body: dict[str, Any]) -> bytes:
    """The stream to a proxy that knows no journals, with the identity of the one that does."""
    stream = (await node.begin(path, body, None)).body
    stream = re.sub(rb'"id":"([a-z]+)-[0-9a-f]{32}"', rb'"id":"\1-%b"' % bytes(range(16)).hex().encode(), stream)
    return re.sub(rb'"created":\d+', b'"created":1700000000', stream)


PLAIN: dict[str, Any] = {"model": MODEL, "prompt": "x", "seed": 5, "ignore_eos": True, "max_tokens": 6, "stream": True}


def words(tokenizer: Tokenizer) -> list[int]:
    """An alphabet whose tokens all have text of their own."""
    return tokenizer.encode(REPLY_TEXT, add_special_tokens=False)


async def test_the_proxy_names_the_answer_and_its_seeds(tokenizer: Tokenizer) -> None:
    """Streamed or whole, of any node; other answers have other seeds."""
    body = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "max_tokens": 2}
    seeds = []
    async with stepped_node(tokenizer, words(tokenizer)) as first, stepped_node(tokenizer, words(tokenizer)) as second:
        for node in (first, second):
            for extra in ({}, {"stream": True}):
                reply = await node.begin(TEXT, {**body, **extra})
                event = re.search(rb'\{"id":"(cmpl-[0-9a-f]{32})".*?"created":(\d+)', reply.body)
                assert event is not None
                assert event.groups() == (b"cmpl-" + bytes(range(16)).hex().encode(), b"1700000000")
        await second.begin(TEXT, body, None)
        for prompts in (*first.engine.opened, *second.engine.opened):
            seeds.append([choice.seed for prompt in prompts for choice in prompt.choices])
    assert len(set(seeds[0])) == 4
    assert seeds[:4] == [seeds[0]] * 4
    assert not set(seeds[4]) & set(seeds[0])
    assert all(0 <= seed < 2**63 for seed in seeds[0])


async def test_nodes_whose_clocks_differ_render_the_same_date(model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_dir, tmp_path / "dated")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y, %H:%M:%S') }}")
    dated = load_tokenizer(folder)
    prompts = []
    for clock in (ANSWER.created, ANSWER.created + 86_400.5):
        async with stepped_node(dated, words(dated)) as node:
            with patch.object(time, "time", lambda clock=clock: clock):
                assert (await node.begin(CHAT, {"model": MODEL, "messages": MESSAGES, "max_tokens": 1})).status == 200
            prompts += [prompt.token_ids for prompt in node.engine.opened[0]]
    assert prompts == [dated.encode("14 Nov 2023, 22:13:20", add_special_tokens=False)] * 2


async def test_an_answer_can_be_resumed_again_and_again(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "n": 2, "stop": ["ld! H"], "stream_options": {"include_usage": True}}
    async with stepped_node(tokenizer, alphabet(tokenizer)) as node:
        whole = events_of((await node.begin(CHAT, {**body, "messages": MESSAGES})).body)
        has: list[bytes] = whole[:1]
        while choice_of(has[-1]) != "done":
            rest = await node.resume(CHAT, {**body, "messages": MESSAGES}, journal_of(has))
            has += events_of(rest.body)[:2]
        assert by_choice(has) == by_choice(whole)


async def test_usage_so_far_counts_the_tokens_of_all_nodes(tokenizer: Tokenizer) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with stepped_node(tokenizer, alphabet(tokenizer), 2) as node:
        events = events_of((await node.begin(TEXT, {**PLAIN, **options})).body)
        for count in range(len(events)):
            rest = await node.resume(TEXT, {**PLAIN, **options}, journal_of(events[:count]))
            assert events[:count] + events_of(rest.body) == events


async def test_the_engine_gets_what_is_left(tokenizer: Tokenizer) -> None:
    """A prompt whose choices are over is not submitted, and a choice with a stop string at its end is not."""
    body = {**PLAIN, "prompt": [[7], [8], [9]], "n": 2, "stop": ["lo,"]}
    hello = b" ".join(b"%d" % token_id for token_id in tokenizer.encode("Hello,", add_special_tokens=False))
    journal = b"0 33\n0.\n1 33\n1.\n3 33\n4 33\n5 %b\n" % hello
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(TEXT, body, journal)
        [prompts] = node.engine.opened
    assert [
        [prompt.token_ids, *((choice.index, choice.emitted) for choice in prompt.choices)] for prompt in prompts
    ] == [[[8], (2, ()), (3, (33,))], [[9], (4, (33,))]]
    assert [prompt.choices[0].seed for prompt in prompts] == [5, 5]
    assert prompts[0].choices[1].seed == 6
    assert by_choice(events_of(reply.body))["5"] == [
        b':5.\ndata: {"id":"cmpl-%b","object":"text_completion","created":1700000000,"model":"%b",'
        b'"system_fingerprint":"fp_ffffffffffffffff","choices":[{"index":5,"text":"","finish_reason":"stop",'
        b'"logprobs":null,"stop_reason":"lo,","matched_stop":"lo,"}]}\n\n'
        % (bytes(range(16)).hex().encode(), MODEL.encode())
    ]


async def test_nothing_is_left_but_the_end(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "stream_options": {"include_usage": True}}
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        events = events_of((await node.begin(TEXT, body)).body)
        node.engine.opened.clear()
        for left in range(3):
            count = len(events) - left
            rest = await node.resume(TEXT, body, journal_of(events[:count]))
            assert (rest.status, rest.body) == (200, b"".join(events[count:]))
        assert node.engine.opened == [[]] * 3


async def test_a_node_that_prepares_fetches_what_holders_have_and_generates_nothing(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "prompt": [[7], [8]], "n": 2}
    holders = (PrefillTarget("d0", "tcp://d0.invalid:1", bytes(16)),)
    journal = b"0 33\n0.\n1 33 17\n"
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.prepare(TEXT, body, journal, holders=holders)
        lacking = {1: 3, 2: 1, 3: 1}
        assert (reply.status, decode_prepared(reply.body)) == (200, Prepared(True, 16, lacking))
        [prompts] = node.engine.opened
        assert node.engine.fetched == [holders]
        assert [(choice.index, choice.emitted) for prompt in prompts for choice in prompt.choices] == [
            (1, (33, 17)),
            (2, ()),
            (3, ()),
        ]
        shown = (await node.metrics.render()).decode()
        assert 'pdserve_request_success_total{finished_reason="length"} 0.0' in shown
        assert "pdserve_e2e_request_latency_seconds_count 0.0" in shown
        over = b"".join(b"%d.\n" % number for number in range(4))
        assert (await node.prepare(TEXT, body, over)).status == 200


async def test_a_node_that_stops_while_it_prepares_says_so(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        begin = node.engine.open

        def stop(*args: Any, **named: Any) -> Generation:
            node.engine.state = EngineState.STOPPED
            return begin(*args, **named)

        monkeypatch.setattr(node.engine, "open", stop)
        assert (await node.prepare(TEXT, PLAIN, b"0 33\n")).status == 503


@pytest.mark.parametrize("engine", [{"fail_after": 0}, {"lost_after": 0}])
async def test_a_node_that_cannot_fetch_says_so(engine: dict[str, Any], tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), **engine) as node:
        reply = await node.prepare(TEXT, PLAIN, b"0 33\n")
        assert (reply.status, reply.error["code"]) == (500, "engine_error")


async def test_a_resumed_answer_is_no_first_token(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve.request")
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        events = events_of((await node.begin(TEXT, PLAIN)).body)
        await node.resume(TEXT, PLAIN, journal_of(events[:2]))
        await node.resume(TEXT, PLAIN, b"")
        shown = (await node.metrics.render()).decode()
    assert "pdserve_time_to_first_token_seconds_count 1.0" in shown
    begun, resumed, from_nothing = caplog.messages
    assert "resumed=" not in begun
    assert " output=4 " in resumed
    assert " resumed=2 " in resumed
    assert " resumed=0 " in from_nothing


@pytest.mark.parametrize("journaled", [True, False])
async def test_a_request_that_fails_says_so_after_all_that_can_be_resumed(
    journaled: bool, tokenizer: Tokenizer
) -> None:
    """The engine's error is the request's own, which every node would have."""
    body = {**PLAIN, "stop": ["lo, world"]}
    async with stepped_node(tokenizer, words(tokenizer)[:1], fail_after=2) as node:
        reply = await node.begin(TEXT, body, AnswerIdentity(bytes(16), 1) if journaled else None)
    shown, entries = cut(reply.body)
    chunks = [json.loads(line[6:])["choices"][0]["text"] for line in shown.decode().split("\n\n") if "choices" in line]
    assert "".join(chunks) == ("HelloHel" if journaled else "HelloHello")
    assert shown.split(b"\n\n")[-2].startswith(b"event: error\n")
    assert entries == (b"0 %d\n" % words(tokenizer)[0] * 2 if journaled else b"")


async def test_a_node_that_fails_leaves_the_rest_to_another(tokenizer: Tokenizer) -> None:
    """It says nothing more: an error event would be the end for the client. A stream without a journal gets one."""
    body = {**PLAIN, "stop": ["lo, world"]}
    async with (
        stepped_node(tokenizer, words(tokenizer), lost_after=3) as lost,
        stepped_node(tokenizer, words(tokenizer)) as node,
    ):
        plain = await lost.begin(TEXT, body, None)
        assert plain.body.split(b"\n\n")[-2].startswith(b"event: error\n")
        begun = events_of((await lost.begin(TEXT, body)).body)
        rest = events_of((await node.resume(TEXT, body, journal_of(begun))).body)
        assert begun + rest == events_of((await node.begin(TEXT, body)).body)


SCORED = {**PLAIN, "prompt": ["x y", "y z x"], "n": 2, "echo": True, "logprobs": 1, "max_tokens": 3}


def merged(events: Sequence[bytes]) -> dict[int, dict[str, Any]]:
    """What a client puts together of each choice, however it is cut into events."""
    whole: dict[int, dict[str, Any]] = {}
    for event in events:
        data = event.partition(b"data: ")[2]
        for choice in [] if data == b"[DONE]\n\n" else json.loads(data)["choices"]:
            shown = whole.setdefault(choice["index"], {"text": ""})
            shown["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                shown.setdefault(name, []).extend(values)
    return whole


async def test_every_prefix_of_a_stream_with_scored_prompts_can_be_resumed(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        events = events_of((await node.begin(TEXT, SCORED)).body)
        for count in range(len(events) + 1):
            rest = events_of((await node.resume(TEXT, SCORED, journal_of(events[:count]))).body)
            assert merged(events[:count] + rest) == merged(events), f"after {count}"


async def test_a_node_that_fails_has_begun_no_choice_whose_prompt_is_not_scored(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        whole = merged(events_of((await node.begin(TEXT, SCORED)).body))
        for steps in range(1, 6):
            async with stepped_node(tokenizer, words(tokenizer), lost_after=steps) as lost:
                begun = events_of((await lost.begin(TEXT, SCORED)).body)
            rest = events_of((await node.resume(TEXT, SCORED, journal_of(begun))).body)
            assert merged(begun + rest) == whole, f"after {steps} steps"


async def test_a_node_that_fails_before_it_has_said_anything_has_its_own_status(tokenizer: Tokenizer) -> None:
    """Its first tokens show nothing: they may be the beginning of a stop string."""
    body = {**PLAIN, "stop": ["HelloHelloHello!"]}
    async with stepped_node(tokenizer, words(tokenizer)[:1], lost_after=1) as node:
        reply = await node.resume(TEXT, body, b"0 %d\n" % words(tokenizer)[0])
    assert (reply.status, reply.error["code"]) == (500, "engine_error")
    assert ENGINE_GONE_HEADER in reply.headers, "the proxy has another node answer"


UNFIT = {
    "another choice": (b"1 33\n", "names choice 1"),
    "a token that is none": (b"0 %d\n" % VOCAB_SIZE, "names choice 0 and tokens"),
    "more tokens than are asked for": (b"0 1 1 1 1 1 1 1\n", "choice 0 has 7 tokens, of at most 6"),
    "no entries": (b"hello\n", "entry 0 of the journal is none"),
    "half an entry": (b"0 33", "has no end"),
    "more after an end": (b"0.\n0 33\n", "which is over"),
    "an end without its choice's": (b"0 33\ndone\n", "ends with 1 choices that do not"),
    "a usage that nobody asked for": (b"0 33\n0.\nusage\n", "a usage that the request does not ask for"),
    "NUL": (b"\0" * 9 + b"\n", "is none"),
}


@pytest.mark.parametrize("name", UNFIT)
async def test_a_journal_of_another_request(name: str, tokenizer: Tokenizer) -> None:
    journal, why = UNFIT[name]
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(TEXT, PLAIN, journal)
        assert (reply.status, reply.error["code"]) == (400, "bad_journal")
        assert why in reply.error["message"]
        assert not node.engine.opened


async def test_more_tokens_than_the_context_holds(tokenizer: Tokenizer) -> None:
    body = {name: value for name, value in PLAIN.items() if name != "max_tokens"}
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(TEXT, body, b"0" + b" 33" * 256 + b"\n")
    assert (reply.status, reply.error["code"]) == (400, "bad_journal")


async def test_tokens_behind_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, world", add_special_tokens=False)
    journal = b"0" + b"".join(b" %d" % token_id for token_id in ids) + b"\n"
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(TEXT, {**PLAIN, "stop": "Hello"}, journal)
    assert (reply.status, reply.error["code"]) == (400, "bad_journal")
    assert "behind a stop string" in reply.error["message"]


async def test_the_ticket_is_for_one_journal(tokenizer: Tokenizer) -> None:
    data, journal = json.dumps(PLAIN).encode(), b"0 33\n"
    wrong = {
        "another digest": (data + journal, Resume(5, digest(b"0 34\n"))),
        "a longer one": (data + journal, Resume(6, digest(journal))),
        "a shorter one": (data + journal, Resume(4, digest(journal))),
        "no journal": (data, Resume(5, digest(journal))),
        "a body that is shorter": (b"{}", Resume(5, digest(journal))),
    }
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        for sent, resume in wrong.values():
            reply = await node.ask(TEXT, sent, node.ticket(answer=ANSWER, resume=resume))
            assert (reply.status, reply.error["code"]) == (401, "bad_ticket")
        nameless = await node.ask(TEXT, data + journal, node.ticket(resume=Resume(5, digest(journal))))
        assert (nameless.status, nameless.error["code"]) == (401, "bad_ticket")
        unannounced = await node.ask(TEXT, data + journal, node.ticket(answer=ANSWER))
        assert (unannounced.status, unannounced.error["code"]) == (400, "invalid_json")
        unsigned = await node.ask(TEXT, data + journal, None)
        assert (unsigned.status, unsigned.error["code"]) == (401, "no_ticket")
        assert not node.engine.opened


async def test_the_journal_has_room_beside_the_body(tokenizer: Tokenizer) -> None:
    """The bytes that a ticket announces come on top of the largest body; no client's body gets any of them."""
    padded = {**PLAIN, "user": "x" * (MAX_BODY_BYTES - len(json.dumps({**PLAIN, "user": ""})))}
    journal = b"0 33\n" * 6
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        assert (await node.resume(TEXT, padded, journal)).status == 200
        larger = await node.resume(TEXT, {**padded, "user": padded["user"] + "x"}, journal)
        assert (larger.status, larger.error["message"].startswith("the request body is above")) == (413, True)


async def test_a_long_journal_is_read_in_a_thread(tokenizer: Tokenizer) -> None:
    body = {**PLAIN, "max_tokens": 200, "n": 100}
    journal = b"".join(b"%d 33\n" % choice for choice in range(100) for _ in range(8))
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        assert len(journal) > INLINE_BYTES
        reply = await node.resume(TEXT, body, journal)
        assert reply.status == 200
        [[prompt]] = node.engine.opened
    assert [choice.emitted for choice in prompt.choices] == [(33,) * 8] * 100


@pytest.mark.integration
def test_a_node_is_killed_and_another_goes_on(model_dir: Path, tmp_path: Path) -> None:
    """Real processes and sockets, and the engine's messages between them."""
    body = {"model": MODEL, "messages": MESSAGES, "n": 2, "seed": Behaviour.GATED, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    folders = [tmp_path / name for name in ("killed", "other")]
    for folder in folders:
        folder.mkdir()
    (folders[1] / GATE).touch()
    with closing(FakeProxy()) as proxy, ExitStack() as stack:
        node_config = config(proxies=(proxy.address,))
        killed = stack.enter_context(scripted_node(node_config, model_dir, folders[0], Role.DECODE))
        killed_info = registered(proxy, killed)
        other = stack.enter_context(scripted_node(node_config, model_dir, folders[1], Role.DECODE))
        other_info = registered(proxy, other)
        begun = begin_and_kill(killed, proxy.ticket(killed_info, answer=ANSWER), data)
        entries = cut(begun)[1]
        ticket = proxy.ticket(other_info, answer=ANSWER, resume=Resume(len(entries), digest(entries)))
        rest = send("POST", f"{other.url}{CHAT}", content=data + entries, headers={TICKET_HEADER: ticket})
        [submit] = other.submits()
        unbroken = send(
            "POST", f"{other.url}{CHAT}", content=data, headers={TICKET_HEADER: proxy.ticket(other_info, answer=ANSWER)}
        )
    assert rest.status == 200
    assert [len(submit.emitted), *(len(child.emitted) for child in submit.children)] == [2, 2]
    assert meaning(begun + rest.body) == meaning(unbroken.body)


def registered(proxy: FakeProxy, node: NodeUnderTest) -> NodeInfo:
    while (info := proxy.receive(Register).node).url != node.url:
        pass  # the other node says again what it has said
    return cast("NodeInfo", info)


def begin_and_kill(node: NodeUnderTest, ticket: str, data: bytes) -> bytes:
    """The events of both choices' first two tokens, after which the node is killed."""
    connection = http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=WAIT_S)
    with closing(connection):
        connection.request("POST", CHAT, body=data, headers={TICKET_HEADER: ticket})
        response = connection.getresponse()
        begun = b""
        while not begun.endswith(b"\n\n") or len(re.findall(rb" \d+", cut(begun)[1])) < 4:
            begun += response.readline()
        node.process.popen.kill()
        return begun


def meaning(stream: bytes) -> tuple[dict[int, tuple[int, str, str | None]], dict[str, Any], bytes]:
    """Roles, text and finish reason of each choice, the usage, and the end of the stream."""
    *events, end = cut(stream)[0].removesuffix(b"\n\n").split(b"\n\n")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    said: dict[int, tuple[int, str, str | None]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            roles, text, _ = said.get(choice["index"], (0, "", None))
            delta = choice["delta"]
            text += delta.get("content", "")
            said[choice["index"]] = (roles + ("role" in delta), text, choice["finish_reason"])
    return said, chunks[-1]["usage"], end


@pytest.mark.parametrize("move_at", [1, 3])
@pytest.mark.parametrize(("path", "prompt"), [(TEXT, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})])
async def test_a_wish_for_room_stands_between_two_events(
    path: str, prompt: dict[str, Any], move_at: int, tokenizer: Tokenizer
) -> None:
    """One that comes before the first event comes behind that."""
    body = {"model": MODEL, **prompt, "seed": 5, "ignore_eos": True, "max_tokens": 6, "stream": True}
    async with (
        stepped_node(tokenizer, alphabet(tokenizer)) as calm,
        stepped_node(tokenizer, alphabet(tokenizer), move_at=move_at) as crowded,
    ):
        unbroken, wished = (await calm.begin(path, body)).body, (await crowded.begin(path, body)).body
    assert cut_move_blocks(wished) == (unbroken, MOVE_TOKENS)
    assert 0 < wished.index(b":move") < wished.index(b":done")


async def test_only_an_answer_with_a_journal_is_movable(tokenizer: Tokenizer) -> None:
    whole = {**PLAIN, "stream": False}
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        await node.begin(TEXT, {**PLAIN, "stream": True})
        await node.begin(TEXT, whole)
        await node.begin(TEXT, {**whole, "best_of": 2})
        await node.begin(TEXT, whole, answer=None)
        await node.prepare(TEXT, {**PLAIN, "stream": True}, b"0 33\n")
        assert node.engine.movable == [True, True, False, False, False]
