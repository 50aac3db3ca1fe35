"""A prefill engine's answers to ``pdserve doctor``: its properties, and a link for measuring without KV memory.

There is one probe at a time, bounded in bytes and time. Its link has a worker and scratch memory of its own, so nothing
that an asker sends can land in a KV block or be sent from one.
"""

from __future__ import annotations

import logging
import math
import time

from pdserve.control.connection_guard import RoutedMessage
from pdserve.control.frame import MAX_REASON_CHARS
from pdserve.errors import PeerLost, TransferError
from pdserve.wire.transfer import (
    MAX_PROBE_BYTES,
    Examine,
    Examined,
    Probe,
    ProbeEnd,
    ProbeOpened,
    ProbeRefused,
    ToDecode,
)
from pdserve.wire.version import INSTALLED_VERSION, OLDEST_PROTOCOL, Spoken
from pdserve_kvtransfer.control.sockets import ControlServer
from pdserve_kvtransfer.pieces import label_of, tag_of
from pdserve_kvtransfer.probe.examiner import (
    LOAD_TAG,
    MAX_ASKER_BYTES,
    PAUSE_S,
    PING_TAG,
    PROBE_LIMIT_S,
    START_TAG,
    WINDOW,
)
from pdserve_kvtransfer.region import machine_identity
from pdserve_kvtransfer.sides import LocalEngine, Pollable
from pdserve_kvtransfer.transport import ArrivedMessage, MovedMessage, Transport

log = logging.getLogger(__name__)

_ASKER_MESSAGES = 64
"""How many messages an asker may send at once."""


class _Probing:
    """One probe under way. The constructor raises TransferError, and so do methods when the probe cannot go on."""

    def __init__(self, transport: Transport, asked: Probe, received: RoutedMessage, now: float) -> None:
        self.asker = asked.boot_id
        self.route = received.route
        self.connection = received.connection
        self.until = now + PROBE_LIMIT_S
        self._left = asked.messages
        self._messages = asked.messages
        self._started = False
        self._size = asked.message_bytes
        self._in_flight = 0
        self._unarmed: Exception | None = None
        # The load sends the same bytes again and again. Behind them is room for what the asker sends.
        memory = memoryview(bytearray(asked.message_bytes + _ASKER_MESSAGES * MAX_ASKER_BYTES))
        self._free = [asked.message_bytes + index * MAX_ASKER_BYTES for index in range(_ASKER_MESSAGES)]
        self.link = transport.open_link(memory)
        try:
            self.link.connect([asked.address])
        except BaseException:
            self.link.close()
            raise

    def turn(self) -> bool:
        if self._unarmed is not None:
            raise self._unarmed
        moved = self.link.progress()
        for message in self.link.sent():
            self._in_flight -= 1
            if tag_of(message.label) == PING_TAG:
                self._free.append(message.place)
        for message in self.link.landed():
            self._on_message(message)
        arrivals = self.link.arrivals()
        if arrivals:
            self.link.receive([self._place(arrival) for arrival in arrivals])
        self._fill()
        if self.link.broken():
            raise PeerLost("the connection of the probe broke")
        return moved or bool(arrivals)

    def arm(self) -> bool:
        """Arms the link. An error is raised by the next turn."""
        try:
            return self.link.arm()
        except Exception as exc:
            self._unarmed = exc
            return False

    def _place(self, arrival: ArrivedMessage) -> int:
        if arrival.length > MAX_ASKER_BYTES:
            raise PeerLost(f"an asker may not send {arrival.length} bytes")
        if not self._free:
            raise PeerLost(f"an asker may not send more than {_ASKER_MESSAGES} messages at once")
        return self._free.pop()

    def _on_message(self, message: MovedMessage) -> None:
        tag = tag_of(message.label)
        if tag == PING_TAG:
            self.link.send([message.place], message.length, [message.label])
            self._in_flight += 1
            return
        self._free.append(message.place)
        self._started |= tag == START_TAG

    def _fill(self) -> None:
        count = min(self._left, WINDOW - self._in_flight) if self._started else 0
        if count > 0:
            first = self._messages - self._left
            labels = [label_of(LOAD_TAG, index) for index in range(first, first + count)]
            self.link.send([0] * count, self._size, labels)
            self._in_flight += count
            self._left -= count


class ProbeHost:
    """Answers the doctor's messages. The prefill side drives it like a peer."""

    def __init__(self, engine: LocalEngine, server: ControlServer) -> None:
        self._engine = engine
        self._server = server
        self._probing: _Probing | None = None
        self._free_at = -math.inf

    def on_message(self, message: Examine | Probe | ProbeEnd, received: RoutedMessage, now: float) -> None:
        match message:
            case Examine(boot_id, newest, oldest):
                common = self._engine.spec.spoken.common(Spoken(newest, oldest))
                # Without a common version the asker gets an answer in its own, which tells this engine's versions.
                self._send(received.route, boot_id, common or newest, self._examined())
            case Probe():
                self._open(message, received, now)
            case ProbeEnd(boot_id):
                if self._probing is not None and self._probing.asker == boot_id:
                    self._end(now)

    def _examined(self) -> Examined:
        identity = machine_identity()
        return Examined(
            boot_id=self._engine.boot_id,
            version=INSTALLED_VERSION,
            spec=self._engine.spec,
            block_bytes=self._engine.region.block_bytes,
            clock_ms=int(time.time() * 1000),
            machine=identity.machine,
            ipc_namespace=identity.ipc_namespace,
        )

    def _open(self, asked: Probe, received: RoutedMessage, now: float) -> None:
        def refuse(reason: str) -> None:
            self._refuse(received.route, asked.boot_id, reason)

        if asked.messages * asked.message_bytes > MAX_PROBE_BYTES:
            refuse(f"a probe moves at most {MAX_PROBE_BYTES} bytes")
            return
        if self._probing is not None or now < self._free_at:
            refuse("another probe is under way")
            return
        try:
            self._probing = _Probing(self._engine.transport, asked, received, now)
        except Exception as exc:
            if not isinstance(exc, TransferError):
                log.exception("a probe cannot begin")
            refuse(str(exc))
            return
        log.info("a probe of %d messages of %d bytes", asked.messages, asked.message_bytes)
        opened = ProbeOpened(self._engine.boot_id, self._probing.link.address)
        self._send(received.route, asked.boot_id, OLDEST_PROTOCOL, opened)

    def turn(self, now: float) -> bool:
        if self._probing is None:
            return False
        try:
            return self._probing.turn()
        except Exception as exc:
            if not isinstance(exc, TransferError):
                log.exception("a probe failed")
            self._give_up(self._probing, str(exc), now)
            return True

    def disconnected(self, connection: int, now: float) -> None:
        if self._probing is not None and self._probing.connection == connection:
            self._end(now)

    def tick(self, now: float) -> None:
        if self._probing is not None and now >= self._probing.until:
            self._give_up(self._probing, f"a probe takes at most {PROBE_LIMIT_S:.0f} s", now)

    def next_timer(self) -> float | None:
        return None if self._probing is None else self._probing.until

    def moving(self) -> bool:
        return self._probing is not None

    def arm(self) -> bool:
        return self._probing is None or self._probing.arm()

    def pollables(self) -> list[Pollable]:
        return [] if self._probing is None else [self._probing.link.fileno()]

    def close(self) -> None:
        if self._probing is not None:
            self._give_up(self._probing, "the prefill engine is closing", -math.inf)

    def _give_up(self, probing: _Probing, reason: str, now: float) -> None:
        self._end(now)
        self._refuse(probing.route, probing.asker, reason)

    def _end(self, now: float) -> None:
        if self._probing is not None:
            self._probing.link.close()
            self._probing = None
            self._free_at = now + PAUSE_S

    def _refuse(self, route: bytes, asker: bytes, reason: str) -> None:
        self._send(route, asker, OLDEST_PROTOCOL, ProbeRefused(self._engine.boot_id, reason[:MAX_REASON_CHARS]))

    def _send(self, route: bytes, asker: bytes, protocol: int, message: ToDecode) -> None:
        self._server.send(route, self._engine.sealer.seal_to(asker, protocol, message))
