"""Everything that a node's ``/metrics`` shows, under pdserve's names, vLLM's, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from pdserve.api.metrics.engine_metrics import EngineCollector
from pdserve.api.metrics.request_metrics import MetricsScale, RequestMetrics
from pdserve.api.metrics.vllm_names import VllmNames
from pdserve.config import MetricsNames
from pdserve.metrics.text import text_of
from pdserve.wire.engine import EngineStats


class NodeMetrics:
    """The metrics of a node. Observed values come from the API, the rest from the engine's last stats."""

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        model: str = "",
        scale: MetricsScale = MetricsScale(),  # noqa: B008  # frozen
        names: MetricsNames = MetricsNames.BOTH,
        others: Iterable[Collector] = (),
    ) -> None:
        """``model`` is the name that clients know it by. ``others`` are collectors of metrics without vLLM's names."""
        self.requests = RequestMetrics(scale)
        shown = VllmNames([self.requests, EngineCollector(stats)], model, names)
        self._registry = CollectorRegistry()
        for collector in (shown, *others):
            self._registry.register(collector)

    async def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return await text_of(self._registry)
