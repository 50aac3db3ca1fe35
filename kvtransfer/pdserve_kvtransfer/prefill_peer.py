"""A decode engine's view of one prefill engine: its control connection, its link, and the fetches from it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pdserve.errors import PeerLost
from pdserve.wire.ids import TransferId
from pdserve.wire.ticket import PrefillTarget
from pdserve.wire.transfer import (
    Cancel,
    Digests,
    Done,
    Failed,
    FirstToken,
    Hello,
    Ping,
    Pong,
    PrefillRequest,
    Refused,
    ToDecode,
    Welcome,
)
from pdserve_kvtransfer.control import ControlClient
from pdserve_kvtransfer.digest import digest
from pdserve_kvtransfer.events import BlocksReleased, FailureKind, FetchCancelled, FetchFailed, FetchLanded
from pdserve_kvtransfer.fetch import FetchEffect, FetchSession, FetchState
from pdserve_kvtransfer.frames import Inbound
from pdserve_kvtransfer.handshake import Greeting, Standing
from pdserve_kvtransfer.lease import Heartbeat, Lease
from pdserve_kvtransfer.station import Pollable, Station, earliest
from pdserve_kvtransfer.transport import MAX_MESSAGE_BYTES, Arrival, Completion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Receiving:
    completion: Completion
    session: FetchSession | None
    """None for what lands in scratch memory."""
    index: int
    into: memoryview


class PrefillPeer:
    """Methods raise TransferError when this peer is of no use any more; the owner then calls ``end``.

    The constructor greets; it raises TransferError if the peer's address or a link cannot be used.
    """

    def __init__(self, station: Station, target: PrefillTarget, inbound: Inbound[ToDecode], now: float) -> None:
        self.target = target
        self._station = station
        self._inbound = inbound
        self._sessions: dict[TransferId, FetchSession] = {}
        self._tags: dict[int, FetchSession] = {}
        self._receiving: list[_Receiving] = []
        self._arrived = now
        self._scratch = memoryview(bytearray(station.region.block_bytes))
        self._heartbeat = Heartbeat(station.heartbeat_s)
        self.lease = Lease(station.lease_s)
        self._client = ControlClient(station.zmq_context, target.control)
        try:
            self._link = station.transport.open_link()
        except BaseException:
            self._client.close(0.0)
            raise
        self._greeting = Greeting(station.boot_id, station.spec, self._link.address, target.boot_id)
        station.counters.handshakes += 1
        self._send(self._greeting.hello())

    @property
    def serving(self) -> bool:
        """Whether the handshake with this very boot was made, and transfers with it are under way."""
        return self._greeting.standing is Standing.WELCOME and bool(self._sessions)

    def has_tag(self, tag: int) -> bool:
        return tag in self._tags

    def fetch(self, session: FetchSession, now: float) -> None:
        """Raises PeerLost, with the session among those that ``end`` fails."""
        self._sessions[session.order.transfer_id] = session
        self._tags[session.tag] = session
        self.lease.hold(now)
        self._heartbeat.run(now)
        if self._greeting.standing is Standing.WELCOME:
            self._apply(session, session.request(now))

    def cancel(self, transfer_id: TransferId) -> bool:
        """False if this peer has no such fetch."""
        session = self._sessions.get(transfer_id)
        if session is None:
            return False
        self._apply(session, session.cancel())
        return True

    def turn(self, now: float) -> bool:
        batch, more = self._client.receive()
        for frame in batch:
            message = self._inbound.open(frame, now)
            if message is not None:
                self.lease.renew(now)
                self._on_message(message, now)
        # What it sent before it closed the connection comes first.
        reason = None if more else self._client.lost()
        if reason is not None:
            raise PeerLost(reason)
        moved = self._link.progress() or more
        while (arrival := self._link.probe()) is not None:
            self._receive(arrival)
            self._arrived = now
            moved = True
        if self._receiving:
            self._complete(now)
        if self._link.broken():
            raise PeerLost("the connection that carries KV blocks broke")
        return moved

    def _on_message(self, message: ToDecode, now: float) -> None:
        match message:
            case Welcome():
                self._on_welcome(message, now)
            case Refused():
                raise self._greeting.refused(message)
            case Pong(boot_id):
                self._greeting.check_boot(boot_id)
            case Digests(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_digests(message, now))
            case FirstToken(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_first_token(message, now))
            case Failed(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_failed(message))

    def _on_welcome(self, message: Welcome, now: float) -> None:
        address = self._greeting.on_welcome(message)
        if address is None:
            return
        self._link.connect(address)
        for session in list(self._sessions.values()):
            self._apply(session, session.request(now))

    def _receive(self, arrival: Arrival) -> None:
        session = self._tags.get(arrival.tag)
        block_id = None if session is None else session.accept(arrival.index, arrival.length)
        if block_id is None:
            self._station.counters.stale_blocks_dropped += 1
            log.debug("dropped block %d of an unknown or ended transfer", arrival.index)
            session, into = None, self._scratch_for(arrival.length)
        else:
            into = self._station.region.block(block_id)
        self._receiving.append(_Receiving(self._link.receive(arrival, into), session, arrival.index, into))

    def _scratch_for(self, length: int) -> memoryview:
        if length > MAX_MESSAGE_BYTES:
            raise PeerLost(f"the prefill engine sent a block of {length} bytes")
        return self._scratch if length <= self._scratch.nbytes else memoryview(bytearray(length))

    def _complete(self, now: float) -> None:
        done = [receiving for receiving in self._receiving if receiving.completion.done()]
        if not done:
            return
        self._receiving = [receiving for receiving in self._receiving if not receiving.completion.done()]
        for receiving in done:
            session = receiving.session
            if session is None:
                continue
            if receiving.completion.failed():
                raise PeerLost("a KV block broke off")
            self._station.counters.bytes_received += self._station.region.block_bytes
            found = digest(receiving.into, session.tag, receiving.index) if session.wants_digest else 0
            self._apply(session, session.landed(receiving.index, found, now))

    def tick(self, now: float) -> None:
        if self._heartbeat.due(now):
            self._send(Ping(self._station.boot_id))
        for session in list(self._sessions.values()):
            self._apply(session, session.expire(now))
            stalls = self._stalls_at(session)
            if stalls is not None and now >= stalls:
                self._apply(session, session.withdraw(FailureKind.STALLED, "KV blocks were sent, but did not arrive"))

    def _stalls_at(self, session: FetchSession) -> float | None:
        """When to give up blocks that were sent: other transfers' blocks show that it is only slow."""
        if session.over or session.all_sent is None:
            return None
        return max(session.all_sent, self._arrived) + self._station.lease_s

    def next_timer(self) -> float | None:
        live = [session for session in self._sessions.values() if not session.over]
        timers = (time for session in live for time in (session.deadline, self._stalls_at(session)))
        return earliest((self.lease.until, self._heartbeat.next, *timers))

    def moving(self) -> bool:
        return bool(self._receiving)

    def arm(self) -> bool:
        return self._link.arm()

    def pollables(self) -> list[Pollable]:
        return [*self._client.sockets, self._link.fileno()]

    def end(self, kind: FailureKind, reason: str) -> None:
        """Close the link and the connection; what was alive fails."""
        self._link.close()
        self._receiving.clear()
        for session in list(self._sessions.values()):
            self._apply(session, session.lost(kind, reason))
        self._client.close(0.0)

    def leave(self, reason: str, linger_s: float) -> None:
        """As ``end``, because this engine shuts down: the prefill engine is told."""
        for session in list(self._sessions.values()):
            self._apply(session, session.withdraw(FailureKind.CLOSED, reason))
        self._link.close()
        self._receiving.clear()
        for session in list(self._sessions.values()):
            self._apply(session, session.lost(FailureKind.CLOSED, reason))
        self._client.close(linger_s)

    def _apply(self, session: FetchSession, effects: list[FetchEffect]) -> None:
        for effect in effects:
            match effect:
                case PrefillRequest():
                    if not self._send(effect):
                        raise PeerLost("the prefill node is not reading its control channel")
                case Done() | Cancel():
                    self._send(effect)
                case _:
                    self._count(effect)
                    self._station.outbox.put(effect)
        if session.state is FetchState.ENDED and self._sessions.pop(session.order.transfer_id, None) is not None:
            del self._tags[session.tag]
            if not self._sessions:
                self.lease.let_go()
                self._heartbeat.stop()

    def _count(self, effect: FetchEffect) -> None:
        counters = self._station.counters
        match effect:
            case FetchLanded(seconds=seconds):
                counters.transfers_received += 1
                counters.transfer_seconds += seconds
            case FetchFailed(kind=kind, quarantined=quarantined):
                counters.failures[kind] += 1
                counters.quarantined_blocks += len(quarantined)
            case FetchCancelled(quarantined=quarantined):
                counters.quarantined_blocks += len(quarantined)
            case BlocksReleased(block_ids):
                counters.quarantined_blocks -= len(block_ids)

    def _send(self, message: Hello | PrefillRequest | Done | Cancel | Ping) -> bool:
        sent = self._client.send(self._station.sealer.seal(message))
        if not sent:
            log.warning("%s is not reading its control channel", self.target.name)
        return sent
