"""The settings of one root dataclass (``NodeConfig`` and its like), as a flat list, and the way back."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pdserve.errors import ConfigError

ENV_PREFIX = "PDSERVE_"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that users can set."""

    section: str
    """Field name in the root, and the TOML section."""
    title: str
    """First line of the section's docstring."""
    field: str
    flag: str
    """Without the leading dashes."""
    help: str
    type: Any
    """As the dataclass declares it: ``int``, ``tuple[str, ...]``, an enum."""
    default: Any
    metavar: str | None
    bare: str | None
    """What the flag means where no value follows it; None if one has to."""
    secret: bool
    minimum: float | None
    maximum: float | None

    @property
    def env(self) -> str:
        return env_name(self.flag)


def env_name(flag: str) -> str:
    """``block-size`` → ``PDSERVE_BLOCK_SIZE``."""
    return ENV_PREFIX + flag.upper().replace("-", "_")


def settings_of(root: type) -> list[Setting]:
    """Every setting below ``root``, in the order of declaration, with the defaults that this root gives it."""
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
    title = inspect.getdoc(type(values)) or section
    return Setting(
        section=section,
        title=title.splitlines()[0].removesuffix("."),
        field=leaf.name,
        type=get_type_hints(type(values))[leaf.name],
        default=getattr(values, leaf.name),
        **leaf.metadata,
    )


def build(root: type[T], values: Mapping[str, Any]) -> T:
    """A ``root`` with ``values`` (by flag) in place of its defaults."""
    config: Any = root()
    by_section: dict[str, dict[str, Any]] = {}
    for setting in settings_of(root):
        if setting.flag in values:
            by_section.setdefault(setting.section, {})[setting.field] = values[setting.flag]
    sections = {name: dataclasses.replace(getattr(config, name), **changes) for name, changes in by_section.items()}
    built: T = dataclasses.replace(config, **sections)
    return built
