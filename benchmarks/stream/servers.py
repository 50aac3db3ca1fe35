"""Starts what ``benchmarks stream`` measures: for each variant a real proxy, and a real node with a mock engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from benchmarks.process_usage import engine_of
from benchmarks.stream.mock_node import mock_node_command
from benchmarks.stream.variants import Variant
from pdserve.bench.cluster import Program, running
from pdserve.errors import BenchError
from pdserve.process import pdserve_command

SERVED_NAME = "mock"
NODE, PROXY, ENGINE = "node", "proxy", "engine"
_LOOPBACK = {
    "PDSERVE_HOST": "127.0.0.1",
    "PDSERVE_PORT": "0",
    "PDSERVE_LOG_LEVEL": "info",
    "PDSERVE_CONTROL_PORT": "0",
}
_ASKING_S = 0.05
_ASK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    """The running servers of one variant."""

    variant: Variant
    url: str
    """The URL of the proxy."""
    pids: dict[str, int]


class _Tokens(msgspec.Struct):
    tokens: list[int]


@asynccontextmanager
async def running_servers(
    found: Sequence[Variant], model: str, streams: int, script_file: str, environ: Mapping[str, str], timeout_s: float
) -> AsyncIterator[list[Server]]:
    """Yields a server for each variant, once all are registered. Each is fit for ``streams`` streams at once.

    Raises BenchError if one does not come up in ``timeout_s``, and ChildDied if one ends.
    """
    plain = {name: value for name, value in environ.items() if not name.startswith("PDSERVE_")}
    own = {**plain, **_LOOPBACK, "PDSERVE_SECRET": secrets.token_hex(32)}
    proxies = [
        Program(f"proxy of {variant.name}", pdserve_command("proxy"), _proxy_environ(own, streams)) for variant in found
    ]
    async with running(proxies, timeout_s) as fronts:
        nodes = [
            Program(
                f"node of {variant.name}",
                mock_node_command(script_file),
                {**_node_environ(own, model, streams), **variant.environ, "PDSERVE_PROXY": front.listening.control},
            )
            for variant, front in zip(found, fronts, strict=True)
        ]
        async with running(nodes, timeout_s) as backs:
            for front in fronts:
                await _registered(front.listening.url, timeout_s)
            yield [
                Server(
                    variant,
                    front.listening.url,
                    {NODE: back.pid, PROXY: front.pid, ENGINE: engine_of(back)},
                )
                for variant, front, back in zip(found, fronts, backs, strict=True)
            ]


async def token_ids(url: str, text: str) -> list[int]:
    """Returns the token ids of ``text`` by the tokenizer behind the proxy ``url``. Raises BenchError."""
    body = {"model": SERVED_NAME, "prompt": text, "add_special_tokens": False}
    try:
        timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/tokenize", data=msgspec.json.encode(body)) as response,
        ):
            return msgspec.json.decode(await response.read(), type=_Tokens).tokens
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as exc:
        raise BenchError(f"the node does not tokenize: {exc!r}") from exc


def _proxy_environ(own: Mapping[str, str], streams: int) -> dict[str, str]:
    return {
        **own,
        "PDSERVE_MAX_IN_FLIGHT": str(max(4096, streams)),
        "PDSERVE_MAX_CONNECTIONS": str(max(8192, streams)),
        "PDSERVE_MAX_CLIENT_CONNECTIONS": str(max(16_384, streams)),
    }


def _node_environ(own: Mapping[str, str], model: str, streams: int) -> dict[str, str]:
    return {
        **own,
        "PDSERVE_MODEL": model,
        "PDSERVE_SERVED_MODEL_NAME": SERVED_NAME,
        "PDSERVE_MAX_WAITING": str(max(4096, streams)),
        "PDSERVE_MAX_CLIENT_CONNECTIONS": str(max(16_384, streams)),
    }


async def _registered(url: str, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(_ASKING_S)
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise BenchError(f"no node has registered at the proxy {url} in {timeout_s:g} s") from exc
