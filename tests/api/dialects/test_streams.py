"""The streams of the dialects: the order of their events, and that another node goes on behind any of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pdserve.api.message.formats import MessageFormats
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.control.journal import DONE_ENTRY, cut, digest
from pdserve.wire.terms import Resume, Storing
from tests.api.dialects.sse import events_in
from tests.api.node import MODEL
from tests.api.scripted_engine import EOS
from tests.api.stepped_node import ANSWER, SteppedNode, stepped_node
from tests.api.test_resumed_answers import alphabet, events_of, journal_of, words
from tests.examples import examples

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


def request(path: str, tokens: int, stops: list[str], **fields: Any) -> dict[str, Any]:
    """Returns a request to either route."""
    if path == RESPONSES:
        return {"model": MODEL, "input": "Hi", "max_output_tokens": tokens, "stop": stops, **fields}
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "stop_sequences": stops, **fields}


def check_responses(events: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """The events are in OpenAI's order, and say what the whole answer says."""
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = names.count("output_text.delta")
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done"),
        "incomplete" if whole["status"] == "incomplete" else "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if "delta" in event)
    last = events[-1]["response"]
    assert last == whole
    assert last["output"][0]["content"][0]["text"] == text == events[-4]["text"]
    assert events[-2]["item"] == last["output"][0]


def check_messages(events: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """The events are in Anthropic's order, and say what the whole answer says."""
    names = [event["type"] for event in events]
    deltas = names.count("content_block_delta")
    assert names == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    text = "".join(event["delta"]["text"] for event in events[2:-3])
    assert whole["content"] == [{"type": "text", "text": text, "citations": None}]
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"] == whole["usage"]
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    tokens = {"input_tokens": sum(whole["usage"][kind] for kind in kinds), "output_tokens": 0}
    begun["usage"] = {**dict.fromkeys(kinds, 0), **tokens, "output_tokens_details": {"thinking_tokens": 0}}
    assert events[0]["message"] == begun


CHECKS = {RESPONSES: check_responses, MESSAGES: check_messages}


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(sorted(CHECKS)),
    tokens=st.integers(1, 8),
    stops=st.sampled_from([[], ["Hello"], [", w", "are"], ["\ufffd"], ["ld! H", "l"]]),
    fields=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 999),
            "stop_token_ids": st.sampled_from([[], [28], [33, 17]]),
            "skip_special_tokens": st.booleans(),
            "min_tokens": st.integers(0, 1),
        }
    ),
    group=st.integers(1, 3),
)
@example(path=RESPONSES, tokens=6, stops=["l"], fields={"seed": 3}, group=3)
def test_every_prefix_can_be_resumed(
    path: str, tokens: int, stops: list[str], fields: dict[str, Any], group: int, tokenizer: Tokenizer
) -> None:
    """A resumed stream has the bytes of one node's stream, and its events are those of the whole answer."""
    body = request(path, tokens, stops, **fields)

    async def scenario() -> None:
        async with (
            stepped_node(tokenizer, alphabet(tokenizer), group) as first,
            stepped_node(tokenizer, alphabet(tokenizer), group) as second,
        ):
            whole = await first.begin(path, body)
            stream = (await first.begin(path, {**body, "stream": True})).body
            CHECKS[path](events_in(stream), json.loads(whole.body))
            events = events_of(stream)
            assert events[-1].startswith(DONE_ENTRY)
            for count in range(len(events)):
                rest = await second.resume(path, {**body, "stream": True}, journal_of(events[:count]))
                assert rest.status == 200
                assert events[:count] + events_of(rest.body) == events, f"after {count}"

    asyncio.run(scenario())


@pytest.mark.parametrize("path", sorted(CHECKS))
async def test_a_stream_can_be_resumed_again_and_again(path: str, tokenizer: Tokenizer) -> None:
    body = request(path, 6, [], seed=5, ignore_eos=True, stream=True)
    async with stepped_node(tokenizer, alphabet(tokenizer), 2) as node:
        events = events_of((await node.begin(path, body)).body)
        has = events[:1]
        while len(has) < len(events):
            has += events_of((await node.resume(path, body, journal_of(has))).body)[:1]
        assert has == events


@pytest.mark.parametrize("path", sorted(CHECKS))
async def test_a_whole_answer_can_be_resumed(path: str, tokenizer: Tokenizer) -> None:
    body = request(path, 6, [], seed=5, ignore_eos=True)
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        whole = (await node.begin(path, body)).body
        tokens = cut((await node.begin(path, {**body, "stream": True})).body)[1]
        entries = [line for line in tokens.splitlines() if line.startswith(b"0 ")]
        for count in range(len(entries)):
            journal = b"".join([line + b"\n" for line in entries[:count]])
            assert (await node.resume(path, body, journal)).body == whole


@pytest.mark.parametrize("path", sorted(CHECKS))
async def test_a_journal_whose_answer_is_over_is_refused(path: str, tokenizer: Tokenizer) -> None:
    body = request(path, 6, [], stream=True)
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        reply = await node.resume(path, body, b"0 33\n0.\n")
    assert reply.status == 400
    assert b"over before the stream is" in reply.body


async def failed(node: SteppedNode, path: str) -> dict[str, Any]:
    """Returns the last event of a stream whose engine failed."""
    body = request(path, 6, [], stream=True, ignore_eos=True)
    return events_in((await node.begin(path, body)).body)[-1]


async def test_a_request_that_fails_ends_with_the_event_of_its_route(tokenizer: Tokenizer) -> None:
    async with stepped_node(tokenizer, words(tokenizer), fail_after=2) as node:
        last = await failed(node, RESPONSES)
        assert (last["type"], last["sequence_number"]) == ("response.failed", 6)
        response = last["response"]
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert response["error"]["message"]
        assert [(item["status"], bool(shown(item))) for item in response["output"]] == [("incomplete", True)]
        error = await failed(node, MESSAGES)
        assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "api_error", "r")


@pytest.mark.parametrize("path", sorted(CHECKS))
async def test_a_stream_that_another_node_goes_on_with_has_no_error(path: str, tokenizer: Tokenizer) -> None:
    body = request(path, 6, [], stream=True, ignore_eos=True)
    async with stepped_node(tokenizer, words(tokenizer), lost_after=2) as node:
        lost = (await node.begin(path, body)).body
        assert not lost.endswith(b":done\n")
        assert b"event: error" not in lost


CALLING = """<think>
Adding is easy.
</think>
I add.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}
</tool_call>
Then I stop.
<tool_call>
{"name": "stop", "arguments": {}}
</tool_call>
Done."""
"""An answer with a block of each kind, and text before, between and behind calls."""
FORMATS = MessageFormats(ToolFormat.HERMES, ReasoningFormat.THINK)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("group", [1, 4, 100])
@pytest.mark.parametrize("path", sorted(CHECKS))
async def test_reasoning_and_calls_are_blocks_and_can_be_resumed_anywhere(
    path: str, group: int, tokenizer: Tokenizer
) -> None:
    tokens = [*tokenizer.encode(CALLING, add_special_tokens=False), EOS]
    if path == RESPONSES:
        tools: list[dict[str, Any]] = [
            {"type": "function", "name": name, "parameters": SCHEMA} for name in ("add", "stop")
        ]
    else:
        tools = [{"name": name, "input_schema": SCHEMA} for name in ("add", "stop")]
    body = request(path, len(tokens), [], tools=tools)
    async with stepped_node(tokenizer, (), group, formats=FORMATS, script=tokens) as node:
        whole = json.loads((await node.begin(path, body)).body)
        stream = (await node.begin(path, {**body, "stream": True})).body
        events = events_of(stream)
        for count in range(len(events)):
            rest = await node.resume(path, {**body, "stream": True}, journal_of(events[:count]))
            assert events[:count] + events_of(rest.body) == events, f"after {count}"
    thought = tokenizer.encode(CALLING.partition("\nI add.")[0], add_special_tokens=False)
    details = whole["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens" if path == RESPONSES else "thinking_tokens": len(thought)}
    if path == RESPONSES:
        kinds = [(item["type"], item["status"], shown(item)) for item in whole["output"]]
        assert kinds == [(kind, "completed", text) for kind, text in RESPONSE_ITEMS]
        assert events_in(stream)[-1]["response"] == whole
        opened = [event["item"]["type"] for event in events_in(stream) if event["type"].endswith("item.added")]
        assert opened == [kind for kind, _ in RESPONSE_ITEMS]
    else:
        assert whole["stop_reason"] == "tool_use"
        assert [{**block, "id": None} if "id" in block else block for block in whole["content"]] == MESSAGE_BLOCKS
        assert put_together(events_in(stream)) == whole["content"]


RESPONSE_ITEMS = [
    ("reasoning", "Adding is easy.\n"),
    ("message", "I add.\n"),
    ("function_call", '{"a": 1, "b": [2, "x"]}'),
    ("message", "Then I stop.\n"),
    ("function_call", "{}"),
    ("message", "Done."),
]
MESSAGE_BLOCKS = [
    {"type": "thinking", "thinking": "Adding is easy.\n", "signature": ""},
    {"type": "text", "text": "I add.\n", "citations": None},
    {"type": "tool_use", "id": None, "name": "add", "input": {"a": 1, "b": [2, "x"]}},
    {"type": "text", "text": "Then I stop.\n", "citations": None},
    {"type": "tool_use", "id": None, "name": "stop", "input": {}},
    {"type": "text", "text": "Done.", "citations": None},
]


def shown(item: dict[str, Any]) -> str:
    """Returns the text of an item of a response, or the arguments of a call."""
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the content of a message as a client makes it of its events."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(block)
                arguments = ""
            case {"type": "content_block_delta", "delta": {"partial_json": piece}}:
                arguments += piece
                # Every client reads the whole of it when the block ends.
            case {"type": "content_block_delta", "delta": delta}:
                [name] = delta.keys() - {"type"}
                blocks[-1][name] += delta[name]
            case {"type": "content_block_stop"} if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(arguments)
    return blocks


async def test_a_call_that_is_cut_has_no_input(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": [1', add_special_tokens=False)
    body = request(MESSAGES, len(tokens), [], tools=[{"name": "add", "input_schema": SCHEMA}])
    async with stepped_node(tokenizer, (), formats=FORMATS, script=tokens) as node:
        whole = json.loads((await node.begin(MESSAGES, body)).body)
    assert (whole["stop_reason"], whole["content"][0]["input"]) == ("max_tokens", {})


async def test_the_text_of_arguments_that_are_no_json_is_the_input(tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {\'a\': 1}}\n</tool_call>'
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    tools = [{"name": "add", "input_schema": SCHEMA}]
    async with stepped_node(tokenizer, (), formats=FORMATS, script=tokens) as node:
        whole = json.loads((await node.begin(MESSAGES, request(MESSAGES, len(tokens), [], tools=tools))).body)
        assert (whole["stop_reason"], whole["content"][0]["input"]) == ("tool_use", {"INVALID_JSON": "{'a': 1}"})
        body = request(MESSAGES, len(tokens), [], tools=tools, stream=True)
        events = events_in((await node.begin(MESSAGES, body)).body)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == "{'a': 1}"


@pytest.mark.parametrize("group", [1, 3, 100])
async def test_log_probabilities_of_a_response_are_those_of_its_text_alone(group: int, tokenizer: Tokenizer) -> None:
    """However many tokens come at once, and without a journal, which has none."""
    tokens = [*tokenizer.encode(CALLING, add_special_tokens=False), EOS]
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("add", "stop")]
    body = request(RESPONSES, len(tokens), [], tools=tools, include=["message.output_text.logprobs"])
    async with stepped_node(tokenizer, (), group, formats=FORMATS, script=tokens) as node:
        whole = json.loads((await node.begin(RESPONSES, body)).body)
        stream = (await node.begin(RESPONSES, {**body, "stream": True})).body
    assert cut(stream) == (stream, b"")
    last = events_in(stream)[-1]["response"]
    parts = [part for item in last["output"] if item["type"] == "message" for part in item["content"]]
    assert [part["text"] for part in parts] == ["I add.\n", "Then I stop.\n", "Done."]
    for part in parts:
        # Its first token may have the line's end behind the call, which is not shown.
        assert "".join(each["token"] for each in part["logprobs"]).lstrip() == part["text"]
    assert last == whole


async def test_a_response_says_whether_it_is_kept_and_what_it_goes_on_from(tokenizer: Tokenizer) -> None:
    history = b'[{"role":"user","content":"Hello"},{"role":"assistant","content":"you"}]'
    body = request(RESPONSES, 3, [], previous_response_id="resp_1", store=True)
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        refused = await node.begin(RESPONSES, body)
        assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
        assert "--store" in refused.error["message"]
        ticket = node.ticket(answer=ANSWER, storing=Storing(True, len(history)))
        told = json.loads((await node.ask(RESPONSES, json.dumps(body).encode() + history, ticket)).body)
        assert (told["store"], told["previous_response_id"]) == (True, "resp_1")
        said = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "you"}]
        alone = {**body, "input": [*said, {"role": "user", "content": "Hi"}], "previous_response_id": None}
        same = json.loads((await node.begin(RESPONSES, alone)).body)
        assert (same["usage"], same["store"]) == (told["usage"], False)
        short = node.ticket(answer=ANSWER, storing=Storing(True, 10**6))
        assert (await node.ask(RESPONSES, json.dumps(body).encode(), short)).status == 401


async def test_a_response_with_a_history_can_be_resumed(tokenizer: Tokenizer) -> None:
    history = b'[{"role":"user","content":"Hello"}]'
    body = request(RESPONSES, 4, [], seed=5, ignore_eos=True, stream=True, previous_response_id="resp_1")
    data, storing = json.dumps(body).encode() + history, Storing(True, len(history))
    async with stepped_node(tokenizer, words(tokenizer)) as node:
        events = events_of((await node.ask(RESPONSES, data, node.ticket(answer=ANSWER, storing=storing))).body)
        for count in (3, len(events) - 2):
            journal = journal_of(events[:count])
            resume = Resume(len(journal), digest(journal))
            ticket = node.ticket(answer=ANSWER, storing=storing, resume=resume)
            assert events[:count] + events_of((await node.ask(RESPONSES, data + journal, ticket)).body) == events


async def test_a_call_names_its_namespace_apart(tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "crm.find", "arguments": {}}\n</tool_call>'
    tokens = [*tokenizer.encode(text, add_special_tokens=False), EOS]
    function = {"type": "function", "name": "find"}
    space = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [function]}
    body = request(RESPONSES, len(tokens), [], tools=[space])
    async with stepped_node(tokenizer, (), formats=FORMATS, script=tokens) as node:
        whole = json.loads((await node.begin(RESPONSES, body)).body)
        events = events_in((await node.begin(RESPONSES, {**body, "stream": True})).body)
    [call] = whole["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "find")
    assert events[-1]["response"] == whole
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["find"]
