"""Lists the settings of one root dataclass (such as ``NodeConfig``), and builds the dataclass from their values.

Single values are read from a flag's or variable's text or from TOML, checked against their type and range, and
written back as text.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pdserve.errors import ConfigError

ENV_PREFIX = "PDSERVE_"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that the user can set."""

    section: str
    """The name of the field in the root, which is also the TOML section."""
    title: str
    """The first line of the section's docstring."""
    field: str
    flag: str
    """The flag without its leading dashes."""
    help: str
    type: Any
    """The type as the dataclass declares it: ``int``, ``tuple[str, ...]``, an enum."""
    default: Any
    metavar: str | None
    bare: str | None
    """The value that the flag has if none follows it; None if one has to follow."""
    secret: bool
    minimum: float | None
    maximum: float | None
    former: str
    """The flag's name one version ago, without its dashes; empty if it had no other."""
    spellings: Mapping[str, str]
    """Other words for a choice's values."""
    refused: Mapping[str, str]
    """Values that other servers have for it, and why pdserve has not."""
    first: bool
    """Whether short help shows the setting."""

    @property
    def env(self) -> str:
        return env_name(self.flag)


def env_name(flag: str) -> str:
    """Returns the name of the flag's variable: ``block-size`` → ``PDSERVE_BLOCK_SIZE``."""
    return ENV_PREFIX + flag.upper().replace("-", "_")


def settings_of(root: type) -> list[Setting]:
    """Returns every setting below ``root``, in the order of declaration, with the defaults that this root gives it."""
    defaults = root()
    found = [
        _setting(section.name, getattr(defaults, section.name), leaf)
        for section in dataclasses.fields(root)
        for leaf in dataclasses.fields(getattr(defaults, section.name))
    ]
    flags = [setting.flag for setting in found]
    if len(set(flags)) != len(flags):
        raise ConfigError(f"{root.__name__} declares a flag twice: {sorted({f for f in flags if flags.count(f) > 1})}")
    return found


def _setting(section: str, values: Any, leaf: dataclasses.Field[Any]) -> Setting:
    declared = _declared(type(values))  # type: ignore[arg-type]  # mypy takes a class for one that has no hash
    return Setting(
        section=section,
        title=declared.title or section,
        field=leaf.name,
        type=declared.types[leaf.name],
        default=getattr(values, leaf.name),
        **leaf.metadata,
    )


@dataclass(frozen=True, slots=True)
class _Declared:
    """What a section's dataclass says of itself."""

    title: str
    """The first line of its docstring."""
    types: Mapping[str, Any]
    """The types of its fields."""


@cache
def _declared(section: type) -> _Declared:
    """Evaluating the annotations of all sections takes a tenth of a second, and most roots share their sections."""
    doc = inspect.getdoc(section) or ""
    return _Declared(doc.partition("\n")[0].removesuffix("."), get_type_hints(section))


def build(root: type[T], values: Mapping[str, Any]) -> T:
    """Returns a ``root`` with ``values`` (by flag) in place of its defaults."""
    config: Any = root()
    by_section: dict[str, dict[str, Any]] = {}
    for setting in settings_of(root):
        if setting.flag in values:
            by_section.setdefault(setting.section, {})[setting.field] = values[setting.flag]
    sections = {name: dataclasses.replace(getattr(config, name), **changes) for name, changes in by_section.items()}
    built: T = dataclasses.replace(config, **sections)
    return built


def from_texts(setting: Setting, texts: Sequence[str], where: str) -> Any:
    """Returns the value that ``texts`` mean: one text, or any number for a repeatable setting.

    Raises ConfigError that names ``where`` the value was given, what was given, and what would be right.
    """
    if setting.type == tuple[str, ...]:
        return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    text = texts[-1]
    if setting.type == tuple[int, ...]:
        return _numbers(setting, text, where)
    if setting.type is str:
        return text
    if isinstance(setting.type, type) and issubclass(setting.type, enum.Enum):
        return _choice(setting, text, where)
    return _in_range(setting, _number(setting, setting.spellings.get(text, text), where), where)


def from_toml(setting: Setting, value: Any, where: str) -> Any:
    """Returns the value that a TOML file gives, which has the setting's own type or is text in the form of the flag."""
    if setting.type == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif setting.type == tuple[int, ...]:
        if isinstance(value, list) and all(type(item) is int for item in value):
            return _numbers(setting, ",".join(str(item) for item in value), where)
    elif type(value) is int and setting.type in (int, float):
        return _in_range(setting, setting.type(value), where)
    elif type(value) is float and setting.type is float:
        return _in_range(setting, value, where)
    if isinstance(value, str) and (setting.type not in (int, float) or value in setting.spellings):
        return from_texts(setting, [value], where)
    raise _wrong(setting, value, where)


def to_text(value: Any) -> str:
    """Returns the text that a flag or variable has to have to mean ``value``."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return str(value)


def expected(setting: Setting) -> str:
    """Returns what may be given, for help and errors, such as ``a whole number from 0 to 65535``."""
    if setting.type == tuple[str, ...]:
        return "one or more texts"
    if setting.type == tuple[int, ...]:
        return "a list like 0,1,4-7"
    if isinstance(setting.type, type) and issubclass(setting.type, enum.Enum):
        return "one of " + ", ".join([*(str(member.value) for member in setting.type), *setting.spellings])
    if setting.type is str:
        return "text"
    noun = " or ".join([*setting.spellings, "a whole number" if setting.type is int else "a number"])
    if setting.minimum is not None and setting.maximum is not None:
        return f"{noun} from {setting.minimum:g} to {setting.maximum:g}"
    if setting.minimum is not None:
        return f"{noun}, at least {setting.minimum:g}"
    return noun


def _wrong(setting: Setting, given: Any, where: str) -> ConfigError:
    shown = "a value that is not shown" if setting.secret else repr(given)
    return ConfigError(f"{where}: {shown} was given; it takes {expected(setting)}")


def _number(setting: Setting, text: str, where: str) -> int | float:
    try:
        number: int | float = setting.type(text)
    except ValueError as exc:
        raise _wrong(setting, text, where) from exc
    return number


def _in_range(setting: Setting, number: float, where: str) -> float:
    too_small = setting.minimum is not None and number < setting.minimum
    too_large = setting.maximum is not None and number > setting.maximum
    if too_small or too_large or not math.isfinite(number):
        raise _wrong(setting, number, where)
    return number


def _choice(setting: Setting, text: str, where: str) -> enum.Enum:
    members: type[enum.Enum] = setting.type
    if text in setting.refused:
        raise ConfigError(f"{where}: {text} was given; {setting.refused[text]}")
    meant = setting.spellings.get(text, text)
    for member in members:
        if member.value == meant:
            return member
    raise _wrong(setting, text, where)


def _numbers(setting: Setting, text: str, where: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise _wrong(setting, text, where)
        span = range(int(first), int(last or first) + 1)
        if not span or len(span) > 65_536:
            raise _wrong(setting, text, where)
        numbers.extend(span)
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"{where}: {text!r} names a number twice")
    return tuple(numbers)
