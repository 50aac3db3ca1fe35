"""Tests that the mock engine follows its script and speaks the engine's protocol as the API process knows it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import msgspec

from benchmarks.programs import study_program
from benchmarks.stream.credit import credit_to
from benchmarks.stream.mock_engine import MockEngine, Script
from pdserve.api.generation.engine_client import EngineClient, PromptChoices, WantedChoice
from pdserve.api.generation.generation import Generation
from pdserve.config import StreamConfig
from pdserve.wire.engine import Abort, FinishReason, RequestOutput, Submit
from pdserve.wire.sampling_params import SamplingParams
from tests.api.test_disconnect import engine_config
from tests.terms import made_terms

SAMPLING = SamplingParams(max_tokens=1000, seed=0)
PROMPT = PromptChoices([1], SAMPLING, (WantedChoice(0, 0),))
SCRIPT = Script(requests=3, step_s=0.0, seconds=2.0, admit=2, token_ids=(10, 11), last_token_id=99)
WAIT_S = 30.0


def submit(local_id: int) -> Submit:
    return Submit(local_id=local_id, uuid=bytes(16), token_ids=[1], sampling=SAMPLING, terms=made_terms())


def said(outputs: list[RequestOutput]) -> dict[int, list[int]]:
    return {output.local_id: output.new_token_ids for output in outputs}


def test_steps_take_in_a_few_and_end_all_together() -> None:
    engine = MockEngine(SCRIPT)
    for local_id in (1, 2, 3):
        engine.submit(submit(local_id))
    assert said(engine.step(0.0).outputs) == {1: [10], 2: [10]}
    assert said(engine.step(5.0).outputs) == {1: [11], 2: [11], 3: [10]}
    assert said(engine.step(6.9).outputs) == {1: [10], 2: [10], 3: [11]}
    last = engine.step(7.0).outputs
    assert said(last) == {1: [99], 2: [99], 3: [99]}
    assert {output.finish for output in last} == {FinishReason.LENGTH}
    assert engine.idle
    assert engine.tokens == 11


def test_an_aborted_request_gets_nothing_more() -> None:
    engine = MockEngine(SCRIPT)
    for local_id in (1, 2, 3):
        engine.submit(submit(local_id))
    engine.step(0.0)
    engine.abort(Abort([1, 3]))
    assert said(engine.step(1.0).outputs) == {2: [11]}
    engine.abort(Abort([2]))
    assert engine.idle


async def text_of(generation: Generation, stop_after: int | None = None) -> list[int]:
    found: list[int] = []
    while True:
        for item in await generation.wait():
            found += item.output.new_token_ids
            if item.output.finish is not None:
                return found
        if stop_after is not None and len(found) >= stop_after:
            return found


def client(folder: Path, script: Script, stream: StreamConfig) -> EngineClient:
    file = folder / "script.json"
    file.write_bytes(msgspec.json.encode(script))
    command = study_program("benchmarks.stream.mock_engine", str(file))
    return EngineClient(dataclasses.replace(engine_config(folder), stream=stream), command=command)


async def test_as_a_process_it_answers_one_script_after_the_other(tmp_path: Path) -> None:
    script = msgspec.structs.replace(SCRIPT, requests=1, step_s=0.001, seconds=0.01)

    engine = client(tmp_path, script, StreamConfig())
    try:
        async with asyncio.timeout(WAIT_S):
            await engine.start()
            found = [await text_of(engine.open([PROMPT], made_terms(60.0))) for _ in range(2)]
            await engine.wait_idle()  # as its node does before it ends
    finally:
        await engine.stop(5.0)
        assert engine.failure is None
    for text in found:
        assert text[-1] == 99
        assert text[:-1] == [10 + index % 2 for index in range(len(text) - 1)]


async def test_with_credit_it_is_no_more_than_a_chunk_ahead(tmp_path: Path) -> None:
    fifo = tmp_path / "credit"
    os.mkfifo(fifo)
    # The script has more requests than come, so that only credit holds the engine back.
    script = msgspec.structs.replace(SCRIPT, requests=2, credit_file=str(fifo), ahead=0.5)

    engine = client(tmp_path, script, StreamConfig(interval=3))
    try:
        async with asyncio.timeout(WAIT_S):
            await engine.start()
            generation = engine.open([PROMPT], made_terms(60.0))
            with credit_to(str(fifo)) as credit:
                assert credit is not None
                first = await text_of(generation, stop_after=3)
                credit.tell(len(first))
                second = await text_of(generation, stop_after=3)
    finally:
        await engine.stop(5.0)
    assert len(first) == 3
    assert len(second) == 3
