"""What the processes of a proxy know and hold, as the simulation sees it: their registries, suspects and admissions.

A supervisor and its workers have to agree at rest, and hold their limits together at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from lab.simulation.machine.virtual_time import SimProcess, present_process
from pdserve.wire.discovery import NodeInfo, Role
from pdserve.wire.proxy_workers import SuspectedRequest
from pdserve_proxy.continuation.losses import Suspects
from pdserve_proxy.registry.registry import Registry, RegistryMirror
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.requests.admission_queue import AdmissionController
from pdserve_proxy.upstream.node_pool import NodePool

REPORTED_S = 1.0
"""Within this time a process that has just started knows what the others do."""
P = ParamSpec("P")
T = TypeVar("T")


class WatchedSuspects(Suspects):
    """Suspects of one process, which also keeps those that are over."""

    def __init__(self, refused_s: float) -> None:
        super().__init__(refused_s)
        self.made_s = self._clock()
        self.taken: dict[bytes, SuspectedRequest] = {}

    def take(self, found: Iterable[SuspectedRequest]) -> None:
        requests = tuple(found)
        self.taken |= {request.fingerprint: request for request in requests}
        super().take(requests)

    def differences(self, worker: str, supervisor: WatchedSuspects) -> Iterator[str]:
        """Yields what a worker has not told its supervisor, or was not told though it had started in time."""
        for fingerprint in self.taken.keys() - supervisor.taken.keys():
            yield f"{worker} has not told its supervisor of {self.taken[fingerprint]}"
        for fingerprint, suspect in supervisor.taken.items():
            if fingerprint not in self.taken and self.made_s < suspect.until_s - REPORTED_S:
                yield f"{worker} was not told of {suspect}"


@dataclass
class ProxyProcesses:
    """The parts of all proxies' processes, as they are made."""

    registries: dict[SimProcess, RegistryView] = field(default_factory=dict)
    suspects: dict[SimProcess, WatchedSuspects] = field(default_factory=dict)
    admissions: dict[SimProcess, AdmissionController] = field(default_factory=dict)
    pools: dict[SimProcess, NodePool] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """The names of the nodes that any proxy has taken for lost."""

    def connections(self, process: SimProcess) -> int:
        """Returns how many connections to nodes a process has."""
        pool = self.pools.get(process)
        return 0 if pool is None else len(pool._open)

    def stand_ins(self, admission: type[AdmissionController]) -> dict[str, Any]:
        """Returns what has to stand in the place of each name, so that the parts are known here."""
        workers, lost = "pdserve_proxy__workers__", self.lost

        class WatchedRegistry(Registry):
            def _lose(self, info: NodeInfo) -> None:
                lost.append(info.name)
                super()._lose(info)

        return {
            "pdserve_proxy__server__Registry": _noted(self.registries, WatchedRegistry),
            f"{workers}supervisor__Registry": _noted(self.registries, WatchedRegistry),
            f"{workers}worker__RegistryMirror": _noted(self.registries, RegistryMirror),
            f"{workers}worker_channel__Suspects": _noted(self.suspects, WatchedSuspects),
            f"{workers}worker__Suspects": _noted(self.suspects, WatchedSuspects),
            "pdserve_proxy__relay__relay__NodePool": _noted(self.pools, NodePool),
            "pdserve_proxy__serving__AdmissionController": _noted(self.admissions, admission),
        }

    def over_limit(self, processes: Sequence[SimProcess], in_flight: int, waiting: int) -> str | None:
        """Returns what the workers of one proxy hold beyond limits that are divided between so many, rounded up."""
        queues = [self.admissions[process]._queue for process in processes if process in self.admissions]
        for what, limit, held in (
            ("answers under way", in_flight, sum(queue._places_taken for queue in queues)),
            ("requests waiting", waiting, sum(queue.waiting for queue in queues)),
        ):
            if held > limit + len(processes) - 1:
                return f"{held} {what}, and its limit is {limit}"
        return None

    def disagreements(self, supervisor: SimProcess, workers: Sequence[SimProcess]) -> Iterator[str]:
        """Yields what a worker knows otherwise than its supervisor, when nothing has happened for a while."""
        nodes, suspects = self._nodes(supervisor), self.suspects.get(supervisor)
        for worker in workers:
            if (known := self._nodes(worker)) != nodes:
                yield f"{worker.name} knows the nodes {known}, and its supervisor {nodes}"
            if suspects is not None and not (worker.was_stopped or supervisor.was_stopped):
                yield from self.suspects[worker].differences(worker.name, suspects)

    def lacks_role(self, process: SimProcess) -> bool:
        """Returns whether a process knows no node that computes prompts, or none that answers."""
        roles = {node.info.role for node in self.registries[process].snapshot().nodes}
        return not ({Role.PREFILL, Role.MIXED} & roles and {Role.DECODE, Role.MIXED} & roles)

    def _nodes(self, process: SimProcess) -> list[tuple[str, str, str, int]]:
        """Returns the name, role, state and number of proxies of each node that a process knows."""
        nodes = self.registries[process].snapshot().nodes
        return sorted((node.info.name, node.info.role.value, node.state.value, node.proxies) for node in nodes)


def _noted(parts: dict[SimProcess, Any], make: Callable[P, T]) -> Callable[P, T]:
    """Returns what makes a part and notes whose it is."""

    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        part = make(*args, **kwargs)
        parts[present_process()] = part
        return part

    return made
