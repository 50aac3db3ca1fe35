"""A server that ``pdserve up`` starts again when it dies, a bounded number of times."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pdserve.cli.console import Console
from pdserve.process import ChildDied, ServerProcess

MAX_RESTARTS = 3
STEADY_S = 60.0
FIRST_PAUSE_S = 0.5


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


class KeptServer:
    """One server of a cluster. The caller has to end its newest ``process``, whatever happened before."""

    def __init__(self, name: str, environ: Mapping[str, str], console: Console, command: Sequence[str]) -> None:
        """Starts the server."""
        self.name = name
        self._environ = environ
        self._console = console
        self.process = self._start(command)

    @property
    def url(self) -> str:
        """Where the server listens; empty as long as it has not said so."""
        return self.process.url

    async def keep(self, command: Sequence[str]) -> None:
        """Starts the server again, with ``command``, whenever it has died, and says so.

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
            served_s, status = await self._served(self.process, f"{self.name} serves again")
        self._console.say(f"{self.name} was stopped, and is not started again")

    def _start(self, command: Sequence[str]) -> ServerProcess:
        return ServerProcess(self.name, command, self._environ, self._console.relay)

    async def _served(self, process: ServerProcess, words: str = "") -> tuple[float, int]:
        """Returns how long the process has served, once it has ended, and its exit status.

        Says ``words`` as soon as the process serves.
        """
        try:
            await process.listening()
        except ChildDied:
            return 0.0, await process.wait()
        if words:
            self._console.say(words)
        began = asyncio.get_running_loop().time()
        status = await process.wait()
        return asyncio.get_running_loop().time() - began, status
