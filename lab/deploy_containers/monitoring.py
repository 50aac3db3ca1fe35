"""A real Prometheus that does what the PodMonitor and the rules say, as its operator would have it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from lab.deploy_containers.stand_in.cluster import Cluster
from lab.deploy_containers.stand_in.manifests import Manifests, PodMonitor, PrometheusRule
from lab.deploy_containers.stand_in.packet_rules import Endpoint
from lab.deploy_containers.stand_in.pod_network import socket_on
from lab.deploy_containers.stand_in.podman import end
from tests.hosts.namespaces import Host

INTERVAL = "5s"
"""In place of the PodMonitor's: the test has minutes, and a rate needs two scrapes."""
FOR = "5s"
"""In place of each alert's, if it has one."""
RATE = "1m"
_PORT = 9090
_READY_S = 60.0
_UPPER = re.compile(r"(?<!^)(?=[A-Z])")


def configuration(monitors: list[PodMonitor], folder: Path) -> dict[str, Any]:
    """Returns Prometheus's configuration for these monitors. Their targets come from files in ``folder``."""
    jobs = []
    for monitor in monitors:
        for i, endpoint in enumerate(monitor.spec.pod_metrics_endpoints):
            jobs.append(
                {
                    "job_name": f"{monitor.metadata.namespace}/{monitor.metadata.name}/{i}",
                    "metrics_path": endpoint.path,
                    "scrape_interval": INTERVAL,
                    "scrape_timeout": INTERVAL,
                    "honor_labels": endpoint.honor_labels,
                    "file_sd_configs": [{"files": [str(target_file(folder, monitor, i))], "refresh_interval": "1s"}],
                    "relabel_configs": [*map(_snake, endpoint.relabelings)],
                    "metric_relabel_configs": [*map(_snake, endpoint.metric_relabelings)],
                }
            )
    timing = {"scrape_interval": INTERVAL, "evaluation_interval": "1s"}
    return {"global": timing, "rule_files": [str(folder / "rules.yaml")], "scrape_configs": jobs}


def _snake(relabeling: dict[str, Any]) -> dict[str, Any]:
    """Returns a relabelling in Prometheus's own words. The operator's have capitals."""
    return {_UPPER.sub("_", key).lower(): value for key, value in relabeling.items()}


def target_file(folder: Path, monitor: PodMonitor, number: int) -> Path:
    return folder / f"targets-{monitor.metadata.name}-{number}.json"


def targets(monitor: PodMonitor, number: int, pods: list[Endpoint]) -> list[dict[str, Any]]:
    """Returns the pods that one endpoint of a monitor scrapes, with the labels that the operator gives them."""
    port = monitor.spec.pod_metrics_endpoints[number].port
    spaces = monitor.spec.namespace_selector
    names = spaces.match_names or (monitor.metadata.namespace,)
    found = []
    for pod in pods:
        if port not in pod.ports or not monitor.spec.selector.selects(pod.labels):
            continue
        if not spaces.any and pod.namespace not in names:
            continue
        labels = {
            "job": f"{monitor.metadata.namespace}/{monitor.metadata.name}",
            "namespace": pod.namespace,
            "pod": pod.name,
            "endpoint": port,
            "__meta_kubernetes_pod_name": pod.name,
            "__meta_kubernetes_namespace": pod.namespace,
        }
        labels |= {f"__meta_kubernetes_pod_label_{_word(key)}": value for key, value in pod.labels.items()}
        found.append({"targets": [f"{pod.address}:{pod.ports[port]}"], "labels": labels})
    return found


def _word(label: str) -> str:
    return re.sub(r"\W", "_", label)


def rules(found: list[PrometheusRule]) -> dict[str, Any]:
    """Returns a file of rules that wait ``FOR`` at most."""
    groups = [msgspec.to_builtins(group) for rule in found for group in rule.spec.groups]
    for group in groups:
        group["rules"] = [
            {key: FOR if key == "for" else value for key, value in rule.items() if value} for rule in group["rules"]
        ]
    return {"groups": [{key: value for key, value in group.items() if value} for group in groups]}


def dashboard_expressions(manifests: Manifests, namespace: str) -> list[str]:
    """Returns each expression of each dashboard, for the namespace of the pods."""
    found = []
    for config_map in manifests.config_maps:
        for name, text in config_map.data.items():
            if name.endswith(".json"):
                found += list(_expressions(json.loads(text)))
    variables = {"namespace": namespace, "__rate_interval": RATE, "__interval": RATE}
    return [
        re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], ".*"), expression)
        for expression in dict.fromkeys(found)
    ]


def _expressions(panel: Any) -> Iterator[str]:
    if isinstance(panel, dict):
        if isinstance(panel.get("expr"), str):
            yield panel["expr"]
        for value in panel.values():
            yield from _expressions(value)
    elif isinstance(panel, list):
        for value in panel:
            yield from _expressions(value)


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str
    session: aiohttp.ClientSession
    cluster: Cluster
    monitors: list[PodMonitor]
    folder: Path

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Returns the result of an expression. Raises AssertionError for one that Prometheus does not take."""
        async with self.session.get(f"{self.url}/api/v1/query", params={"query": expression}) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    async def alerts(self) -> dict[str, str]:
        """Returns the state of each alert that is not inactive."""
        async with self.session.get(f"{self.url}/api/v1/alerts") as response:
            answer = await response.json()
        found: dict[str, str] = {}
        for alert in answer["data"]["alerts"]:
            name, state = alert["labels"]["alertname"], alert["state"]
            if found.get(name) != "firing":
                found[name] = state
        return found

    async def until(self, condition: Callable[[dict[str, str]], bool], what: str, timeout_s: float) -> None:
        """Waits for a state of alerts, which Prometheus announces to an alertmanager alone."""
        seen: dict[str, str] = {}
        try:
            async with asyncio.timeout(timeout_s):
                # Nothing announces an alert here.
                while not condition(seen := await self.alerts()):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        except TimeoutError as exc:
            raise AssertionError(f"did not happen in {timeout_s:g} s: {what}. Alerts: {seen}") from exc

    def write_targets(self) -> None:
        """Tells Prometheus which pods there are."""
        pods = [pod.endpoint for pod in self.cluster.pods.values()]
        for monitor in self.monitors:
            for i in range(len(monitor.spec.pod_metrics_endpoints)):
                path = target_file(self.folder, monitor, i)
                text = json.dumps(targets(monitor, i, pods))
                if not path.exists() or path.read_text() != text:
                    whole = path.with_suffix(".new")
                    whole.write_text(text)
                    whole.rename(path)


@asynccontextmanager
async def prometheus_on(host: Host, cluster: Cluster, monitoring: Manifests, folder: Path) -> AsyncIterator[Prometheus]:
    """Runs Prometheus on a host during the block. Its files are in ``folder``."""
    program = shutil.which("prometheus")
    assert program is not None, "there is no prometheus: apt-get install --no-install-recommends prometheus"
    connector = aiohttp.TCPConnector(socket_factory=lambda _: socket_on(host))
    url = f"http://{host.address}:{_PORT}"
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session:
        prometheus = Prometheus(url, session, cluster, monitoring.monitors, folder)
        prometheus.write_targets()
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules(monitoring.rules)))
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(monitoring.monitors, folder)))
        with (folder / "prometheus.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                # It ends with this process, even by SIGKILL.
                *("setpriv", "--pdeathsig", "KILL"),
                *host.prefix,
                program,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={host.address}:{_PORT}",
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
            )
        cluster.listeners.append(prometheus.write_targets)
        try:
            await _until_ready(prometheus)
            yield prometheus
        finally:
            cluster.listeners.remove(prometheus.write_targets)
            await end(process)


async def _until_ready(prometheus: Prometheus) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            try:
                async with prometheus.session.get(f"{prometheus.url}/-/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
