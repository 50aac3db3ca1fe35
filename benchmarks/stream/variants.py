"""The variants that ``benchmarks stream`` compares: which parts of the text path are on."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError


class Part(enum.Enum):
    """An optimisation, by its name in ``--variants``."""

    DISPATCH = "dispatch"
    NOTIFY = "notify"
    FAST_PATH = "fast-path"
    INTERVAL = "interval"


_VARIABLES = {
    Part.DISPATCH: ("PDSERVE_BATCHED_DISPATCH", "off", "on"),
    Part.NOTIFY: ("PDSERVE_BATCH_NOTIFY_SIZE", "0", "16"),
    Part.FAST_PATH: ("PDSERVE_SSE_FAST_PATH", "off", "on"),
    Part.INTERVAL: ("PDSERVE_STREAM_INTERVAL", "1", "10"),
}
"""The variable of each part, its value without the part, and its value with the part."""

OFF, ON = "off", "on"
ALL = frozenset(Part)


@dataclass(frozen=True, slots=True)
class Variant:
    """A node whose ``parts`` are on and whose other parts are off."""

    name: str
    parts: frozenset[Part]

    @property
    def environ(self) -> dict[str, str]:
        """Returns the environment of the variant's node."""
        return {name: on if part in self.parts else off for part, (name, off, on) in _VARIABLES.items()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gain of some parts: two variants that differ in nothing else."""

    parts: str
    others: str
    """Whether the other parts are on or off."""
    without: Variant
    having: Variant


def default_variants() -> list[Variant]:
    """Returns variants with nothing, each part alone, everything, and everything but each part that has a target."""
    alone = ["dispatch", "notify", "fast-path", "notify+fast-path", "interval"]
    left_out = ["on-dispatch", "on-notify+fast-path", "on-interval"]
    return [variant(name) for name in (OFF, *alone, ON, *left_out)]


def variants(names: Sequence[str]) -> list[Variant]:
    """Returns the named variants, or the default ones. Raises ConfigError for an unknown or a repeated name."""
    found = [variant(name) for name in names] or default_variants()
    if len({one.parts for one in found}) < len(found):
        raise ConfigError("--variants: two of the names mean the same")
    return found


def variant(name: str) -> Variant:
    """Returns a variant: ``off``, ``on``, ``notify+fast-path`` (only these parts) or ``on-notify`` (all but this part).

    Raises ConfigError.
    """
    if name == OFF:
        return Variant(name, frozenset())
    if name == ON:
        return Variant(name, ALL)
    if name.startswith(f"{ON}-"):
        return Variant(name, ALL - _parts(name, name.removeprefix(f"{ON}-")))
    return Variant(name, _parts(name, name))


def comparisons(found: Sequence[Variant]) -> list[Comparison]:
    """Pairs ``off`` with each variant that has parts on, and each variant that leaves some out with ``on``."""
    by_name = {one.name: one for one in found}
    off, on = by_name.get(OFF), by_name.get(ON)
    result = []
    for one in found:
        left_out = one.name.removeprefix(f"{ON}-")
        if left_out != one.name:
            if on is not None:
                result.append(Comparison(left_out, ON, one, on))
        elif off is not None and one is not off:
            result.append(Comparison("all" if one is on else one.name, OFF, off, one))
    return result


def _parts(name: str, joined: str) -> frozenset[Part]:
    try:
        return frozenset(Part(word) for word in joined.split("+"))
    except ValueError as exc:
        names = ", ".join(part.value for part in Part)
        raise ConfigError(
            f"--variants: {name!r} was given; it takes off, on, or parts joined by + ({names}), also after on-"
        ) from exc
