"""Reads settings from the command line, the environment and a TOML file. Each source returns values by flag.

A name that no subcommand knows is an error in all three, with the nearest right one. A name that only another
subcommand knows is an error as a flag, and ignored in the environment and the file, which several processes may
share. A name that a setting had one version ago is taken in all three, and a warning names the new one.

This module also finds the user's own folders in the environment, by the XDG rules.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import logging
import shutil
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NoReturn

from pdserve.errors import ConfigError
from pdserve.machine.file_system import keep_own_folder
from pdserve.settings.other_servers import own_words
from pdserve.settings.setting import ENV_PREFIX, Setting, env_name, expected, from_texts, from_toml, to_text

logger = logging.getLogger(__name__)

CONFIG_FLAG = "config"

HELP_ALL_FLAG = "help-all"
_FEWEST_COLUMNS, _MOST_COLUMNS = 40, 110

_PRECEDENCE = (
    "A flag wins over its environment variable (in parentheses), the variable wins over the file of --config, "
    "and the file wins over the default [in brackets]."
)


EXAMPLES: Mapping[str, Sequence[str]] = {
    "pdserve up": (
        "pdserve up demo --ask 'What is a KV cache?'",
        "pdserve up Qwen/Qwen3-0.6B",
        "pdserve up /models/qwen3-8b --prefill 1 --decode 2 --port 8000",
    ),
    "pdserve serve": (
        "pdserve serve demo --ask 'What is a KV cache?'",
        "pdserve serve Qwen/Qwen3-0.6B",
        "pdserve serve /models/qwen3-8b --prefill 1 --decode 2 --port 8000",
    ),
    "pdserve proxy": (
        "pdserve proxy --host 0.0.0.0 --port 8000 --control-host 0.0.0.0 --secret-file cluster.secret",
        "pdserve proxy --policy prefix-affinity --api-key-file keys.txt --workers 2",
    ),
    "pdserve prefill": (
        "pdserve prefill --model /models/qwen3-8b --proxy tcp://10.0.0.1:8100 --host 10.0.0.2 \\",
        "    --transfer-host 10.0.0.2 --secret-file cluster.secret",
    ),
    "pdserve decode": (
        "pdserve decode --model /models/qwen3-8b --proxy tcp://10.0.0.1:8100 --host 10.0.0.3 \\",
        "    --transfer-host 10.0.0.3 --secret-file cluster.secret",
    ),
    "pdserve mixed": (
        "pdserve mixed --model demo --port 8000",
        "pdserve mixed --model /models/qwen3-8b --tensor-parallel-size 2 --gpu-memory-utilization 0.9",
    ),
    "pdserve chat": (
        "pdserve chat demo",
        "pdserve chat Qwen/Qwen3-0.6B",
        "pdserve chat http://10.0.0.1:8000 --api-key-file keys.txt",
        "pdserve chat demo < question.txt",
    ),
    "pdserve trace": (
        "pdserve trace chatcmpl-0b5f --proxy-url http://10.0.0.1:8000",
        "pdserve trace --slowest 5",
        "pdserve trace --failed",
    ),
    "pdserve role": ("pdserve role decode-1 prefill --proxy-url http://10.0.0.1:8000 --secret-file cluster.secret",),
    "pdserve drain": ("pdserve drain decode-1 --proxy-url http://10.0.0.1:8000 --secret-file cluster.secret",),
    "pdserve pull": ("pdserve pull Qwen/Qwen3-0.6B", "pdserve pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
    "pdserve models": ("pdserve models", "pdserve models Qwen/Qwen3-0.6B"),
    "pdserve doctor": (
        "pdserve doctor",
        "pdserve doctor --proxy-url http://10.0.0.1:8000 --model /models/qwen3-8b --secret-file cluster.secret",
    ),
}
"""Commands that help shows, by subcommand."""

POSITIONALS: Mapping[str, str] = {
    "pdserve chat": "[MODEL|URL [QUESTION]]",
    "pdserve drain": "NODE",
    "pdserve role": "NODE ROLE",
    "pdserve trace": "[REQUEST_ID]",
}
"""What stands before the flags, by subcommand."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see '{self.prog} --help'")


class CommandLine:
    """Parses and explains the flags of one subcommand."""

    def __init__(self, prog: str, description: str, settings: Sequence[Setting], positional: Sequence[str]) -> None:
        """``positional`` are the flags that may be left out before their values, in this order."""
        self.prog = prog
        self.settings = settings
        self.positional = positional
        self._description = description

    def _usage(self) -> str:
        first = POSITIONALS.get(self.prog) or " ".join(f"[{flag.upper()}]" for flag in self.positional)
        return " ".join(part for part in ("%(prog)s", first, "[--flag value ...]") if part)

    def parse(self, argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Returns texts by flag, and what was not understood.

        Exits 0 after ``--help``, which shows what people set first, or ``--help-all``. Raises ConfigError.
        """
        known, extra = self._parser(whole=f"--{HELP_ALL_FLAG}" in argv).parse_known_args(list(argv))
        return vars(known), extra

    def _parser(self, *, whole: bool) -> _Parser:
        """Returns a parser of all settings, whose help shows all of them or those that people set first."""
        shown = [setting for setting in self.settings if whole or self._is_first(setting)]
        parser = _Parser(
            prog=self.prog,
            description=self._description,
            epilog=self._epilog(len(self.settings) - len(shown)),
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_Formatter,
            usage=self._usage(),
        )
        general = parser.add_argument_group("Help, and a file of settings")
        general.add_argument("-h", "--help", action="help", help="This page shows what people set first.")
        general.add_argument(f"--{HELP_ALL_FLAG}", action="help", help="This page shows every setting.")
        general.add_argument(
            f"--{CONFIG_FLAG}",
            action="append",
            metavar="FILE",
            help="This TOML file has a table for each group below. [none] (PDSERVE_CONFIG)",
        )
        for (section, title), group in groupby(self.settings, key=lambda setting: (setting.section, setting.title)):
            arguments = parser.add_argument_group(textwrap.fill(f"[{section}] {title}", _columns() - 1))
            for setting in group:
                arguments.add_argument(
                    f"--{setting.flag}",
                    dest=setting.flag,
                    action="append",
                    nargs=None if setting.bare is None else "?",
                    const=setting.bare,
                    metavar=setting.metavar or _metavar(setting),
                    help=_help(setting) if setting in shown else argparse.SUPPRESS,
                )
        return parser

    def _is_first(self, setting: Setting) -> bool:
        """Whether people set it first, or it is of the subcommand's first section."""
        return setting.first or setting.section == self.settings[0].section

    def _epilog(self, hidden: int) -> str:
        rest = f"{hidden} more settings: {self.prog} --{HELP_ALL_FLAG}\n\n" if hidden else ""
        examples = "".join(f"\n  {example}" for example in EXAMPLES.get(self.prog, ()))
        return rest + _PRECEDENCE + (f"\n\nExamples:\n{examples}" if examples else "")


def _columns() -> int:
    return max(_FEWEST_COLUMNS, min(_MOST_COLUMNS, shutil.get_terminal_size().columns - 2))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills texts to the terminal's width, and keeps examples as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=_columns())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled, examples, commands = text.partition("\n\nExamples:")
        paragraphs = (textwrap.fill(paragraph, width, break_on_hyphens=False) for paragraph in filled.split("\n\n"))
        return "\n\n".join(paragraphs) + examples + commands

    def _split_lines(self, text: str, width: int) -> list[str]:
        # A flag stays whole on its line: --kv-cache-mib, not --kv- and cache-mib.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _help(setting: Setting) -> str:
    default = "none" if setting.secret or setting.default in ("", ()) else shown_default(setting)
    return f"{setting.help} [{default}] ({setting.env})".replace("%", "%%")


def shown_default(setting: Setting) -> str:
    """Returns the default as help shows it: a number that has a word by its word."""
    text = to_text(setting.default)
    words = () if isinstance(setting.default, enum.Enum) else setting.spellings.items()
    return next((word for word, value in words if float(value) == setting.default), text)


def _metavar(setting: Setting) -> str:
    taken = expected(setting)
    if taken.startswith("one of "):
        return "{" + taken.removeprefix("one of ").replace(", ", ",") + "}"
    if setting.type in (int, float):
        return "N" if setting.type is int else "X"
    return setting.flag.rpartition("-")[2].upper()


CONFIG_ENV = env_name(CONFIG_FLAG)
_KEYS = "keys are the proxy's: 'pdserve proxy' takes them, and 'pdserve up' gives its proxy those of PDSERVE_API_KEY"
_CHAT = "'pdserve chat' takes it, and requests to the API say it themselves"
ELSEWHERE = {
    "api-key": _KEYS,
    "api-key-file": f"{_KEYS}_FILE",
    **dict.fromkeys(("temperature", "max-tokens", "system"), _CHAT),
    "model": "nodes take it, and 'pdserve bench load' asks for the model of --served-model-name",
}
"""Where settings belong that people give to another subcommand, by their flags."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean --block-size?``, or an empty text if no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def from_flags(
    command_line: CommandLine, argv: Sequence[str], elsewhere: Mapping[str, Setting]
) -> tuple[dict[str, Any], str]:
    """Returns the values of the command line, and the TOML file that it names (empty if none).

    ``elsewhere`` holds the settings of all subcommands, to tell a misplaced flag from a misspelt one. Flags of other
    servers count as what they mean here. Prints help and exits for ``--help``. Raises ConfigError.
    """
    own = {setting.flag for setting in command_line.settings}
    words = _with_bare_values(_current_words(own_words(argv, own), elsewhere), command_line)
    texts, extra = command_line.parse(words)
    if len(extra) <= len(command_line.positional) and not any(word.startswith("-") for word in extra):
        for flag, word in zip(command_line.positional, extra, strict=False):
            if flag in texts:
                raise ConfigError(f"the {flag} is given twice: {word!r}, and --{flag} {texts[flag][-1]!r}")
            texts[flag] = [word]
    elif extra:
        # The error shows only the flag's own name, because the text after it may be a misspelt flag's secret.
        name = next((part for part in extra if part.startswith("-")), extra[0]).partition("=")[0]
        if not name.startswith("-"):
            name = extra[len(command_line.positional)]
            raise ConfigError(f"unexpected argument {name!r}; settings are given as --flag value")
        if name.lstrip("-") in elsewhere:
            where = ELSEWHERE.get(name.lstrip("-"), "")
            raise ConfigError(f"{name} is not a setting of {command_line.prog!r}{where and f': {where}'}")
        flags = [f"--{setting.flag}" for setting in command_line.settings] + [
            f"--{CONFIG_FLAG}",
            "--help",
            f"--{HELP_ALL_FLAG}",
        ]
        raise ConfigError(f"unknown flag {name} of {command_line.prog!r}{suggestion(name, flags)}")
    file = texts.pop(CONFIG_FLAG, [""])[-1]
    settings = {setting.flag: setting for setting in command_line.settings}
    return {flag: from_texts(settings[flag], given, f"--{flag}") for flag, given in texts.items()}, file


def _with_bare_values(argv: Sequence[str], command_line: CommandLine) -> list[str]:
    """Returns ``argv`` with the value of each switch that stands without one, so that no other word is taken for it."""
    switches = {
        f"--{setting.flag}": setting
        for setting in command_line.settings
        if setting.bare is not None and isinstance(setting.type, type) and issubclass(setting.type, enum.Enum)
    }
    words: list[str] = []
    for word, following in pairwise([*argv, ""]):
        switch = switches.get(word)
        takes_next = switch is not None and any(following == member.value for member in switch.type)
        words.append(word if switch is None or takes_next else f"{word}={switch.bare}")
    return words


def _current_words(argv: Sequence[str], elsewhere: Mapping[str, Setting]) -> list[str]:
    """Returns ``argv`` with the names of today for flags that had other ones."""
    renamed = {f"--{setting.former}": f"--{setting.flag}" for setting in elsewhere.values() if setting.former}
    words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if name in renamed:
            _warn_of(name, renamed[name])
            name = renamed[name]
        words.append(name + equals + value)
    return words


@cache
def _warn_of(former: str, name: str) -> None:
    # Once in a process, however often it reads the same source.
    logger.warning("%s is called %s now; the old name goes with the next version", former, name)


def current_environ(environ: Mapping[str, str], known: Iterable[Setting]) -> dict[str, str]:
    """Returns ``environ`` with the names of today for variables that had other ones. Raises ConfigError for both."""
    current = dict(environ)
    for setting in known:
        former = env_name(setting.former)
        if setting.former and former in current:
            if setting.env in current:
                raise ConfigError(f"{setting.env} is given twice: {former} is its old name")
            _warn_of(former, setting.env)
            current[setting.env] = current.pop(former)
    return current


def from_environ(
    settings: Sequence[Setting], environ: Mapping[str, str], elsewhere: Mapping[str, Setting]
) -> tuple[dict[str, Any], str]:
    """Returns the values of ``PDSERVE_*`` variables, and the file that ``PDSERVE_CONFIG`` names (empty if none)."""
    environ = current_environ(environ, elsewhere.values())
    known = {setting.env for setting in elsewhere.values()} | {CONFIG_ENV}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}{suggestion(name, known)}")
    named = [(setting, _given_name(setting, environ)) for setting in settings]
    values = {setting.flag: from_texts(setting, [environ[name]], name) for setting, name in named if name is not None}
    return values, environ.get(CONFIG_ENV, "")


_FOREIGN = {"otlp-endpoint": ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")}
"""Variables of other programs that give a setting where pdserve's own is missing, the first one first."""


def _given_name(setting: Setting, environ: Mapping[str, str]) -> str | None:
    """Returns the variable that gives the setting a value, if one does. Foreign ones that are empty give none."""
    if setting.env in environ:
        return setting.env
    return next((name for name in _FOREIGN.get(setting.flag, ()) if environ.get(name)), None)


def from_file(settings: Sequence[Setting], path: Path, elsewhere: Sequence[Setting]) -> dict[str, Any]:
    """Returns the values of a TOML file, with a table for each section and keys like flags (dashes or underscores)."""
    document = _read(path)
    ours = {(setting.section, setting.flag): setting for setting in settings}
    every = {(setting.section, setting.flag) for setting in elsewhere}
    renamed = {(setting.section, setting.former): setting.flag for setting in elsewhere if setting.former}
    values: dict[str, Any] = {}
    for section, table in document.items():
        _check_section(path, section, table, {name for name, _ in every})
        for key, value in table.items():
            flag = key.replace("_", "-")
            where = f"{path}: {section}.{key}"
            if (section, flag) in renamed:
                _warn_of(where, f"{section}.{renamed[section, flag]}")
                flag = renamed[section, flag]
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


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for files that pdserve can make again, such as compiled code and packed weights.

    Raises ConfigError if other users can put files there, which would be run and served.
    """
    folder = _xdg(environ, "XDG_CACHE_HOME", ".cache")
    try:
        keep_own_folder(folder)
    except PermissionError as exc:
        raise ConfigError(
            f"code and weights cannot be loaded from the cache folder {folder}: {exc.strerror}. Delete it, or name a "
            "folder of your own in XDG_CACHE_HOME"
        ) from exc
    except OSError:  # There is none yet, or there cannot be one: who needs it says so.
        pass
    return folder


def state_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for files that have to stay, such as the secret of a cluster on one machine."""
    return _xdg(environ, "XDG_STATE_HOME", ".local/state")


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    folder = Path(environ.get(variable, ""))
    # By the XDG rules a relative path counts as unset.
    return (folder if folder.is_absolute() else Path.home() / fallback) / "pdserve"
