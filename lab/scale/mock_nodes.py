"""A process that plays many nodes: ``python -m lab.scale.mock_nodes PROXY FIRST COUNT ALL``.

Each node registers at PROXY and sends heartbeats over a connection of its own, with the protocol state of real nodes
and heartbeats as large as theirs. All answer requests on one port, each below a path of its own, and compute nothing.
The cluster secret comes from the environment, and the nodes are those from FIRST on of ALL.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import cast

import uvloop
import zmq

from benchmarks.proxy.mock_backend import BackendConnection
from pdserve.api.node.proxy_link import ProxyLink
from pdserve.config import CacheConfig, RegistryConfig
from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.process import allow_open_files, die_with_parent
from pdserve.wire.discovery import Capacity, ComputeCores, FromProxy, GapCounts, NodeInfo, NodeLoad, Role
from pdserve.wire.ids import new_id
from pdserve.wire.version import INSTALLED_VERSION, SPOKEN

MODEL = "scale"
HEARTBEAT_S = RegistryConfig().heartbeat_ms / 1000
MAX_RUNNING = 64
NODES_A_MACHINE = 8
_GAPS = GapCounts(tuple(0.001 * 1.5**step for step in range(20)), tuple(range(1000, 1021)))


def role_of(number: int, every: int) -> Role:
    """Returns the role of one of ``every`` nodes: each fourth one prefills, and a node that is alone does both."""
    if every < 4:
        return Role.MIXED
    return Role.PREFILL if number % 4 == 3 else Role.DECODE


def describe(number: int, every: int, url: str) -> NodeInfo:
    role = role_of(number, every)
    return NodeInfo(
        protocol=SPOKEN.newest,
        oldest_protocol=SPOKEN.oldest,
        name=f"{role.value}-{number}",
        boot_id=new_id(),
        role=role,
        url=f"{url}/node{number}",
        control="tcp://127.0.0.1:1" if role is Role.PREFILL else "",
        model=MODEL,
        fingerprint="the same for all",
        capacity=Capacity(
            max_running=MAX_RUNNING, num_blocks=2**16, block_size=CacheConfig().block_size, max_model_len=2**15
        ),
        version=INSTALLED_VERSION,
        compute=ComputeCores(f"machine-{number // NODES_A_MACHINE}", (number % NODES_A_MACHINE,), 1),
    )


class MockNode:
    """One node's side of its registration."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], node: NodeInfo, proxy: str, secret: bytes) -> None:
        self._load = NodeLoad(running=8, free_blocks=2**15, step_s=0.02, gaps=_GAPS)
        self.link = ProxyLink(node, HEARTBEAT_S, lambda: self._load, time.monotonic(), lambda: (self.link.accepted_by,))
        self._sealer = Sealer(secret, Purpose.DISCOVERY, node.boot_id)
        self._opener: Opener[FromProxy] = Opener(
            secret, Purpose.DISCOVERY, cast("type[FromProxy]", FromProxy), receiver=node.boot_id
        )
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self.socket.connect(proxy)

    def send_due(self, now: float) -> float:
        """Sends what is due, and returns when something is due next."""
        for message in self.link.tick(now):
            self.socket.send(self.link.seal(self._sealer, message), zmq.NOBLOCK)
        return self.link.due_s

    def receive(self, now: float) -> float:
        """Takes the frame that has come, and returns when something is due next."""
        self.link.answered(self._opener.open_from(self.socket.recv_multipart()[-1]), now)
        return self.link.due_s


def play(nodes: Sequence[NodeInfo], proxy: str, secret: bytes) -> None:
    """Keeps ``nodes`` registered until the process ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, len(nodes) + 16)
    poller = zmq.Poller()
    played: dict[zmq.Socket[bytes], MockNode] = {}
    due: list[tuple[float, int, MockNode]] = []
    for number, info in enumerate(nodes):
        node = MockNode(context, info, proxy, secret)
        played[node.socket] = node
        poller.register(node.socket, zmq.POLLIN)
        # Nodes start at times of their own, so their heartbeats are spread over the interval.
        heapq.heappush(due, (time.monotonic() + HEARTBEAT_S * number / len(nodes), number, node))
    while True:
        now = time.monotonic()
        while due[0][0] <= now:
            _, number, node = due[0]
            heapq.heapreplace(due, (node.send_due(now), number, node))
        for socket, _ in poller.poll(max(0, int((due[0][0] - now) * 1000) + 1)):
            node = played[socket]
            if node.receive(time.monotonic()) <= time.monotonic():
                node.send_due(time.monotonic())


async def serve(proxy: str, first: int, count: int, every: int, secret: bytes) -> None:
    server = await asyncio.get_running_loop().create_server(BackendConnection, "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()
    nodes = [describe(number, every, f"http://{host}:{port}") for number in range(first, first + count)]
    threading.Thread(target=play, args=(nodes, proxy, secret), daemon=True).start()
    await server.serve_forever()


def main() -> None:
    die_with_parent()
    allow_open_files()
    proxy, *numbers = sys.argv[1:]
    first, count, every = map(int, numbers)
    uvloop.run(serve(proxy, first, count, every, os.environ["PDSERVE_SECRET"].encode()))


if __name__ == "__main__":
    main()
