"""The driver of an engine's fetches, which has one peer for each boot that the engine fetches from."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import cast

from pdserve.errors import HandshakeRefused, PeerLost, RankLost, SpoiltMessage, TransferError
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import Offer, ToDecode
from pdserve_kvtransfer.control.sockets import FrameOpener
from pdserve_kvtransfer.events import CachedFetchOrder, FailureKind, FetchFailed, FetchOrder, PeersMet
from pdserve_kvtransfer.fetch.peer import FetchPeer
from pdserve_kvtransfer.sides import (
    AcceptBlocks,
    CancelFetch,
    LocalEngine,
    MeetPeers,
    OfferBlocks,
    Pollable,
    TransferCommand,
    earliest,
)

log = logging.getLogger(__name__)


class FetchSide:
    """All fetches of an engine, from any others. It is a ``sides.Side``."""

    def __init__(self, engine: LocalEngine, address: str) -> None:
        """``address`` is that of the engine's own control channel, at which others fetch what it offers."""
        self._engine = engine
        self._holder = PrefillTarget(engine.boot_id.hex()[:8], address, engine.boot_id)
        self._opener: FrameOpener[ToDecode] = FrameOpener(
            engine.secret, cast("type[ToDecode]", ToDecode), engine.stats, engine.boot_id
        )
        self._peers: dict[bytes, FetchPeer] = {}
        self._closing: list[FetchPeer] = []
        self._silent: dict[str, bytes] = {}
        """The boot whose lease ran out last at each address, and that has not answered a greeting since."""
        self._no_offers_until: dict[str, float] = {}
        """Until when no peer is made for an offer to an address, because it did not answer the last one."""
        self._meeting: int | None = None
        """The number of the last ``MeetPeers``, until ``PeersMet``."""
        self._to_meet: deque[PrefillTarget] = deque()
        self._unmet: set[bytes] = set()
        """The boots among its targets whose handshake is under way."""

    def handle(self, command: TransferCommand, now: float) -> None:
        match command:
            case FetchOrder() | CachedFetchOrder():
                self._start_fetch(command, now)
            case OfferBlocks():
                self._offer(command, now)
            case MeetPeers(number, targets):
                self._meeting, self._to_meet = number, deque(targets)
                for target in targets:
                    self._forget_silence(target, now)
            case AcceptBlocks(transfer_id) | CancelFetch(transfer_id):
                for peer in list(self._peers.values()):
                    if peer.has(transfer_id):
                        self._try(peer, partial(peer.on_command, command, now), now)
            case _:
                raise TypeError(f"no fetch has a {type(command).__name__}")

    def _start_fetch(self, order: FetchOrder | CachedFetchOrder, now: float) -> None:
        try:
            if order.target.boot_id == self._engine.boot_id:
                raise TransferError("an engine does not fetch from itself")
            peer = self._peers.get(order.target.boot_id) or self._peer_for(order.target, now)
            if self._fell_silent(peer.target) and not peer.welcomed:
                if peer.unanswered(now):
                    self._lose(peer, FailureKind.PEER_LOST, "it has not answered the greeting", now)
                    self._greet_again(order.target, now)
                raise PeerLost("it fell silent, and has not answered since")
        except TransferError as exc:
            self._cannot_fetch(order, str(exc))
            return
        except RankLost:
            raise
        except Exception as exc:
            log.exception("prefill node %s cannot be met", order.target.name)
            self._cannot_fetch(order, f"{type(exc).__name__}: {exc}")
            return
        self._try(peer, partial(peer.fetch, order, now), now)

    def _offer(self, command: OfferBlocks, now: float) -> None:
        """Offers blocks to a peer, which is met for that if it can be. An offer that cannot be made is dropped."""
        peer = self._met(command.target, now)
        if peer is not None:
            offer = Offer(self._holder, command.hashes, command.request_id)
            self._try(peer, partial(peer.offer, offer, now), now)

    def _met(self, target: PrefillTarget, now: float) -> FetchPeer | None:
        """Returns a peer that is no order's, and is made if it may and can be."""
        peer = self._peers.get(target.boot_id)
        if peer is not None or target.boot_id == self._engine.boot_id or not self._may_meet(target, now):
            return peer
        try:
            return self._peer_for(target, now)
        except RankLost:
            raise
        except Exception as exc:
            log.info("node %s cannot be met: %s", target.name, exc, exc_info=not isinstance(exc, TransferError))
            self._no_offers_until[target.control] = now + self._engine.settings.lease_s
            return None

    def _meet(self, number: int, now: float) -> None:
        """Meets the next of the engines that are to be peers, one in each turn: transfers under way wait meanwhile."""
        if self._to_meet and (peer := self._met(self._to_meet.popleft(), now)) is not None:
            self._unmet.add(peer.target.boot_id)
        for boot_id in tuple(self._unmet):
            peer = self._peers.get(boot_id)
            if peer is not None and peer.idle and peer.unanswered(now):
                self._lose(peer, FailureKind.PEER_LOST, "it has not answered the greeting", now)
                peer = None
            if peer is None or peer.welcomed:
                self._unmet.discard(boot_id)
        if not self._to_meet and not self._unmet:
            self._engine.event_queue.put(PeersMet(number))
            self._meeting = None

    def _forget_silence(self, target: PrefillTarget, now: float) -> None:
        """Has a node that a proxy names greeted anew if it fell silent: orders wait for the answer as for a new node's.

        If this host was cut off, the connection of the last greeting may not try again for seconds, or never.
        """
        peer = self._peers.get(target.boot_id)
        if peer is not None and not peer.welcomed and self._fell_silent(target):
            self._lose(peer, FailureKind.PEER_LOST, "it is greeted anew", now)
        self._silent.pop(target.control, None)
        self._no_offers_until.pop(target.control, None)

    def _fell_silent(self, target: PrefillTarget) -> bool:
        return self._silent.get(target.control) == target.boot_id

    def _may_meet(self, target: PrefillTarget, now: float) -> bool:
        """Returns whether a peer may be made for an offer, or before any order.

        Fetches from another boot at its address go before it, and so does one that has answered there: which of the
        two is the present one shows when its connection ends, or an order names the other.
        """
        if now < self._no_offers_until.get(target.control, now):
            return False
        self._no_offers_until.pop(target.control, None)
        known = (peer for peer in self._peers.values() if peer.target.control == target.control)
        return all(peer.idle and not peer.welcomed for peer in known)

    def _cannot_fetch(self, order: FetchOrder | CachedFetchOrder, reason: str) -> None:
        self._engine.stats.failures[FailureKind.PEER_LOST] += 1
        self._engine.event_queue.put(FetchFailed(order.transfer_id, reason, 0, (), FailureKind.PEER_LOST))

    def _try(self, peer: FetchPeer, action: Callable[[], bool | None], now: float) -> bool:
        """Does ``action``, which concerns this peer alone: whatever it raises, this peer is lost, and no other.

        Returns its result, and True if it raised. RankLost passes through: this engine cannot go on without its ranks.
        """
        try:
            return bool(action())
        except RankLost:
            raise
        except HandshakeRefused as exc:
            self._lose(peer, FailureKind.MISFIT, str(exc), now)
        except SpoiltMessage as exc:
            self._lose(peer, FailureKind.CORRUPT, str(exc), now)
        except TransferError as exc:
            self._lose(peer, FailureKind.PEER_LOST, str(exc), now)
        except Exception as exc:
            log.exception("prefill node %s cannot be dealt with", peer.target.name)
            self._lose(peer, FailureKind.PEER_LOST, f"{type(exc).__name__}: {exc}", now)
        return True

    def _peer_for(self, target: PrefillTarget, now: float) -> FetchPeer:
        for known in list(self._peers.values()):
            if known.target.control == target.control:
                if known.serving:
                    # The connection stands, so the boot that the order names is a past one.
                    raise PeerLost("the order names a boot that this address no longer (or not yet) has")
                self._lose(known, FailureKind.PEER_LOST, "the prefill node has restarted", now)
        peer = FetchPeer(self._engine, target, self._opener, now)
        self._peers[target.boot_id] = peer
        return peer

    def turn(self, now: float) -> bool:
        more = False
        self._closing = [peer for peer in self._closing if not peer.closed(now)]
        for peer in list(self._peers.values()):
            more |= self._try(peer, partial(peer.turn, now), now)
        return more

    def tick(self, now: float) -> None:
        if self._meeting is not None:
            self._meet(self._meeting, now)
        for peer in list(self._peers.values()):
            if peer.lease.expired(now):
                self._engine.stats.leases_expired_receiving += 1
                self._lose(peer, FailureKind.LEASE_EXPIRED, "the prefill engine fell silent", now)
                self._greet_again(peer.target, now)
            else:
                self._try(peer, partial(peer.tick, now), now)

    def _greet_again(self, target: PrefillTarget, now: float) -> None:
        """Begins a new handshake. Until it is answered, orders fail at once instead of waiting for another lease."""
        self._silent[target.control] = target.boot_id
        try:
            self._peer_for(target, now)
        except RankLost:
            raise
        except TransferError as exc:
            log.info("prefill node %s cannot be greeted anew: %s", target.name, exc)
        except Exception:
            log.exception("prefill node %s cannot be greeted anew", target.name)

    def _lose(self, peer: FetchPeer, kind: FailureKind, reason: str, now: float) -> None:
        log.info("prefill node %s is lost: %s", peer.target.name, reason)
        del self._peers[peer.target.boot_id]
        if peer.welcomed:
            self._silent.pop(peer.target.control, None)
        else:
            self._no_offers_until[peer.target.control] = now + self._engine.settings.lease_s
        peer.end(kind, reason)
        if not peer.closed(now):
            self._closing.append(peer)

    def renew_leases(self, now: float) -> None:
        for peer in self._peers.values():
            peer.renew_leases(now)

    def next_timer(self) -> float | None:
        return earliest(peer.next_timer() for peer in self._peers.values())

    def moving(self) -> bool:
        return any(peer.link.moving() for peer in self._peers.values())

    def arm(self) -> bool:
        return not self._to_meet and all(peer.link.arm() for peer in self._peers.values())

    def pollables(self) -> list[Pollable]:
        return [pollable for peer in self._peers.values() for pollable in peer.pollables()]

    def close(self, linger_s: float) -> None:
        peers = list(self._peers.values())
        self._peers.clear()
        with ExitStack() as stack:
            for peer in peers:
                stack.callback(peer.abandon, "the decode engine is closing", linger_s)
