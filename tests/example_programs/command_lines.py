"""Reads the command lines and variables of examples as pdserve itself does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from pdserve.config import NodeConfig, ProxyConfig
from pdserve.settings import ROOTS, load
from pdserve.settings.setting import settings_of


def proxy_config(words: Sequence[str], environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]) -> ProxyConfig:
    """Returns what ``pdserve proxy`` would start with. Raises ConfigError, and fails the test if it warns."""
    subcommand, *flags = words
    assert subcommand == "proxy"
    config = load(ProxyConfig, flags, environ, prog="pdserve proxy")
    _check(environ, capsys)
    return config


def node_config(
    role: str, words: Sequence[str], environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> NodeConfig:
    """Returns what the node of ``role`` would start with. Raises ConfigError, and fails the test if it warns."""
    subcommand, *flags = words
    assert subcommand == role
    config = load(NodeConfig, flags, environ, prog=f"pdserve {role}")
    _check(environ, capsys)
    return config


def _check(environ: Mapping[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert capsys.readouterr().err == "", "a setting has a former name"
    known = {setting.env for root in ROOTS for setting in settings_of(root)} | {"PDSERVE_SECRET"}
    assert {name for name in environ if name.startswith("PDSERVE_")} <= known
