"""Runs the rendered manifests in containers, and breaks what can break: ``python -m lab.deploy_containers``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from lab.deploy_containers.clients import client_on
from lab.deploy_containers.fitting import changes, fitted
from lab.deploy_containers.monitoring import prometheus_on
from lab.deploy_containers.reachability import Party
from lab.deploy_containers.report import Findings, Report, Verdict, markdown, write_report
from lab.deploy_containers.scenarios import ALWAYS, SCENARIOS, Run, Scenario
from lab.deploy_containers.stand_in.cluster import Cluster
from lab.deploy_containers.stand_in.manifests import read_manifests
from lab.deploy_containers.stand_in.packet_rules import Endpoint
from lab.deploy_containers.stand_in.pod import Moment, Pod
from lab.deploy_containers.stand_in.pod_network import PodNetwork, pod_network, socket_on
from lab.deploy_containers.stand_in.podman import Podman, podman
from tests.hosts.namespaces import why_impossible

ROOT = Path(__file__).parents[2]
RENDERED = ROOT / "deploy" / "rendered"
FOLDER = ROOT / ".deploy"
IMAGE = "localhost/pdserve:test-deploy"
NEEDED = ("ip", "nft", "podman", "prometheus", "setpriv")
PACKAGES = "podman runc nftables iproute2 prometheus"
BUILD_S = 3600.0
SCENARIO_S = 600.0
"""The longest that one scenario may take."""

_logger = logging.getLogger("deploy")


def main() -> int:
    arguments = _arguments()
    FOLDER.mkdir(exist_ok=True)
    log = logging.FileHandler(FOLDER / "run.log", mode="w")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", handlers=[logging.StreamHandler(sys.stdout), log]
    )
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        _logger.error("needs %s: apt-get install --no-install-recommends %s", ", ".join(missing), PACKAGES)
        return 1
    if (reason := why_impossible()) is not None:
        _logger.error("%s", reason)
        return 1
    try:
        report = asyncio.run(_whole(arguments))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _logger.error("interrupted")
        return 130
    write_report(report, arguments.report)
    print(markdown(report))
    _logger.info("%s", "passed" if report.passed else "FAILED")
    return 0 if report.passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.deploy_containers", description=__doc__)
    parser.add_argument("--image", default="", help="takes this image and builds none")
    parser.add_argument("--build-options", default="", help="options for podman build, as a shell would split them")
    parser.add_argument("--only", default="", help="names of scenarios, with commas, beside those that always run")
    parser.add_argument("--rendered", type=Path, default=RENDERED, help="the folder of cpu.yaml and monitoring.yaml")
    parser.add_argument("--report", type=Path, default=FOLDER / "report.json", help="where the figures go")
    arguments = parser.parse_args()
    names = {scenario.name for scenario in SCENARIOS}
    if unknown := set(filter(None, arguments.only.split(","))) - names:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(names))}")
    return arguments


async def _whole(arguments: argparse.Namespace) -> Report:
    """Builds the image and runs the scenarios. SIGTERM ends it as Ctrl-C does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    runtime = podman()
    image = arguments.image or await _build(runtime, shlex.split(arguments.build_options))
    size = int(await runtime("image", "inspect", "--format", "{{.Size}}", image))
    chosen = [each for each in SCENARIOS if not arguments.only or each.name in {*ALWAYS, *arguments.only.split(",")}]
    pods = FOLDER / "pods"
    shutil.rmtree(pods, ignore_errors=True)
    pods.mkdir()
    with pod_network() as network:
        verdicts = await _scenarios(runtime, network, image, arguments.rendered, pods, chosen)
    return Report(
        measured=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu(),
        image=image,
        image_bytes=size,
        changes=changes(),
        verdicts=verdicts,
    )


async def _build(runtime: Podman, options: Sequence[str]) -> str:
    _logger.info("building the image")
    words = (
        "build",
        "--tag",
        IMAGE,
        "--file",
        str(ROOT / "deploy" / "Dockerfile"),
        *runtime.limits,
        *options,
        str(ROOT),
    )
    await runtime(*words, timeout_s=BUILD_S)
    return IMAGE


async def _scenarios(
    runtime: Podman, network: PodNetwork, image: str, rendered: Path, folder: Path, chosen: Sequence[Scenario]
) -> list[Verdict]:
    manifests = fitted(read_manifests((rendered / "cpu.yaml").read_text()), image)
    monitoring = read_manifests((rendered / "monitoring.yaml").read_text())
    secret = secrets.token_hex(32)
    cluster = Cluster(manifests, {"pdserve-secret": {"secret": secret}}, folder, runtime, network, _say)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(cluster.running())
        namespace = manifests.workloads[0].metadata.namespace
        beside = {
            Party.CLIENT: Endpoint("client", "", namespace, {"pdserve-client": "true"}),
            Party.MONITORING: Endpoint("prometheus", "", "monitoring", {"app.kubernetes.io/name": "prometheus"}),
            Party.NEIGHBOUR: Endpoint("neighbour", "", namespace),
            Party.OUTSIDER: Endpoint("outsider", "", "default"),
        }
        hosts = {party: cluster.add_stranger(endpoint) for party, endpoint in beside.items()}
        url = f"http://{cluster.service_address('pdserve')}"
        client = await stack.enter_async_context(client_on(hosts[Party.CLIENT], url))
        (folder / "prometheus").mkdir()
        prometheus = await stack.enter_async_context(
            prometheus_on(hosts[Party.MONITORING], cluster, monitoring, folder / "prometheus")
        )
        connector = aiohttp.TCPConnector(force_close=True, socket_factory=lambda _: socket_on(hosts[Party.MONITORING]))
        scraper = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        run = Run(cluster, client, scraper, prometheus, monitoring, hosts)
        verdicts = []
        for scenario in chosen:
            verdicts.append(await _run(scenario, run))
            if not verdicts[0].passed:
                # Nothing can be learned from pods that have not come up.
                break
        return verdicts


async def _run(scenario: Scenario, run: Run) -> Verdict:
    _logger.info("--- %s", scenario.name)
    begun, found = time.monotonic(), Findings()
    try:
        with found.checked():
            async with asyncio.timeout(SCENARIO_S):
                await scenario.act(run, found)
    except Exception as exc:
        _logger.exception("%s", scenario.name)
        found.problems.append(f"{type(exc).__name__}: {exc}")
    for figure in found.figures:
        _logger.info("%s %s: %s", figure.of, figure.name, figure)
    for problem in found.problems:
        _logger.error("PROBLEM %s", problem)
    shows = " ".join((scenario.act.__doc__ or "").split())
    return Verdict(scenario.name, shows, round(time.monotonic() - begun, 1), found.figures, found.problems)


def _say(pod: Pod, moment: Moment) -> None:
    _logger.info("%s %s", pod.name, moment.value)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
