"""Real clusters for tests, on loopback.

``served`` runs one as programs do, by ``pdserve.serve``. It starts nodes again that die, and gives every process the
same settings. ``cluster`` runs each process by itself, for tests that end or stop processes, wait for their exit status
or give some of them flags of their own.
"""

from __future__ import annotations

import json
import os
import random
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import pdserve
from pdserve.serving import SettingValue
from tests.cluster.process_forks import NODE, forks
from tests.eventually import eventually
from tests.processes import SECRET, Process, clean_environ, end_together
from tests.processes import pdserve as command

MODEL = "smollm2-135m-instruct"
PATIENCE_S = 60.0
EARLY_LOSS = ("--heartbeat-ms", "400")
"""Flags of a proxy that drops a silent node after 1.2 s. Tests that lose nodes wait for it, and by default for 3 s."""


@dataclass(frozen=True)
class Reply:
    """One HTTP response with any status."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def http(url: str, body: object = None, *, raw: bytes | None = None, timeout_s: float = 120.0) -> Reply:
    """Sends a GET request, or a POST request if there is a body."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Reply(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, dict(error.headers), error.read())


def random_prompt(length: int, seed: int) -> list[int]:
    """Returns token ids that the demo model and ``tiny_model`` know, always the same ones, none of which is special."""
    return random.Random(seed).choices(range(3, 4_096), k=length)


@dataclass(frozen=True)
class Metrics:
    """The ``/metrics`` of a proxy or node at one moment. A node takes 5 ms to write them."""

    text: str

    @classmethod
    def of(cls, url: str) -> Metrics:
        return cls(http(url + "/metrics").body.decode())

    def sample(self, name: str, **labels: str) -> float:
        """Returns one sample, or 0 if there is none."""
        wanted = "pdserve_" + name
        if labels:
            wanted += "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
        found = re.search(rf"^{re.escape(wanted)} (\S+)$", self.text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def groups(self, name: str) -> dict[str, float]:
        """Returns a metric of each cache group of a node that is no whole contexts, by the group's name."""
        found = re.findall(rf'^pdserve_{name}{{group="(.+)"}} (\S+)$', self.text, re.M)
        return {group: float(value) for group, value in found}

    @property
    def blocks_are_free(self) -> bool:
        """Whether a node has all of its blocks: of contexts, and of windows and states, if the model has any."""
        held = any(map(self.sample, ("kv_cache_usage_perc", "quarantined_blocks")))
        return not held and self.groups("cache_group_blocks") == self.groups("cache_group_free_blocks")

    @property
    def has_requests(self) -> bool:
        states = ("running", "waiting", "waiting_for_remote_kvs")
        return any(self.sample(f"num_requests_{state}") for state in states)


def sample(url: str, name: str, **labels: str) -> float:
    """Returns one sample of the ``/metrics`` of a proxy or node, or 0 if it has none."""
    return Metrics.of(url).sample(name, **labels)


def group_samples(url: str, name: str) -> dict[str, float]:
    """Returns a metric of each cache group of a node that is no whole contexts, by the group's name."""
    return Metrics.of(url).groups(name)


class Log(Protocol):
    """What a process has written."""

    @property
    def lines(self) -> list[str]: ...

    @property
    def output(self) -> str: ...

    def wait_for(self, wanted: Callable[[str], object], timeout_s: float = PATIENCE_S) -> str:
        """Returns the first line, of those so far and those to come, for which ``wanted`` is true."""


@dataclass(frozen=True)
class LogFile:
    """A log that the cluster keeps in a file."""

    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    def wait_for(self, wanted: Callable[[str], object], timeout_s: float = PATIENCE_S) -> str:
        found = eventually(lambda: [line for line in self.lines if wanted(line)], f"a line in {self.path}", timeout_s)
        return found[0]


@dataclass(frozen=True)
class ServedNode:
    """A node of a running cluster."""

    name: str
    log: Log
    url: str

    def metric(self, name: str, **labels: str) -> float:
        """Returns one sample of the node's ``/metrics``, or 0 if it has none."""
        return sample(self.url, name, **labels)

    @property
    def idle(self) -> bool:
        """Whether the node has no requests and all of its blocks are free."""
        now = Metrics.of(self.url)
        return now.blocks_are_free and not now.has_requests


@dataclass(frozen=True)
class Node(ServedNode):
    """A node whose process belongs to the test."""

    log: Process

    @property
    def process(self) -> Process:
        return self.log


@dataclass
class ServedCluster:
    """Named nodes behind one proxy. Mixed nodes count as decode nodes."""

    url: str
    proxy: Log
    prefill: Sequence[ServedNode] = field(default_factory=list, kw_only=True)
    decode: Sequence[ServedNode] = field(default_factory=list, kw_only=True)

    @property
    def nodes(self) -> Sequence[ServedNode]:
        return [*self.prefill, *self.decode]

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **more: object) -> list[int]:
        """Returns the generated token ids of a greedy completion, which must succeed."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }
        reply = http(self.url + "/v1/completions", body)
        assert reply.status == 200, reply.body
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    def until_idle(self, timeout_s: float = PATIENCE_S) -> None:
        eventually(lambda: all(node.idle for node in self.nodes), "every node idle, every block free", timeout_s)


@dataclass
class Cluster(ServedCluster):
    """A cluster whose processes belong to the test."""

    proxy: Process
    control: str
    others: Sequence[str] = ()
    """The URLs of further proxies of the same nodes."""
    prefill: list[Node] = field(default_factory=list, kw_only=True)
    decode: list[Node] = field(default_factory=list, kw_only=True)

    def behind(self, url: str) -> Cluster:
        """Returns the same nodes behind one of the other proxies."""
        return replace(self, url=url)

    @property
    def nodes(self) -> list[Node]:
        return self.prefill + self.decode

    def answering(self, label: str) -> Node:
        """Returns the node that answers the request with the id ``label``."""
        proxy, *_ = http(f"{self.url}/requests/{label}/timeline").json()["parts"]
        # An attempt at a node that has just been lost may have come before.
        *_, name = (phase["node"] for phase in proxy["phases"] if phase["kind"] == "attempt")
        return next(node for node in self.nodes if node.name == name)


@contextmanager
def served(
    model: Path | str, *, prefill: int = 1, decode: int = 1, mixed: int = 0, **settings: SettingValue
) -> Iterator[ServedCluster]:
    """Serves ``model`` within the block. By default, decode nodes have every prompt prefilled remotely."""
    own: dict[str, Any] = {"kv_cache_mib": 256, "disaggregation": "always", "store": True}
    with TemporaryDirectory() as state:
        environ = clean_environ(PDSERVE_SECRET=SECRET, PDSERVE_SERVED_MODEL_NAME=MODEL, XDG_STATE_HOME=state)
        roles = {"prefill": prefill, "decode": decode, "mixed": mixed}
        with pdserve.serve(model, **roles, environ=environ, **(own | settings)) as running:
            logs = running.logs
            assert logs is not None
            made = {node: ServedNode(node.name, LogFile(logs / f"{node.name}.log"), node.url) for node in running.nodes}
            yield ServedCluster(
                running.url,
                LogFile(logs / "proxy.log"),
                prefill=[own for node, own in made.items() if node.role is pdserve.Role.PREFILL],
                decode=[own for node, own in made.items() if node.role is not pdserve.Role.PREFILL],
            )


@contextmanager
def cluster(
    model: Path | str,
    *node_flags: str,
    prefill: int = 1,
    decode: int = 1,
    mixed: int = 0,
    proxy_flags: Sequence[str] = (),
    others: Sequence[Sequence[str]] = (),
    forked: bool = False,
) -> Iterator[Cluster]:
    """Starts a cluster, waits until its proxies know every node, and stops it at the end of the block.

    Each of ``others`` is the flags of a further proxy of the same nodes. All processes may be ``forked`` where a test
    neither stops nor kills one, nor asks the system about it.
    """
    with ExitStack() as stack:
        proxy, *more = (stack.enter_context(start_proxy(*flags, forked=forked)) for flags in (proxy_flags, *others))
        found, beside = proxy.listening(), [each.listening() for each in more]
        made = Cluster(found.url, proxy, found.control, [each.url for each in beside])
        joined = [word for each in beside for word in ("--proxy", each.control)]
        starting: list[tuple[str, str, Process]] = []
        for role, count in (("prefill", prefill), ("decode", decode), ("mixed", mixed)):
            for i in range(count):
                name = f"{role}-{i}"
                flags = [*node_flags, *joined, *one_core(i)]
                started = stack.enter_context(start_node(role, name, model, made, *flags, forked=forked))
                starting.append((role, name, started))
        for role, name, process in starting:
            node = Node(name, process, process.listening().url)
            (made.prefill if role == "prefill" else made.decode).append(node)
        for url in (made.url, *made.others):
            eventually(lambda: len(http(url + "/instances").json()) == len(starting), "every node registered")  # noqa: B023
        try:
            yield made
        finally:
            end_together([process for _, _, process in starting])


def one_core(index: int) -> tuple[str, str]:
    """Returns flags that give an engine one core. Engines that all use every core slow each other down."""
    cores = sorted(os.sched_getaffinity(0))
    return "--cores", str(cores[index % len(cores)])


@contextmanager
def start_proxy(*flags: str, forked: bool = False) -> Iterator[Process]:
    """Starts a proxy at ports that the system chooses."""
    program = forks().command("pdserve") if forked else ()
    with command("proxy", "--port", "0", "--control-port", "0", "--store", *flags, program=program) as process:
        yield process


@contextmanager
def start_node(
    role: str,
    name: str,
    model: Path | str,
    cluster: Cluster,
    *flags: str,
    prefix: Sequence[str] = (),
    module: str = "",
    forked: bool = False,
) -> Iterator[Process]:
    """Starts a further node of a running cluster. By default, it has every prompt prefilled remotely."""
    defaults = {"--kv-cache-mib": "256", "--disaggregation": "always"}
    more = [word for flag, value in defaults.items() if flag not in flags for word in (flag, value)]
    of_cluster = ["--model", str(model), "--served-model-name", MODEL, "--proxy", cluster.control]
    program = forks().command(module or NODE, forks().socket) if forked else ()
    argv = (role, "--name", name, *of_cluster, *more, *flags)
    with command(*argv, prefix=prefix, module=module, program=program) as process:
        yield process
