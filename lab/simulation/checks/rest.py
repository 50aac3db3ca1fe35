"""What is left in processes when a cluster has had no request for a while: transfers, tasks, timers and connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from lab.simulation.machine.virtual_time import PROCESS, SimProcess
from pdserve.patience import PatientTimer
from pdserve_kvtransfer.fetch.port import FetchPort
from pdserve_kvtransfer.push.port import PushPort
from pdserve_kvtransfer.rank_thread import RankThread
from pdserve_kvtransfer.thread import BothSides

IDLE_TIMERS = frozenset({"ExpiryQueue._expire", "GuardedHttp.timeout_keep_alive_handler"})
"""Those of connections between a proxy and a node, which stay open for the next request."""


def tasks_of(process: SimProcess) -> Counter[str]:
    """Returns how many tasks there are of each coroutine function."""
    return Counter(task.get_coro().__qualname__ for task in process.tasks if not task.done())  # type: ignore[union-attr]


def product_timers_of(process: SimProcess) -> Counter[str]:
    """Returns the product's timers that are not asyncio's or the simulation's own, by the functions that they call."""
    timers: Counter[str] = Counter()
    for _, _, handle in process.loop.timers:
        callback: Any = handle._callback  # type: ignore[attr-defined]
        timer = getattr(callback, "__self__", None)
        if isinstance(timer, PatientTimer):
            callback = timer._callback
        module = getattr(callback, "__module__", "") or ""
        if handle._context.get(PROCESS) is process and not module.startswith(("asyncio", "lab.")):  # type: ignore[attr-defined]
            timers[callback.__qualname__] += 1
    return timers


def left_in(process: SimProcess, settled: Counter[str]) -> Iterator[str]:
    """Yields what a proxy's or node's process has more than ``settled``, the tasks of one without requests."""
    for name, count in (tasks_of(process) - settled).items():
        yield f"{count} more of the task {name}"
    for name, count in product_timers_of(process).items():
        if name not in IDLE_TIMERS:
            yield f"{count} of the timer {name}"


def left_at_rank(thread: RankThread) -> Iterator[str]:
    """Yields what the ports of a rank still have to receive or to send, and links that broke and are not closed."""
    for port in thread._ports.values():
        if isinstance(port, FetchPort | PushPort) and port._link.broken:
            yield "a link that broke is not closed"
        match port:
            case FetchPort() if port._landings or port._in_flight:
                yield f"the blocks of {len(port._landings)} fetches are to land"
            case PushPort() if port._unposted or port._in_flight:
                yield f"the blocks of {len(port._unposted)} pushes are to be sent"


def left_transfers(sides: BothSides) -> Iterator[str]:
    """Yields the transfers that an engine has, and the peers that it has lost and not let go."""
    for name, side in (("fetching", sides._fetch), ("pushing", sides._push)):
        peers: list[Any] = [*side._peers.values(), *side._closing]
        for peer in peers:
            sessions = [*peer._sessions.values(), *peer._tags.values()]
            if sessions:
                yield f"{name}: {sessions[0]} is {sessions[0].state}"
        if side._closing:
            yield f"{name}: {len(side._closing)} lost peers are not closed"
