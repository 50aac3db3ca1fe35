"""Holds the responses of one proxy in memory, within bounds of bytes, number and age.

    begin ──▶ finish ──▶ …      the response is stored, until it is deleted, too old, or in the way of newer ones
          ──▶ abandon           it never came

A response belongs to an owner, and no other owner can tell it from one that there never was. It holds the items of
those before it in its conversation (``Items``), which are stored once, however many responses share them. So a
conversation goes on when an earlier response in it has been deleted or has become too old.

``ResponseStore`` holds them, without any I/O. ``ResponseStorage`` reaches the one store of a proxy: from its only
process, or from a worker through the supervisor.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
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

OVERHEAD_BYTES = 512
"""What the store counts for a response beside its bytes."""
SHARE = 8
"""One response may take this part of the memory."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    memory_bytes: int
    responses: int
    ttl_s: float
    """Seconds that a response is stored."""

    @property
    def share_bytes(self) -> int:
        """The memory that one response with its input may take."""
        return self.memory_bytes // SHARE


@dataclass(frozen=True, slots=True)
class ResponseKey:
    """Names a response that has begun."""

    asker: bytes
    """The process that has begun it."""
    number: int


@dataclass(frozen=True, slots=True)
class Begun:
    """What a response that has begun goes on from."""

    history: bytes = b""
    """The items before its own, as a JSON list; empty if there are none."""
    prompt_start: bytes = b""
    """The first bytes of the conversation's prompt, by which its first request was routed."""
    accepted: bool = False
    """Whether the response will be stored."""


@dataclass(frozen=True, slots=True)
class FinishedResponse:
    """A response that is over."""

    id: str
    output: bytes
    """Its items, as a JSON list."""
    body: bytes
    """All of it, as JSON."""


class Items:
    """Some items of a conversation, behind those of ``before``. Every list of items is JSON."""

    __slots__ = ("before", "holders", "items", "prompt_start")

    def __init__(self, items: bytes, before: Items | None, prompt_start: bytes) -> None:
        self.items = items
        self.before = before
        self.prompt_start = prompt_start
        self.holders = 0
        """How many responses and later items hold these."""

    @property
    def size(self) -> int:
        """The bytes that these items take, without those before."""
        start = len(self.prompt_start) if self.before is None else 0
        return len(self.items) + start + OVERHEAD_BYTES

    def chain(self) -> Iterator[Items]:
        """Yields these items and all those before them, the last ones first."""
        items: Items | None = self
        while items is not None:
            yield items
            items = items.before


@dataclass(frozen=True, slots=True)
class _Stored:
    body: bytes
    input: Items
    output: Items
    until_s: float


class ResponseStore:
    """The responses of all owners. Times are those of any one clock."""

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.taken_bytes = 0
        self._begun: dict[ResponseKey, tuple[str, Items]] = {}
        """The owner and the input of each response that has begun."""
        self._stored: dict[tuple[str, str], _Stored] = {}
        """The responses by owner and id, the oldest first."""

    def __len__(self) -> int:
        """The number of responses that are stored."""
        return len(self._stored)

    def begin(
        self, key: ResponseKey, owner: str, previous: str | None, items: bytes, prompt_start: bytes, now: float
    ) -> Begun | None:
        """Begins a response with these ``items`` as its own input. Returns None if there is no ``previous`` one.

        The response will not be stored if ``items`` are empty, or take too much memory.
        """
        self._expire(now)
        before = None
        if previous is not None:
            if (last := self._stored.get((owner, previous))) is None:
                return None
            before, prompt_start = last.output, last.output.prompt_start
        own = Items(items, before, prompt_start)
        self._hold(own)
        accepted = bool(items) and self._free_bytes(0, own.size)
        if accepted:
            self._begun[key] = owner, own
        found = Begun(_joined(before), b"" if before is None else prompt_start, accepted)
        if not accepted:
            self._release(own)
        return found

    def finish(self, key: ResponseKey, response: FinishedResponse, now: float) -> bool:
        """Stores the response that has begun as ``key``. Returns whether it could."""
        owner, own = self._begun.pop(key, (None, None))
        if owner is None or own is None:
            return False
        self._expire(now)
        try:
            output = Items(response.output, own, own.prompt_start)
            size = output.size + len(response.body)
            if not self._free_bytes(size, own.size + size):
                return False
            self._hold(output)
            self.taken_bytes += len(response.body)
            own.holders += 1
            place = owner, response.id
            self._drop(place)  # nodes never give two responses one id
            self._stored[place] = _Stored(response.body, own, output, now + self.limits.ttl_s)
            return True
        finally:
            self._release(own)

    def abandon(self, key: ResponseKey) -> None:
        """Ends a response that has begun and will not come. Does nothing if it has ended."""
        _, own = self._begun.pop(key, (None, None))
        if own is not None:
            self._release(own)

    def abandon_all(self, asker: bytes) -> None:
        """Ends all responses that a process had begun which is gone."""
        for key in [key for key in self._begun if key.asker == asker]:
            self.abandon(key)

    def body(self, owner: str, response: str, now: float) -> bytes | None:
        """Returns the complete response, as JSON; None if this owner has no such response."""
        self._expire(now)
        stored = self._stored.get((owner, response))
        return None if stored is None else stored.body

    def input_items(self, owner: str, response: str, now: float) -> bytes | None:
        """Returns the items of which the response was made, as a JSON list; None if there is no such response."""
        self._expire(now)
        stored = self._stored.get((owner, response))
        return None if stored is None else _joined(stored.input)

    def delete(self, owner: str, response: str, now: float) -> bool:
        """Deletes a response. Returns whether this owner had it."""
        self._expire(now)
        return self._drop((owner, response))

    def _free_bytes(self, needed: int, share: int) -> bool:
        """Drops the oldest responses until ``needed`` more bytes can be stored. Returns whether they can.

        ``share`` are all bytes of the response for which they are.
        """
        limits = self.limits
        if share > limits.share_bytes:
            return False
        while self._stored and (self.taken_bytes + needed > limits.memory_bytes or len(self) >= limits.responses):
            self._drop(next(iter(self._stored)))
        return self.taken_bytes + needed <= limits.memory_bytes

    def _expire(self, now: float) -> None:
        while self._stored:
            place, stored = next(iter(self._stored.items()))
            if stored.until_s > now:
                return
            self._drop(place)

    def _drop(self, place: tuple[str, str]) -> bool:
        stored = self._stored.pop(place, None)
        if stored is None:
            return False
        self.taken_bytes -= len(stored.body)
        self._release(stored.output)
        self._release(stored.input)
        return True

    def _hold(self, items: Items) -> None:
        """Holds items that are new, and with them those before."""
        items.holders = 1
        self.taken_bytes += items.size
        if items.before is not None:
            items.before.holders += 1

    def _release(self, items: Items) -> None:
        """Gives items up, and all those before them that nothing else holds."""
        for each in items.chain():
            each.holders -= 1
            if each.holders:
                return
            self.taken_bytes -= each.size


def _joined(items: Items | None) -> bytes:
    """Returns a JSON list of these items and all those before them; nothing if there are none."""
    if items is None:
        return b""
    lists = [each.items[1:-1] for each in items.chain()]
    return b"[%b]" % b",".join([each for each in reversed(lists) if each.strip()])


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
            return StoreReply(number, found=True, stored=stored)
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
        return Begun(reply.data, reply.prompt_start, reply.stored) if reply.found else None

    async def finish(self, key: ResponseKey, response: FinishedResponse) -> bool:
        question = FinishResponse(next(self._numbers), key.number, response.id, response.output, response.body)
        return (await self._ask(question)).stored

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
