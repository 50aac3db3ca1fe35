"""A prefill engine's view of one decode engine: its link, and the pushes to it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from pdserve.errors import PeerLost
from pdserve.wire.ids import TransferId
from pdserve.wire.transfer import (
    Cancel,
    Digests,
    Done,
    Failed,
    FirstToken,
    Ping,
    Pong,
    PrefillRequest,
    ToDecode,
)
from pdserve_kvtransfer.control import ControlServer
from pdserve_kvtransfer.digest import digest
from pdserve_kvtransfer.events import FailureKind, PushEnded, PushOutcome
from pdserve_kvtransfer.lease import Lease
from pdserve_kvtransfer.push import PushEffect, PushSession, PushState, SendBlocks
from pdserve_kvtransfer.station import FailPush, GiveFirstToken, Push, Station, earliest
from pdserve_kvtransfer.transport import Completion, Link

log = logging.getLogger(__name__)

_FAILURE_OF = {
    PushOutcome.FAILED: FailureKind.REFUSED,
    PushOutcome.PEER_LOST: FailureKind.PEER_LOST,
    PushOutcome.LEASE_EXPIRED: FailureKind.LEASE_EXPIRED,
}


@dataclass(frozen=True, slots=True)
class _Sending:
    completion: Completion
    session: PushSession


class DecodePeer:
    """Takes over ``link``. Methods raise PeerLost when the link broke; the owner then calls ``end``."""

    def __init__(self, station: Station, server: ControlServer, link: Link, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self.route = b""
        self.connection = -1
        """The TCP connection of its latest frame."""
        self.link = link
        self.lease = Lease(station.lease_s)
        self._station = station
        self._server = server
        self._sessions: dict[TransferId, PushSession] = {}
        self._sending: list[_Sending] = []

    @property
    def idle(self) -> bool:
        return not self._sessions

    def heard(self, route: bytes, connection: int, now: float) -> None:
        """An authentic frame of it has arrived."""
        self.route = route
        self.connection = connection
        self.lease.renew(now)

    def on_message(self, message: PrefillRequest | Done | Cancel | Ping, now: float) -> None:
        match message:
            case PrefillRequest():
                self._open(message, now)
            case Done(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_done())
            case Cancel(transfer_id):
                if (session := self._sessions.get(transfer_id)) is not None:
                    self._apply(session, session.on_cancel())
            case Ping():
                self._send(Pong(self._station.boot_id))

    def _open(self, request: PrefillRequest, now: float) -> None:
        if request.transfer_id in self._sessions:
            log.warning("transfer %s was asked for twice", request.transfer_id)
            return
        session = PushSession(request, self._station.spec.block_size, now, self._station.heartbeat_s)
        self._sessions[request.transfer_id] = session
        self.lease.hold(now)
        self._apply(session, session.open())

    def on_command(self, command: Push | GiveFirstToken | FailPush) -> None:
        session = self._sessions.get(command.transfer_id)
        if session is None:
            log.debug("late %s for transfer %s", type(command).__name__, command.transfer_id)
            return
        match command:
            case Push(_, first_index, block_ids):
                self._apply(session, session.push(first_index, block_ids))
            case GiveFirstToken(_, tokens, cached_tokens):
                self._apply(session, session.first_token(tokens, cached_tokens))
            case FailPush(_, reason):
                self._apply(session, session.refuse(reason))

    def turn(self) -> bool:
        moved = self.link.progress()
        if self._sending:
            self._complete()
        if self.link.broken():
            raise PeerLost("the connection that carries KV blocks broke")
        return moved

    def _complete(self) -> None:
        done = [sending for sending in self._sending if sending.completion.done()]
        if not done:
            return
        if any(sending.completion.failed() for sending in done):
            raise PeerLost("a KV block could not be sent")
        self._sending = [sending for sending in self._sending if not sending.completion.done()]
        self._station.counters.bytes_sent += len(done) * self._station.region.block_bytes
        for session, count in Counter(sending.session for sending in done).items():
            self._apply(session, session.sent(count))

    def tick(self, now: float) -> None:
        for session in list(self._sessions.values()):
            self._apply(session, session.expire(now))

    def next_timer(self) -> float | None:
        pushing = (s.deadline for s in self._sessions.values() if s.state is PushState.PUSHING)
        return earliest((self.lease.until, *pushing))

    def moving(self) -> bool:
        return bool(self._sending)

    def end(self, outcome: PushOutcome, reason: str) -> None:
        """Close the link, then end what was alive."""
        self.link.close()
        self._sending.clear()
        for session in list(self._sessions.values()):
            self._apply(session, session.lost(outcome, reason))

    def _apply(self, session: PushSession, effects: list[PushEffect]) -> None:
        for effect in effects:
            match effect:
                case SendBlocks():
                    self._push(session, effect)
                case FirstToken() | Failed():
                    self._send(effect)
                case _:
                    if isinstance(effect, PushEnded):
                        self._count(effect.outcome)
                    self._station.outbox.put(effect)
        if session.state is PushState.ENDED:
            self._sessions.pop(session.transfer_id, None)
            if not self._sessions:
                self.lease.let_go()

    def _push(self, session: PushSession, blocks: SendBlocks) -> None:
        link = self.link
        numbered = list(enumerate(map(self._station.region.block, blocks.block_ids), blocks.first_index))
        for index, block in numbered:
            self._sending.append(_Sending(link.send(block, blocks.tag, index), session))
        if blocks.announce:
            digests = tuple(digest(block, blocks.tag, index) for index, block in numbered)
            self._send(Digests(session.transfer_id, blocks.first_index, digests))

    def _count(self, outcome: PushOutcome) -> None:
        counters = self._station.counters
        if outcome is PushOutcome.DONE:
            counters.transfers_sent += 1
        elif outcome in _FAILURE_OF:
            counters.failures[_FAILURE_OF[outcome]] += 1

    def _send(self, message: ToDecode) -> None:
        if not self._server.send(self.route, self._station.sealer.seal(message)):
            log.warning("decode engine %s is not reading its control channel", self.boot_id.hex()[:8])
