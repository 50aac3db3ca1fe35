"""Puts a whole connector together for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.cached_blocks import CachedFetcher, CachedPusher
from pdserve.engine.kv_connector.connector import TransferConnector
from pdserve.engine.kv_connector.kv_return import ReturnFetcher, ReturnOffers
from pdserve.engine.kv_connector.prompt_fetcher import PromptFetcher
from pdserve.engine.kv_connector.prompt_pusher import PromptPusher
from pdserve.engine.kv_connector.transfers import BlockOrder
from pdserve_kvtransfer.transport import StepUnderWay

LEASE_S = 3.0


def whole_connector(
    transfers: Any,
    blocks: BlockManager,
    fetching: PromptFetcher,
    pushing: PromptPusher,
    boot: bytes,
    finish_writes: Callable[[], None] = lambda: None,
    order: BlockOrder | None = None,
    step: StepUnderWay | None = None,
) -> TransferConnector:
    reusing = CachedFetcher(blocks, transfers, LEASE_S, boot, block_bytes=1e6, finish_writes=finish_writes, order=order)
    holding = CachedPusher(blocks, transfers, finish_writes, order)
    if not blocks.caching:
        return TransferConnector(transfers, fetching, pushing, reusing, holding, step=step)
    offers = ReturnOffers(transfers, blocks.block_size)
    returning = ReturnFetcher(blocks, transfers, boot, finish_writes, order)
    return TransferConnector(transfers, fetching, pushing, reusing, holding, offers, returning, step)
