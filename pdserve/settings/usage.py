"""The command line of one subcommand: what argparse is told, and ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import NoReturn

from pdserve.errors import ConfigError
from pdserve.settings.tree import Setting
from pdserve.settings.values import expected, to_text

CONFIG_FLAG = "config"

_EPILOG = (
    "A flag wins over its environment variable (in parentheses), that over the file of --config, "
    "that over the default [in brackets]."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


class Usage:
    """Parses and explains the flags of one subcommand."""

    def __init__(self, prog: str, description: str, settings: Sequence[Setting]) -> None:
        self.prog = prog
        self.settings = settings
        self._parser = _Parser(
            prog=prog,
            description=description,
            epilog=_EPILOG,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
            usage="%(prog)s [--flag value ...]",
        )
        general = self._parser.add_argument_group("Settings file")
        general.add_argument(
            f"--{CONFIG_FLAG}",
            action="append",
            metavar="FILE",
            help="TOML file with a table for each group below [none] (PDSERVE_CONFIG)",
        )
        for (section, title), group in groupby(settings, key=lambda setting: (setting.section, setting.title)):
            arguments = self._parser.add_argument_group(f"[{section}] {title}")
            for setting in group:
                arguments.add_argument(
                    f"--{setting.flag}",
                    dest=setting.flag,
                    action="append",
                    nargs=None if setting.bare is None else "?",
                    const=setting.bare,
                    metavar=setting.metavar or _metavar(setting),
                    help=_help(setting),
                )

    def parse(self, argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Texts by flag, and what was not understood. Exits 0 after ``--help``; raises ConfigError."""
        known, extra = self._parser.parse_known_args(list(argv))
        return vars(known), extra

    def help(self) -> str:
        return self._parser.format_help()


def _help(setting: Setting) -> str:
    default = "none" if setting.secret or setting.default in ("", ()) else to_text(setting.default)
    return f"{setting.help} [{default}] ({setting.env})".replace("%", "%%")


def _metavar(setting: Setting) -> str:
    taken = expected(setting)
    if taken.startswith("one of "):
        return "{" + taken.removeprefix("one of ").replace(", ", ",") + "}"
    if setting.type in (int, float):
        return "N" if setting.type is int else "X"
    return setting.flag.rpartition("-")[2].upper()
