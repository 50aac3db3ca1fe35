"""Fake engines, whose messages a test sends one by one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, TypeVar

import zmq

from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.errors import AuthenticationFailed
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.terms import PrefillTarget
from pdserve.wire.transfer import (
    Digests,
    EngineSpec,
    Examine,
    Examined,
    Hello,
    Ping,
    Pong,
    PrefillRequest,
    ToDecode,
    ToPrefill,
    Welcome,
)
from pdserve.wire.version import SPOKEN
from pdserve_kvtransfer.pieces import digest, label_of
from pdserve_kvtransfer.region import SharedMemory
from pdserve_kvtransfer.transport import ArrivedMessage
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster
from tests.kvtransfer.rig import SAMPLING, SECRET, SPEC, WAIT_S, compiled_poster

M = TypeVar("M")

MEMORY_BYTES = 4 * 2**20


def prefill_request(boot_id: bytes, tokens: int = 20, first_block: int = 0) -> PrefillRequest:
    return PrefillRequest(
        transfer_id=TransferId(new_id(), 0, boot_id),
        tag=77,
        token_ids=list(range(tokens)),
        first_block=first_block,
        sampling=SAMPLING,
        deadline_s=30.0,
    )


class FakePeer:
    """The parts that both fakes have: a socket, a sealer, and a UCX link that is progressed while waiting."""

    def __init__(self, kind: int, messages: Any, boot_id: bytes | None = None, shares: bool = False) -> None:
        """With ``shares`` the engine may map this fake's memory."""
        self.boot_id = boot_id or new_id()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        self.clock_late_s = 0.0
        """By how much this host's clock is behind."""
        self.sealer = Sealer(SECRET, Purpose.TRANSFER, self.boot_id, clock=lambda: time.time() - self.clock_late_s)
        self.opener: Opener[Any] = Opener(SECRET, Purpose.TRANSFER, messages, receiver=self.boot_id)
        self.peer: bytes | None = None
        """The boot id of the other side, once it is known."""
        self.transport = UcxTransport("", make_poster=compiled_poster() if shares else UcxxPoster)
        memory = SharedMemory(MEMORY_BYTES) if shares else memoryview(bytearray(MEMORY_BYTES))
        self.memory = memory.bytes if isinstance(memory, SharedMemory) else memory
        self.link = self.transport.open_link(memory)
        self._used = 0
        self._sending = 0

    def post(self, payload: memoryview, tag: int, index: int) -> None:
        """Begins to send a copy of the payload."""
        place, self._used = self._used, self._used + len(payload)
        self.memory[place : self._used] = payload
        self.link.send([place], len(payload), [label_of(tag, index)])
        self._sending += 1

    def finish(self) -> None:
        """Progresses the link until everything that was posted is sent."""
        deadline = time.monotonic() + WAIT_S
        while self._sending:
            assert time.monotonic() < deadline, "sends did not complete"
            self.link.progress()
            self._sending -= len(self.link.sent())

    def receive(self) -> tuple[ArrivedMessage, bytes]:
        """Receives the next message. There must be only one."""
        deadline = time.monotonic() + WAIT_S
        while not (arrivals := self.link.arrivals()):
            assert time.monotonic() < deadline, "nothing arrived"
            self.link.progress()
        (arrival,) = arrivals
        place = MEMORY_BYTES - arrival.length
        self.link.receive([place])
        while not self.link.landed():
            assert time.monotonic() < deadline, "it did not land"
            self.link.progress()
        return arrival, bytes(self.memory[place:])

    def _expect(self, message: Any, kind: type[M]) -> M:
        assert isinstance(message, kind), f"{message} where {kind.__name__} was due"
        return message

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.link.close()
        self.transport.close()
        self.socket.close(0)
        self.context.term()


class FakePrefill(FakePeer):
    """A prefill engine that does only what the test says."""

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER, ToPrefill)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.route = b""

    def __enter__(self) -> FakePrefill:
        return self

    @property
    def target(self) -> PrefillTarget:
        return PrefillTarget("fake", f"tcp://127.0.0.1:{self.port}", self.boot_id)

    def next(self, kind: type[M]) -> M:
        """Returns the next message, which must be of this kind. It answers pings that come before."""
        while True:
            assert self.socket.poll(int(WAIT_S * 1000)), f"no {kind.__name__} in time"
            self.route, frame = self.socket.recv_multipart()
            try:
                opened = self.opener.open_from(frame)
            except AuthenticationFailed:
                # The frame is of a former connection, and the first frame of the next one has overtaken it.
                continue
            message = opened.message
            self.peer = opened.sender
            if kind is Ping or not isinstance(message, Ping):
                return self._expect(message, kind)
            self.send(Pong(self.boot_id))

    def send(self, message: ToDecode) -> None:
        self.socket.send_multipart([self.route, self.sealer.seal(message, self.peer)])

    def announce(self, request: PrefillRequest, first_block: int, *blocks: memoryview) -> None:
        """Announces the digests of these blocks, whether they are sent or not."""
        numbered = enumerate(blocks, first_block)
        digests = tuple(digest(block, label_of(request.tag, index)) for index, block in numbered)
        self.send(Digests(request.transfer_id, 0, 0, first_block, digests))

    def deliver(self, request: PrefillRequest, index: int, block: memoryview) -> None:
        """Sends one block and announces it."""
        self.post(block, request.tag, index)
        self.finish()
        self.announce(request, index, block)

    def welcome(self, spec: EngineSpec = SPEC) -> Hello:
        hello = self.next(Hello)
        self.link.connect(hello.rank_addresses)
        self.send(Welcome(self.boot_id, spec, [self.link.address]))
        return hello

    def welcome_and_take(self, spec: EngineSpec = SPEC) -> PrefillRequest:
        self.welcome(spec)
        return self.next(PrefillRequest)


class FakeDecode(FakePeer):
    """A decode engine that does only what the test says."""

    def __init__(self, control: str, *, boot_id: bytes | None = None, shares: bool = False) -> None:
        super().__init__(zmq.DEALER, ToDecode, boot_id, shares)
        self.socket.connect(control)

    def __enter__(self) -> FakeDecode:
        return self

    def next(self, kind: type[M]) -> M:
        assert self.socket.poll(int(WAIT_S * 1000)), f"no {kind.__name__} in time"
        return self._expect(self.opener.open(self.socket.recv()), kind)

    def send(self, message: ToPrefill) -> None:
        self.socket.send(self.seal(message))

    def seal(self, message: ToPrefill) -> bytes:
        """Returns the frame of a message for this prefill engine."""
        if self.peer is None:
            self.socket.send(self.sealer.seal(Examine(self.boot_id, SPOKEN.newest, SPOKEN.oldest)))
            self.peer = self.next(Examined).boot_id
        return self.sealer.seal(message, self.peer)

    def greet(self, spec: EngineSpec = SPEC) -> Welcome:
        self.send(Hello(self.boot_id, spec, [self.link.address]))
        welcome = self.next(Welcome)
        self.link.connect(welcome.rank_addresses)
        return welcome
