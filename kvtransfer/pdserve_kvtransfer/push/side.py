"""The driver of an engine's pushes, which has a control socket and one peer for each boot that has sent ``Hello``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import cast

from pdserve.control.connection_guard import RoutedMessage
from pdserve.control.frame import Opened
from pdserve.errors import RankLost, StaleFrame, TransferError, UnreadableMessage, WrongReceiver
from pdserve.wire.ids import TransferId
from pdserve.wire.transfer import (
    Accept,
    CachedRequest,
    Cancel,
    Done,
    Examine,
    Failed,
    Hello,
    Offer,
    Ping,
    PrefillRequest,
    Probe,
    ProbeEnd,
    Refused,
    ToDecode,
    ToPrefill,
    sender_of,
)
from pdserve.wire.version import OLDEST_PROTOCOL
from pdserve_kvtransfer.control.handshake import answer
from pdserve_kvtransfer.control.sockets import ControlServer, FrameOpener, Spoilt
from pdserve_kvtransfer.events import PushOutcome
from pdserve_kvtransfer.probe.host import ProbeHost
from pdserve_kvtransfer.push.peer import FromFetcher, PushPeer
from pdserve_kvtransfer.sides import (
    FailPush,
    GiveFirstToken,
    GiveHeld,
    LocalEngine,
    Pollable,
    PushBlocks,
    TransferCommand,
    earliest,
)

log = logging.getLogger(__name__)


class PushSide:
    """All pushes of an engine, to any others. It is a ``sides.Side``.

    The constructor raises TransferError if the control channel cannot be bound.
    """

    def __init__(self, engine: LocalEngine) -> None:
        settings = engine.settings
        self._engine = engine
        self._opener: FrameOpener[ToPrefill] = FrameOpener(
            engine.secret, cast("type[ToPrefill]", ToPrefill), engine.stats, engine.boot_id
        )
        self._server = ControlServer(engine.zmq_context, settings.host, settings.port, settings.advertise)
        self._probes = ProbeHost(engine, self._server)
        self._peers: dict[bytes, PushPeer] = {}
        self._closing: list[PushPeer] = []
        self._blocked_since: float | None = None
        """When the last batch of the control channel ended in the middle of a message that is dropped."""
        self._closed = False

    @property
    def address(self) -> str:
        return self._server.address

    def handle(self, command: TransferCommand, now: float) -> None:
        match command:
            case PushBlocks(transfer_id) | GiveFirstToken(transfer_id) | GiveHeld(transfer_id) | FailPush(transfer_id):
                peer = self._peers.get(transfer_id.decode_boot)
                if peer is None:
                    log.debug("transfer=%s: late %s", transfer_id, type(command).__name__)
                    return
                self._try(peer, partial(peer.on_command, command))
            case _:
                raise TypeError(f"no push has a {type(command).__name__}")

    def _try(self, peer: PushPeer, action: Callable[[], bool | None]) -> bool:
        """Does ``action``, which concerns this peer alone: whatever it raises, this peer is lost, and no other.

        Returns its result, and True if it raised. RankLost passes through: this engine cannot go on without its ranks.
        """
        try:
            return bool(action())
        except RankLost:
            raise
        except TransferError as exc:
            self._lose(peer, PushOutcome.PEER_LOST, str(exc))
        except Exception as exc:
            log.exception("decode engine %s cannot be dealt with", peer.boot_id.hex()[:8])
            self._lose(peer, PushOutcome.PEER_LOST, f"{type(exc).__name__}: {exc}")
        return True

    def turn(self, now: float) -> bool:
        self._closing = [peer for peer in self._closing if not peer.closed()]
        if self._blocked_since is not None:
            for peer in self._peers.values():
                peer.lease.extend(now - self._blocked_since)
        batch = self._server.receive()
        self._blocked_since = now if batch.blocked else None
        more = batch.more
        for connection in batch.ended:
            self._on_disconnect(connection, now)
        for received in batch.frames:
            self._on_frame(received, now)
        for connection in batch.gone:
            self._on_disconnect(connection, now)
        for peer in list(self._peers.values()):
            more |= self._try(peer, peer.turn)
        more |= self._probes.turn(now)
        return more

    def _on_frame(self, received: RoutedMessage, now: float) -> None:
        opened = self._opener.open(received.frame, now)
        match opened:
            case Opened():
                self._server.trust(received.connection)
                self._on_message(opened, received, now)
            case WrongReceiver():
                # The sender means another engine at this address, as after a restart of this one.
                self._refuse(received.route, opened.sender, OLDEST_PROTOCOL, "boot_id", "another", "assumed")
            case UnreadableMessage() if (peer := self._peers.get(opened.sender)) is not None:
                peer.on_unreadable(opened)
            case StaleFrame():
                # Nothing is sent twice: a transfer that lacks a message would wait until its request's deadline, and a
                # greeting that was dropped is not repeated.
                peer = self._peers.get(opened.sender)
                if peer is not None and peer.connection == received.connection:
                    self._lose(peer, PushOutcome.PEER_LOST, f"a message of it was dropped: {opened}")
                else:
                    self._refuse(received.route, opened.sender, OLDEST_PROTOCOL, "handshake", "none", "assumed")
            case Spoilt(why):
                for peer in [peer for peer in self._peers.values() if peer.connection == received.connection]:
                    self._lose(peer, PushOutcome.PEER_LOST, f"a message of it came spoilt: {why}")

    def _on_message(self, opened: Opened[ToPrefill], received: RoutedMessage, now: float) -> None:
        message = opened.message
        boot_id = sender_of(message)
        if opened.sender != boot_id or not (opened.named or isinstance(message, Examine)):
            log.debug("a %s of another sender, or for nobody, was dropped", type(message).__name__)
            return
        match message:
            case Hello():
                self._on_hello(message, received, now)
            case PrefillRequest() | CachedRequest() | Accept() | Done() | Cancel() | Ping() | Offer():
                self._on_peer_message(boot_id, message, received, now)
            case Examine() | Probe() | ProbeEnd():
                self._probes.on_message(message, received, now)

    def _on_peer_message(self, boot_id: bytes, message: FromFetcher, received: RoutedMessage, now: float) -> None:
        peer = self._peers.get(boot_id)
        if peer is None:
            if isinstance(message, PrefillRequest | CachedRequest | Ping | Offer):
                self._refuse(received.route, boot_id, OLDEST_PROTOCOL, "handshake", "none", "assumed")
        else:
            peer.on_frame(received.route, received.connection, now)
            if isinstance(message, PrefillRequest | CachedRequest) and self._is_ending(message.transfer_id):
                # The engine would take the end of the former push for that of this one.
                failed = Failed(message.transfer_id, "a former push of this transfer has not ended")
                self._send(received.route, boot_id, peer.protocol, failed)
                return
            self._try(peer, partial(peer.on_message, message, now))

    def _is_ending(self, transfer_id: TransferId) -> bool:
        return any(gone.has(transfer_id) for gone in self._closing)

    def _on_hello(self, hello: Hello, received: RoutedMessage, now: float) -> None:
        known = self._peers.get(hello.boot_id)
        if known is not None:
            self._lose(known, PushOutcome.PEER_LOST, "the decode engine has greeted anew")
        engine = self._engine
        engine.stats.handshakes += 1
        refusal = answer(hello, engine.boot_id, engine.spec)
        if refusal is not None:
            log.warning(
                "decode engine refused: %s is %s here and %s there", refusal.field, refusal.ours, refusal.theirs
            )
            self._send(received.route, hello.boot_id, OLDEST_PROTOCOL, refusal)
            return
        try:
            peer = PushPeer(engine, self._server, hello)
        except RankLost:
            raise
        except Exception as exc:
            log.warning("decode engine refused: %s", exc, exc_info=not isinstance(exc, TransferError))
            self._refuse(received.route, hello.boot_id, OLDEST_PROTOCOL, "rank_addresses", str(exc), "unusable")
            return
        peer.on_frame(received.route, received.connection, now)
        self._peers[hello.boot_id] = peer

    def _on_disconnect(self, connection: int, now: float) -> None:
        # A last frame, such as a Done, may still wait to be read, so the peer is only suspected to be gone.
        self._probes.disconnected(connection, now)
        for peer in list(self._peers.values()):
            if peer.connection != connection:
                continue
            if peer.idle:
                self._lose(peer, PushOutcome.PEER_LOST, "the decode engine closed the connection")
            else:
                peer.lease.shorten(now + 2 * self._engine.settings.heartbeat_s)

    def tick(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if peer.lease.expired(now):
                self._engine.stats.leases_expired_sending += 1
                self._lose(peer, PushOutcome.LEASE_EXPIRED, "the decode engine fell silent")
            else:
                self._try(peer, partial(peer.tick, now))
        self._probes.tick(now)
        self._server.check(now)

    def _lose(self, peer: PushPeer, outcome: PushOutcome, reason: str) -> None:
        log.info("decode engine %s is lost: %s", peer.boot_id.hex()[:8], reason)
        del self._peers[peer.boot_id]
        peer.end(outcome, reason)
        if not peer.closed():
            self._closing.append(peer)
        # The refusal makes the peer send a Hello before its next request, and not because of it.
        self._refuse(peer.route, peer.boot_id, peer.protocol, "handshake", "none", "assumed")

    def renew_leases(self, now: float) -> None:
        for peer in self._peers.values():
            peer.renew_leases(now)

    def next_timer(self) -> float | None:
        return earliest(
            [
                self._server.next_check(),
                self._probes.next_timer(),
                *(peer.next_timer() for peer in self._peers.values()),
            ]
        )

    def moving(self) -> bool:
        return self._probes.moving() or any(peer.link.moving() for peer in self._peers.values())

    def arm(self) -> bool:
        return self._probes.arm() and all(peer.link.arm() for peer in self._peers.values())

    def pollables(self) -> list[Pollable]:
        links = [pollable for peer in self._peers.values() for pollable in peer.link.pollables()]
        return [*self._server.sockets, *links, *self._probes.pollables()]

    def close(self, linger_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            stack.callback(self._server.close, linger_s)
            stack.callback(self._probes.close)
            stack.callback(self._forget_all)
            for peer in self._peers.values():
                stack.callback(self._lose, peer, PushOutcome.FAILED, "the prefill engine is closing")

    def _forget_all(self) -> None:
        for peer in self._closing:
            peer.forget()

    def _refuse(self, route: bytes, boot_id: bytes, protocol: int, field: str, ours: str, theirs: str) -> None:
        self._send(route, boot_id, protocol, Refused(self._engine.boot_id, field, ours, theirs))

    def _send(self, route: bytes, boot_id: bytes, protocol: int, message: ToDecode) -> None:
        if not self._server.send(route, self._engine.sealer.seal_to(boot_id, protocol, message)):
            log.warning("a decode engine is not reading its control channel")
