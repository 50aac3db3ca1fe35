"""Shows what the engine of a node has counted, which it sends as totals, without counting it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pdserve.wire.engine import (
    STEP_TOKEN_BOUNDS,
    EngineStats,
    PrefillNodeStats,
    PrefillReason,
    PrefillSource,
    PrefillStats,
    StepStats,
)

_DECIDED = (PrefillSource.LOCAL, PrefillSource.REMOTE)
"""The sources that a decision may name: a fallback is none's decision."""


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
        yield from _prompts(stats)
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
        yield _by_label(
            "prefills_failed", "prompts ordered from prefill nodes in vain, by why", "reason", stats.prefills_failed
        )
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
        yield _counter("kv_transfer_handshakes", "greetings of other engines that were completed", stats.handshakes)
        yield _counter("kv_transfer_frames_dropped", "control frames that were not acceptable", stats.frames_dropped)
        yield _gauge("kv_transfer_clock_skew_seconds", "that another engine's clock is behind", stats.clock_skew_s)
        yield _gauges_by_label(
            "kv_links",
            "links to other engines that have moved KV blocks, by what carries them",
            "transport",
            msgspec.structs.asdict(stats.links),
        )
        yield from _prefill(stats.prefill)
        yield from _steps(stats.step)
        yield _counter("stale_blocks_dropped", "blocks of dead transfers refused", stats.stale_blocks_dropped)


def _prompts(stats: EngineStats) -> Iterable[Metric]:
    """Yields the tokens of prompts: those that were answered here, each once in the cluster, and those computed here.

    The sources have vLLM's names.
    """
    cached, transferred = stats.cached_prompt_tokens, stats.transferred_prompt_tokens
    yield _counter("prompt_tokens", "tokens of prompts that are answered here", stats.prompt_tokens)
    yield _counter("prompt_tokens_cached", "those of them that were not computed here", cached + transferred)
    yield _by_label(
        "prompt_tokens_by_source",
        "tokens of prompts that are answered here, by where their KV cache came from",
        "source",
        {
            "local_compute": stats.prompt_tokens - cached - transferred,
            "local_cache_hit": cached,
            "external_kv_transfer": transferred,
        },
    )
    yield _counter(
        "prompt_tokens_computed",
        "tokens of prompts that were computed here, for this node or others",
        stats.step.computed_prompt_tokens,
    )


def _prefill(stats: PrefillStats) -> Iterable[Metric]:
    """Yields what the choice between local and remote prefill goes by."""
    decisions = CounterMetricFamily(
        "pdserve_placement", "prompts, by where they went and why", labels=["source", "reason"]
    )
    made = {(source, reason): 0 for source in _DECIDED for reason in PrefillReason}
    made |= {(decision.source, decision.reason): decision.count for decision in stats.decisions}
    for (source, reason), count in made.items():
        decisions.add_metric([source.value, reason.value], count)
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
    steps = HistogramMetricFamily("pdserve_iteration_tokens", "tokens of a step, of prompts and answers")
    bounds = [*map(floatToGoString, STEP_TOKEN_BOUNDS), "+Inf"]
    steps.add_metric([], list(zip(bounds, accumulate(stats.num_tokens), strict=True)), stats.tokens)
    yield steps
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


def _gauges_by_label(name: str, help: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"pdserve_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _by_label(name: str, help: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"pdserve_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
