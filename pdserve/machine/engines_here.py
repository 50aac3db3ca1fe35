"""Finds the engines that run on this machine, as far as this process can see them, and the cores that they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ENGINE_MODULES = (b"pdserve.engine", b"pdserve.engine.tp.rank_program")


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A running engine, or a TP rank of one, and the cores that it may use."""

    pid: int
    cores: frozenset[int]
    parent: int = 0


def running_engines(root: Path = Path("/")) -> tuple[RunningEngine, ...]:
    """Returns them by process number; ``root`` is where ``proc`` is. Other containers' engines may not be seen."""
    found = []
    for folder in (root / "proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"-m" not in words or words[words.index(b"-m") + 1] not in ENGINE_MODULES:
                continue
            status = dict(line.split(":", 1) for line in (folder / "status").read_text(errors="replace").splitlines())
        except (OSError, ValueError):
            # The process has ended meanwhile, or belongs to another user.
            continue
        cores = core_list(status.get("Cpus_allowed_list", "").strip())
        found.append(RunningEngine(int(folder.name), cores, int(status.get("PPid", "0"))))
    return tuple(sorted(found, key=lambda engine: engine.pid))


def other_engines(pid: int, root: Path = Path("/")) -> list[RunningEngine]:
    """Returns those that are neither the engine ``pid`` nor one of its ranks."""
    return [engine for engine in running_engines(root) if pid not in (engine.pid, engine.parent)]


def cores_left(allowed: Sequence[int], others: Iterable[RunningEngine]) -> list[int]:
    """Returns those of the ``allowed`` cores that no other engine is kept to; all of them if none is left.

    An engine that may use all of them is kept to none.
    """
    taken = [engine.cores for engine in others if not engine.cores.issuperset(allowed)]
    left = sorted(set(allowed).difference(*taken))
    return left or list(allowed)


def sharing_note(cores: Iterable[int], others: Iterable[RunningEngine]) -> str:
    """Returns which engines an engine on ``cores`` shares some with, for its log; an empty text if none."""
    own = frozenset(cores)
    sharing = [engine for engine in others if engine.cores & own]
    if not sharing:
        return ""
    shared = sorted(own.intersection(frozenset[int]().union(*(engine.cores for engine in sharing))))
    processes = "process" if len(sharing) == 1 else "processes"
    return (
        f"this engine shares core{'s' if len(shared) > 1 else ''} {core_words(shared)} with the engine of {processes} "
        f"{', '.join(str(engine.pid) for engine in sharing[:8])}, which makes each several times slower: give each "
        "node cores of its own with --cores"
    )


def core_list(text: str) -> frozenset[int]:
    """Returns the cores of a list of the kernel's, like ``0,2-5``."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return frozenset(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))


def core_words(cores: Sequence[int]) -> str:
    """Returns a sorted list of cores as the kernel writes it: ``0,2-5``."""
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
