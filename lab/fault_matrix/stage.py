"""The cluster that the cells break: each process on a host of its own, started again as ``pdserve up`` would do it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.fault_matrix.engine_program import CLOSED
from lab.fault_matrix.models import MAX_REQUESTS, STEP_TOKENS, Saved
from pdserve.process import PARENT_PID_ENV, parse_listening
from tests.cluster.nodes import MODEL, Metrics, http, one_core, sample
from tests.eventually import eventually
from tests.hosts.namespaces import Host, Network, network
from tests.processes import SECRET, alive, clean_environ

PROXIES = ("proxy-0", "proxy-1")
CLIENT = "client"
MAX_IN_FLIGHT = 8
ENGINE_SILENCE_MS = 2000
PROXY_PORT, PROXY_CONTROL_PORT, NODE_PORT, TRANSFER_PORT = 8000, 8100, 9000, 9100
KNOWN_PORTS = (PROXY_PORT, PROXY_CONTROL_PORT, NODE_PORT, TRANSFER_PORT)
"""All that listens but UCX, over which blocks come."""
NODE_FLAGS = (
    *("--dtype", "fp32", "--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(MAX_REQUESTS)),
    *("--prefix-cache", "off", "--disaggregation", "always", "--kv-overlap", "on", "--ucx-tls", "tcp"),
    *("--transfer-lease-ms", "1500", "--transfer-heartbeat-ms", "200", "--tp-timeout-ms", "2000"),
    *("--engine-silence-ms", str(ENGINE_SILENCE_MS)),
)
DRAFT_FLAGS = ("--speculation", "mtp", "--draft-tokens", "3")
"""With more of them, a step would reach the positions at which engines are held too early."""
PROXY_FLAGS = (
    *("--heartbeat-ms", "300", "--max-in-flight", str(MAX_IN_FLIGHT)),
    *("--port", str(PROXY_PORT), "--control-port", str(PROXY_CONTROL_PORT)),
)
END_S = 20.0
ANSWER_S = 5.0


class Logged:
    """A process that writes its log into a file, as a service does."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self.log = log
        environ = clean_environ(**{"PDSERVE_SECRET": SECRET, PARENT_PID_ENV: str(os.getpid())})
        self._from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                list(argv), env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        """What it has written."""
        return self.log.read_bytes()[self._from :].decode(errors="replace")

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None

    def listening(self) -> str:
        """Returns the process's URL as soon as it has written it. Fails the test if it ends first."""

        def found() -> str | None:
            assert not self.ended, self.output
            lines = (parse_listening(line) for line in self.output.splitlines())
            return next((line.url for line in lines if line is not None), None)

        return eventually(found, f"{self.log.stem} listens")

    def reap(self) -> None:
        """Ends the process and its children, whatever state they are in."""
        if not self.ended:
            self.popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(END_S)


def children_of(pid: int) -> list[int]:
    with suppress(FileNotFoundError):
        lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(child) for children in lists for child in children.read_text().split()]
    return []


@dataclass
class Server:
    """A proxy or a node."""

    name: str
    host: Host
    role: str
    process: Logged
    url: str = ""
    draining: bool = False
    boot: str = ""
    """Its boot id, once the proxies know it."""
    past_boot: str = ""

    @property
    def engine(self) -> int:
        """The process id of a node's engine."""
        (pid,) = children_of(self.process.pid)
        return pid

    @property
    def pids(self) -> list[int]:
        """All processes of the server, its children first."""
        own = self.process.pid
        children = children_of(own)
        return [*(rank for child in children for rank in children_of(child)), *children, own]

    def metric(self, name: str, **labels: str) -> float:
        return sample(self.url, name, **labels)


@dataclass
class Stage:
    """Two proxies, four nodes, and the network between them. Only the client's host reaches their URLs."""

    model: Saved
    folder: Path
    network: Network
    ranks: int
    servers: dict[str, Server] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Server]:
        return [server for server in self.servers.values() if server.role != "proxy"]

    @property
    def proxies(self) -> list[Server]:
        return [self.servers[name] for name in PROXIES]

    def of_role(self, role: str) -> list[Server]:
        return [server for server in self.servers.values() if server.role == role]

    def start(self, name: str) -> None:
        """Starts a server, or starts it again."""
        host, role = self.network.hosts[name], name.partition("-")[0]
        address = host.address
        if role == "proxy":
            own = ["-P", "-m", "pdserve", "proxy", *PROXY_FLAGS, "--host", address, "--control-host", address]
        else:
            own = ["-m", "lab.fault_matrix.node_program", role, str(self.folder), *self._node_flags(name, address)]
        log = self.folder / f"{name}.log"
        process = Logged([*host.prefix, sys.executable, *own], log)
        past = self.servers[name].boot if name in self.servers else ""
        self.servers[name] = Server(name, host, role, process, past_boot=past)

    def _node_flags(self, name: str, address: str) -> list[str]:
        proxies = [f"tcp://{self.network.hosts[proxy].address}:{PROXY_CONTROL_PORT}" for proxy in PROXIES]
        to_proxies = [word for proxy in proxies for word in ("--proxy", proxy)]
        ranks = ["--tensor-parallel-size", str(self.ranks)] if self.ranks > 1 else list(one_core(int(name[-1])))
        cache = ["--kv-cache-mib", str(self.model.model.kv_cache_mib)]
        drafts = DRAFT_FLAGS if self.model.model.drafts else ()
        own = ["--name", name, "--host", address, "--port", str(NODE_PORT), "--model", str(self.model.folder)]
        transfer = ["--transfer-host", address, "--transfer-port", str(TRANSFER_PORT)]
        return [*own, *transfer, "--served-model-name", MODEL, *to_proxies, *NODE_FLAGS, *cache, *drafts, *ranks]

    def until_known(self) -> None:
        """Waits until both proxies know every node as it is now, and no other."""
        for server in self.servers.values():
            server.url = server.process.listening()
        eventually(lambda: all(self._knows_all(proxy) for proxy in self.proxies), "both proxies know every node")

    def _knows_all(self, proxy: Server) -> bool:
        listed = http(proxy.url + "/instances").json()
        boots = {known["name"]: known["boot_id"] for known in listed if known["state"] == "serving"}
        if len(listed) != len(self.nodes) or len(boots) != len(self.nodes):
            return False
        for node in self.nodes:
            if boots[node.name] == node.past_boot:
                return False
            node.boot = boots[node.name]
        return True

    # ------------------------------------------------------------ the gate

    def close_gate(self) -> None:
        for held in self.folder.glob("held-*"):
            held.unlink()
        (self.folder / CLOSED).touch()

    def open_gate(self) -> None:
        (self.folder / CLOSED).unlink(missing_ok=True)

    def held(self, role: str) -> list[Server]:
        """Returns the nodes of this role that are held."""
        return [node for node in self.of_role(role) if (self.folder / f"held-{node.name}").exists()]

    # ------------------------------------------------------------ between two cells

    def mend(self) -> None:
        """Makes the cluster whole: the network, stopped and drained processes, and those that have ended."""
        self.open_gate()
        self.network.wire.mend()
        again = [server.name for server in self.servers.values() if server.draining or server.process.ended]
        for name in again:
            self.servers[name].process.reap()
            self.start(name)
        self.until_known()
        for proxy in self.proxies:
            # Right after a cut, a proxy may list nodes that it is about to drop, not having heard them for long.
            eventually(lambda: answers(proxy), f"{proxy.name} answers")  # noqa: B023
        eventually(self._idle, "every node idle, every block free")

    def _idle(self) -> bool:
        for node in self.nodes:
            if node.process.ended:
                raise AssertionError(f"{node.name} ended: {node.process.output[-2000:]}")
            now = Metrics.of(node.url)
            if now.has_requests or not now.blocks_are_free:
                return False
        # A cell finds the node of its request by a change of this count. If an older request ended at that moment, the
        # count would not change.
        every = [Metrics.of(proxy.url) for proxy in self.proxies]
        return not any(
            now.sample("proxy_node_requests_in_flight", node=node.name) for now in every for node in self.nodes
        )

    def lost_since(self, before: dict[str, int]) -> list[str]:
        """Returns the names of the nodes whose engine of ``before`` is gone."""
        return [node.name for node in self.nodes if not alive(before[node.name])]

    def engines(self) -> dict[str, int]:
        return {node.name: node.engine for node in self.nodes}


def answers(proxy: Server) -> bool:
    """Whether the proxy answers a short request."""
    body = {"model": MODEL, "prompt": list(range(10, 22)), "max_tokens": 1}
    with suppress(OSError):
        return http(proxy.url + "/v1/completions", body, timeout_s=ANSWER_S).status == 200
    return False


@contextmanager
def stage(model: Saved, folder: Path, *, ranks: int = 1) -> Iterator[Stage]:
    """Yields a running cluster. The thread that uses it is on the client's host."""
    nodes = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with network(CLIENT, *PROXIES, *nodes) as joined, joined.hosts[CLIENT].inside():
        made = Stage(model, folder, joined, ranks)
        try:
            for name in (*PROXIES, *nodes):
                made.start(name)
            began = time.monotonic()
            made.until_known()
            print(f"started in {time.monotonic() - began:.1f} s", file=sys.stderr)
            yield made
        finally:
            made.open_gate()
            for server in made.servers.values():
                with suppress(ProcessLookupError):
                    os.killpg(server.process.pid, signal.SIGCONT)
                    server.process.popen.terminate()
            for server in made.servers.values():
                server.process.reap()
