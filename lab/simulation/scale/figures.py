"""Figures of runs, as a file that pages are made of. Several commands may add to it."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lab.simulation.scale.cluster import Plan, Report
from pdserve.bench.report import Machine, this_machine


@dataclass(frozen=True)
class Run:
    """One simulation."""

    plan: Plan
    report: Report
    cpu_s: float
    """What it took on this machine, in CPU time."""


@dataclass(frozen=True)
class Figures:
    """All runs of a file, in the order in which they ended."""

    machine: Machine
    """Where the last one was made: it matters to costs alone."""
    runs: tuple[Run, ...] = field(default=())


def read(path: Path) -> Figures:
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def add(path: Path, run: Run) -> None:
    """Adds a run to the file, in place of one with the same plan."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        kept = read(path).runs if path.stat().st_size else ()
        figures = Figures(this_machine(), (*(other for other in kept if other.plan != run.plan), run))
        content = msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(figures))), indent=1)
        file.truncate(0)
        file.write(content + b"\n")


def rounded(value: object) -> object:
    """Returns ``value`` with four digits of each number that is no whole one."""
    match value:
        case dict():
            return {name: rounded(part) for name, part in value.items()}
        case list() | tuple():
            return [rounded(part) for part in value]
        case float():
            return float(f"{value:.4g}")
    return value
