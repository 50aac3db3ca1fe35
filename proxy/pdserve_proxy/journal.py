"""What is left of an exchange: one log line and its metrics."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from pdserve_proxy.exchange import Exchange, Outcome
from pdserve_proxy.metrics import ProxyMetrics

log = logging.getLogger("pdserve_proxy.requests")


class ExchangeLog:
    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._outcomes = {outcome: metrics.outcomes.labels(outcome.value) for outcome in Outcome}
        self._requests: dict[tuple[str, int], Counter] = {}

    def began(self) -> None:
        self._metrics.in_flight.inc()

    def retried(self) -> None:
        self._metrics.retries.inc()

    def ended(self, exchange: Exchange) -> None:
        assert exchange.outcome is not None
        metrics = self._metrics
        metrics.in_flight.dec()
        self._requests_of(exchange.route, exchange.status).inc()
        metrics.relayed_bytes.inc(exchange.relayed_bytes)
        self._outcomes[exchange.outcome].inc()
        if exchange.first_byte_s is not None:
            metrics.first_byte_seconds.observe(exchange.first_byte_s)
        log.info(
            "request_id=%s route=%s decode=%s prefill=%s status=%d first_byte_s=%s total_s=%.3f bytes=%d outcome=%s",
            exchange.request_id,
            exchange.route,
            exchange.decode_name,
            exchange.prefill_name,
            exchange.status,
            "-" if exchange.first_byte_s is None else f"{exchange.first_byte_s:.3f}",
            exchange.total_s,
            exchange.relayed_bytes,
            exchange.outcome.value,
        )

    def _requests_of(self, route: str, status: int) -> Counter:
        key = (route, status)
        if key not in self._requests:
            self._requests[key] = self._metrics.requests.labels(route, status)
        return self._requests[key]
