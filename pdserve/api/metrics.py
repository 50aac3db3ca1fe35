"""Prometheus metrics of a node, under the names that serving dashboards know, prefixed ``pdserve_``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve.api.outcome import ChoiceOutcome
from pdserve.wire.engine import EngineStats, PrefillNodeStats, PrefillSource, PrefillStats, RequestReport, StepStats

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TAIL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class NodeMetrics:
    """Everything that ``/metrics`` shows. Observed values come from the API, the rest from the engine's last stats."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats))
        self._ttft = self._histogram("time_to_first_token_seconds", "from arrival to the first token", _SECONDS)
        self._itl = TokenGaps(_TOKEN_SECONDS)
        self._registry.register(self._itl)
        self._e2e = self._histogram("e2e_request_latency_seconds", "from arrival to the end", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "waiting in the engine", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", "from the queue to the first token", _SECONDS)
        self._tail = self._histogram(
            "kv_transfer_tail_seconds", "from a remote first token to its prompt's last KV block", _TAIL_SECONDS
        )
        self._decode = self._histogram("request_decode_time_seconds", "from the first token to the end", _SECONDS)
        self._success = Counter("pdserve_request_success", "answers", ["finished_reason"], registry=self._registry)
        self._failure = Counter("pdserve_request_failure", "requests without one", ["reason"], registry=self._registry)
        for outcome in ChoiceOutcome:  # so that rates start from 0 and not from nothing
            (self._success if outcome.is_answer else self._failure).labels(outcome.value)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def next_tokens(self, gap_s: float, count: int) -> None:
        """Observes ``count`` tokens that came at once, ``gap_s`` after the one before them."""
        self._itl.observe(gap_s, count)

    def choice_ended(self, outcome: ChoiceOutcome, report: RequestReport | None) -> None:
        (self._success if outcome.is_answer else self._failure).labels(outcome.value).inc()
        if report is not None:
            self._queue.observe(report.queue_s)
            self._prefill.observe(report.prefill_s)
            if report.prefill_source is PrefillSource.REMOTE:
                self._tail.observe(report.transfer_s)

    def request_ended(self, total_s: float, decode_s: float | None) -> None:
        self._e2e.observe(total_s)
        if decode_s is not None:
            self._decode.observe(decode_s)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pdserve_{name}", help, buckets=buckets, registry=self._registry)


class TokenGaps(Collector):
    """A histogram that is observed at each token of each request: it has no locks, and takes equal values at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, gap_s: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, gap_s / count)] += count
        self._sum += gap_s

    def collect(self) -> Iterable[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            "pdserve_inter_token_latency_seconds",
            "gap between two tokens; those that are sent in one chunk share the gap before it evenly",
            buckets=list(zip(names, map(float, accumulate(self._counts)), strict=True)),
            sum_value=self._sum,
        )


class EngineCollector(Collector):
    """Shows the engine's own counters, which it sends as totals, without counting them again."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        used = 1 - stats.free_blocks / stats.total_blocks if stats.total_blocks else 0.0
        yield _gauge("num_requests_running", "in the running batch", stats.running)
        yield _gauge("num_requests_waiting", "queued in the engine", stats.waiting)
        yield _gauge("num_requests_waiting_for_remote_kvs", "prompt computed elsewhere", stats.waiting_for_remote)
        yield _gauge("prompt_queue_seconds", "that a prompt waits which comes now, estimated", stats.queue_s)
        yield _gauge("kv_cache_usage_perc", "share of KV blocks in use, 0 to 1", used)
        yield _gauge("quarantined_blocks", "KV blocks held until a receive completes", stats.quarantined_blocks)
        yield _gauge("cached_blocks", "KV blocks in the prefix cache, in use or idle", stats.cached_blocks)
        yield _counter("engine_steps", "batches computed", stats.steps)
        yield _counter("prompt_tokens", "tokens of prompts, those from the prefix cache too", stats.prompt_tokens)
        yield _counter("generation_tokens", "tokens generated", stats.generated_tokens)
        yield _counter("num_preemptions", "requests set back for lack of blocks", stats.preemptions)
        yield _counter("num_moves_wanted", "requests that should leave before blocks run out", stats.moves_wanted)
        yield _counter(
            "prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prefix_cache_queries
        )
        yield _counter("prefix_cache_hits", "prompt tokens found in the prefix cache", stats.prefix_cache_hits)
        yield _counter(
            "resume_blocks_wanted", "full KV blocks of resumed answers and their prompts", stats.resume_blocks_wanted
        )
        yield _counter(
            "resume_blocks_reused", "those of them that were here or came from a holder", stats.resume_blocks_reused
        )
        yield _gauge("borrowed_cores", "of sleeping engines, which compute for this one", stats.borrowed_cores)
        yield _counter("borrowed_core_seconds", "for which such cores were borrowed", stats.borrowed_core_seconds)
        yield _counter("kv_blocks_returned", "KV blocks of answers that decode nodes returned", stats.blocks_returned)
        yield _counter("kv_offers_dropped", "offers of KV blocks without room for them", stats.offers_dropped)
        yield _by_label(
            "prefills",
            "prompts, by who computed them",
            "source",
            {"local": stats.prefills_local, "remote": stats.prefills_remote, "fallback": stats.prefills_fallback},
        )
        yield _counter("fallbacks", "prompts computed here because a prefill node failed", stats.prefills_fallback)
        directions = {"sent": stats.transfer_bytes_sent, "received": stats.transfer_bytes_received}
        yield _by_label("kv_transfer_bytes", "KV cache moved", "direction", directions)
        yield _by_label(
            "kv_transfers",
            "KV caches moved",
            "direction",
            {"sent": stats.transfers_sent, "received": stats.transfers_received},
        )
        yield _counter("kv_transfer_seconds", "time of completed transfers", stats.transfer_seconds)
        yield _by_label("kv_transfer_failures", "transfers that failed", "reason", stats.transfer_failures)
        yield _by_label(
            "leases_expired",
            "peers that stopped answering",
            "direction",
            {"sent": stats.leases_expired_sending, "received": stats.leases_expired_receiving},
        )
        yield from _prefill(stats.prefill)
        yield from _steps(stats.step)
        yield _counter("stale_blocks_dropped", "blocks of dead transfers refused", stats.stale_blocks_dropped)


def _prefill(stats: PrefillStats) -> Iterable[Metric]:
    """Yields what the choice between local and remote prefill goes by."""
    decisions = CounterMetricFamily(
        "pdserve_placement", "prompts, by where they went and why", labels=["source", "reason"]
    )
    for made in stats.decisions:
        decisions.add_metric([made.source.value, made.reason.value], made.count)
    yield decisions
    yield _gauge("prefill_local_tokens_per_second", "rate of prompts on this node", stats.tokens_per_s)
    yield _gauge("prefill_decode_step_seconds", "a step without prompts", stats.decode_step_s)
    yield _gauge("placement_last_local_seconds", "to the first token, of the prompt last compared", stats.last_local_s)
    yield _gauge("placement_last_remote_seconds", "the same, by a prefill node", stats.last_remote_s)
    gauges: dict[str, tuple[str, Callable[[PrefillNodeStats], float]]] = {
        "remote_tokens_per_second": ("rate of prompts on a prefill node", lambda node: node.tokens_per_s),
        "remote_queued_tokens": ("of prompts before a prefill node", lambda node: node.queued_tokens),
        "remote_overhead_seconds": ("of a first token, beside queue and rate", lambda node: node.overhead_s),
        "remote_transfer_bytes_per_second": ("of KV blocks from a prefill node", lambda node: node.bytes_per_s),
    }
    for name, (help, value) in gauges.items():
        family = GaugeMetricFamily(f"pdserve_prefill_{name}", help, labels=["node"])
        for node in stats.nodes:
            family.add_metric([node.name], value(node))
        yield family


def _steps(stats: StepStats) -> Iterable[Metric]:
    """Yields what steps take, and how those with prompts beside streams kept their target."""
    yield _gauge("itl_target_seconds", "of the steps that decode, 0 without a target", stats.itl_target_s)
    yield _counter("shared_steps", "with chunks of prompts beside requests that decode", stats.shared)
    yield _counter("shared_steps_prompt_tokens", "in the chunks of those steps", stats.shared_prompt_tokens)
    yield _counter("shared_steps_late", "of those, the ones that took longer than the target", stats.shared_late)
    parts = GaugeMetricFamily("pdserve_step_part_seconds", "estimated, of each part of a step", labels=["part"])
    for name, seconds in stats.parts.items():
        parts.add_metric([name], seconds)
    yield parts


def _gauge(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"pdserve_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"pdserve_{name}", help, value=value)


def _by_label(name: str, help: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"pdserve_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
