"""Where settings are given: the command line, the environment, a TOML file. Each returns values by flag.

A name that no subcommand knows is an error in all three, with the nearest right one. A name that only another
subcommand knows is an error as a flag, and ignored in the environment and the file, which several processes may share.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError
from pdserve.settings.tree import ENV_PREFIX, Setting, env_name
from pdserve.settings.usage import CONFIG_FLAG, Usage
from pdserve.settings.values import from_texts, from_toml

CONFIG_ENV = env_name(CONFIG_FLAG)


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean --block-size?``, or nothing where nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def from_flags(usage: Usage, argv: Sequence[str], elsewhere: Mapping[str, Setting]) -> tuple[dict[str, Any], str]:
    """Values of the command line, and the TOML file that it names (empty if none).

    ``elsewhere`` holds the settings of all subcommands, to tell a misplaced flag from a misspelt one. Prints help and
    exits for ``--help``. Raises ConfigError.
    """
    texts, extra = usage.parse(argv)
    if extra:
        # Only the flag's own name: what follows it may be a misspelt flag's secret.
        name = next((part for part in extra if part.startswith("-")), extra[0]).partition("=")[0]
        if not name.startswith("-"):
            raise ConfigError(f"unexpected argument {name!r}; settings are given as --flag value")
        if name.lstrip("-") in elsewhere:
            raise ConfigError(f"{name} is not a setting of {usage.prog!r}")
        flags = [f"--{setting.flag}" for setting in usage.settings] + [f"--{CONFIG_FLAG}", "--help"]
        raise ConfigError(f"unknown flag {name} of {usage.prog!r}{suggestion(name, flags)}")
    file = texts.pop(CONFIG_FLAG, [""])[-1]
    settings = {setting.flag: setting for setting in usage.settings}
    return {flag: from_texts(settings[flag], given, f"--{flag}") for flag, given in texts.items()}, file


def from_environ(
    settings: Sequence[Setting], environ: Mapping[str, str], elsewhere: Mapping[str, Setting]
) -> tuple[dict[str, Any], str]:
    """Values of ``PDSERVE_*`` variables, and the TOML file that ``PDSERVE_CONFIG`` names (empty if none)."""
    known = {setting.env for setting in elsewhere.values()} | {CONFIG_ENV}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{suggestion(name, known)}")
    values = {
        setting.flag: from_texts(setting, [environ[setting.env]], setting.env)
        for setting in settings
        if setting.env in environ
    }
    return values, environ.get(CONFIG_ENV, "")


def from_file(settings: Sequence[Setting], path: Path, elsewhere: Sequence[Setting]) -> dict[str, Any]:
    """Values of a TOML file: a table for each section, keys named like flags, with dashes or underscores."""
    document = _read(path)
    ours = {(setting.section, setting.flag): setting for setting in settings}
    every = {(setting.section, setting.flag) for setting in elsewhere}
    values: dict[str, Any] = {}
    for section, table in document.items():
        _check_section(path, section, table, {name for name, _ in every})
        for key, value in table.items():
            flag = key.replace("_", "-")
            where = f"{path}: {section}.{key}"
            if (section, flag) not in every:
                keys = [known for name, known in every if name == section]
                raise ConfigError(f"{where} is not a setting{_key_suggestion(section, flag, keys, every)}")
            if flag in values:
                raise ConfigError(f"{where} is given twice")
            if (section, flag) in ours:
                values[flag] = from_toml(ours[section, flag], value, where)
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read the settings file {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc


def _check_section(path: Path, section: str, table: object, known: set[str]) -> None:
    if section not in known:
        raise ConfigError(f"{path}: unknown section [{section}]{suggestion(section, known)}")
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {section} has to be a table: [{section}]")


def _key_suggestion(section: str, flag: str, keys: Sequence[str], every: set[tuple[str, str]]) -> str:
    others = [f"{name}.{known}" for name, known in sorted(every) if known == flag]
    return f"; did you mean {others[0]}?" if others else suggestion(flag, keys)
