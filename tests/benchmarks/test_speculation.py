"""Tests ``benchmarks speculation``: its prompts, its ratios, that another answer is a failure, and the whole study."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.speculation
from benchmarks.speculation.benchmark import (
    KINDS,
    REQUESTS,
    Case,
    Drafts,
    Pair,
    check_equal,
    compared,
    read_prompts,
    request_rows,
)
from benchmarks.speculation.plot import write_plot
from pdserve.bench.dataset import open_dataset
from pdserve.bench.report import Report, read_report, this_machine
from pdserve.bench.streamed_answer import Stream
from pdserve.config.bench import DatasetConfig
from pdserve.errors import BenchError
from tests.benchmarks.studies import run_study

SMALL = ("--rounds", "1", "--clients", "1,2", "--prompts", "2", "--output-tokens", "24")


def stream(seconds: float, text: str = "same") -> Stream:
    """An answer of 5 tokens whose first one comes after a second, and the last one ``seconds`` later."""
    return Stream(0.0, [1.0, 1.0 + seconds], 1.0 + seconds, output_tokens=5, pieces=[text])


def pair(clients: int) -> Pair:
    prompts = read_prompts("free", 2, 5)
    found = Pair(Case("free", 0.8, clients), prompts)
    found.on.append([stream(1.0), stream(3.0)])
    found.off.append([stream(4.0), stream(3.0)])
    found.drafts += [Drafts(4, 3), Drafts(1, 0)]
    found.cpu_s = {True: 1.0, False: 2.0}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompts_are_a_dataset_of_bench_load(kind: str) -> None:
    file = Path(benchmarks.speculation.__file__).with_name(f"{kind}.jsonl")
    prompts = read_prompts(kind, 99, 999)
    sessions = list(open_dataset(DatasetConfig(str(file)), 64, 400, 0).sessions(0, 99))
    jobs = [turn.job for session in sessions for turn in session.turns]
    assert [job.messages for job in jobs] == [prompt.job.messages for prompt in prompts]
    assert [job.output_tokens for job in jobs] == [prompt.job.output_tokens for prompt in prompts]
    assert len({prompt.name for prompt in prompts}) == len(prompts) == {"repeating": 10, "free": 5}[kind]


def test_ratios_of_one_client_and_of_several() -> None:
    one, two = compared(pair(1)), compared(pair(2))
    assert one.figure("TPOT").value == pytest.approx((1 / 4 + 3 / 3) / 2)
    assert two.figure("TPOT").value == pytest.approx(2.0 / 3.5)
    assert one.figure("output").value == pytest.approx((5 + 4) / (2 + 4))
    assert two.figure("output").value == pytest.approx(5 / 4)
    assert one.figure("engine CPU").value == 0.5
    assert (one.figure("drafted").value, one.figure("accepted").value) == (5, 3)
    assert one.figure("accepted a step").value == pytest.approx(3 / 7)
    assert [row.figure("accepted").value for row in request_rows(pair(1))] == [3, 0]


def test_another_answer_is_a_failure() -> None:
    found = pair(1)
    check_equal(found)
    found.on.append([stream(1.0), stream(3.0, "another")])
    found.off.append([stream(1.0), stream(3.0)])
    with pytest.raises(BenchError, match=r"'an explanation' .* has 'another' with speculation and 'same' without"):
        check_equal(found)


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    report = Report("speculation", this_machine(""), {}, (), tuple(request_rows(pair(1))))
    write_plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(BenchError, match="cannot write"):
        write_plot(report, tmp_path / "nowhere" / "plot.png")


# tests/engine/speculation shows in `make test` that no answer depends on drafts.
@pytest.mark.integration
@pytest.mark.nightly
def test_two_clusters_give_the_same_answers(tiny_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_model), "--dtype", "fp32", "--kv-cache-mib", "64")
    files = ("--json", "figures.json", "--plot", "plot.png")
    done = run_study("speculation", *SMALL, *model, *files, folder=tmp_path, timeout_s=240)
    assert "16 answers are the same with speculation and without" in done.stdout
    report = read_report(tmp_path / "figures.json")
    clients = [row.at["clients"] for row in report.rows_of("with speculation against without")]
    assert clients == [1] * 4 + [2] * 4
    assert len(report.rows_of(REQUESTS)) == 8
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
