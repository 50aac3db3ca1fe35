"""Checks the limits that transfers can reach: shared memory, locked memory and descriptors."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from pdserve.doctor.finding import Finding, not_applicable, ok, problem, warning

_MIB = 2**20
_MIN_SHM_BYTES = 64 * _MIB
"""Docker's default, which a few links of UCX use up."""
_MIN_DESCRIPTORS = 4096
_MIN_LOCKED_BYTES = 2**30
_SHM = Path("/dev/shm")  # noqa: S108 — it is looked at, nothing is made there.


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
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / _MIB:.0f} MiB"
