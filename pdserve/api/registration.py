"""A node's side of discovery: tells every proxy that it is there, and goes on doing so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

from pdserve.api.heartbeat_thread import HeartbeatThread
from pdserve.api.proxy_link import Standing
from pdserve.wire.discovery import Load, NodeInfo
from pdserve.wire.frame import Secrets

STUCK_S = 30.0
"""An event loop that has not turned for so long is taken for dead. Bursts of thousands of requests take seconds."""


class Registration:
    """Keeps one node registered at every proxy while ``run`` runs in an event loop that turns."""

    def __init__(
        self,
        node: NodeInfo,
        proxies: tuple[str, ...],
        secret: bytes | Secrets,
        heartbeat_ms: int,
        load: Callable[[], Load],
        stuck_s: float = STUCK_S,
    ) -> None:
        """``proxies`` are control addresses, ``tcp://host:port``.

        ``load`` is called for every heartbeat, in another thread.
        """
        self._node = node
        self._proxies = tuple(dict.fromkeys(proxies))
        self._secret = secret
        self._heartbeat_s = heartbeat_ms / 1000
        self._load = load
        self._stuck_s = stuck_s
        self._registered = {proxy: asyncio.Event() for proxy in self._proxies}
        self._standings = dict.fromkeys(self._proxies, Standing.SILENT)

    @property
    def registered(self) -> Mapping[str, asyncio.Event]:
        """By proxy address: set while that proxy knows this node."""
        return MappingProxyType(self._registered)

    @property
    def unaccepted(self) -> str | None:
        """Why no proxy has this node, for people; None if one has, or if there is none to register at."""
        if not self._proxies or any(event.is_set() for event in self._registered.values()):
            return None
        reasons = "; ".join(f"{proxy} {standing.value}" for proxy, standing in self._standings.items())
        return f"no proxy has accepted this node: {reasons}"

    async def run(self) -> None:
        """Register and send heartbeats until cancelled; then say goodbye, within ``GOODBYE_MS``.

        Returns at once if there is no proxy to register at.

        Raises ConfigError for an address that is none.
        """
        if not self._proxies:
            return
        loop = asyncio.get_running_loop()

        def tell(proxy: str, standing: Standing) -> None:
            loop.call_soon_threadsafe(self._show, proxy, standing)

        thread = HeartbeatThread(
            self._node,
            self._proxies,
            self._secret,
            heartbeat_s=self._heartbeat_s,
            stuck_s=self._stuck_s,
            load=self._load,
            tell=tell,
        )
        ended = asyncio.wrap_future(thread.start())
        try:
            while not ended.done():
                thread.pulse()
                await asyncio.wait([ended], timeout=min(self._heartbeat_s, self._stuck_s / 4))
            ended.result()
        finally:
            thread.stop()
            await asyncio.wait([ended])
            for proxy in self._proxies:
                self._show(proxy, Standing.SILENT)

    def _show(self, proxy: str, standing: Standing) -> None:
        self._standings[proxy] = standing
        if standing is Standing.ACCEPTED:
            self._registered[proxy].set()
        else:
            self._registered[proxy].clear()
