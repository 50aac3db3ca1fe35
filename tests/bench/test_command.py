"""Tests the command ``pdserve bench``: its list of benchmarks, its output files, and its messages for mistakes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from pdserve.bench.report import Report, read_report
from pdserve.cli.bench import BENCHMARKS, COMPARE
from pdserve.cli.main import main
from pdserve.config.bench import BenchCompareConfig, BenchEngineConfig
from pdserve.errors import ConfigError
from pdserve.settings import load
from tests.tiny_models import save_tiny_model
from tests.tiny_vocabulary import save_tiny_tokenizer

SMALL = ("--batches", "1", "--contexts", "8", "--chunks", "8", "--seconds", "0", "--copy-mib", "1")


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"], {}) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in (*BENCHMARKS, COMPARE))
    assert set(BENCHMARKS) == {"engine", "load", "transfer"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "which benchmark?"),
        (["enginee"], "unknown benchmark 'enginee'; did you mean engine?"),
        (["goodput"], "unknown benchmark 'goodput'\n\nusage: pdserve bench BENCHMARK"),
        (["compare", "old.json"], "two reports are needed"),
        (["load", "--url", "nowhere"], "--url: 'nowhere' was given"),
        (["engine", "--batches", "0,1"], "--batches: it takes one or more numbers of at least 1"),
        (["engine", "--json", "/nowhere/x.json"], "--json: there is no folder '/nowhere'"),
        (["engine", "--cores", "65000"], "--cores: cannot run on [65000]"),
    ],
)
def test_a_mistake_is_told_and_costs_no_run(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv], {}) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("small_products")
def test_json_goes_to_standard_output_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model("llama", tmp_path / "tiny")
    save_tiny_tokenizer(model)
    flags = ["bench", "engine", "--model", str(model), *SMALL]
    assert main([*flags, "--json"], {}) == 0
    told = capsys.readouterr()
    assert msgspec.json.decode(told.out, type=Report).benchmark == "engine"
    assert "decode step" in told.err
    file = tmp_path / "figures.json"
    assert main([*flags, "--json", str(file)], {}) == 0
    told = capsys.readouterr()
    assert "decode step" in told.out
    assert read_report(file).rows


def test_a_flag_without_a_value_may_be_followed_by_others() -> None:
    config = load(BenchEngineConfig, ["--json", "--seconds", "2"], {}, prog="pdserve bench engine")
    assert (config.report.json, config.engine.seconds) == ("-", 2.0)
    assert load(BenchEngineConfig, [], {}, prog="pdserve bench engine").report.json == ""


def test_words_without_flags_are_the_two_reports() -> None:
    def reports(*argv: str) -> tuple[str, str]:
        compare = load(BenchCompareConfig, argv, {}, prog="pdserve bench compare").compare
        return compare.old, compare.new

    assert reports("a", "b", "--tolerance", "0.2") == ("a", "b")
    assert reports("--tolerance", "0.2", "a", "b") == ("a", "b")
    assert reports("a", "--new", "b") == ("a", "b")
    assert reports("--tolerance", "0.2") == ("", "")
    with pytest.raises(ConfigError, match="the old is given twice: 'b', and --old 'a'"):
        reports("--old", "a", "b")
