"""A decode node whose host is cut off while it streams: the stream goes on at a node on another host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, Cluster, Node, http, one_core, start_node
from tests.eventually import eventually
from tests.faults.test_failover import Client, until_received
from tests.hosts.cluster import prompt
from tests.hosts.namespaces import Network, network
from tests.processes import end_together, pdserve

# In bf16: its compiled kernels give the same bits in every batch.
FLAGS = (
    "--dtype",
    "bf16",
    "--kv-cache-mib",
    "32",
    "--max-num-seqs",
    "8",
    "--ucx-tls",
    "tcp",
    "--disaggregation",
    "always",
)
NODES = {"prefill": "prefill", "one": "decode", "other": "decode"}
"""The hosts of nodes, with their roles."""


@dataclass(frozen=True)
class Divided:
    """A cluster whose nodes are on hosts of their own."""

    network: Network
    cluster: Cluster

    def names(self) -> set[str]:
        return {known["name"] for known in http(self.cluster.url + "/instances").json()}


@pytest.fixture(scope="module")
def divided(possible: None, slow_tiny_model: Path) -> Iterator[Divided]:
    with network("client", "proxy", *NODES) as made, ExitStack() as stack:
        at = made.hosts["proxy"]
        flags = ("--host", at.address, "--port", "8000", "--control-host", at.address, "--control-port", "8100")
        proxy = stack.enter_context(pdserve("proxy", *flags, prefix=at.prefix))
        found = proxy.listening()
        running = Divided(made, Cluster(found.url, proxy, found.control))
        for index, (name, role) in enumerate(NODES.items()):
            host = made.hosts[name]
            flags = (
                "--host",
                host.address,
                "--port",
                "9000",
                "--transfer-host",
                host.address,
                "--transfer-port",
                "9100",
            )
            process = stack.enter_context(
                start_node(
                    role, name, slow_tiny_model, running.cluster, *FLAGS, *flags, *one_core(index), prefix=host.prefix
                )
            )
            nodes = running.cluster.prefill if role == "prefill" else running.cluster.decode
            nodes.append(Node(name, process, f"http://{host.address}:9000"))
        with made.hosts["client"].inside():
            eventually(lambda: running.names() == set(NODES), "every node is registered")
            yield running
        end_together([node.process for node in running.cluster.nodes])


@pytest.mark.nightly
def test_a_stream_goes_on_when_the_host_of_its_node_is_cut_off(divided: Divided) -> None:
    """In every run, the cell of ``tests/faults/matrix`` with a decode node that is cut off shows this of one stream."""
    cluster = divided.cluster
    body = {"model": MODEL, "prompt": prompt(1, 100), "max_tokens": 240, "ignore_eos": True, "seed": 1, "stream": True}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    unbroken = Client(cluster.url, "unbroken", "stream", body).answer()
    stream = Client(cluster.url, "cut", "stream", body)
    until_received(stream, 1500)
    victim = eventually(
        lambda: next((node for node in cluster.decode if node.metric("num_requests_running")), None),
        "one has the stream",
    )
    for path in divided.network.wire.around(victim.name):
        path.cut = True
    stream.answer().like(unbroken)
    assert divided.names() == set(NODES) - {victim.name}, "it was dropped before the stream went on"
    (other,) = [node.name for node in cluster.decode if node is not victim]
    assert f"request_id=cut-stream resumed from={victim.name} to={other}" in cluster.proxy.output
    divided.network.wire.mend()
    eventually(lambda: divided.names() == set(NODES), "it is registered again")
    cluster.until_idle()
