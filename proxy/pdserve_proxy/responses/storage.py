"""Reaches the one store of a proxy: from its only process, or from a worker through the supervisor."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from pdserve.wire.proxy_workers import (
    AbandonResponse,
    BeginResponse,
    DeleteResponse,
    FinishResponse,
    ReadResponse,
    ResponsePart,
    StoreQuestion,
    StoreReply,
)
from pdserve_proxy.responses.store import Begun, FinishedResponse, ResponseKey, ResponseStore, StoreLimits

ANSWERS_AT_ONCE = 8
"""A worker asks for so many conversations at once. Each may be as large as a request body, and until it has come it
counts as nobody's."""


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


def answer(store: ResponseStore, asker: bytes, question: StoreQuestion) -> StoreReply:
    """Returns what the supervisor answers the worker ``asker``."""
    now = time.monotonic()
    match question:
        case BeginResponse(number=number, owner=owner, previous=previous, items=items, prompt_start=start):
            begun = store.begin(ResponseKey(asker, number), owner, previous, items, start, now)
            if begun is None:
                return StoreReply(number, found=False)
            return StoreReply(number, True, begun.history, begun.prompt_start, begun.accepted)
        case FinishResponse(number=number, response=response, id=name, output=output, body=body):
            stored = store.finish(ResponseKey(asker, response), FinishedResponse(name, output, body), now)
            return StoreReply(number, found=True, kept=stored)
        case ReadResponse(number=number, owner=owner, id=name, part=part):
            read = store.body if part is ResponsePart.BODY else store.input_items
            data = read(owner, name, now)
            return StoreReply(number, data is not None, data or b"")
        case DeleteResponse(number=number, owner=owner, id=name):
            return StoreReply(number, store.delete(owner, name, now))


def abandon(store: ResponseStore, asker: bytes, gone: AbandonResponse) -> None:
    """Ends a response that will not come."""
    store.abandon(ResponseKey(asker, gone.response))


class SupervisorStorage:
    """The supervisor's store, as a worker reaches it."""

    def __init__(
        self,
        limits: StoreLimits,
        ask: Callable[[StoreQuestion], Awaitable[StoreReply]],
        post: Callable[[AbandonResponse], None],
    ) -> None:
        """``ask`` returns the supervisor's answer, or raises Unavailable. ``post`` sends what has no answer."""
        self.limits = limits
        self._ask = ask
        self._post = post
        self._numbers = itertools.count(1)
        self._answers = asyncio.Semaphore(ANSWERS_AT_ONCE)

    def new_key(self) -> ResponseKey:
        return ResponseKey(b"", next(self._numbers))

    async def begin(
        self, key: ResponseKey, owner: str, previous: str | None, items: bytes, prompt_start: bytes
    ) -> Begun | None:
        question = BeginResponse(key.number, owner, previous, items, prompt_start)
        if previous is None:
            reply = await self._ask(question)
        else:
            async with self._answers:
                reply = await self._ask(question)
        return Begun(reply.data, reply.prompt_start, reply.kept) if reply.found else None

    async def finish(self, key: ResponseKey, response: FinishedResponse) -> bool:
        question = FinishResponse(next(self._numbers), key.number, response.id, response.output, response.body)
        return (await self._ask(question)).kept

    def abandon(self, key: ResponseKey) -> None:
        self._post(AbandonResponse(key.number))

    async def body(self, owner: str, response: str) -> bytes | None:
        return await self._read(owner, response, ResponsePart.BODY)

    async def input_items(self, owner: str, response: str) -> bytes | None:
        return await self._read(owner, response, ResponsePart.INPUT_ITEMS)

    async def delete(self, owner: str, response: str) -> bool:
        return (await self._ask(DeleteResponse(next(self._numbers), owner, response))).found

    async def _read(self, owner: str, response: str, part: ResponsePart) -> bytes | None:
        async with self._answers:
            reply = await self._ask(ReadResponse(next(self._numbers), owner, response, part))
        return reply.data if reply.found else None
