"""Tests that an answer loses nothing that its generation produced, however it ends and however much comes at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.answers.answer import CompleteAnswer, complete_answer, streamed_answer
from pdserve.api.answers.answer_form import CHAT_FORM, AnswerOptions, PlainChoices
from pdserve.api.answers.detokenizer import BytesDetokenizer, TokenBytes, byte_level_bytes
from pdserve.api.answers.stop_strings import StopStrings, StopTable
from pdserve.api.answers.text_generation import ChoiceText, TextGeneration
from pdserve.api.generation.generation import DEADLINE_GRACE_S, Generation, ReadPace
from pdserve.api.generation.request_log import RequestRecord, shutting_down
from pdserve.api.node.node_metrics import NodeMetrics
from pdserve.errors import Internal
from pdserve.wire.engine import EngineStats, FinishReason, RequestOutput
from pdserve.wire.terms import AnswerIdentity
from tests.api.node import WAIT_S
from tests.examples import examples

PIECES = [b"a", b"b", b" c", b"\xc3", b"\xa9", b"d"]
EOS = len(PIECES)

Events = list[tuple[int, str | None, str | None]]
"""Each chunk's choice, text and finish reason. An error comes last, as its code for choice -1."""


def choice_text(choice: int, stops: Sequence[str]) -> ChoiceText:
    known = TokenBytes(lambda _: None, byte_level_bytes)
    known.update(enumerate(PIECES))
    return ChoiceText(choice, BytesDetokenizer(known, frozenset()), StopStrings(StopTable(stops)), frozenset())


def answer_options(choices: int, plain: PlainChoices | None = None) -> AnswerOptions:
    return AnswerOptions(
        AnswerIdentity(bytes(16), 1), "m", "fp", [[1]] * choices, [""] * choices, lambda _: b"", plain=plain
    )


class Rig:
    """A request with its generation. The test plays the engine."""

    def __init__(self, choices: int, interval: int, stops: Sequence[str] = (), deadline_s: float = 60.0) -> None:
        self.aborted: list[int] = []
        self.generation = Generation(
            {i: i for i in range(choices)}, deadline_s, self.aborted.extend, ReadPace(interval)
        )
        self.metrics = NodeMetrics(EngineStats)
        self.record = RequestRecord("r", "n", 0.0)
        texts = {choice: choice_text(choice, stops) for choice in range(choices)}
        self.run = TextGeneration(self.generation, texts, self.record, self.metrics.requests)
        self.options = answer_options(choices, PlainChoices(CHAT_FORM))

    async def streamed(self, first: RequestOutput, then: Callable[[], None]) -> tuple[Events, bool]:
        """Returns a stream's events, and whether ``[DONE]`` ends it. The first output is read before ``then`` runs."""
        self.generation.deliver(first)
        begun = await self.run.next()
        reading = asyncio.create_task(self._read(begun))
        await asyncio.sleep(0)
        then()
        data = await asyncio.wait_for(reading, WAIT_S)
        self.run.close()
        return parsed(data)

    async def _read(self, begun: Any) -> bytes:
        return b"".join([data async for data in streamed_answer(CHAT_FORM, self.run, begun, self.options)])


def parsed(data: bytes) -> tuple[Events, bool]:
    events: Events = []
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        name, _, payload = block.rpartition("data: ")
        if payload == "[DONE]":
            assert block == blocks[-1]
            return events, True
        body = json.loads(payload)
        if name:
            events.append((-1, body["error"]["code"], None))
        else:
            [choice] = body["choices"]
            events.append((choice["index"], choice["delta"].get("content"), choice["finish_reason"]))
    return events, False


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda rig: rig.generation.deliver(RequestOutput(0, [], FinishReason.ERROR, error="no")), "engine_error"),
        (lambda rig: rig.generation.deliver(RequestOutput(0, [], FinishReason.DEADLINE)), "deadline_exceeded"),
        (lambda rig: rig.generation.fail(shutting_down()), "shutting_down"),
        (lambda rig: rig.generation.fail(Internal("gone", code="engine_error")), "engine_error"),
    ],
    ids=["error", "deadline", "abort by the server", "lost engine"],
)
async def test_what_waits_for_its_interval_is_sent_before_the_error(end: Callable[[Rig], None], code: str) -> None:
    rig = Rig(1, 10)

    def then() -> None:
        rig.generation.deliver(RequestOutput(0, [1]))
        rig.generation.deliver(RequestOutput(0, [2]))
        end(rig)

    assert await rig.streamed(RequestOutput(0, [0]), then) == (
        [(0, "a", None), (0, "b c", None), (-1, code, None)],
        False,
    )


async def test_also_where_the_engine_is_silent_past_the_deadline() -> None:
    rig = Rig(1, 10, deadline_s=0.05 - DEADLINE_GRACE_S)
    result = await rig.streamed(RequestOutput(0, [0]), lambda: rig.generation.deliver(RequestOutput(0, [1])))
    assert rig.aborted == [0]
    assert result == ([(0, "a", None), (0, "b", None), (-1, "deadline_exceeded", None)], False)


async def test_one_choice_that_fails_takes_no_text_of_the_others_along() -> None:
    """The others still get text that waits for its interval or might have become part of a stop string or character."""

    rig = Rig(3, 10, stops=["a!"])

    def then() -> None:
        rig.generation.deliver(RequestOutput(1, [1]))
        rig.generation.deliver(RequestOutput(1, [5, 0]))
        rig.generation.deliver(RequestOutput(2, [1]))
        rig.generation.deliver(RequestOutput(2, [3]))
        rig.generation.deliver(RequestOutput(0, [2], FinishReason.ERROR, error="no"))

    events, done = await rig.streamed(RequestOutput(0, [1]), then)
    aborted = rig.aborted
    shown = {choice: "".join(text or "" for i, text, _ in events if i == choice) for choice in range(3)}
    assert shown == {0: "b c", 1: "bda", 2: "b\ufffd"}
    assert events[-1] == (-1, "engine_error", None)
    assert not done
    assert aborted == [1, 2]


@settings(max_examples=examples(100))
@given(
    st.integers(1, 12),
    st.lists(st.lists(st.integers(0, len(PIECES) - 1), max_size=25), min_size=1, max_size=3),
    st.lists(st.sampled_from(["ab", "é", "a c", "bb", "\ufffd"]), max_size=2),
    st.lists(st.booleans(), max_size=60),
)
def test_an_answer_is_the_same_whatever_the_interval_and_the_readers_pace(
    interval: int, answers: list[list[int]], stops: list[str], pauses: list[bool]
) -> None:
    """Streamed and whole answers have the same text, finish reasons and usage."""

    async def streamed(interval: int, pauses: list[bool]) -> tuple[dict[int, str], int]:
        rig = Rig(len(answers), interval, stops)
        reader = asyncio.create_task(rig._read([]))
        turn = iter(pauses)
        for position in range(max(map(len, answers)) + 1):
            for choice, tokens in enumerate(answers):
                if position < len(tokens):
                    rig.generation.deliver(RequestOutput(choice, [tokens[position]]))
                elif position == len(tokens):
                    rig.generation.deliver(RequestOutput(choice, [EOS], FinishReason.STOP))
                if next(turn, True):
                    for _ in range(3):
                        await asyncio.sleep(0)
        events, done = parsed(await asyncio.wait_for(reader, WAIT_S))
        rig.run.close()
        assert done
        for choice in range(len(answers)):
            assert [finish for i, _, finish in events if i == choice and finish] == ["stop"]
        texts = {choice: "".join(text or "" for i, text, _ in events if i == choice) for choice in range(len(answers))}
        return texts, rig.record.output_tokens

    async def complete() -> tuple[dict[int, str], int]:
        rig = Rig(len(answers), 1_000, stops)
        for choice, tokens in enumerate(answers):
            rig.generation.deliver(RequestOutput(choice, [*tokens, EOS], FinishReason.STOP))
        answer = await complete_answer(CompleteAnswer(CHAT_FORM, rig.options), rig.run, [])
        rig.run.close()
        read = json.loads(answer)
        texts = {choice["index"]: choice["message"]["content"] for choice in read["choices"]}
        return texts, read["usage"]["completion_tokens"]

    expected = asyncio.run(streamed(1, [True] * 200))
    assert asyncio.run(streamed(interval, pauses)) == expected
    assert asyncio.run(complete()) == expected


async def test_gaps_are_counted_for_each_token() -> None:
    """A chunk of several tokens counts as several gaps, so that the mean gap is the mean time of a token."""

    rig = Rig(1, 4)
    for token in range(5):
        rig.generation.deliver(RequestOutput(0, [token]))
        if token in (0, 4):
            await rig.run.next()
    rig.run.close()
    shown = (await rig.metrics.render()).decode()
    assert "pdserve_inter_token_latency_seconds_count 4.0" in shown
    assert "pdserve_time_to_first_token_seconds_count 1.0" in shown
