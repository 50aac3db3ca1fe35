"""``benchmarks goodput`` as a person runs it, and with servers that it has not started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.goodput.benchmark import GoodputBench, MeasuredSystem, in_order, telling
from benchmarks.goodput.workload import LoadPoint, Loop
from benchmarks.settings import BenchGoodputConfig
from pdserve.bench.load import Job, Target
from pdserve.bench.report import read_report
from pdserve.bench.streamed_answer import AnswerTargets
from pdserve.errors import BenchError
from pdserve.settings import load
from tests.bench.openai_server import OpenAiServer
from tests.benchmarks.studies import run_study

LOADS = ("--concurrency", "1,2", "--rate-percents", "50", "--seconds", "0.2", "--repeats", "2")
LIMIT_S = 120.0


def goodput_config(*flags: str) -> BenchGoodputConfig:
    return load(BenchGoodputConfig, ["--shapes", "5/3", *LOADS, *flags], {}, prog="python -m benchmarks goodput")


@pytest.mark.parametrize(("count", "orders"), [(1, 1), (2, 2), (3, 6)])
def test_no_system_always_follows_the_same_one(count: int, orders: int) -> None:
    systems = [MeasuredSystem(str(number), Target("", ""), {}) for number in range(count)]
    turns = [[system.name for system in in_order(systems, turn)] for turn in range(orders)]
    assert len({tuple(names) for names in turns}) == orders
    assert {frozenset(names) for names in turns} == {frozenset(map(str, range(count)))}


def test_a_request_names_the_targets_that_it_is_told() -> None:
    job = Job([3, 4], 5, {"temperature": 0.5})
    told = telling(job, AnswerTargets(0.25, 0.0125)).sampling
    assert told == {"temperature": 0.5, "target_ttft_ms": 250.0, "target_itl_ms": 12.5}
    assert telling(job, None) is job


async def test_servers_that_are_up_get_the_same_requests() -> None:
    one, other = OpenAiServer(), OpenAiServer()
    bench: list[GoodputBench] = []

    async def measure() -> object:
        bench.append(GoodputBench(goodput_config("--systems", "", "--add", f"one={one.url},other={other.url}/")))
        return await bench[0].measure({})

    (outcome,) = await one.serve(lambda: other.serve(measure, LIMIT_S), LIMIT_S)
    closed = [LoadPoint("5/3", Loop.CLOSED, clients) for clients in (1, 2)]
    (opened,) = set(outcome.runs) - set(closed)
    assert (opened.loop, opened.rate) == (Loop.OPEN, pytest.approx(outcome.unloaded.requests_per_s / 2))
    for by_system in outcome.runs.values():
        assert [(name, len(runs)) for name, runs in by_system.items()] == [("one", 2), ("other", 2)]
    for run in (run for by_system in outcome.runs.values() for runs in by_system.values() for run in runs):
        assert run.seconds > 0
        assert run.streams
        assert not any(stream.error for stream in run.streams)
    planned = [[len(run.streams) for run in outcome.runs[opened][name]] for name in ("one", "other")]
    assert planned[0] == planned[1]
    assert max(one.most, other.most) >= 2
    assert (bench[0].errors, bench[0].idle_share) == ({}, 0.0)


async def test_a_server_that_refuses_at_once_ends_the_benchmark() -> None:
    server = OpenAiServer(fault="refuse")
    with pytest.raises(BenchError, match="one failed without much load: status 503"):
        await server.serve(
            lambda: GoodputBench(goodput_config("--systems", "", "--add", f"one={server.url}")).measure({}), LIMIT_S
        )


# The other tests show in `make test` what follows from given times and how loads are made. Clusters are started as for
# `benchmarks turns`.
@pytest.mark.integration
@pytest.mark.nightly
def test_every_system_answers_every_load(tiny_model: Path, tmp_path: Path) -> None:
    shape = ("--shapes", "mix", "--max-prompt-tokens", "48", "--min-output-tokens", "2", "--max-output-tokens", "4")
    # On one core no thread of an engine waits for another, which takes long beside other tests.
    node = ("--model", str(tiny_model), "--kv-cache-mib", "64", "--cores", str(min(os.sched_getaffinity(0))))
    load = ("--systems", "mixed,auto", "--tell", "on", "--prompt-vocab", "400", *shape, *LOADS)
    done = run_study("goodput", *load, *node, "--json", "figures.json", folder=tmp_path, timeout_s=280)
    report = read_report(tmp_path / "figures.json")
    loads = [*report.rows_of("closed loop"), *report.rows_of("open loop")]
    assert len(loads) == 3 * 2 * 2
    assert {row.at["told"] for row in loads} == {"tight", "loose"}
    assert {row.at["system"] for row in loads} == {"mixed", "auto"}
    assert all(row.figure("failed").value == 0 and row.figure("requests").value >= 2 for row in loads), done.stderr
    assert any("wanted at most 2" in note for note in report.notes)
    assert done.stderr.count("round 2, ") == 3 * 2 * 2
