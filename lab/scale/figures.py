"""What many nodes cost a proxy, as figures in files that the page of scale is made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from lab.simulation.scale.figures import rounded
from pdserve.bench.report import Machine, this_machine

T = TypeVar("T")


@dataclass(frozen=True)
class PolicyFigures:
    """A proxy with one policy."""

    policy: str
    request_us: float
    """CPU time of a request, without that of heartbeats."""
    p50_ms: float
    p99_ms: float
    failed: int


@dataclass(frozen=True)
class RackFigures:
    """A fourth of the nodes dies at once, while requests come."""

    known_s: float
    """From the kill until the proxy has dropped all of them."""
    p99_ms: float
    """The 99th percentile of the requests that came from the kill until a second after that."""
    failed: int


@dataclass(frozen=True)
class ProxyFigures:
    """A proxy with so many nodes."""

    nodes: int
    workers: int
    registration_s: float
    """From the start of the processes that play the nodes until the proxy knows all nodes."""
    restart_s: float
    """From when a proxy at the old addresses takes connections until it knows all nodes, which find it themselves."""
    restart_cpu_s: float
    idle_percent: float
    """The share of a core that heartbeats alone take."""
    rss_mib: float
    pages_ms: dict[str, float]
    """CPU time of one answer of each page."""
    policies: list[PolicyFigures]
    rack: RackFigures | None


@dataclass(frozen=True)
class ProxyRuns:
    """All that was measured at real proxies."""

    machine: Machine
    runs: tuple[ProxyFigures, ...]


@dataclass(frozen=True)
class ChoiceTimes:
    """The choice of nodes with one number of nodes."""

    nodes: int
    us: dict[str, float]
    """Microseconds of CPU time, by policy."""


@dataclass(frozen=True)
class ChoiceRuns:
    """The choice of nodes alone."""

    machine: Machine
    runs: tuple[ChoiceTimes, ...]


def add_runs(path: Path, new: list[ProxyFigures]) -> None:
    """Adds runs to the file, in place of those with as many nodes and workers."""
    measured = {(run.nodes, run.workers) for run in new}
    kept = read(path, ProxyRuns).runs if path.exists() else ()
    runs = [*(run for run in kept if (run.nodes, run.workers) not in measured), *new]
    write(path, ProxyRuns(this_machine(), tuple(sorted(runs, key=lambda run: (run.workers, run.nodes)))))


def write(path: Path, figures: ProxyRuns | ChoiceRuns) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rounded(msgspec.to_builtins(figures))), indent=1) + b"\n")


def read(path: Path, kind: type[T]) -> T:
    return msgspec.json.decode(path.read_bytes(), type=kind)
