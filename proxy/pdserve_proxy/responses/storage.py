"""Reaches the one store of a proxy, from its only process. The workers of a proxy reach it through their supervisor."""

from __future__ import annotations

import itertools
import time
from typing import Protocol

from pdserve_proxy.responses.store import Begun, FinishedResponse, ResponseKey, ResponseStore, StoreLimits


class ResponseStorage(Protocol):
    """The store, wherever it is. What waits raises Unavailable if the store does not answer."""

    limits: StoreLimits

    def new_key(self) -> ResponseKey:
        """Returns a name for a response that will begin."""

    async def begin(
        self, key: ResponseKey, owner: str, previous: str | None, items: bytes, prompt_start: bytes
    ) -> Begun | None:
        """Does what ``ResponseStore.begin`` does."""

    async def finish(self, key: ResponseKey, response: FinishedResponse) -> bool:
        """Does what ``ResponseStore.finish`` does."""

    def abandon(self, key: ResponseKey) -> None:
        """Does what ``ResponseStore.abandon`` does, now or soon."""

    async def body(self, owner: str, response: str) -> bytes | None:
        """Does what ``ResponseStore.body`` does."""

    async def input_items(self, owner: str, response: str) -> bytes | None:
        """Does what ``ResponseStore.input_items`` does."""

    async def delete(self, owner: str, response: str) -> bool:
        """Does what ``ResponseStore.delete`` does."""


class OwnStorage:
    """The store in this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._numbers = itertools.count()
        self.limits = store.limits

    def new_key(self) -> ResponseKey:
        return ResponseKey(b"", next(self._numbers))

    async def begin(
        self, key: ResponseKey, owner: str, previous: str | None, items: bytes, prompt_start: bytes
    ) -> Begun | None:
        return self._store.begin(key, owner, previous, items, prompt_start, time.monotonic())

    async def finish(self, key: ResponseKey, response: FinishedResponse) -> bool:
        return self._store.finish(key, response, time.monotonic())

    def abandon(self, key: ResponseKey) -> None:
        self._store.abandon(key)

    async def body(self, owner: str, response: str) -> bytes | None:
        return self._store.body(owner, response, time.monotonic())

    async def input_items(self, owner: str, response: str) -> bytes | None:
        return self._store.input_items(owner, response, time.monotonic())

    async def delete(self, owner: str, response: str) -> bool:
        return self._store.delete(owner, response, time.monotonic())
