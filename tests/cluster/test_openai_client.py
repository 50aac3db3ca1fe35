"""Tests the whole cluster with the official client."""

from __future__ import annotations

import asyncio

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.cluster.nodes import MODEL, ServedCluster, http

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count from one to five."}]


@pytest.fixture(scope="module")
def answer(pd_cluster: ServedCluster) -> str:
    """Returns the greedy answer to QUESTION, which is not streamed."""
    reply = http(
        pd_cluster.url + "/v1/chat/completions",
        {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24},
    )
    assert reply.status == 200, reply.body
    text: str = reply.json()["choices"][0]["message"]["content"]
    assert text
    return text


def client(cluster: ServedCluster) -> OpenAI:
    return OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)


def test_chat(pd_cluster: ServedCluster, answer: str) -> None:
    with client(pd_cluster) as openai:
        got = openai.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    assert got.choices[0].message.content == answer
    assert got.usage is not None
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_chat_streamed(pd_cluster: ServedCluster, answer: str) -> None:
    with client(pd_cluster) as openai:
        stream = openai.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


def test_responses(pd_cluster: ServedCluster, answer: str) -> None:
    with client(pd_cluster) as openai:
        question = "Count from one to five."
        whole = openai.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=24)
        stream = openai.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=24, stream=True)
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == answer
    assert whole.output_text == answer


def test_stored_responses(pd_cluster: ServedCluster) -> None:
    """A kept response is the one that was sent, and going on from it is sending its items once more."""
    said, asked = "My name is Ada.", "What is my name?"
    with client(pd_cluster) as openai:
        with openai.responses.stream(model=MODEL, input=said, temperature=0, max_output_tokens=8) as stream:
            first = list(stream)[-1]
        assert first.type == "response.incomplete"
        kept = openai.responses.retrieve(first.response.id)
        assert kept.to_dict() == first.response.to_dict()
        second = openai.responses.create(
            model=MODEL, input=asked, previous_response_id=kept.id, temperature=0, max_output_tokens=8
        )
        by_hand = openai.responses.create(
            model=MODEL,
            input=[
                {"role": "user", "content": said},
                {"role": "assistant", "content": kept.output_text},
                {"role": "user", "content": asked},
            ],
            temperature=0,
            max_output_tokens=8,
            store=False,
        )
        assert second.output_text == by_hand.output_text
        assert [each.to_dict()["store"] for each in (second, by_hand)] == [True, False]
        assert second.usage is not None
        assert by_hand.usage is not None
        assert second.usage.input_tokens == by_hand.usage.input_tokens
        items = openai.responses.input_items.list(second.id, order="asc")
        assert [item.to_dict()["role"] for item in items] == ["user", "assistant", "user"]
        openai.responses.delete(kept.id)
        for name in (kept.id, by_hand.id):
            with pytest.raises(NotFoundError):
                openai.responses.retrieve(name)


def test_messages_of_anthropic_s_form(pd_cluster: ServedCluster, answer: str) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    reply = http(pd_cluster.url + "/v1/messages", {**body, "max_tokens": 24}).json()
    assert reply["content"][0]["text"] == answer
    counted = http(pd_cluster.url + "/v1/messages/count_tokens", body).json()
    usage = reply["usage"]
    cached = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert counted["input_tokens"] == usage["input_tokens"] + cached


def test_completion_and_its_stream_agree(pd_cluster: ServedCluster) -> None:
    with client(pd_cluster) as openai:
        whole = openai.completions.create(model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=12)
        stream = openai.completions.create(
            model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=12, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


async def test_async_streams_at_once(pd_cluster: ServedCluster, answer: str) -> None:
    async def ask(openai: AsyncOpenAI) -> str:
        stream = await openai.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with AsyncOpenAI(base_url=pd_cluster.url + "/v1", api_key="none", max_retries=0) as openai:
        found = await asyncio.gather(*(ask(openai) for _ in range(6)))
    assert found == [answer] * 6


async def test_async_completion(pd_cluster: ServedCluster) -> None:
    async with AsyncOpenAI(base_url=pd_cluster.url + "/v1", api_key="none", max_retries=0) as openai:
        got = await openai.completions.create(
            model=MODEL, prompt=["The capital of France is", "Two and two is"], temperature=0, max_tokens=5
        )
        one = await openai.completions.create(
            model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=5
        )
    assert len(got.choices) == 2
    assert got.choices[0].text == one.choices[0].text


def test_models(pd_cluster: ServedCluster) -> None:
    with client(pd_cluster) as openai:
        assert [model.id for model in openai.models.list()] == [MODEL]
        assert openai.models.retrieve(MODEL).id == MODEL
        with pytest.raises(NotFoundError):
            openai.models.retrieve("gpt-4")


def test_errors_are_the_clients_own(pd_cluster: ServedCluster) -> None:
    with client(pd_cluster) as openai:
        with pytest.raises(NotFoundError) as unknown:
            openai.completions.create(model="gpt-4", prompt="x")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(BadRequestError) as negative:
            openai.completions.create(model=MODEL, prompt="x", max_tokens=-1)
        assert negative.value.param == "max_tokens"


def test_stop_string(pd_cluster: ServedCluster) -> None:
    with client(pd_cluster) as openai:
        prompt = "The capital of France is"
        whole = openai.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12).choices[0].text
        stop = whole[len(whole) // 2 :][:4]
        got = openai.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12, stop=[stop])
    assert got.choices[0].text == whole.partition(stop)[0]
    assert got.choices[0].finish_reason == "stop"
    pd_cluster.until_idle()
