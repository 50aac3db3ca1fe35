"""The form of every benchmark's result, with the machine that it comes from: as JSON, and as text with a table for each
thing measured. The command line prints it, and writes it where ``--json`` says.

``changes`` compares two reports of one benchmark, by their ratios alone: they hold on any machine.
"""

from __future__ import annotations

import enum
import importlib
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import msgspec

from pdserve.errors import BenchError, ConfigError

_CPU_INFO = Path("/proc/cpuinfo")


class Machine(msgspec.Struct, frozen=True):
    """What a reader needs to compare two runs."""

    cpu: str
    cores: int
    """The number of cores that this process may use."""
    memory_gib: float
    chip: str
    """The accelerator; empty if there is none, or if the benchmark does not ask for it."""
    python: str
    torch: str
    pdserve: str
    measured: str
    """The date and time of the measurement, in UTC."""


def this_machine(chip: str = "") -> Machine:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / 2**30, 1),
        chip=chip,
        python=platform.python_version(),
        torch=version("torch"),
        pdserve=version("pdserve"),
        measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    )


def _cpu_model() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def chip_name() -> str:
    """Returns the name of the accelerator; empty if there is none."""
    # torch takes seconds to load, and only the benchmarks of an engine need it.
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


class Unit(enum.Enum):
    """The unit of a figure."""

    MS = "ms"
    US = "µs"
    SECONDS = "s"
    GB_PER_S = "GB/s"
    TFLOP_PER_S = "TFLOP/s"
    TOP_PER_S = "Top/s"
    """Operations with whole numbers."""
    GOP = "Gop"
    TOKENS_PER_S = "tok/s"
    REQUESTS_PER_S = "req/s"
    MIB = "MiB"
    KIB = "KiB"
    PERCENT = "%"
    COUNT = ""
    RATIO = "×"
    """The ratio of two figures of the same run: the only unit that means the same on another machine."""


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
    """Returns the figures that have a value: JSON has no NaN, and ``compare`` reports an absent figure as missing."""
    return tuple(figure for figure in figures if math.isfinite(figure.value))


class Row(msgspec.Struct, frozen=True):
    """What was measured, under which conditions, and the figures."""

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
    """The values by environment variable."""
    notes: tuple[str, ...]
    """The facts that a reader has to know to judge the figures."""
    rows: tuple[Row, ...]

    def rows_of(self, what: str) -> list[Row]:
        return [row for row in self.rows if row.what == what]


def to_json(report: Report) -> bytes:
    """Returns the report as indented JSON, so that changes of a committed report are readable."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_report(path: Path) -> Report:
    """Returns the report at ``path``. Raises BenchError if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as exc:
        raise BenchError(f"cannot read {path}: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise BenchError(f"{path} is not a report of pdserve bench: {exc}") from exc


def render(report: Report) -> str:
    """Returns the report as text: machine, notes, tables."""
    machine = report.machine
    chip = f", {machine.chip}" if machine.chip else ""
    head = (
        f"{report.benchmark}: {machine.cpu}, {machine.cores} cores{chip}, torch {machine.torch}, {machine.measured} UTC"
    )
    kinds = dict.fromkeys((row.what, tuple(row.at)) for row in report.rows)
    tables = [
        table(what, [row for row in report.rows if row.what == what and tuple(row.at) == keys]) for what, keys in kinds
    ]
    return "\n\n".join(["\n".join([head, *report.notes]), *tables])


def table(title: str, rows: Sequence[Row]) -> str:
    """Returns a table of rows with the same conditions' names. A figure that a row lacks is left empty."""
    names = {figure.name: _heading(figure) for row in rows for figure in row.figures}
    header = [*rows[0].at, *names.values()]
    lines = [[*(str(value) for value in row.at.values()), *(_cell(row, name) for name in names)] for row in rows]
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    return "\n".join(
        [
            title,
            *(
                "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
                for line in [header, *lines]
            ),
        ]
    )


def _heading(figure: Figure) -> str:
    return f"{figure.name}, {figure.unit.value}" if figure.unit.value else figure.name


def _cell(row: Row, name: str) -> str:
    found = [figure for figure in row.figures if figure.name == name]
    return number(found[0]) if found else ""


def number(figure: Figure) -> str:
    """Returns the value with three significant digits, or all digits before the point, and 0 as it is."""
    value = figure.value
    if figure.unit is Unit.COUNT:
        return f"{value:.0f}"
    size = abs(value)
    places = 0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:,.{places}f}"


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio of the old report and its value in the new report. ``new`` is None if the new report lacks it."""

    name: str
    old: float
    new: float | None
    worse: bool

    def __str__(self) -> str:
        now = "missing" if self.new is None else f"{self.new:.3g}"
        return f"{'WORSE' if self.worse else 'ok':5}  {self.name}: {self.old:.3g} → {now}"


def changes(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Returns every ratio of ``old`` that has a better side, and whether it got worse by more than ``tolerance``.

    Raises BenchError if the reports are not of the same benchmark, or have no such ratio.
    """
    if old.benchmark != new.benchmark:
        raise BenchError(f"one report is of {old.benchmark!r}, the other of {new.benchmark!r}")
    found = {(_key(row), figure.name): figure for row in new.rows for figure in row.figures}
    result = [_change(row, figure, found.get((_key(row), figure.name)), tolerance) for row, figure in _ratios(old)]
    if not result:
        raise BenchError(f"the report of {old.benchmark!r} has no ratio that could be compared")
    return result


def _ratios(report: Report) -> Iterator[tuple[Row, Figure]]:
    for row in report.rows:
        for figure in row.figures:
            if figure.unit is Unit.RATIO and figure.better is not Better.NEITHER:
                yield row, figure


def _change(row: Row, old: Figure, new: Figure | None, tolerance: float) -> Change:
    where = ", ".join(f"{name} {value}" for name, value in row.at.items())
    name = f"{row.what} ({where}), {old.name}" if where else f"{row.what}, {old.name}"
    if new is None:
        return Change(name, old.value, None, worse=True)
    if old.better is Better.HIGHER:
        held = new.value >= old.value * (1 - tolerance)
    else:
        held = new.value <= old.value / (1 - tolerance)
    return Change(name, old.value, new.value, worse=not held)


def _key(row: Row) -> tuple[str, tuple[tuple[str, int | str], ...]]:
    return row.what, tuple(row.at.items())


_STANDARD_OUTPUT = "-"


def check_folder(flag: str, file: str) -> None:
    """Raises ConfigError if the folder of the file that ``flag`` names is not there; ``file`` is empty without one."""
    if file and file != _STANDARD_OUTPUT and not Path(file).parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {str(Path(file).parent)!r}")


def plotter(module: str) -> Callable[[Report, Path], None]:
    """Returns ``write_plot`` of ``module``. It is called before the measurement, which takes minutes."""
    try:
        write_plot: Callable[[Report, Path], None] = importlib.import_module(module).write_plot
    except ImportError as exc:
        raise ConfigError(
            "--plot takes matplotlib, which pdserve's extra 'bench' brings: pip install matplotlib"
        ) from exc
    return write_plot


def publish(text: str, json: bytes, json_file: str) -> None:
    """Prints ``text``, and writes ``json`` to ``json_file`` unless that is empty. Raises ConfigError if it cannot.

    Where ``json_file`` is ``-``, standard output gets the JSON alone, and standard error the text.
    """
    if json_file == _STANDARD_OUTPUT:
        print(text, file=sys.stderr)
        print(json.decode(), end="")
        return
    print(text)
    if json_file:
        try:
            Path(json_file).write_bytes(json)
        except OSError as exc:
            raise ConfigError(f"--json: cannot write {json_file}: {exc.strerror}") from exc
