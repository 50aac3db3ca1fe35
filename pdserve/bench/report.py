"""What a benchmark found: one form for all of them, as JSON."""

from __future__ import annotations

import enum
import math
from pathlib import Path

import msgspec

from pdserve.bench.machine import Machine
from pdserve.errors import BenchError


class Unit(enum.Enum):
    """Of a figure."""

    MS = "ms"
    US = "µs"
    SECONDS = "s"
    GB_PER_S = "GB/s"
    TFLOP_PER_S = "TFLOP/s"
    TOKENS_PER_S = "tok/s"
    REQUESTS_PER_S = "req/s"
    MIB = "MiB"
    KIB = "KiB"
    COUNT = ""
    RATIO = "×"
    """Of two figures of the same run: the only unit that means the same on another machine."""


class Better(enum.Enum):
    """Which way a figure improves."""

    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


class Figure(msgspec.Struct, frozen=True):
    """One number."""

    name: str
    value: float
    unit: Unit
    better: Better = Better.NEITHER


def measured(*figures: Figure) -> tuple[Figure, ...]:
    """Those that have a value: JSON knows no NaN, and a figure that is not there is told as missing."""
    return tuple(figure for figure in figures if math.isfinite(figure.value))


class Row(msgspec.Struct, frozen=True):
    """What was measured, under which conditions, and its figures."""

    what: str
    at: dict[str, int | str]
    figures: tuple[Figure, ...]

    def figure(self, name: str) -> Figure:
        """Raises KeyError if the row has no such figure."""
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(name)


class Report(msgspec.Struct, frozen=True):
    """One run of one benchmark."""

    benchmark: str
    machine: Machine
    settings: dict[str, str]
    """Value by environment variable."""
    notes: tuple[str, ...]
    """What a reader has to know to judge the figures."""
    rows: tuple[Row, ...]

    def rows_of(self, what: str) -> list[Row]:
        return [row for row in self.rows if row.what == what]


def to_json(report: Report) -> bytes:
    """Indented, so that a committed report can be read and its changes seen."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """Raises BenchError if there is none at ``path``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as exc:
        raise BenchError(f"cannot read {path}: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise BenchError(f"{path} is not a report of pdserve bench: {exc}") from exc
