"""Checks which cores and how much memory an engine started from here would have, and which engines share them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve.errors import ConfigError
from pdserve.machine.core_ledger import CoreLedger, CoreState
from pdserve.machine.core_share import cpu_quota, read_text
from pdserve.machine.engines_here import RunningEngine, running_engines

_SLOW_GOVERNORS = frozenset({"powersave", "conservative"})
_MIN_FREE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class CoreFacts:
    allowed: tuple[int, ...]
    machine_cores: int
    quota: float
    """The CPU time, in cores, that the control group gets; 0 means that there is no limit."""
    governors: frozenset[str]
    """The frequency governors of the allowed cores; empty where the kernel does not show them."""
    memory_total: int
    memory_available: int
    engines: tuple[RunningEngine, ...]


def read_cores(asked: Sequence[int], root: Path = Path("/")) -> CoreFacts:
    """``asked`` is what ``--cores`` says; ``root`` is where ``proc`` and ``sys`` are."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    memory = _memory(root)
    return CoreFacts(
        allowed=tuple(asked) or allowed,
        machine_cores=os.cpu_count() or len(allowed),
        quota=cpu_quota(root),
        governors=_governors(asked or allowed, root),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        engines=running_engines(root),
    )


def _memory(root: Path) -> dict[str, int]:
    lines = (line.split() for line in read_text(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _governors(cores: Sequence[int], root: Path) -> frozenset[str]:
    found = (read_text(root / f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor") for core in cores)
    return frozenset(governor for governor in found if governor)


def check_cores(facts: CoreFacts) -> list[Finding]:
    return [_cores(facts), _governor(facts), _memory_finding(facts), _neighbours(facts)]


def _cores(facts: CoreFacts) -> Finding:
    count = len(facts.allowed)
    seen = f"{count} of {facts.machine_cores} allowed"
    if facts.quota and facts.quota < count:
        return warning(
            "cores",
            f"{seen}, with a quota of {facts.quota:g}: the kernel stops an engine in the middle of a step",
            f"--cores with {max(1, int(facts.quota))} of them; in Kubernetes whole numbers, equal requests and limits",
        )
    if facts.allowed and max(facts.allowed) >= facts.machine_cores:
        return problem("cores", f"{seen}; there is no core {max(facts.allowed)}", "give --cores cores of this machine")
    return ok("cores", seen)


def _governor(facts: CoreFacts) -> Finding:
    if not facts.governors:
        return not_applicable("CPU governor", "the kernel does not show one (a virtual machine)")
    seen = ", ".join(sorted(facts.governors))
    if facts.governors & _SLOW_GOVERNORS:
        return warning("CPU governor", seen, "cpupower frequency-set -g performance: decode steps are short and bursty")
    return ok("CPU governor", seen)


def _memory_finding(facts: CoreFacts) -> Finding:
    seen = f"{facts.memory_available / 2**30:.1f} of {facts.memory_total / 2**30:.1f} GiB available"
    if facts.memory_available < _MIN_FREE_BYTES:
        return warning("memory", seen, "a smaller --kv-cache-mib, or fewer nodes on this machine")
    return ok("memory", seen)


def _neighbours(facts: CoreFacts) -> Finding:
    check = "engines here"
    if not facts.engines:
        return ok(check, "none runs")
    shared = [
        f"{one.pid} and {other.pid} on {_list(one.cores & other.cores)}"
        for one, other in combinations(facts.engines, 2)
        if one.cores & other.cores
    ]
    if shared:
        return warning(
            check,
            f"two on the same cores: {'; '.join(shared[:3])}{'; …' if len(shared) > 3 else ''}",
            "give each a part of the cores with --cores (pdserve up does): sharing costs far more than half the speed",
        )
    return ok(check, f"{len(facts.engines)}, each on cores of its own")


def check_core_ledger(path: str) -> Finding:
    """``path`` is what ``--core-ledger`` says."""
    check = "core ledger"
    if not path:
        return not_applicable(check, "--core-ledger names none, so no core is lent; pdserve up has its own")
    try:
        # Nobody is to make the file but an engine.
        os.stat(path)
        with CoreLedger(Path(path)) as ledger:
            words, engines = ledger.read(), ledger.engines()
    except FileNotFoundError:
        return ok(check, "no engine has made it yet")
    except (OSError, ConfigError) as exc:
        return problem(check, str(exc), "name another file, in memory, which all engines of this machine may write")
    counts = Counter(word.state for word in words if word.state is not CoreState.NOBODYS)
    states = [
        f"{count} {'is' if count == 1 else 'are'} {state.name.lower()}" for state, count in sorted(counts.items())
    ]
    seen = f"engines: {engines}; of {len(words)} cores {', '.join(states) or 'none has an engine'}"
    if CoreState.SHARED in counts:
        return warning(check, seen, "give each engine cores of its own with --cores: shared ones are not lent")
    return ok(check, seen)


def _list(cores: frozenset[int]) -> str:
    few = sorted(cores)[:8]
    return f"core{'s' if len(cores) > 1 else ''} {','.join(map(str, few))}{'…' if len(cores) > len(few) else ''}"
