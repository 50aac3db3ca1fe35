"""Lets a plan's faults happen in a simulated cluster. What a fault did ends with it, and only that."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from tests.simulation.cluster import PROXY, Cluster, Node
from tests.simulation.plan import Fault, FaultKind
from tests.simulation.virtual_time import SimProcess

DRAINED_S = 15.0
"""A node that drains, or has lost its engine, has ended by then."""
SKEW_S = -300.0
SLOW_FACTOR = 10.0
FAR_S = 0.3


class Faults:
    """The faults of one run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._conditions: list[Fault] = []
        """The present faults that change what things are like."""

    async def happen(self, fault: Fault) -> None:
        """Lets one fault begin at its time, last, and end."""
        cluster = self.cluster
        await asyncio.sleep(fault.at_s)
        node = cluster.nodes[fault.node]
        cluster.events.add(f"FAULT {node.name} for {fault.lasts_s} s: {fault.kind.value}")
        with ExitStack() as undo:
            gone = self._begin(fault, node, undo)
            await asyncio.sleep(fault.lasts_s)
            cluster.events.add(f"the fault of {node.name} is over: {fault.kind.value}")
        if gone is None:
            return
        if gone is cluster.proxy:
            cluster.start_proxy()
        else:
            await self._started_again(node, gone)

    def _begin(self, fault: Fault, node: Node, undo: ExitStack) -> SimProcess | None:
        """Begins a fault. ``undo`` ends just what it did. Returns the process that ends because of it, if one does."""
        cluster, process = self.cluster, node.process
        others = [other.host for other in cluster.nodes if other is not node]
        match fault.kind:
            case FaultKind.KILL if node.alive:
                node.kill()
                return process
            case FaultKind.KILL_ENGINE if process.child is not None and not process.child.ended:
                node.kill_engine()
                return process
            case FaultKind.DRAIN if node.alive:
                node.drain()
                return process
            case FaultKind.KILL_PROXY if not cluster.proxy.ended:
                cluster.proxy.end(-9)
                return cluster.proxy
            case FaultKind.STOP:
                self._stop(node.processes(), undo)
            case FaultKind.STOP_ENGINE:
                self._stop(node.processes()[1:], undo)
            case FaultKind.CUT_PROXY:
                self._cut([(node.host, PROXY), (PROXY, node.host)], undo)
            case FaultKind.CUT_PEERS:
                self._cut([pair for other in others for pair in ((node.host, other), (other, node.host))], undo)
            case FaultKind.CUT_SENDING:
                self._cut([(node.host, other) for other in (*others, PROXY)], undo)
            case FaultKind.SLOW | FaultKind.SKEW | FaultKind.FAR | FaultKind.CORRUPT:
                cluster.fabric.corrupt += fault.kind is FaultKind.CORRUPT
                self._conditions.append(fault)
                self._set_conditions()
                undo.callback(self._end_condition, fault)
        return None

    def _stop(self, processes: list[SimProcess], undo: ExitStack) -> None:
        for process in processes:
            process.stop()
            undo.callback(process.go_on)

    def _cut(self, ways: list[tuple[str, str]], undo: ExitStack) -> None:
        for source, target in ways:
            self.cluster.network.block(source, target)
            undo.callback(self.cluster.network.open, source, target)

    def _end_condition(self, fault: Fault) -> None:
        self._conditions.remove(fault)
        self._set_conditions()

    def _set_conditions(self) -> None:
        """Makes the cluster such as the present faults say: two of a kind are as bad as one."""
        cluster = self.cluster
        present = {(fault.kind, fault.node) for fault in self._conditions}
        kinds = [fault.kind for fault in self._conditions]
        for number, node in enumerate(cluster.nodes):
            node.pace.factor = SLOW_FACTOR if (FaultKind.SLOW, number) in present else 1.0
            cluster.skews[node.host] = SKEW_S if (FaultKind.SKEW, number) in present else 0.0
        cluster.network.delay_s = FAR_S if FaultKind.FAR in kinds else cluster.shape.delay_s
        cluster.fabric.corrupt = min(cluster.fabric.corrupt, kinds.count(FaultKind.CORRUPT))

    async def _started_again(self, node: Node, process: SimProcess) -> None:
        """Does what a node's supervisor does: starts it again once it has ended."""
        if not process.ended:
            ended = asyncio.Event()
            process.on_end[ended.set] = None
            try:
                async with asyncio.timeout(DRAINED_S):
                    await ended.wait()
            except TimeoutError:
                self.cluster.violated(f"{process.name} has to end and does not")
                return
        if node.process is process:
            node.start()
