"""One proxy for the tests of a module, each of which has nodes of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from tests.proxy.cluster import Cluster, eventually, figures, metric


class SharedProxy:
    """A proxy that serves one test after another. It remembers no suspected request, or tests could refuse each other.

    A test that needs settings of its own, or a proxy that starts or ends, has a ``cluster`` of its own.
    """

    def __init__(self, running: Cluster) -> None:
        self._running = running

    @asynccontextmanager
    async def cluster(self) -> AsyncIterator[Cluster]:
        """Yields the proxy without nodes. Its figures begin at 0; at the exit its requests have ended."""
        async with AsyncExitStack() as nodes:
            before = await figures(self._running)
            running = dataclasses.replace(self._running, nodes=nodes, registrations={}, before=before)
            yield running

        async def nothing_left() -> bool:
            return not await running.instances() and await metric(running, "pdserve_proxy_requests_in_flight") == 0

        await eventually(nothing_left, "the next test finds the proxy as this one did")
