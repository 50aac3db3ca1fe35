"""The private channels between rank 0 and the other ranks: typed MessagePack over ZMQ PAIR sockets."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import zmq

from pdserve.errors import MalformedFrame, RankLost
from pdserve.liveness import SHOWN_EVERY_MS, SHOWN_EVERY_S, LifeSign, unseen_sign
from pdserve.machine.memory import REST_S
from pdserve.wire.rank import FromRank, Numbered, Order

QUEUE_LIMIT = 1000
"""A rank may be this many orders behind. It computes every step together with rank 0, so it is behind by a few only."""


class RankChannel:
    """Rank 0's end of the channel to one other rank. No method blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.sndhwm = QUEUE_LIMIT
        self.socket.bind(address)
        self._decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

    def send(self, frame: bytes) -> None:
        """Sends a ``Numbered``, encoded once for all ranks. Raises RankLost if the rank takes no more."""
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise RankLost("a tensor-parallel rank takes no orders") from exc

    def receive(self) -> FromRank | None:
        """Returns the next message, None if there is none."""
        try:
            frame = self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            return self._decoder.decode(frame)
        except msgspec.DecodeError as exc:
            raise MalformedFrame(f"unexpected message from a tensor-parallel rank: {exc}") from exc

    def close(self, linger_s: float) -> None:
        """Closes the socket. Queued messages have ``linger_s`` to leave."""
        self.socket.close(linger=int(linger_s * 1000))


class OrderChannel:
    """Another rank's end of its channel to rank 0."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        give_back: Callable[[], object] | None = None,
        life: LifeSign | None = None,
    ) -> None:
        """``give_back`` gives free memory back. It is called once when no order has come for a while.

        ``life`` is where the rank shows life while it waits for orders.
        """
        self._give_back = give_back
        self._life = unseen_sign() if life is None else life
        self._socket = context.socket(zmq.PAIR)
        self._socket.rcvhwm = QUEUE_LIMIT
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Numbered)
        self._expected = 1

    def receive(self) -> Order:
        """Waits for the next order and returns it; the kernel ends a rank that outlives rank 0.

        Raises MalformedFrame if one was lost or is out of order.
        """
        if not self._arrives(REST_S):
            if self._give_back is not None:
                self._give_back()
            self._arrives(math.inf)
        try:
            message = self._decoder.decode(self._socket.recv())
        except msgspec.DecodeError as exc:
            raise MalformedFrame(f"unexpected message from rank 0: {exc}") from exc
        if message.number != self._expected:
            raise MalformedFrame(f"message {message.number} from rank 0 came in place of {self._expected}")
        self._expected += 1
        return message.order

    def _arrives(self, within_s: float) -> bool:
        """Waits for an order, and shows life meanwhile. Returns whether one has come in time."""
        waited_s = 0.0
        while waited_s < within_s:
            self._life.show()
            if self._socket.poll(SHOWN_EVERY_MS):
                return True
            waited_s += SHOWN_EVERY_S
        return False

    def send(self, message: FromRank) -> None:
        self._socket.send(self._encoder.encode(message))

    def close(self, linger_s: float) -> None:
        """Closes the socket. Queued messages have ``linger_s`` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
