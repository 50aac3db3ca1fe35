"""Tests ``pdserve plan`` from its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.report import read_report
from pdserve.cli.main import main
from pdserve.plan.profile import write_profile
from tests.plan.profiles import profile_of


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(profile_of(), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def run(*argv: str) -> int:
    return main(["plan", *argv], {})


@pytest.mark.integration
def test_the_smallest_cluster_and_its_neighbours_are_shown(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    argv = ["--profile", profile, "--rate", "4", "--target-ttft-ms", "800", "--target-itl-ms", "100"]
    assert run(*argv, "--plan-requests", "200", "--json", str(file), "--plot", str(plot)) == 0
    shown = capsys.readouterr().out
    assert "the smallest cluster that keeps a TTFT p90 of 800 ms and an ITL p90 of 100 ms: " in shown
    report = read_report(file)
    clusters = [str(row.at["cluster"]) for row in report.rows]
    assert len(clusters) == len(set(clusters)) > 2
    for name in ("TTFT p50", "TTFT p90", "TTFT p99", "ITL p50", "ITL p90", "ITL p99", "output", "goodput"):
        assert all(row.figure(name).value > 0 for row in report.rows)
    assert [row.at["verdict"] for row in report.rows].count("smallest") == 1
    assert "</svg>" in plot.read_text()


def test_a_given_cluster_is_predicted_for_a_trace(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"at_s": {n}, "prompt_tokens": 200, "output_tokens": 20}}\n' for n in range(5)))
    argv = ["--profile", profile, "--trace", str(trace), "--prefill", "1", "--decode", "2", "--json", "-"]
    assert run(*argv, "--target-ttft-ms", "1") == 0
    told = capsys.readouterr()
    (row,) = json.loads(told.out)["rows"]
    assert row["at"] == {"cluster": "1 prefill + 2 decode", "verdict": "too slow"}
    assert "1 prefill + 2 decode: does not keep a TTFT p90 of 1 ms" in told.err


@pytest.mark.integration
def test_few_nodes_are_found_for_bursts_that_may_be_computed_after_the_last_of_them(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{{"at_s": {at_s}, "prompt_tokens": 256, "output_tokens": 64}}\n'
    trace.write_text("".join(line.format(at_s=at_s) * 100 for at_s in (0, 10)))
    argv = ["--profile", profile, "--trace", str(trace), "--target-ttft-ms", "30000", "--max-nodes", "2"]
    assert run(*argv) == 0
    assert "the smallest cluster that keeps a TTFT p90 of 30000 ms: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status", "wrong"),
    [
        ([], 2, "which load? One of --rate, --trace and --from is needed; none was given"),
        (["--rate", "1", "--trace", "x"], 2, "--rate and --trace were given"),
        (["--rate", "1"], 2, "what is wanted? Give --target-ttft-ms"),
        (["--rate", "1", "--prefill", "1"], 1, "it needs a decode or a mixed node"),
        (["--rate", "1", "--mixed", "1", "--prompt-lengths", "many"], 1, "'many' is no length"),
        (["--rate", "1", "--mixed", "2", "--nodes-per-machine", "4"], 2, "a whole number from 1 to 2"),
        (["--from", "http://127.0.0.1:9", "--mixed", "1"], 1, "does not say what its nodes are"),
        (["--rate", "1", "--mixed", "1", "--json", "/absent/plan.json"], 2, "there is no folder"),
        (["profil"], 2, "or the word profile"),
        (["--rate", "1", "--target-itl-ms", "9"], 1, "no number of nodes keeps an ITL p90 of 9 ms: a step for"),
        (["--rate", "1", "--target-ttft-ms", "1", "--max-nodes", "2"], 1, "no cluster that was tried keeps a TTFT"),
    ],
)
def test_what_is_wrong_is_said(
    profile: str, argv: list[str], status: int, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [] if argv == ["profil"] else ["--profile", profile, "--plan-requests", "20"]
    assert run(*argv, *flags) == status
    assert wrong in capsys.readouterr().err


def test_without_a_profile_it_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--profile", str(tmp_path / "absent.json"), "--rate", "1", "--mixed", "1") == 1
    assert "pdserve plan profile" in capsys.readouterr().err
