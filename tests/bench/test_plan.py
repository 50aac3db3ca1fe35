"""Tests the report of ``pdserve bench plan``, its plot and its page, on figures that are made up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pdserve.bench.machine import this_machine
from pdserve.bench.plan.battery import batches_within, beside_within, steps_of
from pdserve.bench.plan.benchmark import SYSTEMS, Outcome, report_of, requests_of, verdict
from pdserve.bench.plan.profiling import check_cache
from pdserve.bench.report import read_report
from pdserve.bench.streamed_answer import Stream, summarise
from pdserve.bench_config import BenchPlanConfig
from pdserve.errors import PlanError
from pdserve.plan.prediction import PlanTargets, predict
from pdserve.plan.profile import CacheGeometry, read_profile
from tests.docs import planning_page
from tests.plan.profiles import profile_of
from tests.processes import clean_environ


def streams(count: int, ttft_s: float, gap_s: float) -> list[Stream]:
    return [
        Stream(
            started=float(number),
            arrivals=[number + ttft_s + token * gap_s for token in range(50)],
            ended=number + ttft_s + 49 * gap_s,
            output_tokens=50,
        )
        for number in range(count)
    ]


def outcomes() -> list[Outcome]:
    config = BenchPlanConfig()
    found = []
    for name, shape in SYSTEMS.items():
        for percent in (30, 90):
            load = requests_of(config, 1.0, percent)
            predicted = predict(profile_of(slower_beside=1.5), shape, load, PlanTargets(0.0, 0.0))
            found.append(Outcome(name, percent, 1.0, predicted, summarise(streams(30, 0.2, 0.02))))
    return found


def test_each_run_has_what_was_predicted_beside_what_was_measured() -> None:
    report = report_of(BenchPlanConfig(), profile_of(), outcomes())
    assert [(row.at["system"], row.at["rate %"]) for row in report.rows] == [
        (name, percent) for name in SYSTEMS for percent in (30, 90)
    ]
    for row in report.rows:
        assert row.figure("ITL p90 measured").value == pytest.approx(20.0)
        assert row.figure("TTFT p90 measured").value == pytest.approx(200.0)
        ratio = row.figure("ITL p90 predicted : measured").value
        assert ratio == pytest.approx(row.figure("ITL p90 predicted").value / 20.0)


def test_a_verdict_says_in_how_many_runs_a_prediction_was_near_enough_and_the_farthest() -> None:
    rows = report_of(BenchPlanConfig(), profile_of(), outcomes()).rows
    ratios = [row.figure("ITL p90 predicted : measured").value for row in rows]
    near = sum(0.8 <= ratio <= 1.2 for ratio in ratios)
    farthest = max(ratios, key=lambda ratio: abs(ratio - 1))
    told = verdict(rows, "ITL p90")
    assert f"holds in {near} of 4 runs" in told
    assert f"the farthest is {farthest:.2f}" in told
    assert told.startswith("met" if near == 4 else "MISSED")


def test_latencies_of_an_overloaded_node_are_shown_but_not_judged() -> None:
    rows = list(report_of(BenchPlanConfig(), profile_of(), outcomes()).rows)
    crowded = [msgspec.structs.replace(row, at={**row.at, "rate %": 120}) for row in rows]
    assert "of 4 runs" in verdict(rows + crowded, "TTFT p90")
    assert "of 8 runs" in verdict(rows + crowded, "output")


def test_a_verdict_of_no_runs_is_not_met() -> None:
    assert verdict([], "ITL p90").startswith("MISSED")


def test_the_requests_of_a_run_are_the_same_for_the_same_seed() -> None:
    config = BenchPlanConfig()
    assert requests_of(config, 2.0, 50) == requests_of(config, 2.0, 50)
    assert requests_of(config, 2.0, 50) != requests_of(config, 2.0, 70)
    assert len(requests_of(config, 2.0, 50)) == round(2.0 * config.plan.seconds)


def cache(tokens: int, streams: int, chunk: int) -> CacheGeometry:
    return CacheGeometry(
        block_size=16, num_blocks=tokens // 16, block_bytes=1, max_num_seqs=streams, max_num_batched_tokens=chunk
    )


@pytest.mark.parametrize(("tokens", "streams", "chunk"), [(65_536, 64, 512), (2048, 3, 18), (4096, 64, 512)])
def test_only_what_a_node_computes_at_once_is_measured(tokens: int, streams: int, chunk: int) -> None:
    node = cache(tokens, streams, chunk)
    check_cache(node)
    for rows, prompt_tokens in batches_within(node):
        assert rows <= min(streams, chunk) and rows * (prompt_tokens + steps_of(rows, prompt_tokens, chunk)) <= tokens
    for rows, prompt_tokens in beside_within(node):
        assert rows < streams and 0 < prompt_tokens <= chunk - rows


@pytest.mark.parametrize(("tokens", "streams", "chunk"), [(65_536, 2, 512), (65_536, 64, 8), (256, 64, 512)])
def test_a_node_that_cannot_be_measured_is_refused_before_it_starts(tokens: int, streams: int, chunk: int) -> None:
    with pytest.raises(PlanError, match="At least 3, 18 and 2048"):
        check_cache(cache(tokens, streams, chunk))


@pytest.mark.integration
def test_the_page_and_the_plot_show_the_report(tmp_path: Path) -> None:
    from pdserve.bench.plan.forecast_plot import write_plot

    report = report_of(BenchPlanConfig(), profile_of(), outcomes())
    write_plot(report, tmp_path / "planning.svg")
    assert "1P1D, measured" in (tmp_path / "planning.svg").read_text()
    shown = planning_page.figures(report)
    assert f"{this_machine().cores} cores" in shown
    assert "| mixed | 1.00 (30 %) |" in shown
    assert shown.count("| 1P1D |") == 2
    page = planning_page.PAGE.read_text()
    text = planning_page.written(page, shown)
    assert planning_page.written(text, shown) == text


@pytest.mark.integration
@pytest.mark.nightly
def test_a_profile_is_measured_and_predictions_are_shown_beside_what_happened(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(tiny_model), "--kv-cache-mib", "64"]
    flags += ["--max-num-batched-tokens", "64", "--max-num-seqs", "32"]
    flags += ["--prompt-vocab", "400", "--prompt-lengths", "16-128", "--output-lengths", "4-32", "--seconds", "2"]
    flags += ["--rate-percents", "10,30", "--keep-profile", "profile.json", "--json", "plan.json", "--plot", "plan.svg"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdserve", "bench", "plan", *flags],
        cwd=tmp_path,
        env=clean_environ(XDG_STATE_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = read_report(tmp_path / "plan.json").rows
    assert [(row.at["system"], row.at["rate %"]) for row in rows] == [
        (name, share) for share in (10, 30) for name in SYSTEMS
    ]
    for row in rows:
        for name in ("output", "TTFT p90", "ITL p90"):
            assert row.figure(f"{name} predicted").value > 0 < row.figure(f"{name} measured").value
    profile = read_profile(tmp_path / "profile.json")
    assert [speed.nodes for speed in profile.speeds] == [1, 2]
    assert profile.cache.max_num_batched_tokens == 64
    assert "</svg>" in (tmp_path / "plan.svg").read_text()
