"""Both sides of an engine's transfers as one: what it fetches from other engines, and what they fetch from it.

The two sides share one thread and the channels to the other TP ranks, and nothing else. Two engines
that fetch from each other have two control connections, two handshakes and two links, one for each direction. A link
has a UCX worker of its own, and its tags are looked up among the transfers of that link alone, so tags, notices and
cells of mapped memory cannot meet those of the other direction.
"""

from __future__ import annotations

from contextlib import ExitStack

from pdserve_kvtransfer.events import CachedFetchOrder, FetchOrder
from pdserve_kvtransfer.fetch.side import FetchSide
from pdserve_kvtransfer.push.side import PushSide
from pdserve_kvtransfer.sides import (
    AcceptBlocks,
    CancelFetch,
    FailPush,
    GiveFirstToken,
    GiveHeld,
    LocalEngine,
    OfferBlocks,
    Pollable,
    PushBlocks,
    TransferCommand,
    earliest,
)


class BothSides:
    """All transfers of one engine. It is a ``sides.Side``.

    The constructor raises TransferError if the control channel cannot be bound.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._ranks = engine.ranks
        self._push = PushSide(engine)
        self._fetch = FetchSide(engine, self._push.address)

    @property
    def address(self) -> str:
        """The address of the control channel, at which other engines fetch from this one."""
        return self._push.address

    def handle(self, command: TransferCommand, now: float) -> None:
        match command:
            case FetchOrder() | CachedFetchOrder() | AcceptBlocks() | CancelFetch() | OfferBlocks():
                self._fetch.handle(command, now)
            case PushBlocks() | GiveFirstToken() | GiveHeld() | FailPush():
                self._push.handle(command, now)

    def turn(self, now: float) -> bool:
        reported = self._ranks.receive()
        fetched = self._fetch.turn(now)
        pushed = self._push.turn(now)
        return reported or fetched or pushed

    def tick(self, now: float) -> None:
        self._fetch.tick(now)
        self._push.tick(now)

    def renew_leases(self, now: float) -> None:
        self._fetch.renew_leases(now)
        self._push.renew_leases(now)

    def next_timer(self) -> float | None:
        return earliest((self._fetch.next_timer(), self._push.next_timer()))

    def moving(self) -> bool:
        return self._fetch.moving() or self._push.moving()

    def arm(self) -> bool:
        return self._fetch.arm() and self._push.arm()

    def pollables(self) -> list[Pollable]:
        return [*self._ranks.sockets, *self._fetch.pollables(), *self._push.pollables()]

    def close(self, linger_s: float) -> None:
        with ExitStack() as stack:
            stack.callback(self._ranks.close, linger_s)
            stack.callback(self._push.close, linger_s)
            stack.callback(self._fetch.close, linger_s)
