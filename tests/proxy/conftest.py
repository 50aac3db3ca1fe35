"""Async tests run on the event loop that the proxy uses in production, each for two minutes at most."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from tests.proxy.cluster import cluster, proxy_config
from tests.proxy.shared_proxy import SharedProxy

LIMIT_S = 120


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def proxy() -> AsyncIterator[SharedProxy]:
    config = proxy_config()
    async with cluster(dataclasses.replace(config, relay=dataclasses.replace(config.relay, suspect_s=0.0))) as running:
        yield SharedProxy(running)


def pytest_itemcollected(item: pytest.Item) -> None:
    # uvloop swallows what pytest-timeout raises in its signal handler: a test that hangs would hang for ever.
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = limited(item.obj)


def limited(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    @functools.wraps(test)
    async def within_limit(**arguments: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            await test(**arguments)

    return within_limit
