"""Fake nodes that write journals: all of them give the same answer, each as far as its test says."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from pdserve.control.frame import Opener, Purpose
from pdserve.control.journal import DONE_ENTRY, USAGE_ENTRY, cut, digest, entry
from pdserve.errors import Unavailable
from pdserve.http.errors import ENGINE_GONE_HEADER, error_event
from pdserve.wire.discovery import Role
from pdserve.wire.terms import TICKET_HEADER, Ticket
from tests.proxy.cluster import SECRET, Cluster, node_info
from tests.proxy.fake_node import Behaviour, Exchange, FakeNode, Received

ANSWER = [
    *(entry(0, [100 + n]) + b'data: {"n": %d}\n\n' % n for n in range(5)),
    entry(0, [7], over=True) + b'data: {"finish": "stop"}\n\n',
    USAGE_ENTRY + b'data: {"usage": 6}\n\n',
    DONE_ENTRY + b"data: [DONE]\n\n",
]
"""The events of the answer with their entries."""
SHOWN = cut(b"".join(ANSWER))[0]
"""The answer as a client gets it."""


def ticket_in(request: Received) -> Ticket:
    header = request.headers[TICKET_HEADER]
    frame = base64.urlsafe_b64decode(header + "=" * (-len(header) % 4))
    return Opener(SECRET, Purpose.TICKET, Ticket).open(frame)


def split(request: Received) -> tuple[bytes, bytes]:
    """Returns the client's body and the journal behind it, and checks that the ticket announces this journal."""
    resume = ticket_in(request).terms.resume
    if resume is None:
        return request.body, b""
    end = len(request.body) - resume.journal_bytes
    assert digest(request.body[end:]) == resume.digest
    return request.body[:end], request.body[end:]


async def answer_up_to(exchange: Exchange, end: int | None = None, *, more: bytes = b"", pause: bool = False) -> None:
    """Begins a stream, and sends the events of the answer that its journal lacks, up to number ``end``, and ``more``.

    With ``pause``, the events come one at a time.
    """
    _, journal = split(exchange.request)
    assert cut(b"".join(ANSWER))[1].startswith(journal)
    await exchange.begin_stream()
    for event in ANSWER[journal.count(b"\n") : end]:
        await exchange.chunk(event)
        if pause:
            await asyncio.sleep(0)
    if more:
        await exchange.chunk(more)


async def complete(exchange: Exchange) -> None:
    await answer_up_to(exchange)
    await exchange.finish()


def dies_at(end: int, more: bytes = b"") -> Behaviour:
    """Returns the behaviour of a node that dies when it has sent the answer up to event ``end``, and ``more``."""

    async def die(exchange: Exchange) -> None:
        await answer_up_to(exchange, end, more=more)
        exchange.die()

    return die


def fails_at(end: int) -> Behaviour:
    """Returns the behaviour of a node that ends the answer with an error event behind event ``end``."""

    async def fail(exchange: Exchange) -> None:
        await answer_up_to(exchange, end, more=error_event(Unavailable("no room", code="no_room")))
        await exchange.finish()

    return fail


def hangs_at(end: int) -> Behaviour:
    async def hang(exchange: Exchange) -> None:
        await answer_up_to(exchange, end)
        await exchange.gone()

    return hang


async def die_at_once(exchange: Exchange) -> None:
    exchange.die()


async def begin_and_die(exchange: Exchange) -> None:
    await exchange.begin_stream()
    exchange.die()


def refuses(status: int) -> Behaviour:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(status, b'{"error": {"message": "no"}}')

    return refuse


async def lose_engine(exchange: Exchange) -> None:
    """Answers as a node whose engine has died under the request."""
    await exchange.answer(500, b'{"error": {"message": "the engine failed"}}', **{ENGINE_GONE_HEADER: "1"})


@dataclass
class Nodes:
    """Nodes of which whichever is asked first behaves as the first of ``behaviours``, and so on."""

    behaviours: Sequence[Behaviour]
    asked: list[Received] = field(default_factory=list)
    made: list[FakeNode] = field(default_factory=list)

    async def behave(self, exchange: Exchange) -> None:
        self.asked.append(exchange.request)
        await self.behaviours[len(self.asked) - 1](exchange)

    @property
    def tickets(self) -> list[Ticket]:
        return [ticket_in(request) for request in self.asked]


@asynccontextmanager
async def nodes(
    running: Cluster,
    *behaviours: Behaviour,
    count: int | None = None,
    role: Role = Role.MIXED,
    kernels: Mapping[int, str] = MappingProxyType({}),
) -> AsyncIterator[Nodes]:
    """Runs ``count`` nodes of one role, one for each of ``behaviours`` by default.

    ``kernels`` are those of the nodes with these numbers.
    """
    found = Nodes(behaviours)
    async with AsyncExitStack() as stack:
        for _ in range(len(behaviours) if count is None else count):
            found.made.append(await stack.enter_async_context(FakeNode(found.behave)))
        infos = [node_info(f"n{number}", role, node.url) for number, node in enumerate(found.made)]
        await running.add(
            *[msgspec.structs.replace(info, kernels=kernels.get(number, "")) for number, info in enumerate(infos)]
        )
        yield found
