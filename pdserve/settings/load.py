"""Builds one configuration out of all sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pdserve.config import (
    ChatConfig,
    DoctorConfig,
    DrainConfig,
    LiveConfig,
    ModelsConfig,
    NodeConfig,
    PlanConfig,
    ProxyConfig,
    PullConfig,
    RequestTraceConfig,
    RoleConfig,
    TopConfig,
    UpConfig,
)
from pdserve.config.bench import (
    BenchCompareConfig,
    BenchEngineConfig,
    BenchLoadConfig,
    BenchTransferConfig,
    PlanProfileConfig,
)
from pdserve.settings.checks import check
from pdserve.settings.setting import Setting, build, settings_of, to_text
from pdserve.settings.sources import CommandLine, current_environ, from_environ, from_file, from_flags

ROOTS: tuple[type, ...] = (
    NodeConfig,
    ProxyConfig,
    UpConfig,
    PullConfig,
    ModelsConfig,
    DoctorConfig,
    RoleConfig,
    DrainConfig,
    TopConfig,
    LiveConfig,
    RequestTraceConfig,
    ChatConfig,
    BenchEngineConfig,
    BenchLoadConfig,
    BenchTransferConfig,
    BenchCompareConfig,
    PlanConfig,
    PlanProfileConfig,
)
"""The root dataclasses of all subcommands: a setting that one of them has is not a misspelling for the others."""

POSITIONAL: Mapping[type, str] = dict.fromkeys((NodeConfig, UpConfig, PullConfig, ModelsConfig), "model")
"""The setting that may stand without its flag, for the subcommands that have one."""

T = TypeVar("T")


def load(root: type[T], argv: Sequence[str], environ: Mapping[str, str], *, prog: str, description: str = "") -> T:
    """Returns a ``root`` filled from ``argv``, then ``PDSERVE_*`` of ``environ``, then the TOML file, then defaults.

    Prints help and exits for ``--help``. Raises ConfigError, which names the setting, where it was given, what was
    given and what would be right.
    """
    return load_with_file(root, argv, environ, prog=prog, description=description)[0]


def load_with_file(
    root: type[T],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    roots: Sequence[type] = ROOTS,
) -> tuple[T, str]:
    """Returns what ``load`` returns, and the path of the TOML file that was read; empty if there was none.

    Environment and file may have settings of all ``roots``.
    """
    settings = settings_of(root)
    every = [setting for known in {root: None, **dict.fromkeys(roots)} for setting in settings_of(known)]
    by_flag: dict[str, Setting] = {setting.flag: setting for setting in every}
    flags, flags_file = from_flags(CommandLine(prog, description, settings, POSITIONAL.get(root, "")), argv, by_flag)
    variables, environ_file = from_environ(settings, environ, by_flag)
    file = flags_file or environ_file
    stored = from_file(settings, Path(file), every) if file else {}
    config = build(root, {**stored, **variables, **flags})
    check(config)
    return config, file


def with_current_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` with the names of today for variables that had other ones, each with a warning."""
    return current_environ(environ, [setting for root in ROOTS for setting in settings_of(root)])


def to_environ(config: object) -> dict[str, str]:
    """Returns the ``PDSERVE_*`` variables that give another process the settings of ``config``, without its secrets."""
    return {
        setting.env: to_text(getattr(getattr(config, setting.section), setting.field))
        for setting in settings_of(type(config))
        if not setting.secret
    }
