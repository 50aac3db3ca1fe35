"""A decode engine's view of one prefill engine: its control connection, its link, and the fetches from it."""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from typing import TypeAlias

from pdserve.control.frame import Opened
from pdserve.errors import PeerLost, SpoiltMessage, StaleFrame
from pdserve.wire.ids import TransferId
from pdserve.wire.rank import (
    ConnectLink,
    Direction,
    Dropped,
    Expect,
    Expecting,
    ExpectMore,
    Forget,
    Forgotten,
    LinkBroken,
    LinkOpened,
    PiecesLanded,
    Released,
)
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import (
    TAG_BITS,
    UNKNOWN_LOAD,
    Accept,
    BlocksReady,
    CachedRequest,
    Cancel,
    Digests,
    Done,
    Failed,
    FirstToken,
    Held,
    Hello,
    Offer,
    Ping,
    Pong,
    PrefillRequest,
    Refused,
    ToDecode,
    Welcome,
)
from pdserve_kvtransfer.control.handshake import Handshake
from pdserve_kvtransfer.control.sockets import ControlClient, FrameOpener, Spoilt
from pdserve_kvtransfer.events import (
    BlocksReleased,
    CachedFetchOrder,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FetchOrder,
    LoadHeard,
    PrefillNodeMet,
)
from pdserve_kvtransfer.fetch.port import FetchPort
from pdserve_kvtransfer.fetch.session import FetchEffect, FetchMessage, FetchSession, FetchState
from pdserve_kvtransfer.pieces import Piece, group_maps
from pdserve_kvtransfer.ranks import NodeLink, Reported
from pdserve_kvtransfer.sides import (
    AcceptBlocks,
    CancelFetch,
    Lease,
    LocalEngine,
    PingTimer,
    Pollable,
    earliest,
    wanted_groups,
)

log = logging.getLogger(__name__)

_MAX_OFFERS = 64
"""How many offers wait for one handshake, or for a sign that the peer reads them."""

_Message: TypeAlias = Hello | PrefillRequest | CachedRequest | Accept | Done | Cancel | Ping | Offer


class FetchPeer:
    """A prefill engine that this engine fetches from.

    A method raises when the peer is lost: TransferError, or any other error if that is a defect. The owner then calls
    ``end``. From then on nothing is sent to the other engine, and nothing raises.

    The constructor raises TransferError if the peer's address or a link cannot be used. The peer sends ``Hello`` when
    every rank of this node has opened its end of the link.
    """

    def __init__(self, engine: LocalEngine, target: PrefillTarget, opener: FrameOpener[ToDecode], now: float) -> None:
        self.target = target
        self._engine = engine
        self._opener = opener
        self._sessions: dict[TransferId, FetchSession] = {}
        self._tags: dict[int, FetchSession] = {}
        self._addresses: dict[int, bytes] = {}
        self._pieces: tuple[tuple[Piece, ...], ...] = ()
        self._lost: tuple[FailureKind, str] | None = None
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()
        """Offers that wait for the handshake, by their last hashes. Each is the newest one of a text."""
        self._offers_until: float | None = None
        self._unread_offers = 0
        """How many offers were sent since the peer was last heard."""
        self._arrived = now
        self._ping_timer = PingTimer(engine.settings.heartbeat_s)
        self.lease = Lease(engine.settings.lease_s)
        self._greeting = Lease(engine.settings.greeting_s)
        """Runs from the greeting to its answer. Nothing but that ends it: pings do not."""
        self._draining = Lease(engine.settings.drain_s)
        """Runs while blocks of ended fetches are still written. Each landed piece renews it."""
        self._client = ControlClient(engine.zmq_context, target.control)
        try:
            self.link = NodeLink(
                engine.ranks,
                Direction.FETCH,
                FetchPort,
                engine.spec.group_heads,
                engine.region,
                engine.transport,
                peer=f"prefill node {target.name}",
                links=engine.stats.links,
            )
        except BaseException:
            self._client.close(0.0)
            raise
        self._handshake = Handshake(engine.boot_id, engine.spec, target.boot_id)
        engine.stats.handshakes += 1

    @property
    def welcomed(self) -> bool:
        """Whether the handshake with this boot is complete."""
        return self._handshake.complete

    def unanswered(self, now: float) -> bool:
        """Returns whether the greeting should have been answered by now, and was not: it may have been dropped."""
        return self._greeting.expired(now)

    @property
    def serving(self) -> bool:
        """Whether the handshake is complete and fetches from this peer are under way."""
        return self.welcomed and not self.idle

    @property
    def idle(self) -> bool:
        """Whether no fetch from this peer is under way."""
        return not self._sessions

    def has(self, transfer_id: TransferId) -> bool:
        """Returns whether a fetch from this peer has this id."""
        return transfer_id in self._sessions

    def fetch(self, order: FetchOrder | CachedFetchOrder, now: float) -> None:
        """Begins a fetch. If it raises PeerLost, ``end`` fails this fetch like the others."""
        engine, checked = self._engine, self._engine.settings.checksums
        sizes = [engine.block_bytes(group) for group in range(engine.region.num_groups)]
        session = FetchSession(
            order, self._new_tag(), self.link.number, wanted_groups(engine.spec, order), sizes, now, checked=checked
        )
        log.debug("%s from %s begins", session, self.target.name)
        self._sessions[order.transfer_id] = session
        self._tags[session.tag] = session
        self.lease.hold(now)
        self._ping_timer.run(now)
        if self._handshake.complete:
            self._prepare(session)
        self._read_ranks(now)

    def _new_tag(self) -> int:
        while True:
            tag = secrets.randbits(TAG_BITS)
            if tag and tag not in self._tags:
                return tag

    def _prepare(self, session: FetchSession) -> None:
        """Prepares a fetch once the handshake is complete."""
        self._apply(session, session.prepare(self._pieces, self.link.ranks))

    def offer(self, offer: Offer, now: float) -> None:
        """Sends an offer once the handshake is complete, if that is soon. It is dropped if the peer reads nothing."""
        if self.welcomed:
            self._send_offer(offer)
            return
        for block_hash in offer.hashes:
            self._offers.pop(block_hash, None)
        self._offers[offer.hashes[-1]] = offer
        if len(self._offers) > _MAX_OFFERS:
            self._offers.popitem(last=False)
        self._offers_until = self._offers_until or now + self._engine.settings.lease_s

    def _send_offer(self, offer: Offer) -> None:
        if self._unread_offers >= _MAX_OFFERS:
            log.debug("request_id=%s an offer to %s was dropped", offer.request_id or "-", self.target.name)
            return
        self._send(offer)
        if not self._unread_offers:
            # No lease runs without a fetch, so the answer is what shows that offers do not pile up here.
            self._send(Ping(self._engine.boot_id))
        self._unread_offers += 1

    def _drop_offers(self) -> None:
        self._offers.clear()
        self._offers_until = None

    def on_command(self, command: AcceptBlocks | CancelFetch, now: float) -> None:
        """Carries out a command for a fetch that this peer has."""
        session = self._sessions[command.transfer_id]
        match command:
            case AcceptBlocks(_, block_ids):
                self._apply(session, session.accept(block_ids, now))
            case CancelFetch():
                self._apply(session, session.cancel())
        self._read_ranks(now)

    def turn(self, now: float) -> bool:
        batch, more = self._client.receive()
        for frame in batch:
            opened = self._opener.open(frame, now)
            if isinstance(opened, Opened) and self._handshake.accepts(opened):
                self.lease.renew(now)
                self._unread_offers = 0
                self._on_message(opened, now)
            elif isinstance(opened, StaleFrame) and self._handshake.is_of_peer(opened):
                # Nothing is sent twice, so a transfer that lacks a message would wait until its request's deadline.
                raise PeerLost(f"a message of the prefill engine was dropped: {opened}")
            elif isinstance(opened, Spoilt):
                raise SpoiltMessage(f"a message of the prefill engine came spoilt: {opened.why}")
        # The messages that it sent before it closed the connection come first.
        reason = None if more else self._client.lost()
        if reason is not None:
            raise PeerLost(reason)
        moved = self.link.turn() or more
        self._read_ranks(now)
        return moved

    # ------------------------------------------------------------ the prefill engine

    def _on_message(self, opened: Opened[ToDecode], now: float) -> None:
        message = opened.message
        match message:
            case Welcome():
                self._on_welcome(message, now)
            case Refused():
                raise self._handshake.refused(message)
            case Pong(boot_id, load):
                self._handshake.check_boot(boot_id)
                if load != UNKNOWN_LOAD:
                    self._engine.event_queue.put(LoadHeard(boot_id, load))
            case (
                BlocksReady(transfer_id)
                | Digests(transfer_id)
                | FirstToken(transfer_id)
                | Held(transfer_id)
                | Failed(transfer_id)
            ):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._on_session_message(session, message, now)

    def _on_session_message(
        self, session: FetchSession, message: BlocksReady | Digests | FirstToken | Held | Failed, now: float
    ) -> None:
        match message:
            case BlocksReady():
                self._apply(session, session.on_ready(message))
            case Digests():
                self._apply(session, session.on_digests(message, now))
            case FirstToken():
                self._apply(session, session.on_first_token(message, now))
            case Held():
                self._apply(session, session.on_held(message, now))
            case Failed(load=load):
                if load != UNKNOWN_LOAD:
                    self._engine.event_queue.put(LoadHeard(self.target.boot_id, load))
                self._apply(session, session.on_failed(message))

    def _on_welcome(self, message: Welcome, now: float) -> None:
        addresses = self._handshake.on_welcome(message)
        if addresses is None:
            return
        self._greeting.release()
        if message.lease_ms:
            self._ping_timer.keep(message.lease_ms / 1000, now)
        if message.max_prompt_tokens:
            self._engine.event_queue.put(PrefillNodeMet(message.boot_id, message.max_prompt_tokens))
        self._pieces = group_maps(self._engine.spec.group_heads, len(addresses), self.link.ranks)
        self.link.command(ConnectLink(self.link.number, addresses))
        for session in list(self._sessions.values()):
            self._prepare(session)
        for offer in self._offers.values():
            self._send_offer(offer)
        self._drop_offers()

    # ------------------------------------------------------------ this node's ranks

    def _read_ranks(self, now: float) -> None:
        while (reported := self.link.take()) is not None:
            try:
                self._on_report(reported, now)
            except Exception:
                if self._lost is None:
                    raise
                log.exception("a report of rank %d on %s, which is lost", reported.rank, self.target.name)

    def _on_report(self, reported: Reported, now: float) -> None:
        rank = reported.rank
        match reported.report:
            case PiecesLanded(tag=tag, indexes=indexes, digests=digests, size=size):
                self._arrived = now
                self._draining.renew(now)
                self._engine.stats.bytes_received += size
                if (session := self._tags.get(tag)) is not None:
                    self._apply(session, session.landed(rank, indexes, digests, now))
            case LinkOpened(address=address) if self._lost is None:
                self._addresses[rank] = address
                if len(self._addresses) == self.link.ranks:
                    self._greeting.hold(now)
                    self._send(self._handshake.hello([self._addresses[i] for i in range(self.link.ranks)]))
            case LinkBroken(reason=reason) if self._lost is None:
                raise PeerLost(reason)
            case Dropped(count=count):
                self._engine.stats.stale_blocks_dropped += count
                log.debug("dropped %d pieces of unknown or ended transfers", count)
            case Expecting(tag=tag) if tag in self._tags:
                self._apply(self._tags[tag], self._tags[tag].expecting(rank, now))
            case Forgotten(tag=tag, in_flight=in_flight) if tag in self._tags:
                self._apply(self._tags[tag], self._tags[tag].forgotten(rank, in_flight))
            case Released(tag=tag, block_ids=block_ids) if tag in self._tags:
                self._draining.renew(now)
                self._apply(self._tags[tag], self._tags[tag].released(rank, block_ids))
            case _:
                log.debug("late %s of rank %d", type(reported.report).__name__, rank)

    # ------------------------------------------------------------ time

    def renew_leases(self, now: float) -> None:
        """Starts the leases anew, because this process did not listen for a while."""
        self.lease.renew(now)
        self._greeting.renew(now)
        self._draining.renew(now)
        self._arrived = now  # what was sent may have come, and waits to be read

    def tick(self, now: float) -> None:
        """Acts on every timer that is due.

        Raises PeerLost if nothing has landed for long while blocks of ended fetches are quarantined, or if a fetch
        waits for the answer to a greeting that should have come by now.
        """
        # Before the Hello the prefill engine would take the frame for a stranger's.
        if self._ping_timer.due(now) and len(self._addresses) == self.link.ranks:
            self._send(Ping(self._engine.boot_id))
        if not self.idle and self.unanswered(now):
            raise PeerLost("it answers pings, and not the greeting")
        if self._offers_until is not None and now >= self._offers_until:
            self._drop_offers()
        for session in list(self._sessions.values()):
            self._apply(session, session.expire(now))
            stalls = self._stalls_at(session)
            if stalls is not None and now >= stalls:
                self._apply(session, session.withdraw(FailureKind.STALLED, "KV blocks were sent, but did not arrive"))
        self._read_ranks(now)
        draining = any(session.state is FetchState.DRAINING for session in self._sessions.values())
        if self._draining.expired_while(draining, now):
            raise PeerLost("it does not finish sending blocks of transfers that have ended")

    def _stalls_at(self, session: FetchSession) -> float | None:
        """Returns when to give up blocks that were sent. The peer is only slow if blocks of other transfers land."""
        if session.over or session.all_sent is None or not session.outstanding:
            return None
        return max(session.all_sent, session.accepted_at, self._arrived) + self._engine.settings.lease_s

    def next_timer(self) -> float | None:
        live = [session for session in self._sessions.values() if not session.over]
        timers = (time for session in live for time in (session.deadline, self._stalls_at(session)))
        greeting = None if self.idle else self._greeting.until
        leases = (self.lease.until, greeting, self._draining.until)
        return earliest((*leases, self._ping_timer.next, self._offers_until, *timers))

    def pollables(self) -> list[Pollable]:
        return [*self._client.sockets, *self.link.pollables()]

    # ------------------------------------------------------------ the end

    def end(self, kind: FailureKind, reason: str) -> None:
        """Closes the connection and begins to close the link. Live fetches fail when ``closed`` returns True."""
        self._lost = (kind, reason)
        self._drop_offers()
        self._client.close(0.0)
        self.link.close()

    def closed(self, now: float) -> bool:
        """Returns whether the link is closed on every rank. If so, it ends all sessions."""
        self._read_ranks(now)
        if self.link.closed and self._lost is not None:
            self._fail_all(*self._lost)
        return self.link.closed

    def abandon(self, reason: str, linger_s: float) -> None:
        """Ends every fetch and tells the prefill engine, without waiting, because this engine shuts down."""
        try:
            for session in list(self._sessions.values()):
                self._apply(session, session.withdraw(FailureKind.CLOSED, reason))
        finally:
            self._lost = (FailureKind.CLOSED, reason)
            self._client.close(linger_s)
            self.link.close()
            self._fail_all(*self._lost)

    def _fail_all(self, kind: FailureKind, reason: str) -> None:
        for session in list(self._sessions.values()):
            self._apply(session, session.closed(kind, reason))

    def _apply(self, session: FetchSession, effects: list[FetchEffect]) -> None:
        # Events come first, so that this engine hears of every end even if sending to the peer raises.
        for effect in effects:
            if not isinstance(effect, FetchMessage):
                self._count(effect)
                self._engine.event_queue.put(effect)
        self._drop_if_ended(session)
        for effect in effects:
            if isinstance(effect, FetchMessage) and self._lost is None:
                self._send_effect(effect)

    def _send_effect(self, effect: FetchMessage) -> None:
        match effect:
            case Expect() | ExpectMore() | Forget():
                self.link.command(effect)
            case PrefillRequest() | CachedRequest():
                if not self._send(effect):
                    raise PeerLost("the prefill node is not reading its control channel")
            case Accept() | Done() | Cancel():
                self._send(effect)

    def _drop_if_ended(self, session: FetchSession) -> None:
        if session.state is FetchState.ENDED and self._sessions.pop(session.order.transfer_id, None) is not None:
            log.debug("%s from %s is over", session, self.target.name)
            del self._tags[session.tag]
            if not self._sessions:
                self.lease.release()
                self._ping_timer.stop()

    def _count(self, effect: FetchEffect) -> None:
        stats = self._engine.stats
        match effect:
            case FetchLanded(seconds=seconds):
                stats.transfers_received += 1
                stats.transfer_seconds += seconds
            case FetchFailed(kind=kind, quarantined=quarantined):
                stats.failures[kind] += 1
                stats.quarantined_blocks += len(quarantined)
            case FetchCancelled(quarantined=quarantined):
                stats.quarantined_blocks += len(quarantined)
            case BlocksReleased(block_ids):
                stats.quarantined_blocks -= len(block_ids)

    def _send(self, message: _Message) -> bool:
        sealer, boot_id, protocol = self._engine.sealer, self.target.boot_id, self._handshake.protocol
        # What comes before the Welcome is a greeting, and its receiver ignores fields that it does not know.
        frame = sealer.seal(message, boot_id) if protocol is None else sealer.seal_to(boot_id, protocol, message)
        sent = self._client.send(frame)
        if not sent:
            log.warning("%s is not reading its control channel", self.target.name)
        return sent
