"""Tests that ``--help`` shows every setting."""

from __future__ import annotations

import re

import pytest

from pdserve.cli.bench import BENCHMARKS, COMPARE
from pdserve.cli.main import SUBCOMMANDS, main
from pdserve.cli.plan import MEMORY, PROFILE
from pdserve.settings.load import CONFIGS
from pdserve.settings.setting import settings_of


def help_of(subcommand: str, capsys: pytest.CaptureFixture[str], flag: str = "--help-all", **environ: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*subcommand.split(), flag], environ)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_no_flag_is_broken_at_the_end_of_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not re.search(r"[a-z]-$", help_of("serve", capsys), re.MULTILINE)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("subcommand", CONFIGS)
def test_every_setting_is_there_with_its_flag_variable_and_meaning(
    subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = words(help_of(subcommand, capsys))
    settings = settings_of(CONFIGS[subcommand])
    assert settings
    for setting in settings:
        assert f"--{setting.flag} " in text
        assert f"({setting.env})" in text
        assert " ".join(setting.help.split()) in text
        assert f"[{setting.section}] {setting.title}:" in text
    assert "--config FILE" in text
    assert "PDSERVE_CONFIG" in text


def test_defaults_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "The server listens on this port. 0 takes a free one. [8000]" in words(help_of("proxy", capsys))
    assert "The server listens on this port. 0 takes a free one. [0]" in words(help_of("decode", capsys))


@pytest.mark.parametrize("subcommand", ["up", "proxy", "decode"])
def test_short_help_shows_what_is_set_first_and_tells_of_the_rest(
    subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = help_of(subcommand, capsys, "--help"), help_of(subcommand, capsys)
    assert len(short.splitlines()) < len(whole.splitlines()) * 0.7
    shown = set(re.findall(r"^  --([a-z-]+)", short, re.MULTILINE))
    hidden = sum(setting.flag not in shown for setting in settings_of(CONFIGS[subcommand]))
    assert hidden > 10
    assert f"{hidden} more settings: pdserve {subcommand} --help-all" in words(short)
    for text in (short, whole):
        assert "Examples:" in text
        assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("subcommand", CONFIGS)
def test_short_help_has_settings_of_every_subcommand(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    short = help_of(subcommand, capsys, "--help")
    assert any(f"--{setting.flag} " in short for setting in settings_of(CONFIGS[subcommand]))


def test_help_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    lines = help_of("decode", capsys, "--help").partition("Examples:")[0].splitlines()
    assert max(map(len, lines)) <= 72


def test_no_secret_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in help_of("proxy", capsys, PDSERVE_SECRET="hunter2hunter2hunter2")


def test_every_subcommand_is_known_to_the_loader() -> None:
    benchmarks = {f"bench {name}" for name in (*BENCHMARKS, COMPARE)}
    plans = {f"plan {name}" for name in (PROFILE, MEMORY)}
    assert set(CONFIGS) == set(SUBCOMMANDS) - {"bench", "completion"} | benchmarks | plans
    assert all(CONFIGS[f"bench {name}"] is benchmark.config for name, benchmark in BENCHMARKS.items())
