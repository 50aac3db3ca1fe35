"""The faults of a soak: which ones come when, by seed, and how long the cluster takes to be whole again.

One proxy, one prefill node and one decode node are *old*: they are stopped, slowed down and cut off, and change their
roles, but are never ended, so that what they lose of memory and descriptors while all others come and go adds up. At
most one node that answers, and one proxy, is broken at a time: otherwise requests may fail as the pages say.
"""

from __future__ import annotations

import asyncio
import enum
import os
import random
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from lab.soak.cluster import LOST_ENGINE, Part, Server, SoakCluster, is_known
from pdserve.wire.discovery import Role

RECOVERY_S = 120.0
"""The cluster has to be whole again within this time after a fault is over."""
_ASKING_S = 0.25
SHORT_S = (0.3, 1.5, 3.5)
"""A node whose engine shows no life for longer, by default five seconds, ends itself."""
_SETTLING_S = 2.0
"""A fault explains what its server's clients see for so long after it is over."""


class Fault(enum.Enum):
    """What happens to a server."""

    KILL = "killed"
    KILL_ENGINE = "engine killed"
    STOP = "stopped for a while"
    STOP_ENGINE = "engine stopped for a while"
    HANG_ENGINE = "engine stopped for ever"
    STOP_API = "API process stopped for a while"
    STOP_KILL = "stopped, then killed"
    DRAIN = "drained (SIGTERM)"
    ROLE = "given another role for a while"
    STUTTER = "slowed down for a while"
    CUT = "HTTP connections cut"
    CUT_TRANSFERS = "transfers' connections cut"


ENDING = frozenset({Fault.KILL, Fault.KILL_ENGINE, Fault.HANG_ENGINE, Fault.STOP_KILL, Fault.DRAIN})
"""Faults that end the process. Old servers are spared these."""
KILLS = ENDING - {Fault.DRAIN}
LOSING = KILLS | {Fault.STOP, Fault.STOP_ENGINE, Fault.STOP_API, Fault.CUT, Fault.CUT_TRANSFERS}
"""Faults with which a node can lose requests. In a drain it has to pass them on."""
CUTS = frozenset({Fault.CUT, Fault.CUT_TRANSFERS})
"""Faults that the kernel makes, for root alone."""
OF_NODES: Mapping[Fault, int] = {
    Fault.KILL: 4,
    Fault.KILL_ENGINE: 2,
    Fault.STOP: 3,
    Fault.STOP_ENGINE: 2,
    Fault.HANG_ENGINE: 1,
    Fault.STOP_API: 2,
    Fault.STOP_KILL: 2,
    Fault.DRAIN: 3,
    Fault.ROLE: 2,
    Fault.STUTTER: 2,
    Fault.CUT: 3,
    Fault.CUT_TRANSFERS: 2,
}
OF_PROXIES: Mapping[Fault, int] = {
    Fault.KILL: 4,
    Fault.STOP: 2,
    Fault.DRAIN: 2,
    Fault.STUTTER: 1,
    Fault.CUT: 2,
}
PARTS: Mapping[Part, int] = {Part.PROXY: 2, Part.PREFILL: 3, Part.DECODE: 4}
OTHER = {Part.PREFILL: Role.DECODE, Part.DECODE: Role.PREFILL}


def is_old(server: str) -> bool:
    return server.endswith("-0")


@dataclass
class Strike:
    """One fault that came."""

    at: float
    fault: Fault
    server: str
    part: Part
    over: float = 0.0
    """When the server was left alone again; 0 while the fault goes on."""
    whole: float = 0.0
    """When the cluster was whole again."""
    failure: str = ""

    @property
    def recovery_s(self) -> float:
        return self.whole - self.over


class FaultSchedule:
    """Makes faults until it is told to stop, and remembers them."""

    def __init__(self, cluster: SoakCluster, seed: int, pause_s: float, began: float) -> None:
        self._cluster = cluster
        self._dice = random.Random(f"faults {seed}")
        self._pause_s = pause_s
        self._began = began
        self.strikes: list[Strike] = []
        self._can_cut = os.geteuid() == 0 and shutil.which("ss") is not None

    # What clients ask

    def hit(self, server: str, since: float) -> bool:
        return any(strike.server == server and _after(strike, since) for strike in self.strikes)

    def hits_on_nodes(self, since: float) -> int:
        return sum(strike.part is not Part.PROXY and _after(strike, since) for strike in self.strikes)

    def lost_nodes(self, since: float) -> int:
        losing = (one for one in self.strikes if one.part is not Part.PROXY and one.fault in LOSING)
        return len({strike.server for strike in losing if _after(strike, since)})

    async def run(self, session: aiohttp.ClientSession, until: float) -> None:
        """Makes faults until this time of ``time.monotonic``, and returns when the cluster is whole again."""
        async with asyncio.TaskGroup() as making:
            while time.monotonic() < until:
                await asyncio.sleep(min(4 * self._pause_s, self._dice.expovariate(1 / self._pause_s)))
                chosen = self._choose()
                if chosen is not None and time.monotonic() < until:
                    strike = Strike(time.monotonic(), chosen[1], chosen[0].name, chosen[0].part)
                    self.strikes.append(strike)
                    making.create_task(self._make(session, strike, chosen[0]))

    def _choose(self) -> tuple[Server, Fault] | None:
        part = self._dice.choices(list(PARTS), list(PARTS.values()))[0]
        kinds = OF_PROXIES if part is Part.PROXY else OF_NODES
        fault = self._dice.choices(list(kinds), list(kinds.values()))[0]
        servers = [server for server in self._cluster.servers.values() if server.part is part]
        if fault in ENDING:
            servers = [server for server in servers if not is_old(server.name)]
        if fault in CUTS and not self._can_cut:
            return None
        broken = [strike for strike in self.strikes if not strike.whole]
        if any(strike.part is part and part is not Part.PREFILL for strike in broken):
            return None
        server = self._dice.choice(servers)
        if any(strike.server == server.name or strike.fault is Fault.ROLE for strike in broken):
            return None
        if fault is Fault.ROLE and broken:
            return None
        return server, fault

    async def _make(self, session: aiohttp.ClientSession, strike: Strike, server: Server) -> None:
        try:
            await self._strike(session, strike.fault, server)
            strike.over = time.monotonic()
            async with asyncio.timeout(RECOVERY_S):
                await self._until_back(session, server)
        except TimeoutError:
            strike.failure = f"it was not back {RECOVERY_S:g} s later"
        except (LookupError, aiohttp.ClientError, OSError) as exc:
            strike.failure = f"the fault could not be made: {exc!r}"
        finally:
            strike.over = strike.over or time.monotonic()
            strike.whole = time.monotonic()

    async def _strike(self, session: aiohttp.ClientSession, fault: Fault, server: Server) -> None:
        match fault:
            case Fault.KILL:
                server.expect_end(-signal.SIGKILL)
                server.process.kill()
            case Fault.KILL_ENGINE:
                server.expect_end(LOST_ENGINE)
                os.kill(server.engine, signal.SIGKILL)
                await asyncio.wait_for(server.ended(), RECOVERY_S)
            case Fault.DRAIN:
                server.expect_end(0)
                server.process.terminate()
                await asyncio.wait_for(server.ended(), RECOVERY_S)
            case Fault.STOP_KILL:
                server.expect_end(-signal.SIGKILL)
                await self._stopped(server.members().values(), self._long())
                server.process.kill()
            case Fault.STOP:
                await self._stopped(server.members().values(), self._long())
            case Fault.STOP_ENGINE:
                await self._stopped([server.engine], self._dice.choice(SHORT_S))
            case Fault.HANG_ENGINE:
                engine = server.engine
                server.expect_end(LOST_ENGINE)
                _signal(engine, signal.SIGSTOP)
                await asyncio.wait_for(server.ended(), RECOVERY_S)
            case Fault.STOP_API:
                await self._stopped([server.process.pid], self._long())
            case Fault.STUTTER:
                for _ in range(self._dice.randint(10, 40)):
                    await self._stopped(server.members().values(), 0.12)
                    await asyncio.sleep(0.06)
            case Fault.ROLE:
                await self._cluster.set_role(session, server, OTHER[server.part])
                await asyncio.sleep(self._dice.uniform(1.0, 8.0))
                await self._cluster.set_role(session, server, Role(server.part.value))
            case Fault.CUT:
                await self._cut(server.url)
            case Fault.CUT_TRANSFERS:
                await self._cut(await self._cluster.control(session, server))

    async def _cut(self, url: str) -> None:
        """Has the kernel reset every TCP connection to the port in ``url``, once or a few times."""
        for _ in range(self._dice.randint(1, 3)):
            port = urlsplit(url).port
            process = await asyncio.create_subprocess_exec(
                *("ss", "-K", "-tn", "dport", "=", f":{port}"), stdout=asyncio.subprocess.DEVNULL
            )
            await process.wait()
            await asyncio.sleep(self._dice.uniform(0.0, 0.5))

    def _long(self) -> float:
        """Returns a time that may outlast leases, for a process that nobody ends meanwhile."""
        return self._dice.choice((*SHORT_S, 6.0, 9.0))

    async def _stopped(self, pids: Iterable[int], for_s: float) -> None:
        """Stops processes for a while."""
        stopped = tuple(pids)
        for pid in stopped:
            _signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            for pid in stopped:
                _signal(pid, signal.SIGCONT)

    async def _until_back(self, session: aiohttp.ClientSession, server: Server) -> None:
        while True:
            if await self._server_back(session, server):
                return
            await asyncio.sleep(_ASKING_S)

    async def _server_back(self, session: aiohttp.ClientSession, server: Server) -> bool:
        """Returns whether all that serve are whole, but those that other faults break now."""
        if not server.process.alive or server.ending or not server.url:
            return False
        broken = {strike.server for strike in self.strikes if not strike.whole} - {server.name}
        proxies = [server] if server.part is Part.PROXY else self._cluster.proxies
        nodes = self._cluster.nodes if server.part is Part.PROXY else [server]
        for proxy in proxies:
            if proxy.name in broken:
                continue
            known = await self._cluster.known(session, proxy)
            if not all(is_known(node, known) for node in nodes if node.name not in broken):
                return False
        return True


def _after(strike: Strike, since: float) -> bool:
    return not strike.whole or strike.whole + _SETTLING_S >= since


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
