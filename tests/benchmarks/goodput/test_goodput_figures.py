"""Tests how streams become goodput, ratios, and what is said of the wanted ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.bootstrap import HIGH, LOW
from benchmarks.goodput.figures import (
    AGAINST_BEST,
    AGAINST_PEER,
    UNLOADED,
    GoodputRun,
    against,
    goodput_name,
    rows,
    verdicts,
)
from benchmarks.goodput.workload import Loop
from benchmarks.goodput.workload import Tightness as T
from pdserve.bench.report import Row, changes
from pdserve.bench.streamed_answer import Stream
from tests.bench.reports import report
from tests.benchmarks.goodput.outcomes import CLOSED, OPEN, SHAPE, goodput_report, goodput_run, outcome, three_systems


def figures(row: Row) -> dict[str, float]:
    return {figure.name: figure.value for figure in row.figures}


def only(found: list[Row], what: str, **at: int | str) -> dict[str, float]:
    (row,) = [row for row in found if row.what == what and at.items() <= row.at.items()]
    return figures(row)


def test_goodput_counts_good_answers_of_all_rounds_over_their_seconds() -> None:
    found = rows([three_systems()])
    mixed = only(found, "closed loop", system="mixed", clients=4)
    # One of four answers is within the tight target, all are within the loose one, in two rounds of 2 s.
    assert (mixed["goodput tight"], mixed["goodput loose"]) == (0.25, 1.0)
    assert only(found, "closed loop", system="auto")["goodput tight"] == 0.75
    assert only(found, "closed loop", system="always")["goodput tight p99"] == 0
    assert mixed["requests"] == 4
    assert mixed["TTFT p50"] == pytest.approx(500)
    assert "rate" not in mixed
    assert only(found, "open loop", system="mixed")["rate"] == 1.5


def test_a_failed_request_is_no_answer_and_still_takes_its_time() -> None:
    failed = Stream(0.0, error="status 503")
    found = rows([outcome({OPEN: {"mixed": [GoodputRun([*goodput_run([0.02]).streams, failed], 4.0)]}})])
    row = only(found, "open loop", system="mixed")
    assert (row["failed"], row["requests"], row["goodput loose"]) == (1, 1, 0.25)
    assert not [row for row in found if "auto" in row.what]


def test_targets_are_reported_in_milliseconds() -> None:
    row = only(rows([three_systems()]), UNLOADED, shape=SHAPE)
    assert row["TTFT target"] == 1000
    assert (row["ITL target tight"], row["ITL target loose"]) == (25, 60)
    assert (row["ITL p50"], row["requests at most"]) == (12.5, 2)


@pytest.mark.parametrize("point", [CLOSED, OPEN])
def test_auto_is_compared_with_the_better_other(point: object) -> None:
    loop = Loop.CLOSED if point is CLOSED else Loop.OPEN
    row = only(rows([three_systems()]), against(loop))
    assert row["goodput tight"] == 3
    assert row["goodput loose"] == 1
    # Output: the first round is 0.7 s to 0.58 s, the second 0.7 s to 0.8 s; the figure is the median of the two.
    assert row["output : mixed"] == pytest.approx((0.7 / 0.58 + 0.7 / 0.8) / 2)
    assert row["TTFT p50 : mixed"] == pytest.approx(1.1)
    assert row["ITL p99 : p50"] == pytest.approx(0.05 / 0.02, rel=0.05)


def test_what_was_told_a_target_is_measured_by_that_alone() -> None:
    tight, loose = (replace(CLOSED, told=told) for told in T)
    found = rows([outcome({tight: three_systems().runs[CLOSED], loose: three_systems().runs[CLOSED]})])
    row = only(found, "closed loop", told="tight", system="mixed")
    assert {name for name in row if name.startswith("goodput")} == {"goodput tight", "goodput tight p99"}
    assert only(found, against(Loop.CLOSED), told="loose")["goodput loose"] == 1
    assert only(found, AGAINST_BEST)["goodput tight"] == 3
    assert "clients 4, told tight" in verdicts(found)[0]


def test_the_best_load_of_each_system_counts_for_the_highest_goodput() -> None:
    slow, fast = [goodput_run([0.02, 0.05])], [goodput_run([0.02, 0.02])]
    found = rows([outcome({CLOSED: {"mixed": fast, "auto": slow}, OPEN: {"mixed": slow, "auto": fast}})])
    assert only(found, AGAINST_BEST)["goodput tight"] == 1


def test_a_ratio_to_nothing_is_left_out() -> None:
    found = rows([outcome({CLOSED: {"mixed": [goodput_run([0.9])], "auto": [goodput_run([0.02])]}})])
    row = only(found, against(Loop.CLOSED))
    assert goodput_name(T.TIGHT) not in row
    assert "output : mixed" in row


def test_a_ratio_at_a_load_has_an_interval_that_more_rounds_make_smaller() -> None:
    good, bad = goodput_run([0.02, 0.02]), goodput_run([0.02, 0.9])

    def interval(rounds: int) -> float:
        by_system = {"mixed": [good, bad] * rounds, "auto": [bad, good] * rounds}
        row = only(rows([outcome({CLOSED: by_system})]), against(Loop.CLOSED))
        assert row["goodput tight" + LOW] < row["goodput tight"] == 1 < row["goodput tight" + HIGH]
        return row["goodput tight" + HIGH] - row["goodput tight" + LOW]

    assert interval(20) < interval(2)
    same = only(rows([outcome({CLOSED: {"mixed": [good] * 3, "auto": [bad] * 3}})]), against(Loop.CLOSED))
    assert same["goodput tight" + LOW] == same["goodput tight"] == same["goodput tight" + HIGH] == 0.5


def test_what_more_rounds_would_decide_is_not_said_to_be_missed() -> None:
    good, bad = goodput_run([0.02, 0.02]), goodput_run([0.02, 0.9])
    (verdict,) = (
        told
        for told in verdicts(rows([outcome({CLOSED: {"mixed": [good, bad, good], "auto": [bad, good, bad]}})]))
        if "tight : the better other's" in told and "highest" not in told
    )
    assert verdict.startswith("undecided: ") and "holds at 0 of 1, undecided at 1; the worst is 0.80" in verdict


def test_where_the_better_other_may_have_nothing_the_interval_has_no_upper_end() -> None:
    good, bad, half = goodput_run([0.02] * 6), goodput_run([0.9] * 6), goodput_run([0.02] * 2 + [0.9] * 4)
    found = rows([outcome({CLOSED: {"mixed": [bad, bad, good], "auto": [half, half, half]}})])
    row = only(found, against(Loop.CLOSED))
    assert row["goodput tight"] == 1
    assert row["goodput tight" + LOW] == 0.5
    assert "goodput tight" + HIGH not in row
    assert verdicts(found)[0].startswith("undecided: ")


def test_one_round_has_no_interval() -> None:
    found = rows([outcome({CLOSED: {"mixed": [goodput_run([0.02])], "auto": [goodput_run([0.9, 0.02])]}})])
    assert "goodput tight" + LOW not in only(found, against(Loop.CLOSED))
    assert verdicts(found)[0].startswith("met: ")


def test_a_load_that_no_system_serves_within_the_targets_has_no_ratio_of_goodputs() -> None:
    lucky = [goodput_run([0.02, *[0.9] * 10])] * 2
    row = only(rows([outcome({CLOSED: {"mixed": lucky, "auto": lucky}})]), against(Loop.CLOSED))
    assert not [name for name in row if name.startswith("goodput")]
    assert "output : mixed" in row


def test_another_server_is_beside_and_changes_no_other_ratio() -> None:
    runs = three_systems().runs[CLOSED]
    found = rows([outcome({CLOSED: {**runs, "peer": [goodput_run([0.02, 0.02]), goodput_run([0.02, 0.02])]}})])
    assert only(found, against(Loop.CLOSED))["goodput tight"] == 3
    row = only(found, f"{AGAINST_PEER}, closed loop", peer="peer")
    assert row["goodput tight"] == 0.75
    assert row["TTFT p50 : peer"] == pytest.approx(1.1)


def test_a_verdict_names_the_worst_place() -> None:
    told = verdicts(rows([three_systems()]))
    assert len(told) == 6
    assert told[0] == (
        "met: auto's goodput tight : the better other's, wanted at least 1, holds at 2 of 2; the worst is 3.00 "
        f"(shape {SHAPE}, clients 4)"
    )
    assert told[4].startswith("met: auto's TTFT p50 : mixed's, wanted at most 1.3, holds at 2 of 2; the worst is 1.10")
    assert told[5].startswith("MISSED: auto's ITL p99 : its median, wanted at most 2, holds at 0 of 2")
    assert verdicts([]) == ()


def test_a_new_run_can_be_compared() -> None:
    old = goodput_report()
    assert not any(change.worse for change in changes(old, old, 0.0))
    gone = report(*old.rows_of("closed loop"), benchmark="goodput")
    assert all(change.worse for change in changes(old, gone, 0.5))
