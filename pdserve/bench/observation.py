"""What a benchmark reads of running servers: the nodes that a proxy knows, and what a server has counted."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import BenchError

_ASKING_S = 0.05
_MAX_BYTES = 64 * 2**20
"""No answer about nodes or counts is longer."""


class NodeAddress(msgspec.Struct, frozen=True):
    """The part of an entry of a proxy's ``/instances`` that is read here."""

    name: str
    url: str


_known = msgspec.json.Decoder(list[NodeAddress])


async def known_nodes(session: aiohttp.ClientSession, proxy_url: str) -> list[NodeAddress]:
    """Returns the nodes that a proxy knows now."""
    return _known.decode(await _body(session, f"{proxy_url}/instances"))


async def until_known(session: aiohttp.ClientSession, proxy_url: str, count: int, timeout_s: float) -> None:
    """Waits until a proxy knows ``count`` nodes. Raises BenchError if that takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if len(await known_nodes(session, proxy_url)) == count:
                    return
                await asyncio.sleep(_ASKING_S)
    except TimeoutError as exc:
        raise BenchError(f"the proxy did not know {count} nodes after {timeout_s:g} s") from exc


async def read_metrics(session: aiohttp.ClientSession, url: str) -> str:
    """Returns the metrics of the server at ``url``, as its ``/metrics`` has them."""
    return (await _body(session, f"{url}/metrics")).decode(errors="replace")


async def _body(session: aiohttp.ClientSession, url: str) -> bytes:
    """Returns what is at ``url``. Raises aiohttp.ClientError, also for an error status, and BenchError."""
    body = bytearray()
    async with session.get(url) as response:
        response.raise_for_status()
        async for part in response.content.iter_any():
            body += part
            if len(body) > _MAX_BYTES:
                raise BenchError(f"{url} has more than {_MAX_BYTES // 2**20} MiB")
    return bytes(body)


def total(metrics: str, name: str, **labels: str) -> float:
    """Returns the sum of the samples of ``name`` that have these labels; 0 if there are none."""
    samples = (sample for family in text_string_to_metric_families(metrics) for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())
