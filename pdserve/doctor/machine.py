"""Checks what of this machine an engine started from here would have: software, cores, memory, limits and GPUs."""

from __future__ import annotations

import os
import platform
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path

from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning
from pdserve.errors import ConfigError, TransferError
from pdserve.machine.core_ledger import CoreLedger, CoreState
from pdserve.machine.core_share import RunningEngine, cpu_quota, read_text, running_engines
from pdserve.machine.memory import MIB
from pdserve_kvtransfer.ucx.ucx_library import PREFER_SYSTEM, LoadedUcx, loaded_ucx

_PACKAGES = ("pdserve", "torch", "transformers", "pyzmq", "ucxx-cu13", "libucx-cu13")

_SLOW_GOVERNORS = frozenset({"powersave", "conservative"})
_MIN_FREE_BYTES = 2**30
_MIN_SHM_BYTES = 64 * MIB
"""Docker's default, which a few links of UCX use up."""
_MIN_DESCRIPTORS = 4096
_MIN_LOCKED_BYTES = 2**30
_SHM = Path("/dev/shm")  # noqa: S108 — it is looked at, nothing is made there.
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    python: str
    kernel: str
    packages: Mapping[str, str]
    """The version of each package; empty if the package is not installed."""
    ucx: LoadedUcx | None
    """The UCX library that ucxx has loaded."""
    ucx_error: str
    """Why UCX cannot be loaded; empty if it can be."""
    variables: Mapping[str, str]
    """The variables of the environment that choose and direct UCX. Nodes that are started from it obey them, too."""


def read_software(environ: Mapping[str, str]) -> SoftwareFacts:
    ucx, error = _load_ucx()
    return SoftwareFacts(
        python=platform.python_version(),
        kernel=platform.release(),
        packages=dict(map(_installed, _PACKAGES)),
        ucx=ucx,
        ucx_error=error,
        variables={
            name: value for name, value in sorted(environ.items()) if name.startswith("UCX_") or name == PREFER_SYSTEM
        },
    )


def _installed(package: str) -> tuple[str, str]:
    """Returns a package and its version. The one for CUDA 12 will do where the one for CUDA 13 is not."""
    names = (package, package.replace("cu13", "cu12"))
    return next(((name, found) for name in names if (found := _version(name))), (package, ""))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load_ucx() -> tuple[LoadedUcx | None, str]:
    """Returns the library, or None and the error."""
    try:
        return loaded_ucx(), ""
    except TransferError as exc:
        return None, str(exc)


def check_software(facts: SoftwareFacts) -> list[Finding]:
    return [_packages(facts), _ucx(facts), _variables(facts)]


def _packages(facts: SoftwareFacts) -> Finding:
    missing = [name for name, found in facts.packages.items() if not found]
    versions = ", ".join(f"{name} {found}" for name, found in facts.packages.items() if found)
    seen = f"{versions}, Python {facts.python}, Linux {facts.kernel}"
    if missing:
        return problem("software", f"{seen}; missing: {', '.join(missing)}", "pip install pdserve brings all of them")
    return ok("software", seen)


def _ucx(facts: SoftwareFacts) -> Finding:
    if facts.ucx_error:
        names = " ".join(name for name in facts.packages if "ucx" in name)
        return problem(
            "UCX library",
            facts.ucx_error,
            f"without {PREFER_SYSTEM}, the package is taken: pip install --force-reinstall {names}; "
            "without UCX no KV block moves",
        )
    return ok("UCX library", str(facts.ucx))


def _variables(facts: SoftwareFacts) -> Finding:
    if not facts.variables:
        return ok("UCX variables", "none in this environment")
    return ok("UCX variables", " ".join(f"{name}={value}" for name, value in facts.variables.items()))


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


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """The limits of this process, in bytes or as counts; -1 means that there is no limit."""

    shm_total: int
    """The size of the file system of shared memory; 0 if there is none."""
    shm_free: int
    locked: int
    descriptors: int
    descriptors_hard: int


def read_limits(shm: Path = _SHM) -> LimitFacts:
    total = free = 0
    if shm.is_dir():
        found = os.statvfs(shm)
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LimitFacts(total, free, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], soft, hard)


def check_limits(facts: LimitFacts, *, rdma: bool) -> list[Finding]:
    return [_shm(facts), _locked(facts, rdma), _descriptors(facts)]


def _shm(facts: LimitFacts) -> Finding:
    check = "shared memory space"
    if not facts.shm_total:
        return problem(check, f"{_SHM} is missing", "mount a tmpfs there: TP ranks and UCX share memory through it")
    seen = f"{_size(facts.shm_free)} of {_size(facts.shm_total)} free in {_SHM}"
    if min(facts.shm_total, facts.shm_free) <= _MIN_SHM_BYTES:
        return warning(
            check,
            seen,
            "give it 1 GiB or more: docker run --shm-size=1g, or an emptyDir of medium Memory in Kubernetes",
        )
    return ok(check, seen)


def _locked(facts: LimitFacts, rdma: bool) -> Finding:
    check = "locked memory"
    seen = "unlimited" if facts.locked < 0 else f"at most {_size(facts.locked)}"
    if not rdma:
        return not_applicable(check, f"{seen}; only RDMA locks memory")
    if 0 <= facts.locked < _MIN_LOCKED_BYTES:
        return problem(
            check,
            f"{seen}, and RDMA locks the whole KV cache",
            "ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit; --ulimit memlock=-1 for docker run",
        )
    return ok(check, seen)


def _descriptors(facts: LimitFacts) -> Finding:
    check = "open files"
    seen = "unlimited" if facts.descriptors < 0 else f"at most {facts.descriptors}"
    if 0 <= facts.descriptors < _MIN_DESCRIPTORS:
        hard = "" if facts.descriptors_hard < 0 else f" (the hard limit is {facts.descriptors_hard})"
        return warning(
            check, seen, f"ulimit -n 65536{hard}: a proxy takes two for each stream, a node several for each peer"
        )
    return ok(check, seen)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / MIB:.0f} MiB"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    names: tuple[str, ...]
    cuda_build: str
    """The CUDA version that torch was built for; empty for a CPU build."""
    driver: bool
    """Whether NVIDIA's driver is loaded."""


def read_gpus() -> GpuFacts:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(torch.cuda.get_device_name(index) for index in range(count))
    return GpuFacts(names, torch.version.cuda or "", _DRIVER.exists())


def check_gpus(facts: GpuFacts) -> Finding:
    if facts.names:
        return ok("GPU", f"{', '.join(facts.names)}, torch for CUDA {facts.cuda_build}")
    if not facts.driver:
        return not_applicable("GPU", "none: engines compute on the CPU")
    if not facts.cuda_build:
        return warning("GPU", "there is a driver, but this torch is built for CPUs", "install torch built for CUDA")
    return warning("GPU", f"there is a driver, but torch for CUDA {facts.cuda_build} finds none", "see nvidia-smi")
