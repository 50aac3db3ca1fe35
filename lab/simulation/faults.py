"""Lets a plan's faults happen in a simulated cluster. What a fault did ends with it, and only that."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TypeAlias

from lab.simulation.clients import fetch
from lab.simulation.cluster import HTTP_PORT, Cluster, Node, Proxy
from lab.simulation.engine_program import RunningEngine
from lab.simulation.machine.links import BlockFault, RankFault
from lab.simulation.machine.network import Spoilt
from lab.simulation.machine.stand_ins import SimFolder
from lab.simulation.machine.virtual_time import SimProcess
from lab.simulation.plan import AT_PROXY, OF_RANKS, Fault, FaultKind
from lab.simulation.transfer_states import TransferState
from pdserve.errors import PdserveError
from pdserve.wire.command import Drain, NodeChange, SetRole
from pdserve.wire.discovery import Role
from pdserve_kvtransfer.fetch.session import FetchState
from pdserve_kvtransfer.push.session import PushState

DRAINED_S = 15.0
"""A node that drains, or has lost its engine, has ended by then."""
SKEW_S = -300.0
SLOW_FACTOR = 10.0
FAR_S = 0.3
COMMAND_EVERY_S = 0.5
READY = 200
READY_EVERY_S = 0.3
WRONG_SECRET = b"the secret of another cluster"
COMMANDED_S = 20.0
"""An operator tries a command again for so long."""
_SPOILT = {FaultKind.TWICE: Spoilt.TWICE, FaultKind.SHORT: Spoilt.SHORT, FaultKind.ALTERED: Spoilt.ALTERED}
_BLOCKS = {
    FaultKind.CORRUPT: BlockFault.CORRUPT,
    FaultKind.BLOCK_TWICE: BlockFault.TWICE,
    FaultKind.BLOCK_SHORT: BlockFault.SHORT,
    FaultKind.LINK_BREAKS: BlockFault.BREAK,
}
_RANK_BLOCKS = {
    FaultKind.RANK_CORRUPT: BlockFault.CORRUPT,
    FaultKind.RANK_TWICE: BlockFault.TWICE,
    FaultKind.RANK_SHORT: BlockFault.SHORT,
    FaultKind.RANK_LINK_BREAKS: BlockFault.BREAK,
}

Server: TypeAlias = Node | Proxy
Ending: TypeAlias = tuple[Server, SimProcess]
"""A process that ends because of a fault, and what starts it again."""


def _nothing() -> None:
    pass


class Faults:
    """The faults of one run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._conditions: list[Fault] = []
        """The present faults that change what things are like."""

    async def happen(self, fault: Fault) -> None:
        """Lets one fault begin at its time, last, and end. What has ended because of it is then started again."""
        cluster = self.cluster
        await asyncio.sleep(fault.at_s)
        node, proxy = cluster.nodes[fault.node], cluster.proxies[fault.proxy]
        where = proxy.name if fault.kind in AT_PROXY else node.name
        cluster.events.add(f"FAULT {where} for {fault.lasts_s} s: {fault.kind.value}")
        ending: list[Ending] = []
        with ExitStack() as undo:
            await self._begin(fault, node, proxy, undo, ending)
            await asyncio.sleep(fault.lasts_s)
            cluster.events.add(f"the fault of {where} is over: {fault.kind.value}")
        for server, process in ending:
            await self._started_again(server, process)

    async def _begin(self, fault: Fault, node: Node, proxy: Proxy, undo: ExitStack, ending: list[Ending]) -> None:
        """Begins a fault. ``undo`` ends just what it did. ``ending`` has what ends because of it."""
        match fault.kind:
            case FaultKind.KILL if node.alive:
                node.kill()
                ending.append((node, node.process))
            case FaultKind.KILL_ENGINE if node.engine_alive:
                node.kill_engine()
                ending.append((node, node.process))
            case FaultKind.DRAIN if node.alive:
                node.drain()
                ending.append((node, node.process))
            case FaultKind.COMMAND_DRAIN if node.alive:
                process = node.process
                if await self._command(node, Drain(), fault.lasts_s):
                    ending.append((node, process))
            case FaultKind.KILL_PROXY if proxy.alive:
                proxy.process.end(-9)
                ending.append((proxy, proxy.process))
            case FaultKind.STOP:
                node.may_hang(undo)
                self._stop(node.processes(), undo)
            case FaultKind.STOP_ENGINE:
                node.may_hang(undo)
                self._stop(node.processes()[1:2], undo)
            case FaultKind.STOP_PROXY:
                self._stop(proxy.processes() if fault.amount % 2 else [proxy.process], undo)
            case FaultKind.KILL_WORKER | FaultKind.STOP_WORKER | FaultKind.CRASH_WORKER if proxy.workers:
                self._disturb_worker(fault, proxy, undo)
            case FaultKind.RESET:
                self.cluster.network.reset(node.host)
            case FaultKind.CRASH | FaultKind.CRASH_ENGINE | FaultKind.CRASH_PROXY:
                self._crash(fault, node, proxy, undo, ending)
            case FaultKind.CRASH_FETCH | FaultKind.CRASH_PUSH:
                self._crash_in_transfer(fault, undo, ending)
            case FaultKind.CRASH_RANK_FETCHING | FaultKind.CRASH_RANK_PUSHING:
                self._crash_in_transfer(fault, undo, ending)
            case kind if kind in OF_RANKS:
                self._harm_rank(fault, node, undo, ending)
            case FaultKind.NO_BLOCKS if node.engine is not None and node.engine_alive:
                self._take_blocks(node.engine, undo)
            case FaultKind.NO_DISK if node.alive:
                self._fill_disk(node, undo)
                ending.append((node, node.process))
            case FaultKind.NO_MEMORY:
                self._refuse_memory(node, undo, ending)
            case FaultKind.VANISH if node.alive:
                self._vanish(node, undo, ending)
            case FaultKind.NO_LINK:
                self.cluster.fabric.unreachable[node.host] += 1
                undo.callback(self.cluster.fabric.unreachable.subtract, [node.host])
            case FaultKind.WRONG_SECRET if node.alive:
                self._start_with_wrong_secret(node, undo, ending)
            case FaultKind.SET_ROLE if node.alive:
                await self._change_role(fault, node)
            case _:
                self._cut(fault, node, proxy, undo)
                self._change_clocks(fault, node, proxy, undo)
                self._change_conditions(fault, undo)

    def _stop(self, processes: list[SimProcess], undo: ExitStack) -> None:
        for process in processes:
            process.stop()
            undo.callback(process.go_on)

    def _disturb_worker(self, fault: Fault, proxy: Proxy, undo: ExitStack) -> None:
        """Does something to a worker, whose supervisor has to see to it that there is another one."""
        worker = proxy.workers[fault.other % len(proxy.workers)]
        match fault.kind:
            case FaultKind.KILL_WORKER:
                proxy.worker_dies()
                worker.end(-9)
            case FaultKind.STOP_WORKER:
                proxy.worker_dies()
                undo.callback(proxy.worker_dies)
                self._stop([worker], undo)
            case _:
                worker.crash_after, worker.on_crash = fault.amount, proxy.worker_dies
                undo.callback(worker.crash_no_more)

    # ------------------------------------------------------------ ranks

    def _harm_rank(self, fault: Fault, node: Node, undo: ExitStack, ending: list[Ending]) -> None:
        """Harms one rank of a node, or its way to others' ranks. Without a second rank, no process is harmed."""
        fabric, way = self.cluster.fabric, (node.host, fault.other % node.tp_size)
        if (block_fault := _RANK_BLOCKS.get(fault.kind)) is not None:
            rank_fault = RankFault(*way, block_fault)
            fabric.rank_faults.append(rank_fault)
            undo.callback(fabric.end, rank_fault)
        if fault.kind is FaultKind.RANK_LATE:
            fabric.slow[way] += 1
            undo.callback(fabric.slow.subtract, [way])
        ranks = [process for process in node.ranks() if not process.ended]
        if not ranks:
            return
        process = ranks[fault.other % len(ranks)]
        match fault.kind:
            case FaultKind.KILL_RANK:
                self._crash_rank(node, process, ending)
            case FaultKind.STOP_RANK:
                node.may_hang(undo)
                self._stop([process], undo)
            case FaultKind.CRASH_RANK:
                own = node.process

                def on_crash() -> None:
                    node.engine_dies()
                    ending.append((node, own))

                process.crash_after, process.on_crash = fault.amount, on_crash
                undo.callback(process.crash_no_more)

    def _crash_rank(self, node: Node, process: SimProcess, ending: list[Ending]) -> None:
        node.engine_dies()
        ending.append((node, node.process))
        process.crash()

    # ------------------------------------------------------------ resources

    def _take_blocks(self, engine: RunningEngine, undo: ExitStack) -> None:
        engine.take_blocks()

        def give_back() -> None:
            if not engine.process.ended:
                engine.give_blocks_back()

        undo.callback(give_back)

    def _refuse_memory(self, node: Node, undo: ExitStack, ending: list[Ending]) -> None:
        """Lets the engine's next step fail, if there is one in the fault's time. The engine has to end, and say why."""

        def refuse() -> None:
            node.pace.before_step = _nothing
            node.memory_refused()
            ending.append((node, node.process))
            raise MemoryError("no memory is left")

        node.pace.before_step = refuse
        undo.callback(setattr, node.pace, "before_step", _nothing)

    def _fill_disk(self, node: Node, undo: ExitStack) -> None:
        """Kills the node, and starts it where it can write nothing. It has to end, and to say why."""
        node.kill()
        SimFolder.full[node.host] += 1
        undo.callback(SimFolder.full.subtract, {node.host: 1})
        node.start()
        node.may_fail()

    # ------------------------------------------------------------ hosts

    def _vanish(self, node: Node, undo: ExitStack, ending: list[Ending]) -> None:
        """Ends the node without a word, and blocks all ways to it and from it until it is started again."""
        others = [server.host for server in self.cluster.servers if server is not node]
        for source, target in [pair for host in others for pair in ((node.host, host), (host, node.host))]:
            self.cluster.network.block(source, target)
            undo.callback(self.cluster.network.open, source, target)
        node.vanish()
        ending.append((node, node.process))

    def _start_with_wrong_secret(self, node: Node, undo: ExitStack, ending: list[Ending]) -> None:
        """Starts the node as a rollout with a wrong secret does. It must never say that it is ready."""
        node.kill()
        node.start(WRONG_SECRET)
        process = node.process
        ending.append((node, process))
        undo.callback(process.end, -9)
        watch = asyncio.create_task(self._check_not_ready(node, process))
        undo.callback(watch.cancel)

    async def _check_not_ready(self, node: Node, process: SimProcess) -> None:
        while not process.ended:
            status, _ = await self.cluster.as_client(fetch(node.host, HTTP_PORT, "GET /ready"))
            if status == READY and not process.ended:
                self.cluster.violated(f"{process.name} is ready, and no proxy can have accepted it")
                return
            await asyncio.sleep(READY_EVERY_S)

    # ------------------------------------------------------------ crashes

    def _crash(self, fault: Fault, node: Node, proxy: Proxy, undo: ExitStack, ending: list[Ending]) -> None:
        """Has a process killed after some more steps, if it gets so far in the fault's time."""
        server: Server = proxy if fault.kind is FaultKind.CRASH_PROXY else node
        own = server.process
        process = own.child if fault.kind is FaultKind.CRASH_ENGINE else own
        if process is None or process.ended:
            return

        def on_crash() -> None:
            if process is not own:
                node.engine_dies()
            ending.append((server, own))

        process.crash_after, process.on_crash = fault.amount, on_crash
        undo.callback(process.crash_no_more)

    def _crash_in_transfer(self, fault: Fault, undo: ExitStack, ending: list[Ending]) -> None:
        """Kills the first engine of which a transfer comes into a state, or the first that has ranks loses one."""
        fetches = fault.kind in (FaultKind.CRASH_FETCH, FaultKind.CRASH_RANK_FETCHING)
        states: tuple[TransferState, ...] = tuple(FetchState if fetches else PushState)
        state, cluster = states[fault.amount % len(states)], self.cluster

        def watch(process: SimProcess, entered: TransferState) -> None:
            node = cluster.node_at(process.host)
            dying = [process] if fault.kind not in OF_RANKS else [rank for rank in node.ranks() if not rank.ended]
            if entered is not state or process.ended or not dying:
                return
            del cluster.on_transfer_state[watch]
            cluster.events.add(f"{dying[-1].name} is killed as a transfer is {state}")
            self._crash_rank(node, dying[-1], ending)

        cluster.on_transfer_state[watch] = None
        undo.callback(cluster.on_transfer_state.pop, watch, None)

    # ------------------------------------------------------------ ways

    def _cut(self, fault: Fault, node: Node, proxy: Proxy, undo: ExitStack) -> None:
        """Blocks what the fault blocks, if that is anything."""
        nodes = [other.host for other in self.cluster.nodes if other is not node]
        proxies = [each.host for each in self.cluster.proxies]
        match fault.kind:
            case FaultKind.CUT_PROXY:
                ways = [pair for host in proxies for pair in ((node.host, host), (host, node.host))]
            case FaultKind.CUT_ONE_PROXY:
                ways = [(node.host, proxy.host), (proxy.host, node.host)]
            case FaultKind.CUT_PEERS:
                ways = [pair for other in nodes for pair in ((node.host, other), (other, node.host))]
            case FaultKind.CUT_SENDING:
                ways = [(node.host, other) for other in (*nodes, *proxies)]
            case FaultKind.CUT_RECEIVING:
                ways = [(other, node.host) for other in (*nodes, *proxies)]
            case FaultKind.CUT_ONE_WAY:
                ways = [(node.host, nodes[fault.other % len(nodes)])]
            case _:
                ways = []
        for source, target in ways:
            self.cluster.network.block(source, target)
            undo.callback(self.cluster.network.open, source, target)

    # ------------------------------------------------------------ clocks

    def _change_clocks(self, fault: Fault, node: Node, proxy: Proxy, undo: ExitStack) -> None:
        clocks = self.cluster.clocks
        match fault.kind:
            case FaultKind.DRIFT:
                host, wrong_s = node.host, fault.amount * (-1.0 if fault.amount % 2 else 1.0)
            case FaultKind.SKEW_PROXY:
                host, wrong_s = proxy.host, fault.amount * (-1.0 if fault.amount % 2 else 1.0)
            case FaultKind.SKEW:
                host, wrong_s = node.host, SKEW_S
            case FaultKind.CLOCK_STANDS:
                undo.callback(clocks.go_on, node.host)
                clocks.stand(node.host)
                return
            case _:
                return
        clocks.skew(host, wrong_s)
        undo.callback(clocks.skew, host, -wrong_s)

    # ------------------------------------------------------------ conditions

    def _change_conditions(self, fault: Fault, undo: ExitStack) -> None:
        self._conditions.append(fault)
        if (block_fault := _BLOCKS.get(fault.kind)) is not None:
            self.cluster.fabric.faults[block_fault] += 1 + fault.amount % 4 * (fault.kind is not FaultKind.CORRUPT)
        self._set_conditions()
        undo.callback(self._end_condition, fault)

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
        network = cluster.network
        network.delay_s = FAR_S if FaultKind.FAR in kinds else cluster.shape.delay_s
        network.lagging = {cluster.nodes[n].host for kind, n in present if kind is FaultKind.LAG}
        network.spoilers = {(cluster.nodes[n].host, _SPOILT[kind]) for kind, n in present if kind in _SPOILT}
        for kind, block_fault in _BLOCKS.items():
            if kind not in kinds:
                cluster.fabric.faults[block_fault] = 0

    # ------------------------------------------------------------ the operator

    async def _change_role(self, fault: Fault, node: Node) -> None:
        """Gives the node another role and, after the time, its first one again."""
        process = node.process
        role = tuple(Role)[fault.amount % len(Role)]
        if not await self._command(node, SetRole(role), fault.lasts_s):
            return
        await asyncio.sleep(fault.lasts_s)
        if node.process is process and not await self._command(node, SetRole(node.role), COMMANDED_S):
            # It has ended, or drains, and will be started in its first role.
            self.cluster.events.add(f"{node.name} does not take its role back")

    async def _command(self, node: Node, command: NodeChange, within_s: float) -> bool:
        """Sends the node a command until it takes it. Returns whether it has."""
        loop, process = self.cluster.loop, node.process
        until_s = loop.time() + within_s
        while node.alive and node.process is process:
            if isinstance(command, Drain):
                node.may_end()
            try:
                await self.cluster.command(node, command)
            except PdserveError as exc:
                self.cluster.events.add(f"{node.name} does not take {command}: {exc}")
            else:
                return True
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(COMMAND_EVERY_S)
        return False

    async def _started_again(self, server: Server, process: SimProcess) -> None:
        """Does what a supervisor does: starts it again once it has ended."""
        if not process.ended:
            ended = asyncio.Event()
            process.on_end[ended.set] = None
            try:
                async with asyncio.timeout(DRAINED_S):
                    await ended.wait()
            except TimeoutError:
                self.cluster.violated(f"{process.name} has to end and does not")
                return
        if server.process is process:
            server.start()
