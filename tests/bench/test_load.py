"""Tests the load generator against an aiohttp server whose answers the test decides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.bench.load import Job, Target, first_model, run_jobs
from pdserve.bench.load_benchmark import run
from pdserve.bench.streamed_answer import Stream
from pdserve.config.bench import BenchLoadConfig, LoadConfig
from pdserve.errors import BenchError
from tests.bench.openai_server import OpenAiServer

LIMIT_S = 30.0


async def streams_of(server: OpenAiServer, jobs: list[Job], concurrency: int) -> list[Stream]:
    async def work() -> list[Stream]:
        return await run_jobs(Target(server.url, "m", token_ids=True), jobs, concurrency)

    found: list[Stream] = await server.serve(work)
    return found


async def test_every_job_is_asked_once_and_answered_in_its_place() -> None:
    server = OpenAiServer()
    jobs = [Job([10 * i, 1], i + 2) for i in range(9)]
    streams = await streams_of(server, jobs, 3)
    for i, stream in enumerate(streams):
        assert not stream.error
        assert stream.output_tokens == len(stream.arrivals) == i + 2
        assert stream.token_ids == [10 * i + k for k in range(i + 2)]
        assert stream.started <= stream.arrivals[0] <= stream.arrivals[-1] <= stream.ended
    assert sorted(body["prompt"][0] for body in server.bodies) == [10 * i for i in range(9)]
    body = server.bodies[0]
    assert body["ignore_eos"] and body["stream"] and body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}


async def test_concurrency_is_reached_and_not_passed() -> None:
    server = OpenAiServer(gathers=4)
    await streams_of(server, [Job([1], 2)] * 12, 4)
    assert server.most == 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuse", "status 503"),
        ("cut", "ClientPayloadError"),
        ("error event", "engine died"),
        ("no end", "without [DONE]"),
        ("short", "2 tokens came where 3 were asked for"),
    ],
)
async def test_a_failure_is_told_and_stops_no_other_request(fault: str, message: str) -> None:
    streams = await streams_of(OpenAiServer(fault=fault), [Job([1], 3)] * 4, 2)
    assert len(streams) == 4
    for stream in streams:
        assert message in stream.error


async def test_a_server_that_is_not_there() -> None:
    (stream,) = await run_jobs(Target("http://127.0.0.1:9", "m"), [Job([1], 3)], 1)
    assert "ClientConnectorError" in stream.error
    with pytest.raises(BenchError, match=r"^nothing answers at http://127\.0\.0\.1:9: Connection refused$"):
        await first_model("http://127.0.0.1:9")


async def test_the_benchmark_warms_up_and_takes_the_first_model() -> None:
    server = OpenAiServer()

    async def work() -> Any:
        load = LoadConfig(url=server.url, concurrency=(2,), requests=5, prompt_tokens=8, output_tokens=4, warm_up=1)
        return await asyncio.to_thread(run, BenchLoadConfig(load=load))

    report = await server.serve(work)
    assert len(server.bodies) == 6
    assert {(body["model"], len(body["prompt"]), body["max_tokens"]) for body in server.bodies} == {("first", 8, 4)}
    row, *latencies = report.rows
    assert row.at == {"concurrency": 2, "requests": 5}
    assert [each.at["of"] for each in latencies] == ["TTFT", "ITL", "TPOT", "E2E"]
    assert row.figure("failed").value == 0
    assert row.figure("output").value > 0
    assert "return_token_ids" not in server.bodies[0]


async def test_two_servers_take_turns_with_the_same_load() -> None:
    first, second = OpenAiServer(), OpenAiServer()

    async def work() -> Any:
        load = LoadConfig(
            url=first.url,
            beside=second.url,
            concurrency=(1, 3),
            rounds=2,
            requests=3,
            prompt_tokens=8,
            output_tokens=4,
            warm_up=1,
        )
        return await asyncio.to_thread(run, BenchLoadConfig(load=load))

    report = await first.serve(lambda: second.serve(work))
    assert len(first.bodies) == len(second.bodies) == 2 * 2 * 4
    prompts = [{tuple(body["prompt"]) for body in server.bodies} for server in (first, second)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 16
    kinds = ["load", "load", *["latencies"] * 8, "first : beside"]
    assert [(row.what, row.at["concurrency"]) for row in report.rows] == [
        (what, clients) for clients in (1, 3) for what in kinds
    ]
    one, other = report.rows_of("load")[:2]
    ratio = report.rows_of("first : beside")[0]
    assert ratio.figure("TTFT p50").value > 0
    assert (one.at["server"], other.at["server"]) == (first.url, second.url)
    assert ratio.figure("output").value == pytest.approx(one.figure("output").value / other.figure("output").value)


async def test_no_answer_at_all_is_an_error() -> None:
    server = OpenAiServer(fault="refuse")

    async def work() -> Any:
        load = LoadConfig(url=server.url, requests=2, model="m", warm_up=0)
        return await asyncio.to_thread(run, BenchLoadConfig(load=load))

    with pytest.raises(BenchError, match="answered none of 2 requests: status 503"):
        await server.serve(work)
