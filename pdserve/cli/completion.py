"""``pdserve completion SHELL`` prints a script by which a shell completes pdserve's subcommands, flags and values."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import shtab

from pdserve.cli.bench import BENCHMARKS, COMPARE
from pdserve.cli.plan import MEMORY, PROFILE
from pdserve.errors import ConfigError
from pdserve.settings.load import CONFIGS
from pdserve.settings.setting import Setting, settings_of
from pdserve.wire.discovery import Role

SHELLS = ("bash", "zsh", "fish", "tcsh")
USAGE = (
    f"usage: pdserve completion {'|'.join(SHELLS)}\n\n"
    "Prints a script for the shell. To load it now, and at each login:\n\n"
    '  bash:  eval "$(pdserve completion bash)"    in ~/.bashrc\n'
    "  zsh:   pdserve completion zsh > ~/.zfunc/_pdserve    with fpath=(~/.zfunc $fpath) before compinit in ~/.zshrc\n"
    "  fish:  pdserve completion fish > ~/.config/fish/completions/pdserve.fish\n"
)
_FILES = {
    "config",
    "model",
    "json",
    "plot",
    "secret-file",
    "api-key-file",
    "admin-key-file",
    "tls-cert",
    "tls-key",
    "tls-ca",
    "core-ledger",
}


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Prints the script for ``argv[0]``; returns the exit status. Raises ConfigError for an unknown shell."""
    if list(argv[:1]) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"which shell? pdserve completion takes one of {', '.join(SHELLS)}")
    # Its name in the imports is the one that shells know, however pdserve was started.
    print(shtab.complete(whole_parser(), shell=argv[0]))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Returns a parser of all subcommands, which shows what there is to complete and parses nothing."""
    from pdserve.cli.main import SUBCOMMANDS

    parser = argparse.ArgumentParser(prog="pdserve")
    parser.add_argument("--version", action="version", version="")
    subcommands = parser.add_subparsers()
    for name, summary in SUBCOMMANDS.items():
        subcommand = subcommands.add_parser(name, help=_escaped(summary), description=_escaped(summary))
        if name in CONFIGS:
            _add_settings(subcommand, CONFIGS[name])
        if name == "completion":
            subcommand.add_argument("shell", choices=SHELLS)
        if name == "chat":
            model = subcommand.add_argument("with_whom", metavar="MODEL|URL")
            model.complete = shtab.FILE  # type: ignore[attr-defined]
        if name == "trace":
            subcommand.add_argument("of_request", metavar="REQUEST_ID")
        if name == "role":
            subcommand.add_argument("to_node", metavar="NODE")
            subcommand.add_argument("to_role", metavar="ROLE", choices=[role.value for role in Role])
        if name == "plan":
            plans = subcommand.add_subparsers()
            for what in (PROFILE, MEMORY):
                _add_settings(plans.add_parser(what), CONFIGS[f"plan {what}"])
        if name == "bench":
            benchmarks = subcommand.add_subparsers()
            for what, benchmark in BENCHMARKS.items():
                one = benchmarks.add_parser(what, help=_escaped(benchmark.summary))
                _add_settings(one, benchmark.config)
            compare = benchmarks.add_parser(COMPARE, help="two reports of one benchmark")
            _add_settings(compare, CONFIGS[f"bench {COMPARE}"])
            for report in ("old_report", "new_report"):
                compare.add_argument(report).complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _add_settings(parser: argparse.ArgumentParser, root: type[Any]) -> None:
    parser.add_argument("--config", metavar="FILE").complete = shtab.FILE  # type: ignore[attr-defined]
    for setting in settings_of(root):
        action = parser.add_argument(
            f"--{setting.flag}",
            dest=f"flag_{setting.flag}",
            nargs=None if setting.bare is None else "?",
            choices=_choices(setting),
            help=_escaped(setting.help.partition(". ")[0].removesuffix(".")),
        )
        if setting.metavar == "FILE" or setting.flag in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _choices(setting: Setting) -> list[str] | None:
    if isinstance(setting.type, type) and issubclass(setting.type, enum.Enum):
        return [str(member.value) for member in setting.type]
    return None


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
