"""Reads from the kernel how much CPU time and memory processes have used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import BenchError

if TYPE_CHECKING:
    from pdserve.bench.cluster import BenchCluster, Running

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_RESET_PEAK = "5"


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns the seconds of CPU that each process has used since its start, in all threads and the kernel, to 10 ms.

    Raises BenchError if one of the processes is gone.
    """
    return {name: _cpu_s(name, pid) for name, pid in pids.items()}


def peak_mib(pids: Mapping[str, int]) -> dict[str, float]:
    """Returns each one's peak of resident memory since ``reset_peaks``, in MiB. Raises BenchError if one is gone."""
    return {name: _peak_mib(name, pid) for name, pid in pids.items()}


def reset_peaks(pids: Mapping[str, int]) -> None:
    """Begins to watch each process's peak memory anew. Raises BenchError if the kernel does not allow it."""
    for name, pid in pids.items():
        try:
            Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK)
        except OSError as exc:
            raise BenchError(f"cannot begin to watch the memory of {name}: {exc.strerror}") from exc


def _cpu_s(name: str, pid: int) -> float:
    # The second field, the program's name in parentheses, may hold any characters.
    fields = _read(name, pid, "stat").rpartition(")")[2].split()
    user, system = fields[11:13]
    return (int(user) + int(system)) * _TICK_S


def _peak_mib(name: str, pid: int) -> float:
    for line in _read(name, pid, "status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"{name} has ended")


def _read(name: str, pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError as exc:
        raise BenchError(f"{name} is gone: {exc.strerror}") from exc


def child_of(pid: int) -> int:
    """Returns the oldest process that the main thread of ``pid`` started. Raises BenchError if there is none."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError as exc:
        raise BenchError(f"process {pid} is gone: {exc.strerror}") from exc
    if not children:
        raise BenchError(f"process {pid} has no children")
    return int(children[0])


def engine_of(node: Running) -> int:
    """Returns the process id of a node's engine. Raises BenchError if it has none."""
    return child_of(node.pid)


def pids_of(cluster: BenchCluster) -> dict[str, int]:
    """Returns the ids of all processes of a cluster, by name."""
    api = {node: running.pid for node, running in cluster.nodes.items()}
    engines = {f"{node} engine": engine_of(running) for node, running in cluster.nodes.items()}
    return {"proxy": cluster.proxy, **api, **engines}
