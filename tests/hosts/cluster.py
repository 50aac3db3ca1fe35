"""A cluster whose proxy, prefill nodes and decode node each run on a host of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.nodes import Cluster, Node, http, one_core, start_node
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid
from tests.hosts.namespaces import Host, Network
from tests.processes import Process, pdserve
from tests.tiny_models import random_prompt, save_tiny_chat_model

NEW_TOKENS = 8
PROMPT_TOKENS = 900
BLOCK_BYTES = 16 * 4 * 2 * 2 * 32 * 4
"""The bytes of a block of the model below: tokens, layers, KV heads, keys and values, head size, fp32."""
LEASE_S = 2.0
FLAGS = (
    *("--dtype", "fp32", "--kv-cache-mib", "64", "--max-num-batched-tokens", "64", "--max-num-seqs", "16"),
    # Without a prefix cache, every prompt has to be transferred again.
    *("--prefix-cache", "off", "--transfer-lease-ms", f"{LEASE_S * 1000:.0f}", "--transfer-heartbeat-ms", "200"),
    # Blocks are sent while later chunks are still computed.
    *("--kv-overlap", "on"),
    # These hosts share memory that UCX would find, and real hosts do not.
    *("--ucx-tls", "tcp"),
)


def tiny_model(demo_model: Path, folder: Path) -> Path:
    """Returns a model that computes almost instantly, though its prompts have megabytes of KV cache."""
    return save_tiny_chat_model(demo_model, folder, num_hidden_layers=4, head_dim=32, max_position_embeddings=2048)


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    return random_prompt(length, seed)


@dataclass
class Hosts:
    """The running cluster and its network. Its URLs can be reached only from the client's host."""

    model: Path
    network: Network
    cluster: Cluster
    stack: ExitStack

    @property
    def prefill(self) -> Node:
        return self.cluster.prefill[0]

    @property
    def decode(self) -> Node:
        return self.cluster.decode[0]

    def ask(self, seed: int) -> list[int]:
        return self.cluster.complete(prompt(seed), NEW_TOKENS, ignore_eos=True)

    def instances(self) -> set[tuple[str, str]]:
        """Returns the name and boot id of every node that the proxy knows."""
        return {(instance["name"], instance["boot_id"]) for instance in http(self.cluster.url + "/instances").json()}

    def names(self) -> set[str]:
        return {name for name, _ in self.instances()}

    def prefills(self, source: str) -> float:
        return self.decode.metric("prefills_total", source=source)

    def launch(self, role: str) -> Process:
        """Starts a node on the host that is named like its role, always at the same ports."""
        host = self.network.hosts[role]
        transfer = ("--transfer-host", host.address, "--transfer-port", "9100") if role == "prefill" else ()
        core = one_core(0 if role == "prefill" else 1)
        flags = (*FLAGS, "--host", host.address, "--port", "9000", *transfer, *core)
        return self.stack.enter_context(start_node(role, role, self.model, self.cluster, *flags, prefix=host.prefix))

    def relaunch(self, role: str) -> None:
        """Starts a new process at the address of one that has ended, and waits until the proxy knows it."""
        known = self.instances()
        process = self.launch(role)
        nodes = self.cluster.prefill if role == "prefill" else self.cluster.decode
        nodes[:] = [Node(role, process, process.listening().url)]
        eventually(lambda: self.names() == {"prefill", "decode"} and self.instances() != known, "the new boot is known")


@contextmanager
def cluster_over(network: Network, model: Path) -> Iterator[Hosts]:
    """Yields a cluster over hosts named client, proxy, prefill and decode."""
    proxy: Host = network.hosts["proxy"]
    with ExitStack() as stack:
        flags = ("--host", proxy.address, "--port", "8000", "--control-host", proxy.address, "--control-port", "8100")
        process = stack.enter_context(pdserve("proxy", *flags, prefix=proxy.prefix))
        found = process.listening()
        hosts = Hosts(model, network, Cluster(found.url, process, found.control), stack)
        starting = {role: hosts.launch(role) for role in ("prefill", "decode")}
        for role, nodes in (("prefill", hosts.cluster.prefill), ("decode", hosts.cluster.decode)):
            nodes.append(Node(role, starting[role], starting[role].listening().url))
        with network.hosts["client"].inside():
            eventually(lambda: hosts.names() == {"prefill", "decode"}, "both nodes are registered")
        yield hosts


def open_files(node: Node) -> int:
    """Returns the number of open descriptors of a node's engine."""
    return len(list(Path(f"/proc/{engine_pid(node)}/fd").iterdir()))


def threads(node: Node) -> int:
    """Returns the number of threads of a node's engine."""
    return len(list(Path(f"/proc/{engine_pid(node)}/task").iterdir()))
