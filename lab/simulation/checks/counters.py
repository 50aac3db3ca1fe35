"""Compares the metrics that proxies and nodes show at rest with what the simulation has seen of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.simulation.checks.witness import EndedRequest, Witness
from lab.simulation.clients import ROUTE, ClientRequest, Outcome, fetch
from lab.simulation.cluster import HTTP_PORT, Cluster, Proxy
from lab.simulation.machine.links import Fabric
from lab.simulation.machine.virtual_time import SimProcess
from lab.simulation.plan import Plan
from pdserve_proxy.records.access_log import CLIENT_GONE

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
AT_REST = {
    "pdserve_proxy_requests_in_flight",
    "pdserve_proxy_requests_queued",
    "pdserve_proxy_journal_bytes",
    "pdserve_proxy_node_requests_in_flight",
    "pdserve_num_requests_running",
    "pdserve_num_requests_waiting",
    "pdserve_num_requests_waiting_for_remote_kvs",
    "pdserve_quarantined_blocks",
    "pdserve_kv_cache_usage_perc",
}
"""What is 0 when nothing is under way."""
FALLBACKS = "pdserve_fallbacks_total"
UNTROUBLED = {
    "pdserve_leases_expired_total",
    FALLBACKS,
    "pdserve_proxy_node_failures_total",
    "pdserve_proxy_resumes_total",
    "pdserve_proxy_journals_dropped_total",
}
"""What is 0 where there was no fault, and no limit that clients could meet."""


LEFT = ("moved", "ended")
"""What becomes of an answer that is to leave its node, if another node may have taken it."""
REPORTED_S = 3.0
"""A worker has told its supervisor by then of a request that has ended."""


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class Metrics:
    """The metrics of one process."""

    def __init__(self, process: SimProcess, text: str) -> None:
        self.process = process
        self.samples = [
            Sample(found[1], dict(_LABEL.findall(found[2] or "")), float(found[3]))
            for line in text.splitlines()
            if (found := _SAMPLE.match(line)) is not None
        ]

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of the samples of this name with these labels."""
        return sum(
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )


async def wrong_counters(cluster: Cluster, plan: Plan) -> list[str]:
    """Returns what the counters say otherwise than what was seen of the run. Nothing is under way any more."""
    proxies = [await _metrics(cluster, proxy.process, proxy.host) for proxy in cluster.proxies]
    nodes = [await _metrics(cluster, node.process, node.host) for node in cluster.nodes]
    wrong = [what for metrics in proxies for what in _not_at_rest(metrics, of_proxy=True)]
    wrong += [what for metrics in nodes for what in _not_at_rest(metrics, of_proxy=False)]
    for proxy, metrics in zip(cluster.proxies, proxies, strict=True):
        wrong += _wrong_of_proxy(metrics, _ends_of(proxy, cluster.witness))
    wrong += _wrong_ends(cluster)
    for metrics in nodes:
        fallbacks, failed = metrics.total(FALLBACKS), metrics.total("pdserve_prefills_failed_total")
        if fallbacks > failed:
            wrong.append(f"{metrics.process.name} shows {fallbacks:.0f} fallbacks, and {failed:.0f} orders in vain")
    if plan.faults:
        return wrong
    engines = [node.engine.process for node in cluster.nodes if node.engine is not None]
    wrong += _wrong_transfers(engines, nodes, cluster.fabric)
    # An answer may leave a node that runs out of blocks: then it has had two.
    left = sum(metrics.total("pdserve_proxy_block_moves_total", outcome=how) for metrics in proxies for how in LEFT)
    if plan.is_calm and not left:
        wrong += _wrong_of_calm_run(cluster.requests, nodes, proxies, cluster.witness)
    return wrong


async def _metrics(cluster: Cluster, process: SimProcess, host: str) -> Metrics:
    status, text = await cluster.as_client(fetch(host, HTTP_PORT, "GET /metrics"))
    if status != 200:
        cluster.violated(f"{process.name} shows its metrics with the status {status}")
    return Metrics(process, text.decode())


def _not_at_rest(metrics: Metrics, of_proxy: bool) -> Iterator[str]:
    """Yields what a process says is under way though nothing is, and what it should show and does not."""
    shown = {sample.name for sample in metrics.samples}
    for name in sorted(AT_REST | UNTROUBLED):
        if name.startswith("pdserve_proxy_") == of_proxy and name not in shown:
            yield f"{metrics.process.name} does not show {name}"
    for sample in metrics.samples:
        if sample.name in AT_REST and sample.value:
            yield f"{metrics.process.name} shows {sample} at rest"


@dataclass(frozen=True)
class Ends:
    """The requests that have ended at one proxy since its start."""

    counted: list[EndedRequest]
    """Those that its counters have."""
    perhaps: list[EndedRequest]
    """Those whose worker died before it may have told of them."""


def _ends_of(proxy: Proxy, witness: Witness) -> Ends:
    """Returns what has ended at the proxy, by its log."""
    ends = Ends([], [])
    for process in [proxy.process, *proxy.process.children]:
        stopped = process.was_stopped or proxy.process.was_stopped
        told_until_s = process.ended_s - REPORTED_S if not (process.ended and stopped) else 0.0
        for one in witness.ended[process]:
            (ends.counted if one.at_s < told_until_s else ends.perhaps).append(one)
    return ends


def _wrong_of_proxy(metrics: Metrics, ends: Ends) -> Iterator[str]:
    """Yields what the counters of a proxy say otherwise than its log."""
    name, all_ends = metrics.process.name, ends.counted + ends.perhaps

    def differs(shown: float, sure: int, perhaps: int) -> str:
        """Returns the words about a count that is wrong."""
        if sure <= shown <= sure + perhaps:
            return ""
        return f"{name} shows {shown:.0f} requests, and there were {sure}" + (f" to {sure + perhaps}" * bool(perhaps))

    for outcome in {one.outcome: None for one in all_ends}:
        sure, perhaps = (sum(one.outcome == outcome for one in some) for some in (ends.counted, ends.perhaps))
        if wrong := differs(metrics.total("pdserve_proxy_outcomes_total", outcome=outcome), sure, perhaps):
            yield f"{wrong} with the outcome {outcome}"
    for status in {one.status: None for one in all_ends}:
        sure, perhaps = (sum(one.status == status for one in some) for some in (ends.counted, ends.perhaps))
        shown = metrics.total("pdserve_proxy_requests_total", route=ROUTE, status=str(status))
        if wrong := differs(shown, sure, perhaps):
            yield f"{wrong} with the status {status}"
    if wrong := differs(metrics.total("pdserve_proxy_outcomes_total"), len(ends.counted), len(ends.perhaps)):
        yield f"{wrong} that have ended"
    resumed = metrics.total("pdserve_proxy_resumes_total", outcome="resumed")
    gaps = metrics.total("pdserve_proxy_resume_gap_seconds_count", kind="lost")
    if resumed != gaps:
        yield f"{name} shows {resumed:.0f} resumed answers, and {gaps:.0f} gaps"


def _wrong_ends(cluster: Cluster) -> Iterator[str]:
    """Yields where a client got something else than the log of its proxy says."""
    hosts = {proxy.host for proxy in cluster.proxies}
    killed = any(process.ended for process in cluster.loop.processes if process.host in hosts)
    ended: dict[str, list[tuple[int, str]]] = {}
    for at_proxy in cluster.witness.ended.values():
        for one in at_proxy:
            ended.setdefault(one.label, []).append((one.status, one.outcome))
    for request in cluster.requests:
        logged = ended.get(request.label, [])
        if len(logged) > 1:
            yield f"request {request.name} has {len(logged)} ends: {logged}"
        if not logged and not killed and request.outcomes == [Outcome.COMPLETE]:
            yield f"request {request.name} has an answer, and no end at a proxy"
        for status, outcome in logged:
            if request.status and status != request.status and status != CLIENT_GONE:
                yield f"request {request.name} got the status {request.status}, and its proxy says {status}"
            if (request.outcomes == [Outcome.COMPLETE]) and outcome != "ok":
                yield f"request {request.name} got its whole answer, and its proxy says {outcome}"
            if request.outcomes == [Outcome.ERROR] and outcome == "ok":
                yield f"request {request.name} got an error, and its proxy says {outcome}"


def _wrong_transfers(engines: Sequence[SimProcess], nodes: Sequence[Metrics], fabric: Fabric) -> Iterator[str]:
    """Yields where engines show other KV blocks than have landed, in a run in which no engine has ended."""
    for engine, metrics in zip(engines, nodes, strict=True):
        for direction, seen in (
            ("sent", fabric.sent_bytes[engine.host]),
            ("received", fabric.landed_bytes[engine.host]),
        ):
            shown = metrics.total("pdserve_kv_transfer_bytes_total", direction=direction)
            if shown != seen:
                yield f"{metrics.process.name} shows {shown:.0f} bytes {direction}, and {seen} were"


def _wrong_of_calm_run(
    requests: Sequence[ClientRequest], nodes: Sequence[Metrics], proxies: Sequence[Metrics], witness: Witness
) -> Iterator[str]:
    """Yields what counters say otherwise than clients have seen, where each request was answered at its first try."""
    for metrics in (*nodes, *proxies):
        # Two mixed nodes with few blocks may hold them all for each other's prompts; then one gives some up.
        overloads = metrics.total("pdserve_kv_transfer_failures_total", reason="overloaded")
        for sample in metrics.samples:
            if sample.name in UNTROUBLED and sample.value > (overloads if sample.name == FALLBACKS else 0):
                yield f"{metrics.process.name} shows {sample}, without any fault"
    # An engine generates a token also where only the prompt's scores are wanted.
    answers = sum(len(request.tokens) for request in requests)
    expected = {
        "pdserve_request_success_total": answers,
        "pdserve_request_failure_total": 0,
        "pdserve_e2e_request_latency_seconds_count": len(requests),
        "pdserve_prompt_tokens_total": sum(len(request.planned.prompt) for request in requests),
        "pdserve_prefills_total": len(requests),
        "pdserve_generation_tokens_total": sum(
            max(1, one.num_tokens) for request in requests for one in request.reference
        ),
    }
    if any(request.stop for request in requests):
        # Whether the engine ends such a request by itself depends on when it hears of the end.
        del expected["pdserve_generation_tokens_total"], expected["pdserve_prefills_total"]
    for name, wanted in expected.items():
        shown = sum(metrics.total(name) for metrics in nodes)
        if shown != wanted:
            yield f"the nodes show {shown:.0f} as {name}, and it should be {wanted}"
    attempts = sum(metrics.total("pdserve_proxy_node_requests_total") for metrics in proxies)
    retries = sum(metrics.total("pdserve_proxy_upstream_retries_total") for metrics in proxies)
    taken = sum(one.begins_answer for one in witness.taken.values())
    if attempts != taken:
        yield f"the proxies show {attempts:.0f} attempts, and nodes took {taken} tickets"
    if attempts != len(requests) + retries:
        yield f"the proxies show {attempts:.0f} attempts at {len(requests)} requests, and {retries:.0f} retries"
