"""Tests the report of ``benchmarks plan``, its plot and its page, on figures that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.bootstrap import HIGH, LOW
from benchmarks.pages import planning_page
from benchmarks.plan.benchmark import SYSTEMS, report_of, requests_of, run_of
from benchmarks.plan.figures import (
    BESIDE,
    LEAST_PACE,
    MET,
    MISSED,
    MOST_PACE,
    PACE,
    UNDECIDED,
    Outcome,
    alone_name,
    by_the_profile_alone,
    verdict,
)
from benchmarks.plan.paces import slower
from benchmarks.settings import BenchPlanConfig
from pdserve.bench.plan.profiling import batches_within, beside_within, cache_geometry, check_cache, sized, steps_of
from pdserve.bench.report import Figure, Row, Unit, read_report, this_machine
from pdserve.bench.streamed_answer import Stream
from pdserve.config import CacheConfig, SchedulerConfig
from pdserve.config.bench import PlanProfileConfig
from pdserve.errors import PlanError
from pdserve.plan.profile import CacheGeometry, read_profile
from tests.benchmarks.studies import run_study
from tests.plan.profiles import profile_of

STUDY_S = 600
"""A whole study may take so long where other tests run."""


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


def outcomes(*gaps_s: float, pace: float = 1.0) -> list[Outcome]:
    """Returns outcomes whose rounds have such gaps between tokens; without any, there are three of 20 ms."""
    config, profile = BenchPlanConfig(), profile_of(slower_beside=1.5)
    found = []
    for name, shape in SYSTEMS.items():
        for percent in (30, 90):
            runs = [
                run_of(
                    profile, shape, 1.0, requests_of(config, 1.0, percent, number), pace, streams(30, 10 * gap_s, gap_s)
                )
                for number, gap_s in enumerate(gaps_s or (0.02, 0.02, 0.02))
            ]
            found.append(Outcome(name, percent, runs))
    return found


def test_each_load_has_what_was_predicted_beside_what_was_measured_in_all_rounds() -> None:
    report = report_of(BenchPlanConfig(), outcomes(0.01, 0.02, 0.02))
    assert [(row.at["system"], row.at["rate %"]) for row in report.rows] == [
        (name, percent) for name in SYSTEMS for percent in (30, 90)
    ]
    seconds = 3 * 29 + 0.1 + 0.2 + 0.2 + 49 * (0.01 + 0.02 + 0.02)
    for row in report.rows:
        assert row.figure("ITL p50 measured").value == pytest.approx(20.0)
        assert row.figure("TTFT p50 measured").value == pytest.approx(200.0)
        assert row.figure("output measured").value == pytest.approx(3 * 30 * 50 / seconds)
        ratio = row.figure("ITL p90 predicted : measured").value
        assert ratio == pytest.approx(row.figure("ITL p90 predicted").value / row.figure("ITL p90 measured").value)
    half = report_of(BenchPlanConfig(), outcomes(0.01, 0.01, 0.02))
    assert [row.figure("ITL p50 measured").value for row in half.rows] == [pytest.approx(10.0)] * len(half.rows)


def test_a_ratio_has_the_interval_in_which_it_lies_if_rounds_are_drawn_anew() -> None:
    ratio = "ITL p90 predicted : measured"
    for row in report_of(BenchPlanConfig(), outcomes(0.01, 0.02, 0.03, 0.02)).rows:
        assert row.figure(ratio + LOW).value < row.figure(ratio + HIGH).value
        assert row.figure(ratio + LOW).value <= row.figure(ratio).value <= row.figure(ratio + HIGH).value
    one = report_of(BenchPlanConfig(), outcomes(0.02)).rows
    assert not [figure.name for row in one for figure in row.figures if figure.name in (ratio + LOW, ratio + HIGH)]
    assert verdict(one, "ITL p90").startswith(UNDECIDED)


def test_a_round_is_predicted_for_the_pace_that_it_had_and_for_that_of_the_profile() -> None:
    profile, load = profile_of(), requests_of(BenchPlanConfig(), 0.1, 10)
    run = run_of(profile, SYSTEMS["mixed"], 0.1, load, 3.0, streams(2, 0.2, 0.02))
    for alone, slow in zip(run.expected_of_profile.answers, run.expected.answers, strict=True):
        assert slow.ttft_s == pytest.approx(3 * alone.ttft_s)
    usual, slower = (report_of(BenchPlanConfig(), outcomes(pace=pace)).rows[0] for pace in (1.0, 3.0))
    assert [slower.figure(name).value for name in (PACE, MOST_PACE)] == pytest.approx([3.0, 3.0])
    assert slower.figure("ITL p50 predicted").value > 2.5 * usual.figure("ITL p50 predicted").value
    ratio = alone_name("ITL p90")
    assert usual.figure(ratio).value == slower.figure(ratio).value == usual.figure("ITL p90 predicted : measured").value


def test_each_round_is_predicted_by_its_own_profile() -> None:
    config, shape, found = BenchPlanConfig(), SYSTEMS["mixed"], streams(30, 0.2, 0.02)
    profile, load = profile_of(), requests_of(config, 0.1, 10)
    rounds = [run_of(profile, shape, 0.2, load, 1.0, found), run_of(slower(profile, 3.0), shape, 0.1, load, 1.0, found)]
    told = [Outcome("mixed", 10, of_round) for of_round in (rounds[:1], rounds[1:], rounds)]
    quick, slow, both = report_of(config, told).rows
    name = "TTFT p50 predicted"
    assert slow.figure(name).value == pytest.approx(3 * quick.figure(name).value)
    assert quick.figure(name).value <= both.figure(name).value <= slow.figure(name).value
    assert [row.figure("rate").value for row in (quick, slow, both)] == pytest.approx([0.2, 0.1, 0.15])


def test_how_near_the_profile_alone_would_have_been_is_told_without_a_judgement() -> None:
    rows = report_of(BenchPlanConfig(), outcomes()).rows
    near = sum(abs(row.figure(alone_name("ITL p90")).value - 1) <= 0.2 for row in rows)
    assert f"ITL p90 at {near} of 4 loads" in by_the_profile_alone(rows)


def judged(*ratios: tuple[float, float, float]) -> list[Row]:
    name = "ITL p90 predicted : measured"
    return [
        Row(
            BESIDE,
            {"system": "mixed", "rate %": 50},
            (
                Figure(PACE, 1.0, Unit.RATIO),
                Figure(name, middle, Unit.RATIO),
                Figure(name + LOW, low, Unit.RATIO),
                Figure(name + HIGH, high, Unit.RATIO),
            ),
        )
        for low, middle, high in ratios
    ]


def test_a_verdict_says_where_a_prediction_was_near_enough_and_what_more_rounds_would_decide() -> None:
    near, unsure, far = (0.9, 1.0, 1.1), (0.7, 0.9, 1.1), (0.5, 0.6, 0.7)
    assert verdict(judged(near, near), "ITL p90") == (
        f"{MET}ITL p90 predicted : measured, wanted within 20% where the machine can answer all, "
        "holds at 2 of 2 loads; "
        "the farthest is 1.00 (mixed at 50 %)"
    )
    told = verdict(judged(near, unsure), "ITL p90")
    assert told.startswith(UNDECIDED)
    assert "holds at 1 of 2 loads, undecided at 1; the farthest is 0.90" in told
    told = verdict(judged(near, unsure, far), "ITL p90")
    assert told.startswith(MISSED)
    assert "holds at 1 of 3 loads, undecided at 1; the farthest is 0.60" in told


def test_latencies_of_an_overloaded_node_are_shown_but_not_judged() -> None:
    rows = list(report_of(BenchPlanConfig(), outcomes()).rows)
    crowded = [msgspec.structs.replace(row, at={**row.at, "rate %": 120}) for row in rows]
    assert "of 4 loads" in verdict(rows + crowded, "TTFT p90")
    assert "of 8 loads" in verdict(rows + crowded, "output")
    # At this pace, more comes at 90 % than the node can answer.
    slow = report_of(BenchPlanConfig(), outcomes(pace=1.2)).rows
    assert "of 2 loads" in verdict(slow, "TTFT p90")


def test_a_verdict_of_no_loads_is_not_met() -> None:
    assert verdict([], "ITL p90").startswith("MISSED")


def test_the_requests_of_a_run_are_the_same_for_the_same_seed() -> None:
    config = BenchPlanConfig()
    assert requests_of(config, 2.0, 50) == requests_of(config, 2.0, 50)
    assert requests_of(config, 2.0, 50) != requests_of(config, 2.0, 70)
    assert requests_of(config, 2.0, 50) != requests_of(config, 2.0, 50, number=1)
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
    from benchmarks.plan.plot import write_plot

    report = report_of(BenchPlanConfig(), outcomes())
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
@pytest.mark.timeout(STUDY_S + 30)
def test_a_profile_is_measured_and_predictions_are_shown_beside_what_happened(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(tiny_model), "--kv-cache-mib", "64"]
    flags += ["--max-num-batched-tokens", "64", "--max-num-seqs", "32"]
    flags += ["--prompt-vocab", "400", "--prompt-lengths", "16-128", "--output-lengths", "4-32", "--seconds", "2"]
    flags += ["--repeats", "2"]
    flags += ["--rate-percents", "10,30", "--keep-profile", "profile.json", "--json", "plan.json", "--plot", "plan.svg"]
    run_study("plan", *flags, folder=tmp_path, timeout_s=STUDY_S)
    rows = read_report(tmp_path / "plan.json").rows
    assert [(row.at["system"], row.at["rate %"]) for row in rows] == [
        (name, share) for share in (10, 30) for name in SYSTEMS
    ]
    for row in rows:
        assert 0 < row.figure(LEAST_PACE).value <= row.figure(PACE).value <= row.figure(MOST_PACE).value
        for name in ("output", "TTFT p90", "ITL p90"):
            assert row.figure(f"{name} predicted").value > 0 < row.figure(f"{name} measured").value
    profile = read_profile(tmp_path / "profile.json")
    assert [speed.nodes for speed in profile.speeds] == [1, 2]
    assert all(speed.probe is not None for speed in profile.speeds)
    assert profile.cache.max_num_batched_tokens == 64
    assert "</svg>" in (tmp_path / "plan.svg").read_text()


def test_a_profile_without_sizes_has_those_that_its_nodes_are_given(tiny_model: Path) -> None:
    config = sized(PlanProfileConfig(cache=CacheConfig(node_memory_mib=4096)), tiny_model)
    assert config.cache.kv_cache_mib == pytest.approx((4096 - 512) / 2, abs=16)
    cache = cache_geometry(config, tiny_model)
    check_cache(cache)
    assert cache.max_num_batched_tokens == config.scheduler.max_num_batched_tokens >= 256
    assert cache.max_num_seqs == config.scheduler.max_num_seqs >= 64
    assert sized(config, tiny_model) == config
    drafted = PlanProfileConfig(
        cache=CacheConfig(node_memory_mib=1536), scheduler=SchedulerConfig(draft_model=str(tiny_model))
    )
    alone = replace(drafted, scheduler=SchedulerConfig())
    assert sized(drafted, tiny_model).cache.kv_cache_mib < sized(alone, tiny_model).cache.kv_cache_mib
