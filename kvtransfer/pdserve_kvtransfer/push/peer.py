"""A prefill engine's view of one decode engine: its link, and the pushes to it."""

from __future__ import annotations

import logging
from typing import TypeAlias

import msgspec

from pdserve.control.frame import MAX_REASON_CHARS, UNDECODABLE
from pdserve.errors import PeerLost, UnreadableMessage
from pdserve.wire.ids import TransferId
from pdserve.wire.rank import ConnectLink, Direction, LinkBroken, LinkOpened, PiecesAnnounced, PiecesSent, SendBlocks
from pdserve.wire.transfer import (
    UNKNOWN_LOAD,
    Accept,
    CachedRequest,
    Cancel,
    Digests,
    Done,
    Failed,
    FailureCause,
    Hello,
    Offer,
    Ping,
    Pong,
    PrefillRequest,
    ToDecode,
    Welcome,
)
from pdserve.wire.version import OLDEST_PROTOCOL
from pdserve_kvtransfer.control.sockets import ControlServer
from pdserve_kvtransfer.events import KIND_OF_CAUSE, BlocksOffered, FailureKind, PushEnded, PushOutcome
from pdserve_kvtransfer.pieces import group_maps
from pdserve_kvtransfer.push.port import PushPort
from pdserve_kvtransfer.push.session import PushEffect, PushMessage, PushSession, PushState
from pdserve_kvtransfer.ranks import NodeLink, Reported
from pdserve_kvtransfer.sides import (
    FailPush,
    GiveFirstToken,
    GiveHeld,
    Lease,
    LocalEngine,
    PushBlocks,
    earliest,
    wanted_groups,
)

log = logging.getLogger(__name__)

FromFetcher: TypeAlias = PrefillRequest | CachedRequest | Accept | Done | Cancel | Ping | Offer
"""What a decode engine says after its greeting."""


class _AnyRequest(msgspec.Struct, frozen=True, tag_field="kind", tag="prefill"):
    """The part of a PrefillRequest that is read whatever else it holds."""

    transfer_id: TransferId


class _AnyCachedRequest(msgspec.Struct, frozen=True, tag_field="kind", tag="cached"):
    """The part of a CachedRequest that is read whatever else it holds."""

    transfer_id: TransferId


_any_request: msgspec.msgpack.Decoder[_AnyRequest | _AnyCachedRequest] = msgspec.msgpack.Decoder(
    _AnyRequest | _AnyCachedRequest
)

_FAILURE_OF = {PushOutcome.PEER_LOST: FailureKind.PEER_LOST, PushOutcome.LEASE_EXPIRED: FailureKind.LEASE_EXPIRED}


class PushPeer:
    """A decode engine that this engine pushes to.

    A peer is made of an accepted ``Hello``. It answers ``Welcome`` when every rank of this node has opened its end of
    the link.

    A method raises when the peer is lost: TransferError, or any other error if that is a defect. The owner then calls
    ``end``, and from then on nothing raises. The constructor raises TransferError if a link cannot be opened.
    """

    def __init__(self, engine: LocalEngine, server: ControlServer, hello: Hello) -> None:
        """The engines fit: ``control.handshake.answer`` refuses nothing in ``hello``."""
        self.boot_id = hello.boot_id
        self.protocol = engine.spec.spoken.common(hello.spec.spoken) or OLDEST_PROTOCOL
        """The version of the protocol that the engines agreed on."""
        self.route = b""
        self.connection = -1
        """The TCP connection of its latest frame."""
        self.lease = Lease(engine.settings.lease_s)
        self._draining = Lease(engine.settings.drain_s)
        """Runs while blocks of ended pushes are still read. Each sent piece renews it."""
        self._any_sent = False
        """Whether a piece was sent since the last tick."""
        self._engine = engine
        self._server = server
        self._hello_addresses = tuple(hello.rank_addresses)
        self._addresses: dict[int, bytes] = {}
        maps = group_maps(engine.spec.group_heads, engine.spec.tp_size, hello.spec.tp_size)
        self._pieces = [len(pieces) for pieces in maps]
        """How many messages a block of each group is, over all ranks."""
        self._sessions: dict[TransferId, PushSession] = {}
        self._tags: dict[int, PushSession] = {}
        self._lost = False
        self.link = NodeLink(
            engine.ranks,
            Direction.PUSH,
            PushPort,
            engine.spec.group_heads,
            engine.region,
            engine.transport,
            peer=f"decode engine {hello.boot_id.hex()[:8]}",
            links=engine.stats.links,
        )

    @property
    def idle(self) -> bool:
        return not self._sessions

    def has(self, transfer_id: TransferId) -> bool:
        """Returns whether a push with this id has not ended."""
        return transfer_id in self._sessions

    def on_frame(self, route: bytes, connection: int, now: float) -> None:
        """Notes that an authentic frame of this peer has arrived."""
        self.route = route
        self.connection = connection
        self.lease.renew(now)

    # ------------------------------------------------------------ the decode engine and this one

    def on_message(self, message: FromFetcher, now: float) -> None:
        match message:
            case PrefillRequest() | CachedRequest():
                self._open(message, now)
            case Accept(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_accept(message))
            case Done(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_done())
            case Cancel(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_cancel())
            case Ping():
                self._send(Pong(self._engine.boot_id, self._engine.load()))
            case Offer(holder, hashes, request_id):
                self._engine.event_queue.put(BlocksOffered(holder, hashes, request_id))
        self._read_ranks()

    def on_unreadable(self, message: UnreadableMessage) -> None:
        """Fails a request at once if it asks for something that this version does not know."""
        try:
            request = _any_request.decode(message.body)
        except UNDECODABLE:
            return
        reason = f"the prefill node cannot read the request: {message}"
        self._send(Failed(request.transfer_id, reason[:MAX_REASON_CHARS]))

    def _open(self, request: PrefillRequest | CachedRequest, now: float) -> None:
        if request.transfer_id in self._sessions or request.tag in self._tags:
            log.warning("request_id=%s transfer=%s was asked for twice", request.request_id or "-", request.transfer_id)
            return
        engine = self._engine
        if request.digests and not engine.region.readable:
            self._send(Failed(request.transfer_id, "KV blocks of a GPU's memory have no checksums: --kv-checksums off"))
            return
        session = PushSession(
            request,
            self.link.number,
            wanted_groups(engine.spec, request),
            self._pieces,
            now,
            engine.settings.heartbeat_s,
            reports_sent=engine.reports_sent,
        )
        log.debug("%s begins", session)
        self._sessions[request.transfer_id] = session
        self._tags[request.tag] = session
        self.lease.hold(now)
        self._apply(session, session.open())

    def on_command(self, command: PushBlocks | GiveFirstToken | GiveHeld | FailPush) -> None:
        session = self._sessions.get(command.transfer_id)
        if session is None:
            log.debug("transfer=%s: late %s", command.transfer_id, type(command).__name__)
            return
        match command:
            case PushBlocks(_, first_block, block_ids):
                groups = bytes(map(self._engine.region.group_of, block_ids)) if self._engine.spec.groups else None
                self._apply(session, session.push(first_block, block_ids, groups))
            case GiveFirstToken(_, tokens, cached_tokens, load, prompt_logprobs):
                self._apply(session, session.first_token(tokens, cached_tokens, load, prompt_logprobs))
            case GiveHeld(_, count, usable):
                self._apply(session, session.held(count, usable))
            case FailPush(_, reason, cause):
                load = self._engine.load() if cause is FailureCause.LOAD else UNKNOWN_LOAD
                self._apply(session, session.refuse(reason, cause, load))
        self._read_ranks()

    def turn(self) -> bool:
        moved = self.link.turn()
        self._read_ranks()
        return moved

    # ------------------------------------------------------------ this node's ranks

    def _read_ranks(self) -> None:
        while (reported := self.link.take()) is not None:
            try:
                self._on_report(reported)
            except Exception:
                if not self._lost:
                    raise
                log.exception("a report of rank %d on %s, which is lost", reported.rank, self.boot_id.hex()[:8])

    def _on_report(self, reported: Reported) -> None:
        match reported.report:
            case LinkOpened(address=address) if not self._lost:
                self._addresses[reported.rank] = address
                if len(self._addresses) == self.link.ranks:
                    self._welcome()
            case LinkBroken(reason=reason) if not self._lost:
                raise PeerLost(reason)
            case PiecesSent(tag=tag, count=count, size=size):
                self._any_sent = True
                self._engine.stats.bytes_sent += size
                if (session := self._tags.get(tag)) is not None:
                    self._apply(session, session.sent(count))
            case PiecesAnnounced(tag=tag, target=target, first_block=first, digests=digests) if tag in self._tags:
                self._send(Digests(self._tags[tag].transfer_id, reported.rank, target, first, digests))
            case _:
                log.debug("late %s of rank %d", type(reported.report).__name__, reported.rank)

    def _welcome(self) -> None:
        self.link.command(ConnectLink(self.link.number, self._hello_addresses))
        addresses = [self._addresses[rank] for rank in range(self.link.ranks)]
        engine = self._engine
        welcome = Welcome(
            engine.boot_id, engine.spec, addresses, engine.max_prompt_tokens, lease_ms=engine.settings.lease_ms
        )
        self._send(welcome)

    # ------------------------------------------------------------ time

    def renew_leases(self, now: float) -> None:
        """Starts the leases anew, because this process did not listen for a while."""
        self.lease.renew(now)
        self._draining.renew(now)

    def tick(self, now: float) -> None:
        """Acts on every timer that is due.

        Raises PeerLost if nothing could be sent for long while blocks of ended pushes are still read.
        """
        for session in list(self._sessions.values()):
            self._apply(session, session.expire(now))
        if self._any_sent:
            self._draining.renew(now)
            self._any_sent = False
        draining = any(session.state is PushState.DRAINING for session in self._sessions.values())
        if self._draining.expired_while(draining, now):
            raise PeerLost("it does not take blocks of transfers that have ended")

    def next_timer(self) -> float | None:
        pushing = (s.deadline for s in self._sessions.values() if s.state is PushState.PUSHING)
        return earliest((self.lease.until, self._draining.until, *pushing))

    # ------------------------------------------------------------ the end

    def end(self, outcome: PushOutcome, reason: str) -> None:
        """Fails every push and begins to close the link. No block is read any more when ``closed`` returns True."""
        self._lost = True
        for session in list(self._sessions.values()):
            self._apply(session, session.lost(outcome, reason))
        self.link.close()

    def closed(self) -> bool:
        """Returns whether the link is closed on every rank. If so, it ends all sessions."""
        self._read_ranks()
        if self.link.closed:
            self.forget()
        return self.link.closed

    def forget(self) -> None:
        """Ends all sessions, because no rank reads blocks for this peer any more."""
        for session in list(self._sessions.values()):
            self._apply(session, session.closed())

    def _apply(self, session: PushSession, effects: list[PushEffect]) -> None:
        # Events come first, so that this engine hears of every end even if sending to the peer raises.
        for effect in effects:
            if not isinstance(effect, PushMessage):
                if isinstance(effect, PushEnded):
                    self._count(effect.outcome, session.cause)
                self._engine.event_queue.put(effect)
        self._drop_if_ended(session)
        for effect in effects:
            if isinstance(effect, SendBlocks):
                self.link.command(effect)
            elif isinstance(effect, PushMessage):
                self._send(effect)

    def _drop_if_ended(self, session: PushSession) -> None:
        if session.state is PushState.ENDED and self._sessions.pop(session.transfer_id, None) is not None:
            log.debug("%s is over: %s", session, session.outcome.value if session.outcome else "refused")
            self._tags.pop(session.tag, None)
            if not self._sessions:
                self.lease.release()

    def _count(self, outcome: PushOutcome, cause: FailureCause) -> None:
        stats = self._engine.stats
        if outcome is PushOutcome.DONE:
            stats.transfers_sent += 1
        elif outcome is PushOutcome.FAILED:
            stats.failures[KIND_OF_CAUSE[cause]] += 1
        elif outcome in _FAILURE_OF:
            stats.failures[_FAILURE_OF[outcome]] += 1

    def _send(self, message: ToDecode) -> None:
        if not self._server.send(self.route, self._engine.sealer.seal_to(self.boot_id, self.protocol, message)):
            log.warning("decode engine %s is not reading its control channel", self.boot_id.hex()[:8])
