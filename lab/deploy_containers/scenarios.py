"""What is done to the cluster, and what has to hold then. The scenarios run in this order, on one cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from lab.deploy_containers.by_hand import follow_page
from lab.deploy_containers.clients import Client, Load, load
from lab.deploy_containers.monitoring import Prometheus, dashboard_expressions
from lab.deploy_containers.reachability import Attempt, Party, PortUse, listening_ports, may_reach, surprises
from lab.deploy_containers.report import Findings
from lab.deploy_containers.stand_in.cluster import Cluster
from lab.deploy_containers.stand_in.manifests import Manifests
from lab.deploy_containers.stand_in.pod import Moment, Pod
from tests.hosts.namespaces import Host

PROXY, PREFILL, DECODE = "pdserve-proxy", "pdserve-prefill", "pdserve-decode"
SETTLED_S = 400.0
CLIENTS = 3
ANSWER_TOKENS = 32
LONG_ANSWER_TOKENS = 160
RETRIES = 10
"""How often a client asks again, where it does at all."""
FAIL_OVER_S = 3.0
"""So long after the loss of a proxy, no client has to ask again."""
ALERT_S = 60.0
_ALERTS = {PREFILL: "PdserveNoPrefillNode", DECODE: "PdserveNoDecodeNode"}
METRIC_S = 10.0

_TOPICS = (
    "the sea",
    "a railway station",
    "the oldest tree of a village",
    "winter",
    "a clock that is always late",
    "bread",
)


@dataclass
class Run:
    """Everything that scenarios use."""

    cluster: Cluster
    client: Client
    scraper: aiohttp.ClientSession
    prometheus: Prometheus
    monitoring: Manifests
    hosts: dict[Party, Host]
    """Those who are beside the cluster."""
    references: dict[str, str] = field(default_factory=dict)
    """Unbroken answers of ``ANSWER_TOKENS`` by prompt."""

    async def metric(self, pod: Pod, name: str, **labels: str) -> float:
        """Returns the sum of a metric's series with these labels, as Prometheus would read them."""
        port = pod.template.container.port("http")
        async with self.scraper.get(f"http://{pod.identity.address}:{port}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            return sum(
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()
            )

    async def total(self, workload: str, name: str, **labels: str) -> float:
        return sum([await self.metric(pod, name, **labels) for pod in self.cluster.pods_of(workload)])

    async def settled(self) -> None:
        await self.cluster.until(lambda: self.cluster.all_settled, "every pod is the wanted one, and ready", SETTLED_S)

    @asynccontextmanager
    async def load(self, retries: int = 0) -> AsyncIterator[Load]:
        async with load(self.client, self.references, CLIENTS, ANSWER_TOKENS, retries) as seen:
            yield seen


@dataclass(frozen=True)
class Scenario:
    name: str
    act: Callable[[Run, Findings], Awaitable[None]]


def prompt(topic: str) -> str:
    """Returns a prompt of several KV blocks."""
    return (
        f"You are a patient writer who never hurries. Write about {topic}. Begin with what one sees from afar, go on "
        f"with what one hears when one comes closer, and end with what somebody said about {topic} many years ago. Use "
        "short sentences, and no lists, no headings and no quotations from books. Do not explain what you do."
    )


async def start(run: Run, found: Findings) -> None:
    """Pods start, their probes become right in their order, and proxies are ready only when there are nodes."""
    await run.settled()
    pods = [pod for workload in run.cluster.workloads for pod in run.cluster.pods_of(workload)]
    for pod in pods:
        found.figure("ready after", pod.last(Moment.READY) - pod.last(Moment.RUN), "s", of=_plain(pod))
        order = [moment for _, moment in pod.moments]
        expected = [Moment.RUN, Moment.STARTED, Moment.READY]
        found.check(order == expected, f"{pod.name}: {[each.value for each in order]}")
    nodes = [pod for pod in pods if pod.workload != PROXY]
    first_node = min(_live_from(pod) for pod in nodes)
    for pod in run.cluster.pods_of(PROXY):
        found.check(pod.last(Moment.READY) > first_node, f"{pod.name} was ready before any node could be")


def _live_from(pod: Pod) -> float:
    """Returns a time before which the pod did not answer: that of the last startup probe that failed."""
    probe = pod.template.container.startup_probe
    return pod.last(Moment.STARTED) - (probe.period_seconds + probe.timeout_seconds if probe else 0)


def _plain(pod: Pod) -> str:
    """Returns a pod's name without the hash that a Deployment puts into it."""
    return pod.name.replace(f"-{pod.revision}", "")


async def remote_prefill(run: Run, found: Findings) -> None:
    """A chat is answered, and a prefill node computed its prompt."""
    before = await run.total(DECODE, "pdserve_prefills_total", source="remote")
    for topic in _TOPICS:
        answer = await run.client.ask(prompt(topic), ANSWER_TOKENS)
        found.check(not answer.failure and bool(answer.text), f"{topic}: {answer.failure or 'no text'}")
        run.references[answer.prompt] = answer.text
    remote = await run.total(DECODE, "pdserve_prefills_total", source="remote") - before
    found.check(remote == len(_TOPICS), f"{remote:.0f} of {len(_TOPICS)} prompts were computed by a prefill node")
    found.figure("prompts computed remotely", remote, f"of {len(_TOPICS)}")
    fallbacks = await run.total(DECODE, "pdserve_fallbacks_total")
    found.check(fallbacks == 0, f"{fallbacks:.0f} prompts fell back to local prefill")


def _uses(pod: Pod, host: Host) -> dict[int, PortUse]:
    """Returns what each port is for that the pod listens to: those that it names, and the KV transfer's."""
    named = {port.container_port: PortUse(port.name) for port in pod.template.container.ports}
    return {port: named.get(port, PortUse.TRANSFER) for port in listening_ports(host)}


async def network_policy(run: Run, found: Findings) -> None:
    """Each port answers whom it is for, and nobody else."""
    pods = list(run.cluster.pods.values())
    hosts = {pod.name: run.cluster.host(pod.name) for pod in pods}
    sources = [*run.hosts.items(), *((_party(pod), hosts[pod.name]) for pod in pods)]
    attempts = [
        Attempt(host, hosts[pod.name], port, may_reach(party, _party(pod), use))
        for pod in pods
        for port, use in _uses(pod, hosts[pod.name]).items()
        for party, host in sources
        if host.name != pod.name
    ]
    # From a pod to somebody who would answer anybody.
    outsider = run.hosts[Party.OUTSIDER]
    attempts += [Attempt(host, outsider, 80, allowed=False) for host in hosts.values()]
    found.problems += await surprises(attempts)
    found.check(any(each.allowed for each in attempts), "nothing is allowed")
    found.figure("connections that are allowed and come about", sum(each.allowed for each in attempts))
    found.figure("connections that are kept out", sum(not each.allowed for each in attempts))


def _party(pod: Pod) -> Party:
    return Party.PROXY if pod.workload == PROXY else Party.NODE


async def drain(run: Run, found: Findings) -> None:
    """A decode pod is deleted while it streams. The stream goes on elsewhere, with the text of an unbroken one."""
    question = prompt("a lighthouse")
    unbroken = await run.client.ask(question, LONG_ANSWER_TOKENS)
    found.check(not unbroken.failure, f"the unbroken answer: {unbroken.failure}")
    arrived = asyncio.Event()
    moved_before = await run.total(PROXY, "pdserve_proxy_moves_total", outcome="moved")
    asking = asyncio.create_task(run.client.ask(question, LONG_ANSWER_TOKENS, arrived))
    try:
        async with asyncio.timeout(60):
            await arrived.wait()
        busy = await _streaming(run)
        busy.delete()
        answer = await asking
    finally:
        asking.cancel()
    found.check(not answer.failure, f"the stream: {answer.failure}")
    found.check(answer.text == unbroken.text, "the moved stream's text is not the unbroken one's")
    moved = await run.total(PROXY, "pdserve_proxy_moves_total", outcome="moved") - moved_before
    found.check(moved == 1, f"{moved:.0f} answers moved")
    found.figure("longest gap of the unbroken stream", unbroken.longest_gap_s, "s")
    found.figure("longest gap of the moved stream", answer.longest_gap_s, "s")
    await run.settled()
    ended = run.cluster.gone[-1]
    found.check(ended is busy and ended.status == 0, f"{ended.name} ended with status {ended.status}")
    found.figure("drained in", ended.last(Moment.GONE) - ended.last(Moment.TERMINATING), "s")


async def _streaming(run: Run) -> Pod:
    """Returns the decode pod that has the only request. A node counts its requests now and then, not at once."""
    async with asyncio.timeout(METRIC_S):
        while True:
            for pod in run.cluster.pods_of(DECODE):
                if await run.metric(pod, "pdserve_num_requests_running") > 0:
                    return pod
            await asyncio.sleep(0.1)


async def kills(run: Run, found: Findings) -> None:
    """Each role's busiest pod is killed under load and comes back. No request fails.

    Clients ask again where a proxy dies, with the key of their request, and their streams go on behind what they have.
    """
    for workload in (PREFILL, DECODE, PROXY):
        what = f"SIGKILL of {workload.removeprefix('pdserve-')}"
        async with run.load(retries=RETRIES if workload == PROXY else 0) as seen:
            await seen.more(CLIENTS)
            victim = await _busiest(run, workload)
            killed = time.monotonic()
            await victim.kill()
            again = partial(_ready_again, victim, killed)
            await run.cluster.until(again, f"{victim.name} is ready again", SETTLED_S)
            # Some answers that begin afterwards.
            await seen.more(CLIENTS)
        await run.settled()
        found.check(victim.status not in (None, 0), f"{what}: the container's status is {victim.status}")
        found.figure("ready again after", victim.last(Moment.READY) - killed, "s", of=what)
        _judge(seen, what, found)
        late = [each for each in seen.answers if each.retries and each.begun > killed + FAIL_OVER_S]
        found.check(not late, f"{what}: {len(late)} requests had to be asked again later than {FAIL_OVER_S:g} s")
        found.figure("asked again", sum(answer.retries > 0 for answer in seen.answers), of=what)


async def _busiest(run: Run, workload: str) -> Pod:
    """Returns the pod of a workload that has the most requests under way."""
    metric = "pdserve_proxy_requests_in_flight" if workload == PROXY else "pdserve_num_requests_running"
    busy = [(await run.metric(pod, metric), pod.name) for pod in run.cluster.pods_of(workload)]
    return run.cluster.pods[max(busy)[1]]


def _ready_again(pod: Pod, since: float) -> bool:
    return pod.ready and pod.last(Moment.READY) > since


def _judge(seen: Load, what: str, found: Findings) -> None:
    """Checks what clients saw."""
    failures = [answer.failure for answer in seen.failed]
    found.check(not failures, f"{what}: {len(failures)} requests failed: {failures[:3]}")
    found.check(not seen.wrong, f"{what}: {len(seen.wrong)} answers are not the unbroken ones")
    found.figure("requests", len(seen.answers), of=what)
    found.figure("failed", len(failures), of=what)
    found.figure("longest gap of a stream", seen.longest_gap_s, "s", of=what)


async def rolling_updates(run: Run, found: Findings) -> None:
    """Each role is replaced pod by pod under load, and no request fails."""
    for workload in (PREFILL, DECODE, PROXY):
        what = f"rolling update of {workload.removeprefix('pdserve-')}"
        old = run.cluster.pods_of(workload)
        gone = len(run.cluster.gone)
        async with run.load() as seen:
            await seen.more(CLIENTS)
            begun = time.monotonic()
            run.cluster.restart(workload, f"{begun:.0f}")
            await run.settled()
            took = time.monotonic() - begun
            await seen.more(CLIENTS)
        ended = run.cluster.gone[gone:]
        found.check(len(ended) == len(old), f"{what}: {len(ended)} of {len(old)} pods were replaced")
        for pod in ended:
            found.check(pod.status == 0, f"{what}: {pod.name} ended with status {pod.status}")
        found.figure("took", took, "s", of=what)
        _judge(seen, what, found)
        drains = [pod.last(Moment.GONE) - pod.last(Moment.TERMINATING) for pod in ended]
        found.figure("longest drain", max(drains, default=0), "s", of=what)


async def dashboard(run: Run, found: Findings) -> None:
    """Every pod is scraped, and every expression of the dashboard returns data."""
    async with run.load() as seen:
        await seen.more(2 * CLIENTS)
        up = await run.prometheus.query("up == 1")
        names = {sample["metric"]["pod"] for sample in up}
        found.check(names == set(run.cluster.pods), f"Prometheus scrapes {sorted(names)}")
        expressions = dashboard_expressions(run.monitoring, run.cluster.manifests.workloads[0].metadata.namespace)
        found.check(bool(expressions), "there is no dashboard")
        for expression in expressions:
            with found.checked():
                result = await run.prometheus.query(expression)
                found.check(bool(result), f"no data: {expression}")
    found.figure("expressions of the dashboard", len(expressions))


async def alerts(run: Run, found: Findings) -> None:
    """Without prefill pods, and then without decode pods, the alerts about it fire, and end when the pods are back.

    Clients are served without prefill pods, and are refused without decode pods.
    """
    before = await run.prometheus.alerts()
    for name in ("PdserveNoProxy", *_ALERTS.values()):
        found.check(name not in before, f"{name} is {before.get(name)} while all pods are there")
    replicas = {workload: len(run.cluster.pods_of(workload)) for workload in _ALERTS}
    for workload, alert in _ALERTS.items():
        begun = time.monotonic()
        run.cluster.scale(workload, 0)
        await run.cluster.until(partial(_has_no_pods, run, workload), f"{workload} has no pods", SETTLED_S)
        await run.prometheus.until(partial(_fires, alert), f"{alert} fires", ALERT_S)
        found.figure("fires after", time.monotonic() - begun, "s", of=alert)
        answer = await run.client.ask(prompt("an empty street"), ANSWER_TOKENS)
        served = not answer.failure
        found.check(served == (workload == PREFILL), f"without {workload}: {answer.failure or 'an answer came'}")
    for workload, number in replicas.items():
        run.cluster.scale(workload, number)
    await run.settled()
    for alert in _ALERTS.values():
        await run.prometheus.until(partial(_is_quiet, alert), f"{alert} ends", ALERT_S)


def _has_no_pods(run: Run, workload: str) -> bool:
    return not run.cluster.pods_of(workload)


def _fires(alert: str, states: dict[str, str]) -> bool:
    return states.get(alert) == "firing"


def _is_quiet(alert: str, states: dict[str, str]) -> bool:
    return alert not in states


async def stop(run: Run, found: Findings) -> None:
    """All pods stop in order within their grace period."""
    begun = time.monotonic()
    there = list(run.cluster.pods.values())
    await run.cluster.stop(SETTLED_S)
    for pod in there:
        found.check(pod.status == 0, f"{pod.name} ended with status {pod.status}")
        killed = any(moment is Moment.KILL_SENT for _, moment in pod.moments)
        found.check(not killed, f"{pod.name} had to be killed")
    found.figure("all pods are gone after", time.monotonic() - begun, "s")


async def by_hand(run: Run, found: Findings) -> None:
    """The commands of containers.md bring up a cluster by hand, kill a process of each role, and drain a node.

    No answer is lost, and each command shows what the page says.
    """
    manifests = run.cluster.manifests
    image = manifests.workloads[0].spec.template.container.image
    await follow_page(run.cluster.podman, image, run.cluster.folder / "by-hand", found)


SCENARIOS: Sequence[Scenario] = (
    Scenario("start", start),
    Scenario("remote prefill", remote_prefill),
    Scenario("network policy", network_policy),
    Scenario("drain", drain),
    Scenario("kills", kills),
    Scenario("rolling updates", rolling_updates),
    Scenario("dashboard", dashboard),
    Scenario("alerts", alerts),
    Scenario("stop", stop),
    Scenario("by hand", by_hand),
)
ALWAYS = ("start", "remote prefill", "stop")
"""What the others need: pods, unbroken answers to compare with, and an end."""
