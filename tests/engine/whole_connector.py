"""Puts a whole connector together for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdserve.engine.kv_cache.block_manager import BlockManager
from pdserve.engine.kv_connector.cached_blocks import ReusingConnector
from pdserve.engine.kv_connector.holding_connector import HoldingConnector
from pdserve.engine.kv_connector.kv_return import ReturningConnector
from pdserve.engine.kv_connector.prompt_fetcher import FetchingConnector
from pdserve.engine.kv_connector.prompt_pusher import PushingConnector
from pdserve.engine.kv_connector.return_offers import ReturnOffers
from pdserve.engine.kv_connector.transfer_connector import TransferConnector

LEASE_S = 3.0


def whole_connector(
    transfers: Any,
    blocks: BlockManager,
    fetching: FetchingConnector,
    pushing: PushingConnector,
    boot: bytes,
    finish_writes: Callable[[], None] = lambda: None,
) -> TransferConnector:
    reusing = ReusingConnector(blocks, transfers, LEASE_S, boot, block_bytes=1e6, finish_writes=finish_writes)
    holding = HoldingConnector(blocks, transfers, finish_writes)
    if not blocks.caching:
        return TransferConnector(transfers, fetching, pushing, reusing, holding)
    offers = ReturnOffers(transfers, blocks.block_size)
    returning = ReturningConnector(blocks, transfers, boot, finish_writes)
    return TransferConnector(transfers, fetching, pushing, reusing, holding, offers, returning)
