"""Writes metrics as Prometheus's text, a little at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector


async def text_of(collector: Collector) -> bytes:
    """Returns the text of what ``collector`` shows.

    After each metric other tasks have a turn: all of it may take milliseconds, for which no token should wait.
    """
    texts = []
    for metric in collector.collect():
        texts.append(generate_latest(_Collected(metric)))
        await asyncio.sleep(0)
    return b"".join(texts)


class _Collected(Collector):
    """One metric that has been collected before."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)
