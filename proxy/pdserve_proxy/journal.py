"""What is left of an exchange: one log line and its metrics."""

from __future__ import annotations

import logging

from pdserve_proxy.exchange import Exchange
from pdserve_proxy.request_counts import RequestCounts

log = logging.getLogger("pdserve_proxy.requests")


class ExchangeLog:
    def __init__(self, counts: RequestCounts) -> None:
        self._counts = counts

    def began(self) -> None:
        self._counts.in_flight += 1

    def retried(self) -> None:
        self._counts.retries += 1

    def ended(self, exchange: Exchange) -> None:
        assert exchange.outcome is not None
        counts = self._counts
        counts.in_flight -= 1
        counts.requests[exchange.route, exchange.status] += 1
        counts.relayed_bytes += exchange.relayed_bytes
        counts.outcomes[exchange.outcome] += 1
        if exchange.first_byte_s is not None:
            counts.first_byte(exchange.first_byte_s)
        if log.isEnabledFor(logging.INFO):  # the line's fields cost more than all the counting
            _write(exchange)


def _write(exchange: Exchange) -> None:
    assert exchange.outcome is not None
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
