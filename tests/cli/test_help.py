"""Tests that ``--help`` shows every setting."""

from __future__ import annotations

import pytest

from pdserve.bench_config import BenchCompareConfig
from pdserve.cli.bench import BENCHMARKS, COMPARE
from pdserve.cli.main import SUBCOMMANDS, main
from pdserve.config import DoctorConfig, DrainConfig, NodeConfig, ProxyConfig, RoleConfig, UpConfig
from pdserve.settings import ROOTS
from pdserve.settings.setting import settings_of

ROOT_OF: dict[str, type] = {
    "up": UpConfig,
    "proxy": ProxyConfig,
    "prefill": NodeConfig,
    "decode": NodeConfig,
    "mixed": NodeConfig,
    "doctor": DoctorConfig,
    "role": RoleConfig,
    "drain": DrainConfig,
    f"bench {COMPARE}": BenchCompareConfig,
    **{f"bench {name}": benchmark.config for name, benchmark in BENCHMARKS.items()},
}
"""The settings of each subcommand."""


def help_of(subcommand: str, capsys: pytest.CaptureFixture[str], **environ: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*subcommand.split(), "--help"], environ)
    assert caught.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("subcommand", ROOT_OF)
def test_every_setting_is_there_with_its_flag_variable_and_meaning(
    subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(subcommand, capsys)
    settings = settings_of(ROOT_OF[subcommand])
    assert settings
    for setting in settings:
        assert f"--{setting.flag} " in text
        assert f"({setting.env})" in text
        assert " ".join(setting.help.split()) in text
        assert f"[{setting.section}] {setting.title}:" in text
    assert "--config FILE" in text
    assert "PDSERVE_CONFIG" in text


def test_defaults_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "The server listens on this port. 0 takes a free one. [8000]" in help_of("proxy", capsys)
    assert "The server listens on this port. 0 takes a free one. [0]" in help_of("decode", capsys)


def test_no_secret_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in help_of("proxy", capsys, PDSERVE_SECRET="hunter2hunter2hunter2")


def test_every_subcommand_is_known_to_the_loader() -> None:
    benchmarks = {f"bench {name}" for name in (*BENCHMARKS, COMPARE)}
    assert set(ROOT_OF) == set(SUBCOMMANDS) - {"bench"} | benchmarks
    assert set(ROOT_OF.values()) == set(ROOTS)
