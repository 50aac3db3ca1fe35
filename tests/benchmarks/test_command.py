"""Tests ``python -m benchmarks``: its list of studies, its messages for mistakes, and what it tells its servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.__main__ import STUDIES, main
from benchmarks.programs import for_servers
from benchmarks.settings import BenchStreamConfig
from pdserve.bench.report import Report, this_machine
from pdserve.config import NodeConfig
from pdserve.settings import load, to_environ


def test_help_lists_the_studies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], {}) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in STUDIES)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "which study?"),
        (["goodputt"], "unknown study 'goodputt'; did you mean goodput?"),
        (["batching", "--plot", "/nowhere/x.png"], "--plot: there is no folder '/nowhere'"),
        (["batching", "--concurrency", "1,x"], "--concurrency: '1,x' was given"),
        (["goodput", "--systems", "mixed,mixed"], "--systems: 'mixed,mixed' was given; it takes names out of mixed"),
        (["goodput", "--systems", ""], "--systems and --add are both empty"),
        (["goodput", "--shapes", "256"], "--shapes: '256' was given"),
        (["goodput", "--shapes", ""], "--shapes: it takes one or more"),
        (["goodput", "--add", "auto=http://127.0.0.1:1"], "--add: 'auto=http://127.0.0.1:1' was given"),
        (["goodput", "--add", "peer=127.0.0.1:1"], "--add: 'peer=127.0.0.1:1' was given"),
        (["goodput", "--rate-percents", "0"], "--rate-percents: it takes one or more numbers of at least 1"),
        (["batching", "--min-output-tokens", "9", "--max-output-tokens", "8"], "--min-output-tokens (9) is above"),
    ],
)
def test_a_mistake_is_told_and_costs_no_run(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, {}) == 2
    assert message in capsys.readouterr().err


def test_servers_get_no_setting_that_they_would_refuse() -> None:
    environ = {**to_environ(BenchStreamConfig()), "PDSERVE_KV_CACHE_MIB": "64", "HOME": "/nowhere"}
    assert "PDSERVE_STREAMS" in environ
    config = load(NodeConfig, [], for_servers(environ), prog="pdserve decode")
    assert config.cache.kv_cache_mib == 64
    assert for_servers(environ)["HOME"] == "/nowhere"


def test_a_file_may_have_settings_of_studies_and_of_their_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.toml"
    file.write_text("[streaming]\nstreams = [3]\n[cache]\nkv-cache-mib = 64\nblock-size = 32\n")
    told: list[tuple[BenchStreamConfig, Mapping[str, str]]] = []

    def measure(config: BenchStreamConfig, environ: Mapping[str, str]) -> Report:
        told.append((config, environ))
        return Report("stream", this_machine(), {}, (), ())

    monkeypatch.setitem(command.STUDIES, "stream", command.Study("", "", BenchStreamConfig, measure))
    given = {"PDSERVE_BLOCK_SIZE": "8", "PDSERVE_RATE_PERCENTS": "50", "PDSERVE_CONFIG": str(file)}
    assert main(["stream"], given) == 0
    ((config, environ),) = told
    assert config.streaming.streams == (3,)
    node = load(NodeConfig, [], environ, prog="pdserve decode")
    assert (node.cache.kv_cache_mib, node.cache.block_size) == (64, 8)
