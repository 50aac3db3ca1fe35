"""Runs a plan, and checks what has to hold in every run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lab.simulation.checks.counters import wrong_counters
from lab.simulation.checks.rest import left_at_rank, left_in, left_transfers, tasks_of
from lab.simulation.checks.witness import Witness
from lab.simulation.clients import COME_BACK, ClientRequest, Outcome
from lab.simulation.cluster import Cluster, Proxy, simulate
from lab.simulation.faults import Faults
from lab.simulation.intrusions import intrude
from lab.simulation.machine.virtual_time import PROCESS, START_S, Events, SimProcess
from lab.simulation.plan import PROBE, SETTLED_S, Manner, Plan, PlannedRequest
from pdserve.wire.discovery import Role

ANSWERED_S = 45.0
"""A request has ended by then: its deadline of 20 s, and what noticing a dead node and a retry may take beyond."""
REST_S = 40.0
"""After so long without a request, nothing is left of any."""
RECOVERED_S = 30.0
"""When all faults are over, a new request is answered after this time at the latest."""
STOPPED_S = 60.0
GONE_S = 1.0
"""Without a fault, nodes have heard by then that a client has left."""
LIMIT_S = 400.0
ACCESS_LOG = "pdserve_proxy.requests"
LOGGERS = ("pdserve", "pdserve_proxy", "pdserve_kvtransfer")


@dataclass(frozen=True)
class Result:
    """What a run has shown."""

    violations: tuple[str, ...]
    lines: tuple[str, ...]
    digest: str
    outcomes: tuple[Outcome | None, ...]
    virtual_s: float
    turns: int


class Run:
    """One run of a plan."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.plan = plan
        self.faults = Faults(cluster)

    async def scenario(self) -> None:
        cluster, plan = self.cluster, self.plan
        cluster.undisturbed = not (plan.faults or plan.shape.in_a_hurry or plan.shape.moves_roles)
        cluster.start()
        await asyncio.sleep(SETTLED_S)
        self.settled = {kind: tasks_of(process) for kind, process in self._processes()}
        clients = asyncio.gather(*(self._client(i, request) for i, request in enumerate(plan.requests)))
        serves = not plan.faults
        intrusions = asyncio.gather(*(intrude(cluster, one, serves=serves) for one in plan.intrusions))
        faults = asyncio.gather(*(self.faults.happen(fault) for fault in plan.faults))
        try:
            async with asyncio.timeout(ANSWERED_S):
                await clients
        except TimeoutError:
            for request in cluster.requests:
                if not request.outcomes:
                    cluster.violated(f"request {request.name} has no outcome after {ANSWERED_S:.0f} s")
        await faults
        await intrusions
        await self._recovered()
        await asyncio.sleep(REST_S)
        self._at_rest()
        await self._check_counters()
        await self._stopped()

    def _processes(self) -> Iterator[tuple[str, SimProcess]]:
        """Yields the processes with an event loop, and what each is to the cluster."""
        for server in self.cluster.servers:
            # Only the first proxy moves nodes between the roles.
            yield server.name if isinstance(server, Proxy) else "Node", server.process
        for proxy in self.cluster.proxies:
            for worker in proxy.workers:
                yield "Worker", worker

    async def _client(self, number: int, planned: PlannedRequest) -> None:
        await asyncio.sleep(planned.at_s)
        asked = [self._asked(ClientRequest(number, planned))]
        if planned.asks_again_s is not None:
            asked.append(self._asked(ClientRequest(number, planned, again=True), planned.asks_again_s))
        await asyncio.gather(*asked)

    async def _asked(self, request: ClientRequest, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        await self.cluster.ask(request)
        shape, planned, whole = self.plan.shape, request.planned, request.outcomes == [Outcome.COMPLETE]
        if "deadline" in request.error and planned.manner.sends_all and not shape.in_a_hurry:
            # Every fault is over long before.
            self.cluster.violated(f"request {request.name} waited until its deadline")
        if planned.returns and not (whole or shape.in_a_hurry):
            self.cluster.violated(f"the client of request {request.name} came back again and again in vain")
        if self.plan.faults:
            return
        if not planned.stays and planned.manner is Manner.PLAIN and not planned.key:
            await asyncio.sleep(GONE_S)
            self._check_gone(request)
        if not planned.stays or whole:
            return
        self._check_tried(request)
        if not (shape.turns_away and request.status in COME_BACK) and not shape.in_a_hurry:
            self.cluster.violated(f"request {request.name} was not answered, without any fault")

    def _check_tried(self, request: ClientRequest) -> None:
        """Checks that a request was not turned away for busy nodes while there was one that was not asked."""
        shape = self.plan.shape
        answering = sum(role is not Role.PREFILL for role in shape.roles)
        tried = len(self.cluster.witness.tried[request.label])
        if "overloaded" in request.error and tried < answering and not shape.moves_roles:
            self.cluster.violated(f"request {request.name} was turned away by {tried} of {answering} nodes")

    async def _check_counters(self) -> None:
        for wrong in await wrong_counters(self.cluster, self.plan):
            self.cluster.violated(wrong)

    def _check_gone(self, request: ClientRequest) -> None:
        """Checks that nobody works for a client that has left."""
        for node in self.cluster.nodes:
            if node.engine is not None and any(
                live.terms.prompt.request_id == request.label for live in node.engine.loop._scheduler.live()
            ):
                self.cluster.violated(f"{node.name} still has request {request.name}, whose client has left")

    async def _recovered(self) -> None:
        """Asks each proxy again and again for a short answer, until one comes whole."""
        cluster = self.cluster
        until = cluster.loop.time() + RECOVERED_S
        silent = list(range(len(cluster.proxies)))
        while cluster.loop.time() < until:
            request = ClientRequest(len(cluster.requests), replace(PROBE, proxy=silent[0]))
            await cluster.ask(request)
            in_time = not (self.plan.shape.in_a_hurry and "deadline" in request.error)
            if request.outcomes == [Outcome.COMPLETE] or not in_time:
                del silent[0]
            if not silent:
                return
            await asyncio.sleep(0.5)
        cluster.violated(f"the cluster answers nothing {RECOVERED_S:.0f} s after the last fault")

    def _at_rest(self) -> None:
        cluster = self.cluster
        cluster.check_blocks()
        for kind, process in self._processes():
            for what in left_in(process, self.settled[kind]):
                cluster.violated(f"{process.name} has at rest {what}")
        if self.plan.shape.moves_roles and cluster.proxy_processes.lacks_role(cluster.proxies[0].process):
            cluster.violated("a role has no node at rest")
        for proxy in cluster.proxies if self.plan.shape.workers > 1 else ():
            if len(proxy.workers) != self.plan.shape.workers:
                cluster.violated(f"the {proxy.name} has {len(proxy.workers)} workers at rest")
            if not self.plan.faults and len(proxy.process.children) > self.plan.shape.workers:
                cluster.violated(f"a worker of the {proxy.name} was replaced, without any fault")
            for what in cluster.proxy_processes.disagreements(proxy.process, proxy.workers):
                cluster.violated(what)
        if not self.plan.faults and cluster.proxy_processes.lost:
            cluster.violated(f"a proxy has lost {cluster.proxy_processes.lost}, without any fault")
        if cluster.clients.tasks or cluster.connections_of(cluster.clients):
            cluster.violated("a client's connection is still open at rest")
        for node in cluster.nodes:
            engine = node.engine
            if not node.alive or engine is None:
                cluster.violated(f"{node.name} is not there any more")
                continue
            live = list(engine.loop._scheduler.live())
            if live:
                cluster.violated(f"{node.name} still has {live}")
            for what in left_transfers(cluster.sides[engine.process]):
                cluster.violated(f"{node.name} has at rest {what}")
            for rank in node.ranks():
                for what in left_at_rank(cluster.rank_threads[rank]):
                    cluster.violated(f"{rank.name} has at rest: {what}")
            stats = engine.connector.stats()
            if not self.plan.faults and (stats.leases_expired_sending or stats.leases_expired_receiving):
                cluster.violated(f"a lease ran out at {node.name}, without any fault")
            for pool in engine.blocks.pools:
                if pool.num_free != len(pool.ids):
                    cluster.violated(
                        f"{node.name} has {pool.num_free} of {len(pool.ids)} blocks {pool.name} free at rest, and "
                        f"{engine.blocks.num_quarantined} quarantined"
                    )

    async def _stopped(self) -> None:
        """Ends every process in good order: each lets go of everything."""
        cluster = self.cluster
        running = {proxy: proxy.workers for proxy in cluster.proxies}
        for node in cluster.nodes:
            node.drain()
        await asyncio.sleep(STOPPED_S / 2)
        for proxy in cluster.proxies:
            proxy.stop()
        await asyncio.sleep(STOPPED_S / 2)
        workers = [worker for proxy in cluster.proxies for worker in running[proxy]]
        for process in [*(server.process for server in cluster.servers), *workers]:
            if not process.ended:
                cluster.violated(f"{process.name} does not end")
            elif process.status != 0:
                cluster.violated(f"{process.name} ended with {process.status}")
            elif left := [task for task in process.tasks if not task.done()]:
                cluster.violated(f"{process.name} has ended and left {left}")


class _LogLines(logging.Handler):
    """Adds the product's own log lines to the events."""

    def __init__(self, events: Events, witness: Witness) -> None:
        super().__init__(logging.DEBUG)
        self._events = events
        self._witness = witness

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        self._events.add(f"{process.name if process is not None else '-'}: {record.levelname} {record.getMessage()}")
        if record.name == ACCESS_LOG and isinstance(record.args, tuple):
            self._witness.end(record.args)
        if record.exc_info is not None and record.exc_info[1] is not None:
            self._events.add(f"    {record.exc_info[1]!r}")


@contextmanager
def _logged(cluster: Cluster, level: int) -> Iterator[None]:
    handler = _LogLines(cluster.events, cluster.witness)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, old_level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(old_level)
            logger.propagate = propagate


def run_plan(seed: int, plan: Plan, *, until_s: float | None = None, level: int = logging.INFO) -> Result:
    """Runs a plan. ``seed`` decides all chances in the run; ``until_s`` ends it early."""
    with simulate(seed, plan.shape) as cluster, _logged(cluster, level):
        run = Run(cluster, plan)
        cluster.run(run.scenario(), LIMIT_S, until_s)
        return Result(
            tuple(cluster.violations),
            tuple(cluster.events.lines),
            cluster.digest,
            tuple(request.outcomes[-1] if request.outcomes else None for request in cluster.requests),
            cluster.loop.time() - START_S,
            cluster.loop.turns,
        )


def shrunk(seed: int, plan: Plan, attempts: int = 200) -> Plan:
    """Returns a smaller plan that still violates something, if one is found in so many runs."""
    candidates = plan.smaller()
    for _ in range(attempts):
        smaller = next(candidates, None)
        if smaller is None:
            break
        if run_plan(seed, smaller).violations:
            plan, candidates = smaller, smaller.smaller()
    return plan
