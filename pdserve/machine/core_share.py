"""Says how much of a machine's cores an engine gets: its own, beside those of other engines, and the CPU time of its
control group.

A quota of CPU time says nothing about cores. An engine with a quota of 2.5 on a machine of 64 cores sees all 64, and
with a thread on each of them it uses up the quota at the beginning of every period and then stands still, in the middle
of a step. So it gets as many threads as the quota has whole cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.process import partition_cores

ENGINE_MODULES = (b"pdserve.engine", b"pdserve.engine.tp.rank_program")

NVIDIA_DRIVER = Path("/proc/driver/nvidia")
"""It is there if this machine may have a GPU that torch can use."""

_MACHINE = "proc/sys/kernel/random/boot_id"


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
    """Returns those of the ``allowed`` cores that no other engine is pinned to; all of them if none is left.

    An engine that may use all of them is pinned to none.
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


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What one process computes with."""

    cores: tuple[int, ...]
    """It is pinned to these; empty if it may use all that it finds."""
    threads: int


def share_cores(asked: Sequence[int], allowed: Sequence[int], quota: float, ranks: int = 1) -> list[CoreShare]:
    """Returns the share of each of an engine's ``ranks``.

    ``asked`` is what ``--cores`` says, which goes before all. Without it the ranks divide the ``allowed`` cores, or
    where ``quota`` is less, only the threads: which cores other containers leave idle is then the kernel's to know.
    """
    if not asked and 0 < quota < len(allowed):
        return [CoreShare((), max(1, int(quota) // ranks))] * ranks
    if not asked and ranks == 1:
        return [CoreShare((), len(allowed))]
    return [CoreShare(cores, len(cores)) for cores in partition_cores(asked or allowed, ranks)]


def cores_within(allowed: Sequence[int], quota: float, start: int) -> list[int]:
    """Returns as many of the ``allowed`` cores as ``quota`` has whole ones, in a row; all of them without a quota.

    ``start`` says where the row begins. It should differ between the containers of a machine, so that they do not all
    take the first cores.
    """
    if not 0 < quota < len(allowed):
        return list(allowed)
    first = start % len(allowed)
    return sorted([*allowed[first:], *allowed[:first]][: max(1, int(quota))])


def quota_note(asked: Sequence[int], allowed: Sequence[int], quota: float) -> str:
    """Returns what a quota means for an engine, for its log; an empty text if it means nothing."""
    limit = f"the control group has {quota:g} cores of CPU time"
    if not quota or quota >= len(asked or allowed):
        return ""
    if asked:
        return f"{limit} and --cores names {len(asked)}: the kernel stops this engine in the middle of steps"
    return f"{limit}, so of the {len(allowed)} cores that this engine finds it uses {max(1, int(quota))} at a time"


def cpu_quota(root: Path = Path("/")) -> float:
    """Returns the tightest quota of CPU time, in cores, of this control group and those above it; 0 without a limit.

    It reads both versions of control groups. ``root`` is where ``proc`` and ``sys`` are.
    """
    quotas = [_group_quota(folder) for folder in control_groups(root, "cpu")]
    return min((quota for quota in quotas if quota > 0), default=0.0)


def control_groups(root: Path, controller: str) -> list[Path]:
    """Returns the folders of this process's control group and of those above it that limit ``controller``."""
    folders: list[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and controller)
        # A container may see its path on the host, but have only its own folder, at the root.
        here = Path(path.lstrip("/"))
        folders += [mount / folder for folder in (here, *here.parents)]
    return folders


def _group_quota(folder: Path) -> float:
    quota, _, period = read_text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    # Without a limit the quota is "max" or -1.
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else 0.0


def machine_id(root: Path = Path("/")) -> str:
    """Returns what names this start of this machine's kernel, which all its containers share; empty if nothing does."""
    return read_text(root / _MACHINE)


def read_text(file: Path) -> str:
    """Returns what a file of the kernel says; an empty text if it is not there or says nothing to this process."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
