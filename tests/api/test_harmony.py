"""Chats of a Harmony model over HTTP, from the request's body to the answer's bytes, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.message.formats import formats_of
from pdserve.api.message.harmony import MARKERS
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.config import MessageConfig
from pdserve.engine.sampling.grammar_matcher import GrammarMatcher
from pdserve.grammars.compiling import compile_grammar, load_vocabulary
from tests.api.harmony_model import TEMPLATE, save_harmony_model
from tests.api.node import MODEL
from tests.api.stepped_node import SteppedNode, stepped_node
from tests.api.test_resumed_answers import by_choice, events_of, journal_of
from tests.api.test_tool_calls import assembled, whole_messages, without_nothing
from tests.examples import examples

CHAT = "/v1/chat/completions"
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}}
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": TOOL}],
    "max_tokens": 200,
}
THOUGHT = "<|channel|>analysis<|message|>Shall I call f?<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
ANOTHER = CALL.replace("<|call|>", "<|end|><|start|>assistant")
FINAL = "<|channel|>final<|message|>It is sunny.<|return|>"


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_harmony_model(model_dir, tmp_path_factory.mktemp("harmony") / "model")


@pytest.fixture(scope="module")
def harmony(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def answering(tokenizer: Tokenizer, text: str, group: int = 1, **more: Any) -> Any:
    """Returns a node whose engine says ``text``. It stops by the tokens that the node names: not one of them is EOS."""
    script = tokenizer.encode(text + "<|return|>", add_special_tokens=False)
    formats = formats_of(tokenizer.chat_template, MessageConfig())
    return stepped_node(tokenizer, script, group, script=script, formats=formats, **more)


async def ask(node: SteppedNode, **fields: Any) -> dict[str, Any]:
    reply = await node.begin(CHAT, {**BODY, **fields})
    assert reply.status == 200, reply.body
    [message] = assembled(reply.body) if fields.get("stream") else whole_messages(reply.body)
    return without_nothing([message])[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_ends_the_answer(stream: bool, harmony: Tokenizer) -> None:
    async with answering(harmony, THOUGHT + PREAMBLE + CALL) as node:
        message = await ask(node, stream=stream)
        cut_off = await ask(node, stream=stream, max_tokens=12)
        uncalled = await ask(node, stream=stream, tool_choice="none", include_reasoning=False)
    [call] = message["calls"].values()
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (message["reasoning_content"], message["content"]) == ("Shall I call f?", "I look.")
    assert message["finish"] == "tool_calls"
    assert (cut_off["finish"], cut_off["calls"]) == ("length", {})
    assert "Shall I call f?".startswith(cut_off["reasoning_content"])
    assert (uncalled["content"], uncalled["finish"]) == ('I look.\n\n{"a": 1}', "stop")
    assert "reasoning_content" not in uncalled


@pytest.mark.parametrize("stream", [False, True])
async def test_the_final_message_is_the_content(stream: bool, harmony: Tokenizer) -> None:
    async with answering(harmony, THOUGHT + FINAL) as node:
        message = await ask(node, stream=stream)
        stopped = await ask(node, stream=stream, stop=["call", "sun"])
        whole = json.loads((await node.begin(CHAT, BODY)).body)
    assert (message["reasoning_content"], message["content"], message["finish"]) == (
        "Shall I call f?",
        "It is sunny.",
        "stop",
    )
    assert (stopped["reasoning_content"], stopped["content"]) == ("Shall I call f?", "It is ")
    thinking = harmony.encode(THOUGHT.removesuffix("<|start|>assistant"), add_special_tokens=False)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(thinking)


async def test_responses_and_messages_have_the_same_parts(harmony: Tokenizer) -> None:
    async with answering(harmony, THOUGHT + PREAMBLE + CALL) as node:
        functions = [{"type": "function", **TOOL}]
        asked = {"model": MODEL, "input": "Hi", "tools": functions, "reasoning": {"effort": "low"}}
        response = json.loads((await node.begin("/v1/responses", asked)).body)
        tools = [{"name": "f", "input_schema": TOOL["parameters"]}]
        turn = {"model": MODEL, "messages": BODY["messages"], "tools": tools, "max_tokens": 200}
        message = json.loads((await node.begin("/v1/messages", turn)).body)
        prompts = [harmony.decode(one[0].token_ids, skip_special_tokens=False) for one in node.engine.opened]
        refused = await node.begin("/v1/responses", {"model": MODEL, "input": "Hi", "reasoning": {"effort": "none"}})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {"a": 1}
    assert ["Effort: low" in prompts[0], "Effort: medium" in prompts[1]] == [True, True]
    assert (refused.status, refused.error["param"]) == (400, "reasoning.effort")
    assert "must be one of low, medium, high" in refused.error["message"]


@pytest.mark.integration
@settings(max_examples=examples(25))
@given(
    parts=st.lists(st.sampled_from([THOUGHT, PREAMBLE, ANOTHER]), max_size=3),
    last=st.sampled_from([CALL, FINAL, "", "<|channel|>analysis"]),
    group=st.integers(2, 5),
    resumed_after=st.sets(st.integers(0, 60), max_size=3),
    fields=st.fixed_dictionaries(
        {
            "n": st.integers(1, 2),
            "logprobs": st.booleans(),
            "stop": st.sampled_from([[], ["sun"], ["\n"], ["call", "ook"]]),
            "max_tokens": st.sampled_from([9, 100]),
            "parallel_tool_calls": st.booleans(),
            "include_reasoning": st.booleans(),
        }
    ),
)
def test_streams_whole_answers_and_resumed_ones_are_the_same(
    parts: list[str], last: str, group: int, resumed_after: set[int], fields: dict[str, Any], harmony: Tokenizer
) -> None:
    text = "".join(parts) + last
    body = {**BODY, "seed": 3, **fields}

    async def scenario() -> None:
        async with answering(harmony, text, group) as first, answering(harmony, text, group) as second:
            stream = await first.begin(CHAT, {**body, "stream": True})
            assert stream.status == 200, stream.body
            whole = await first.begin(CHAT, body)
            assert without_nothing(assembled(stream.body)) == whole_messages(whole.body)
            events = events_of(stream.body)
            for count in sorted(count for count in resumed_after if count <= len(events)):
                rest = await second.resume(CHAT, {**body, "stream": True}, journal_of(events[:count]))
                assert by_choice(events[:count] + events_of(rest.body)) == by_choice(events), f"after {count}"

    asyncio.run(scenario())


@pytest.mark.integration
async def test_grammars_bind_the_call_and_the_final_message(folder: Path, harmony: Tokenizer) -> None:
    """The engine gets them as the answer's first token has to follow them, and the reasoning stays free."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": TOOL["parameters"], "strict": True}}
    good = THOUGHT + '<|channel|>final<|message|>{"a": 2}'
    async with answering(harmony, good, model_dir=folder) as node:
        structured = await ask(node, tools=None, response_format=schema)
        await ask(node, tool_choice="required")
        refused = await node.begin(CHAT, {**BODY, "structured_outputs": {"regex": "a("}})
        grammars = [prompts[0].sampling.grammar for prompts in node.engine.opened]
    assert (structured["reasoning_content"], structured["content"]) == ("Shall I call f?", '{"a": 2}')
    assert (refused.status, refused.error["param"]) == (400, "structured_outputs.regex")
    vocabulary = load_vocabulary(folder, harmony.encode("<|return|><|call|>", add_special_tokens=False))
    for grammar, followed in zip(grammars, (good, THOUGHT + CALL.removesuffix("<|call|>")), strict=True):
        assert grammar is not None
        matcher = GrammarMatcher(compile_grammar(grammar, vocabulary), [])
        token_ids = harmony.encode(followed, add_special_tokens=False)
        matcher.open_bits(token_ids, vocabulary.vocab_size)
        assert matcher.failure is None
        wrong = GrammarMatcher(compile_grammar(grammar, vocabulary), [])
        wrong.open_bits(harmony.encode(followed.replace('"a"', '"b"'), add_special_tokens=False), vocabulary.vocab_size)
        assert wrong.failure is not None


def test_a_gguf_file_speaks_harmony_by_its_template(tmp_path: Path) -> None:
    """Its vocabulary says of some markers that they are control tokens, and of some that they are texts."""
    tokens, path = [*(chr(code) for code in range(33, 127)), "ab", *MARKERS], tmp_path / "model.gguf"
    writer = GGUFWriter(path, "gpt-oss")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-4o")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * 95 + [3] * 5 + [4] * 2)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", tokens.index("<|return|>"))
    writer.add_string("tokenizer.chat_template", TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(path)
    formats = formats_of(tokenizer.chat_template, MessageConfig())
    assert formats.harmony
    assert [tokenizer.added_id(text) for text in MARKERS] == list(range(95, 102))
    shown = tokenizer.detokenizer(skip_special_tokens=True, shown=formats.call_markers)
    assert shown.add(range(95, 102)) == "".join(MARKERS)
