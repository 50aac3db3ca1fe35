"""One simulated cluster: a proxy and nodes, whose real programs run on one loop in virtual time."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import signal
import traceback
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from lab.simulation.checks.invariants import could_run, wrong_blocks, wrong_place, wrong_turns
from lab.simulation.checks.proxy_processes import ProxyProcesses
from lab.simulation.checks.role_moves import watched_decider
from lab.simulation.checks.witness import Witness
from lab.simulation.clients import MODEL, ClientRequest, ask
from lab.simulation.drafts import speculation
from lab.simulation.engine_program import BLOCK_SIZE, EngineProgram, Pace, RankProgram, RunningEngine, rank_model
from lab.simulation.machine.links import Fabric, LinkTransport
from lab.simulation.machine.network import Network
from lab.simulation.machine.stand_ins import simulated
from lab.simulation.machine.virtual_time import (
    Events,
    SimLoop,
    SimProcess,
    SimThread,
    Stuck,
    WallClocks,
    present_process,
)
from lab.simulation.plan import PlannedRequest, Shape
from lab.simulation.reference import EOS, MAX_MODEL_LEN, VOCAB
from lab.simulation.returning_client import ask_until_complete
from lab.simulation.transfer_states import TransferState, watched_transfers
from pdserve.api.generation.engine_client import ENGINE_COMMAND
from pdserve.api.node.server import NodeServer
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.config import (
    AdmissionConfig,
    CacheConfig,
    CpuConfig,
    DiscoveryConfig,
    HttpConfig,
    LivenessConfig,
    LogConfig,
    ModelConfig,
    NodeConfig,
    ParallelConfig,
    PrefillAnswers,
    ProxyConfig,
    RegistryConfig,
    RelayConfig,
    ReplayConfig,
    RequestConfig,
    RoleChoice,
    RolesConfig,
    RoutingConfig,
    SchedulerConfig,
    Speculate,
    TargetsConfig,
    TransferConfig,
    WorkersConfig,
)
from pdserve.control.frame import Secrets
from pdserve.engine.placement.prefill_node import PrefillNode
from pdserve.engine.tp.tp_ranks import RANK_COMMAND
from pdserve.errors import RankLost
from pdserve.http.tls import Trust
from pdserve.models.checkpoint.cached_tokenizer import CachedTokenizer
from pdserve.wire.command import NodeChange
from pdserve.wire.discovery import Capacity, NodeInfo, Role
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.sides import LocalEngine
from pdserve_kvtransfer.thread import BothSides
from pdserve_proxy import server as proxy_server
from pdserve_proxy.upstream.node_command import CommandRefused, NodeCommander
from pdserve_proxy.workers import worker
from pdserve_proxy.workers.supervisor import WorkerDied

T = TypeVar("T")
SECRET = b"the secret of the simulated cluster"
PROXY = "10.0.0.1"
"""The first proxy's host."""
CLIENTS = "10.0.1.1"
OPERATOR = "10.0.1.2"
HTTP_PORT = 8000
CONTROL_PORT = 9000
SUSPECT_S = 5.0
"""A request with which two nodes were lost is refused for so long: a client that comes back outlasts that."""
RETURNS_S = 35.0
"""A client that comes back until its answer is whole gives up after this time."""
KEEP_S = 20.0
"""A node keeps an answer for a client that may come back for so long."""
LATE_S = 5.0
"""A request has ended so long after its deadline at the latest."""
COLLECT_EVERY = 20
"""What runs have left is collected after so many of them: it takes as long as a small run."""
SILENT_MS = 3_000
"""Where roles move, a node that sends no heartbeat for so long is gone."""
ROLES_INTERVAL_MS = 200
"""A proxy that moves roles looks at its nodes so often, and hears their loads half as often."""
ROLES_REST_S = 1.0
UNANSWERED_PINGS = 3
"""A worker that answers so many pings in a row not counts as hung: faults last for seconds."""
_runs = itertools.count(1)
RANK_TIMEOUT_MS = 1_000
"""A rank that keeps the others waiting for longer hangs."""
SILENCE_MS = 2_000
"""An engine that shows no life for so long hangs. Many are stopped for longer."""
HANG_NOTICED_S = RANK_TIMEOUT_MS / 1000 + 2.0
"""When a process that was stopped has gone on, the others have found by then that it had kept them waiting."""
WORKER_LOST_S = 20.0
"""A proxy that gives up because of a worker has ended by then: the other workers drain first."""
RESTART_S = 0.5
"""What starts a node again that has ended because of a rank, or a proxy because of a worker, takes so long."""
HELD_UP_S = 2.0
"""A request that could run begins within this time."""
CHECK_EVERY_TURNS = 32
"""All blocks are counted after so many turns of the loop."""


class Proxy:
    """One proxy. It may be started again at its address."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.name = f"proxy{number}" if number else "proxy"
        self.host = f"10.0.0.{1 + number}"
        self.process: SimProcess
        self._stopping: asyncio.Event
        self._may_end = False
        self._worker_died_s = -math.inf

    @property
    def alive(self) -> bool:
        return not self.process.ended

    def processes(self) -> list[SimProcess]:
        """Returns the proxy's process, and those of its workers that run."""
        return [self.process, *self.workers]

    @property
    def workers(self) -> list[SimProcess]:
        return [child for child in self.process.children if not child.ended]

    def start(self) -> None:
        self._may_end = False
        self._worker_died_s = -math.inf
        self.process = SimProcess(self.cluster.loop, self.name, self.host)
        self.process.on_end[self._ended] = None
        self.process.start(self._main)

    def worker_dies(self) -> None:
        """Notes that a worker is killed. If it was just starting, or too many were, the proxy has to end."""
        self._worker_died_s = self.cluster.loop.time()

    @property
    def _gives_up(self) -> bool:
        """Whether the proxy ends, or has ended, because of a worker that a fault has killed."""
        return self.cluster.loop.time() < self._worker_died_s + WORKER_LOST_S

    def worker_started(self, worker: SimProcess) -> None:
        """Notes that a worker runs. It may end when its proxy ends, or because of a fault."""

        proxy = self.process

        def ended() -> None:
            if worker.status == 0 and self._gives_up:
                self.cluster.loop.call_later(WORKER_LOST_S, check, context=self.cluster.operator.context)
            elif worker.status != -9:
                check()

        def check() -> None:
            if not (self._may_end or proxy.ended):
                self.cluster.violated(f"{worker.name} ended by itself with {worker.status}")

        worker.on_end[ended] = None

    def stop(self) -> None:
        """Ends it in good order."""
        self._may_end = True
        self.cluster.loop.call_soon(self._stopping.set, context=self.process.context)

    async def _main(self) -> int:
        shape = self.cluster.shape
        heartbeat_ms = 2 * ROLES_INTERVAL_MS if shape.moves_roles else shape.heartbeat_ms
        usual = RegistryConfig().missed_heartbeats
        config = ProxyConfig(
            http=HttpConfig(host=self.host, port=HTTP_PORT, drain_s=5.0),
            registry=RegistryConfig(
                control_host=self.host,
                control_port=CONTROL_PORT,
                heartbeat_ms=heartbeat_ms,
                missed_heartbeats=SILENT_MS // heartbeat_ms if shape.moves_roles else usual,
            ),
            relay=RelayConfig(suspect_s=SUSPECT_S, max_connections=shape.max_connections),
            admission=AdmissionConfig(max_in_flight=shape.max_in_flight, max_queued=shape.max_queued),
            request=RequestConfig(timeout_s=shape.timeout_s),
            workers=WorkersConfig(shape.workers),
            routing=RoutingConfig(prefill_answers=PrefillAnswers.ON if shape.prefill_answers else PrefillAnswers.OFF),
            targets=TargetsConfig(shape.target_ttft_ms, shape.target_itl_ms),
            roles=RolesConfig(
                RoleChoice.AUTO if shape.moves_roles and self.number == 0 else RoleChoice.FIXED,
                interval_ms=ROLES_INTERVAL_MS,
                looks=2,
                rest_s=ROLES_REST_S,
            ),
        )
        self._stopping = asyncio.Event()
        await proxy_server.run(config, SECRET, self._stopping)
        return 0

    def _ended(self) -> None:
        """Notes an end for which there is no reason."""
        status = self.process.status
        if status == 1 and self._gives_up and isinstance(self.process.failure, WorkerDied):
            context = self.cluster.operator.context
            self.cluster.loop.call_later(RESTART_S, self._start_again, self.process, context=context)
        elif not (status == -9 or (status == 0 and self._may_end)):
            self.cluster.violated(f"the {self.name} ended by itself with {status}")

    def _start_again(self, process: SimProcess) -> None:
        """Does what a service manager does."""
        if self.process is process:
            self.start()


class Node:
    """One node: its processes, and what it was started with. It may be started again at its address."""

    def __init__(self, cluster: Cluster, number: int, role: Role) -> None:
        self.cluster = cluster
        self.number = number
        self.role = role
        self.host = f"10.0.0.{10 + number}"
        self.starts = 0
        self.pace = Pace(cluster.random, cluster.shape.step_s)
        self.engine: RunningEngine | None = None
        self.process: SimProcess
        self._forget_faults()

    @property
    def name(self) -> str:
        return f"{self.role.value}{self.number}"

    @property
    def tp_size(self) -> int:
        return self.cluster.shape.tp_size(self.number)

    @property
    def max_model_len(self) -> int:
        return self.cluster.shape.max_prefill_len if self.role is Role.PREFILL else MAX_MODEL_LEN

    @property
    def alive(self) -> bool:
        return not self.process.ended

    def start(self, secret: bytes = SECRET) -> None:
        self.starts += 1
        self._forget_faults()
        self.process = SimProcess(self.cluster.loop, f"{self.name}.{self.starts}", self.host)
        self.process.on_end[self._ended] = None
        self.cluster.events.add(f"{self.process.name} starts")
        self.process.start(partial(self._main, secret))

    def _forget_faults(self) -> None:
        self.held_up_s = 0.0
        """Since when a request that could run may have waited while nothing ran."""
        self._engine_killed = self._told_to_end = self._may_fail = self._lost_rank = self._refused_memory = False
        self._hangs = 0
        """The stops that may still let the node miss a sign of life, or the ranks wait for each other for too long."""

    def _scheduling(self) -> SchedulerConfig:
        shape = self.cluster.shape
        config = SchedulerConfig(
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            max_waiting=shape.max_waiting,
        )
        if self.number >= len(shape.draft_tokens):
            return config
        if not (count := shape.draft_tokens[self.number]):
            return replace(config, speculation=Speculate.OFF)
        return replace(config, speculation=Speculate.NGRAM, draft_tokens=count)

    async def _main(self, secret: bytes) -> int:
        shape = self.cluster.shape
        config = NodeConfig(
            model=ModelConfig(served_model_name=MODEL, max_model_len=self.max_model_len),
            cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_mib=1),
            scheduler=self._scheduling(),
            transfer=TransferConfig(host=self.host, disaggregation=shape.disaggregation),
            http=HttpConfig(host=self.host, port=HTTP_PORT, drain_s=5.0),
            discovery=DiscoveryConfig(
                proxies=tuple(f"tcp://{proxy.host}:{CONTROL_PORT}" for proxy in self.cluster.proxies),
                name=self.process.name,
                drain=shape.drain,
            ),
            request=RequestConfig(timeout_s=shape.timeout_s),
            cpu=CpuConfig(),
            parallel=ParallelConfig(tensor_parallel_size=self.tp_size, timeout_ms=RANK_TIMEOUT_MS),
            log=LogConfig(),
            replay=ReplayConfig(keep_s=KEEP_S),
            liveness=LivenessConfig(silence_ms=SILENCE_MS),
        )
        server = NodeServer(self.role, config, secret, Path("/simulated"), Path("/simulated"), ENGINE_COMMAND)
        return await server.run()

    def _ended(self) -> None:
        """Notes an end for which there is no reason."""
        status = self.process.status
        hung = self._hangs > 0 and "no sign of life" in str(self.process.failure)
        may_fail = self._may_fail or self._engine_killed or self._lost_rank or hung
        if not (status == -9 or (status == 0 and self._told_to_end) or (status == 1 and may_fail)):
            self.cluster.violated(f"{self.process.name} ended by itself with {status}")
        if status == 1 and self._refused_memory and "MemoryError" not in str(self.process.failure):
            self.cluster.violated(f"{self.process.name} ended for want of memory, and said: {self.process.failure}")
        if status == 1 and (self._lost_rank or hung) and not self._engine_killed:
            self._start_again_later()

    def _start_again_later(self) -> None:
        """Does what a supervisor does, unless a fault does it."""
        ended = self.process

        def start() -> None:
            if self.process is ended:
                self.start()

        self.cluster.loop.call_later(RESTART_S, start, context=self.cluster.operator.context)

    def processes(self) -> list[SimProcess]:
        child = self.process.child
        return [self.process, *([child] if child is not None else []), *self.ranks()]

    def ranks(self) -> list[SimProcess]:
        """Returns the processes of the ranks from 1 on."""
        engine = self.process.child
        return [] if engine is None else engine.children

    def kill(self) -> None:
        """Kills the API process, and with it the engine, as the kernel does."""
        self.process.end(-9)

    def vanish(self) -> None:
        """Ends all its processes, of which no other host hears."""
        self.cluster.network.forget(self.host)
        self.kill()

    @property
    def engine_alive(self) -> bool:
        return self.process.child is not None and not self.process.child.ended

    def engine_dies(self) -> None:
        """Notes that the engine is killed, for which the node has to end."""
        self._engine_killed = True

    def may_fail_with(self, exc: Exception) -> bool:
        """Whether a fault is a reason for which an engine or a rank fails so. Then the node has to end."""
        if self._refused_memory and isinstance(exc, MemoryError):
            return True
        if not isinstance(exc, RankLost) or not (self._hangs or self._lost_rank or self._engine_killed):
            return False
        self._lost_rank = True
        return True

    def may_hang(self, undo: ExitStack) -> None:
        """Notes that a process may keep the others waiting for longer than they wait, until a while after ``undo``."""
        process = self.process

        def over() -> None:
            if self.process is process:
                self._hangs -= 1

        self._hangs += 1
        loop, context = self.cluster.loop, self.cluster.operator.context
        undo.callback(loop.call_later, HANG_NOTICED_S, over, context=context)

    def memory_refused(self) -> None:
        """Notes that the engine or a rank is refused memory, for which the node has to end."""
        self.engine_dies()
        self._refused_memory = True

    def may_fail(self) -> None:
        """Notes that the node lacks what it needs to start."""
        self._may_fail = True

    def may_end(self) -> None:
        """Notes that the node is told to end."""
        self._told_to_end = True

    def kill_engine(self) -> None:
        assert self.process.child is not None, "no engine runs"
        self.engine_dies()
        self.process.child.end(-9)

    def drain(self) -> None:
        self.may_end()
        self.process.signal(signal.SIGTERM)


class Cluster:
    """A proxy and nodes, and the clients of the proxy. ``simulate`` makes it."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self.seed = seed
        self.shape = shape
        self.random = Random(seed)
        self.events = Events()
        self.loop = SimLoop(self.events)
        self.loop.after_turn = self._after_turn
        self.network = Network(self.loop, self.random, delay_s=shape.delay_s)
        self.network.window_bytes = 4 * shape.buffer_bytes
        self.network.buffer_bytes = shape.buffer_bytes
        self.requests: list[ClientRequest] = []
        self._asked: dict[int, ClientRequest] = {}
        """The requests by their numbers."""
        self.violations: list[str] = []
        self.undisturbed = False
        """Whether no fault and no short deadline is a reason for failures between nodes."""
        self.clocks = WallClocks(self.loop)
        self.witness = Witness(self.violated, self._clocks_agree, self._asked_for)
        self.sides: dict[SimProcess, BothSides] = {}
        """The transfers of each engine."""
        self.rank_threads: dict[SimProcess, RankThread] = {}
        """The transfer thread of each rank from 1 on."""
        self.on_transfer_state: dict[Callable[[SimProcess, TransferState], None], None] = {}
        self.proxy_processes = ProxyProcesses()
        self.fabric: Fabric
        self.proxies = [Proxy(self, number) for number in range(shape.proxies)]
        self.nodes = [Node(self, number, role) for number, role in enumerate(shape.roles)]
        self.clients = SimProcess(self.loop, "clients", CLIENTS)
        self.operator = SimProcess(self.loop, "operator", OPERATOR)

    @property
    def servers(self) -> list[Proxy | Node]:
        return [*self.proxies, *self.nodes]

    @property
    def digest(self) -> str:
        """The hash of everything that has happened."""
        return self.events.digest

    def start(self) -> None:
        for proxy in self.proxies:
            proxy.start()
        for node in self.nodes:
            node.start()

    def ask(self, request: ClientRequest) -> asyncio.Task[None]:
        """Lets a client send a request."""
        self.requests.append(request)
        self._asked[request.number] = request
        request.on_text = self._check_answer
        request.on_sent = self.witness.sent.add

        async def run() -> None:
            self.events.add(f"request {request.name} begins: {request.planned}")
            processes = self.proxies[request.planned.proxy].processes()
            stopped_before_s = {process: process.stopped_s for process in processes}
            await self._ask(request)
            self.events.add(f"request {request.name} ends: {request.told}")
            self._check_answer(request)
            took_s = request.ended_s - request.began_s
            held_up_s = request.paused_s + max(process.stopped_s - stopped_before_s[process] for process in processes)
            if took_s > self.shape.timeout_s + LATE_S + held_up_s and not request.planned.returns:
                self.violated(f"request {request.name} ended {took_s:.1f} s after it began")

        return self.as_client(run())

    def as_client(self, program: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a program on the clients' host."""
        made: list[asyncio.Task[T]] = []
        self.clients.context.run(lambda: made.append(self.loop.create_task(program)))
        return made[0]

    async def _ask(self, request: ClientRequest) -> None:
        hosts = [proxy.host for proxy in self.proxies]
        if request.planned.returns:
            await ask_until_complete(request, hosts, HTTP_PORT, RETURNS_S)
        else:
            await ask(request, hosts[request.planned.proxy], HTTP_PORT)

    def check_blocks(self) -> None:
        """Checks the blocks of every live engine."""
        for node in self.nodes:
            if node.engine is None or node.engine.process.ended:
                continue
            wrong = wrong_blocks(node.engine)
            if wrong is not None:
                self.violated(f"{node.name}: {wrong}")
            for wrong in (wrong_turns(node.engine, self._priority_of), wrong_place(node.engine)):
                if wrong is not None:
                    self.violated(f"{node.name}: {wrong}")
            self._check_held_up(node, node.engine)
            for request in node.engine.loop._scheduler.live():
                if not request.serves_push and request.terms.prompt.request_id not in self.witness.labels[node.process]:
                    self.violated(f"{node.name} serves {request}, for which it has taken no ticket")

    def _check_held_up(self, node: Node, engine: RunningEngine) -> None:
        """Checks that no request that could run waits while nothing does."""
        if not (node.held_up_s and could_run(engine) and engine.process.running):
            node.held_up_s = self.loop.time()
        elif self.loop.time() > node.held_up_s + HELD_UP_S:
            node.held_up_s = math.inf
            self.violated(f"{node.name} lets a request wait that could run, and runs nothing")

    def check_limits(self) -> None:
        """Checks that the processes of each proxy keep its limits together."""
        for proxy in self.proxies:
            serving = proxy.workers or [proxy.process]
            over = self.proxy_processes.over_limit(serving, self.shape.max_in_flight, self.shape.max_queued)
            if over is not None:
                self.violated(f"the {proxy.name} has {over}")
            for process in serving:
                if (count := self.proxy_processes.connections(process)) > self.shape.max_connections:
                    self.violated(f"{process.name} has {count} connections, and its limit is another")

    def _asked_for(self, label: str) -> PlannedRequest | None:
        number = label.removeprefix("r").partition("-")[0]
        asked = self._asked.get(int(number)) if number.isdecimal() else None
        return None if asked is None else asked.planned

    def _priority_of(self, label: str) -> int | None:
        planned = self._asked_for(label)
        return None if planned is None else planned.priority

    def _clocks_agree(self) -> bool:
        hosts = [*(node.host for node in self.nodes), *(proxy.host for proxy in self.proxies)]
        return not any(map(self.clocks.wrong_s, hosts))

    def _check_answer(self, request: ClientRequest) -> None:
        violation = request.violation()
        if violation is not None:
            self.violated(violation)

    def _after_turn(self) -> None:
        if self.loop.turns % CHECK_EVERY_TURNS == 0:
            self.check_blocks()
            self.check_limits()

    def violated(self, what: str) -> None:
        self.events.add(f"VIOLATION {what}")
        self.violations.append(what)

    def engine_started(self, engine: RunningEngine) -> None:
        self.node_at(engine.process.host).engine = engine

    def make_sides(self, engine: LocalEngine) -> BothSides:
        """Makes an engine's transfers, and keeps them to be looked at."""
        sides = self.sides[present_process()] = BothSides(engine)
        return sides

    def make_rank_thread(self, **arguments: Any) -> RankThread:
        """Makes a rank's transfer thread, and keeps it to be looked at."""
        thread = self.rank_threads[present_process()] = RankThread(**arguments)
        return thread

    def connections_of(self, process: SimProcess) -> list[str]:
        """Returns the names of the processes at the other ends."""
        return [end.peer.process.name for end in self.network.ends if end.process is process]

    def transfer_is(self, process: SimProcess, state: TransferState) -> None:
        """Notes a state into which a transfer has just come."""
        for watch in list(self.on_transfer_state):
            watch(process, state)

    def engine_failed(self, process: SimProcess, exc: Exception) -> None:
        """Notes the failure of an engine or a rank: only a fault, or a rank that is gone or hangs, is a reason."""
        what = f"{process.name} failed: {type(exc).__name__}: {exc}"
        if self.node_at(process.host).may_fail_with(exc):
            self.events.add(what)
        else:
            self.violated(what)

    def pace(self, process: SimProcess) -> Pace:
        return self.node_at(process.host).pace

    async def work(self, launch: worker.WorkerLaunch) -> int:
        """Runs a proxy's worker."""
        process = present_process()
        next(proxy for proxy in self.proxies if proxy.host == process.host).worker_started(process)
        await worker._main(launch)
        return 0

    def node_at(self, host: str) -> Node:
        return next(node for node in self.nodes if node.host == host)

    async def command(self, node: Node, command: NodeChange) -> None:
        """Has the operator send a command to a node. Raises CommandRefused."""
        await self.loop.create_task(self._command(node, command), context=self.operator.context.copy())

    async def _command(self, node: Node, command: NodeChange) -> None:
        if node.engine is None:
            raise CommandRefused("it has not started yet")
        info = NodeInfo(
            protocol=SPOKEN.newest,
            oldest_protocol=SPOKEN.oldest,
            name=node.name,
            boot_id=node.engine.boot_id,
            role=node.role,
            url=f"http://{node.host}:{HTTP_PORT}",
            control="",
            model=MODEL,
            fingerprint="",
            capacity=Capacity(1, 1, 1, 1),
        )
        async with NodeCommander(Secrets(SECRET), Trust()) as commander:
            result = await commander.send(command, info)
        self.events.add(f"{node.name} has carried out {command}: {result}")

    def run(self, scenario: Coroutine[Any, Any, None], limit_s: float, until_s: float | None = None) -> None:
        """Runs a scenario to its end, which has to come within so much virtual time, or only until some time."""
        self.loop.until = self.loop.time() + (limit_s if until_s is None else until_s)
        try:
            self.loop.run_until_complete(scenario)
        except Stuck as exc:
            if until_s is None:
                self.violated(str(exc))
        except Exception as exc:
            where = traceback.extract_tb(exc.__traceback__)[-1]
            self.violated(f"the run itself failed in {where.name}: {type(exc).__name__}: {exc}")
        # A task that has failed and is part of a cycle says so only when it is finalised.
        gc.collect()
        for failure in self.loop.failures:
            self.violated(failure)

    def close(self) -> None:
        """Ends everything that is left of the run."""
        SimThread.over = True
        # A handler that is closed while it waits is an error to uvicorn and to others.
        disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        for process in self.loop.processes:
            process.on_end.clear()
            for thread in process.threads:
                thread.kill()
        self.loop.drop_tasks()
        self.loop.close()
        logging.disable(disabled)


@contextmanager
def simulate(seed: int, shape: Shape) -> Iterator[Cluster]:
    """Yields a cluster that is not started yet. Within the block, the product's parts are simulated."""
    gc_was_on, torch_threads = gc.isenabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    # Finalisers would run at times that do not depend on the seed. What is there already stays as it is when the run
    # collects its garbage.
    if next(_runs) % COLLECT_EVERY == 0:
        gc.collect()
    gc.disable()
    gc.freeze()
    cluster = Cluster(seed, shape)
    program = EngineProgram(
        cluster.pace, shape.counts, shape.cache, shape.kv_heads, cluster.engine_started, cluster.engine_failed
    )
    rank_program = RankProgram(cluster.engine_failed)
    try:
        with (
            simulated(
                cluster.loop,
                cluster.network,
                Random(cluster.random.getrandbits(64)),
                {
                    tuple(ENGINE_COMMAND): program,
                    tuple(RANK_COMMAND): rank_program,
                    worker.WORKER_COMMAND: cluster.work,
                },
                lambda: cluster.clocks.wrong_s(present_process().host),
                pdserve__api__node__server__load_tokenizer=lambda *_: tokenizer(),
                pdserve__api__node__server__TicketGate=cluster.witness.gate(),
                pdserve_proxy__requests__admission_queue__AdmissionQueue=cluster.witness.queue(),
                pdserve_proxy__serving__TicketSigner=cluster.witness.signer(),
                pdserve_proxy__relay__relay__Dispatch=cluster.witness.dispatch(),
                pdserve__engine__scheduling__scheduler__Speculation=speculation(shape.right_drafts),
                pdserve__engine__placement__placement__PrefillNode=watched_prefill_node(cluster),
                pdserve__api__node__server__gc=SimpleNamespace(collect=lambda: None, freeze=lambda: None),
                pdserve__engine__kv_connector__transfer_memory__transport_for=lambda *_, rank, **__: partial(
                    LinkTransport, cluster.fabric, rank
                ),
                pdserve__engine__kv_connector__opening__RankThread=cluster.make_rank_thread,
                **rank_model(shape.cache, shape.kv_heads, cluster.pace),
                pdserve_kvtransfer__thread__BothSides=cluster.make_sides,
                pdserve_kvtransfer__thread__PushSide=cluster.witness.push_side(),
                pdserve_proxy__workers__worker_channel__MAX_UNANSWERED=UNANSWERED_PINGS,
                pdserve_proxy__roles__RoleDecider=watched_decider(cluster.violated),
                **cluster.proxy_processes.stand_ins(cluster.witness.admission()),
            ) as descriptors,
            watched_transfers(cluster.transfer_is),
        ):
            cluster.fabric = Fabric(cluster.network, descriptors)
            try:
                yield cluster
            finally:
                cluster.close()
    finally:
        torch.set_num_threads(torch_threads)
        gc.unfreeze()
        if gc_was_on:
            gc.enable()


def watched_prefill_node(cluster: Cluster) -> type[PrefillNode]:
    """Returns what an engine knows of a prefill node, which is watched for failures that are none."""

    class WatchedPrefillNode(PrefillNode):
        def ordered(
            self, order: Hashable, tokens: int, cached_tokens: int, expected_s: float, alone_s: float, now: float
        ) -> None:
            if 0 < self.max_prompt_tokens < tokens + cached_tokens:
                cluster.violated(f"a longer prompt is ordered from {self.name} than it takes, as it has said")
            super().ordered(order, tokens, cached_tokens, expected_s, alone_s, now)

        def failed(self, order: Hashable, now: float) -> None:
            if cluster.undisturbed:
                cluster.violated(f"{self.name} is taken for failing, without any fault")
            super().failed(order, now)

    return WatchedPrefillNode


@cache
def tokenizer() -> Tokenizer:
    """Returns a tokenizer in which each token is one character."""
    vocabulary = {chr(0x4E00 + token): token for token in range(VOCAB)}
    backend = Backend(models.WordLevel(vocabulary, unk_token=chr(0x4E00)))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    end = chr(0x4E00 + EOS)
    return Tokenizer(CachedTokenizer(backend.to_str(), {"eos_token": end}, "", split_special_tokens=False))
