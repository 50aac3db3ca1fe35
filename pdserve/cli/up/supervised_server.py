"""A server that ``pdserve up`` starts again when it dies, a bounded number of times, and kills when it hangs."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from pdserve.cli.up.output import Console
from pdserve.liveness import Motion, Silence, motion_of
from pdserve.process import ChildDied, ServerProcess

MAX_RESTARTS = 3
STEADY_S = 60.0
FIRST_PAUSE_S = 0.5
PROBE_S = 2.0
"""Seconds between two questions whether a server lives."""
ANSWER_S = 3.0
"""Seconds that it has for an answer."""
STILL_S = 20.0
"""A server that has not answered for so long, and did not run meanwhile, hangs. One that ends may take half as long."""
BUSY_S = 120.0
"""One that runs has so long: its machine may have far more to do than it can."""


class Restarts:
    """Says how long to wait before a server that has died is started again.

    A start counts until the server has served for ``STEADY_S``, however long it took to start. So a server that always
    dies while it loads its weights is not started again for ever.
    """

    def __init__(self) -> None:
        self._count = 0

    def pause_s(self, served_s: float) -> float | None:
        """Notes a death after ``served_s`` of service, and returns the pause; None after too many starts."""
        if served_s >= STEADY_S:
            self._count = 0
        self._count += 1
        return FIRST_PAUSE_S * 2.0 ** (self._count - 1) if self._count <= MAX_RESTARTS else None


class SupervisedServer:
    """One server of a cluster. The caller has to end its newest ``process``, whatever happened before."""

    def __init__(
        self,
        name: str,
        environ: Mapping[str, str],
        console: Console,
        command: Sequence[str],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Starts the server. ``tls`` is for requests to it, if it serves HTTPS."""
        self.name = name
        self._tls = tls
        self._environ = environ
        self._console = console
        self.process = self._start(command)

    @property
    def url(self) -> str:
        """Where the server listens; empty as long as it has not said so."""
        return self.process.url

    async def keep(self, command: Sequence[str], again: Callable[[], None] = lambda: None) -> None:
        """Starts the server again, with ``command``, whenever it has died, says so, and calls ``again`` when it serves.

        Returns when the server has ended with status 0, because somebody has stopped it. Raises ChildDied when it has
        died too often.
        """
        restarts = Restarts()
        served_s, status = await self._served(self.process)
        while status != 0:
            died = self.process.died()
            pause_s = restarts.pause_s(served_s)
            if pause_s is None:
                times = f"{MAX_RESTARTS + 1} times without {STEADY_S:.0f} s of service in between"
                raise ChildDied(f"{self.name} has died {times}; the last time, {died}")
            self._console.say(str(died))
            self._console.say(f"{self.name} is started again in {pause_s:g} s")
            await self.process.end(0.0)
            await asyncio.sleep(pause_s)
            self.process = self._start(command)
            served_s, status = await self._served(self.process, again)
        self._console.say(f"{self.name} was stopped, and is not started again")

    def _start(self, command: Sequence[str]) -> ServerProcess:
        return ServerProcess(self.name, command, self._environ, self._console.relay)

    async def _served(self, process: ServerProcess, again: Callable[[], None] | None = None) -> tuple[float, int]:
        """Returns how long the process has served, once it has ended, and its exit status.

        Says that it serves ``again`` as soon as it does, if it was started again.
        """
        try:
            await process.listening()
        except ChildDied:
            return 0.0, await process.wait()
        if again is not None:
            self._console.say(f"{self.name} serves again")
            again()
        began = asyncio.get_running_loop().time()
        status = await self._ended(process)
        return asyncio.get_running_loop().time() - began, status

    async def _ended(self, process: ServerProcess) -> int:
        """Waits until the server has ended, and kills it when it hangs. Returns its exit status."""
        loop, silence, answers = asyncio.get_running_loop(), Silence(STILL_S, BUSY_S), 0
        ended, looked_s = asyncio.ensure_future(process.wait()), loop.time()
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=PROBE_S)
                answers += await self._lives(process.url)
                # This process may have been stopped itself. Then the server has not been asked meanwhile.
                passed_s, looked_s = min(loop.time() - looked_s, PROBE_S + ANSWER_S), loop.time()
                motion = motion_of(process.pid, process.pid) or Motion(0.0, wants_core=True)
                if silence.look(answers, math.inf, motion, passed_s) and not ended.done():
                    self._console.say(f"{self.name} does not answer, and is killed")
                    process.kill()
                    await ended
            return ended.result()
        finally:
            ended.cancel()

    async def _lives(self, url: str) -> bool:
        connector = aiohttp.TCPConnector(ssl=self._tls or True)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            try:
                async with session.get(f"{url}/live") as response:
                    return response.status == 200
            except (aiohttp.ClientError, TimeoutError):
                return False
