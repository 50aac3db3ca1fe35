"""Messages through ucxx's Python objects: five calls for each, and no compiler needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.link_address import LinkAddress, MemoryOffer
from pdserve_kvtransfer.in_flight import InFlight
from pdserve_kvtransfer.memory import Memory, host_bytes
from pdserve_kvtransfer.transport import DISCARD, Arrival, Moved
from pdserve_kvtransfer.ucx_library import load_ucxx

_PROGRESS_AT_ONCE = 256
_END_ROUNDS = 200


class _Operation:
    """Holds the memory's buffer export for as long as UCX may use it."""

    __slots__ = ("_array", "_request", "message")

    def __init__(self, request: Any, array: Any, message: Moved | None) -> None:
        self._request = request
        self._array = array
        self.message = message
        """None for what is discarded."""

    def done(self) -> bool:
        return bool(self._request.completed)

    def check(self, what: str) -> None:
        """Raises PeerLost if it ended without moving the bytes."""
        try:
            self._request.check_error()
        except Exception as exc:
            raise PeerLost(f"a message could not be {what}: {exc}") from exc


class UcxxMover:
    """Satisfies ``mover.Mover``."""

    attached = 0

    def __init__(self, worker: Any, memory: Memory) -> None:
        own = host_bytes(memory)
        if own is None:
            raise TransferError("a GPU's memory is reached by compiled calls only")
        ucx = load_ucxx()
        from ucxx._lib.arr import Array

        self._tag, self._array = ucx.UCXXTag, Array
        self._any_tag, self._any_mask = ucx.UCXXTag(0), ucx.UCXXTagMask(0)
        self._worker = worker
        self._memory = own
        self._sends: InFlight[_Operation] = InFlight()
        self._receives: InFlight[_Operation] = InFlight()
        self._arrived: list[Any] = []
        self._in_flight: list[_Operation] = []

    def offer(self) -> MemoryOffer | None:
        return None

    def meet(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        """Blocks go through UCX."""

    def send(self, endpoint: Any, places: Sequence[int], length: int, labels: Sequence[int]) -> None:
        for place, label in zip(places, labels, strict=True):
            array = self._array(self._part(place, length))
            try:
                request = endpoint.tag_send(array, self._tag(label))
            except Exception as exc:
                raise PeerLost(f"UCX cannot send: {exc}") from exc
            self._sends.add(_Operation(request, array, Moved(label, place, length)))

    def _part(self, place: int, length: int) -> memoryview:
        if not 0 <= place <= len(self._memory) - length:
            raise ValueError(f"{length} bytes at {place} are outside of {len(self._memory)}")
        return self._memory[place : place + length]

    def progress(self) -> bool:
        step = self._worker.progress_once
        moved = False
        for _ in range(_PROGRESS_AT_ONCE):
            if not step():
                break
            moved = True
        return moved

    def sent(self) -> Sequence[Moved]:
        return self._ended(self._sends, "sent")

    def landed(self) -> Sequence[Moved]:
        return self._ended(self._receives, "received")

    def _ended(self, operations: InFlight[_Operation], what: str) -> Sequence[Moved]:
        done = operations.take_done()
        for operation in done:
            operation.check(what)
        return [operation.message for operation in done if operation.message is not None]

    def arrivals(self) -> Sequence[Arrival]:
        found = []
        while (message := self._worker.tag_probe(self._any_tag, self._any_mask, True)).matched:
            self._arrived.append(message)
            found.append(Arrival(message.sender_tag.value, message.length))
        return found

    def receive(self, places: Sequence[int]) -> None:
        arrived, self._arrived = self._arrived, []
        for message, place in zip(arrived, places, strict=True):
            wanted = place != DISCARD
            length = message.length
            into = self._part(place, length) if wanted else memoryview(bytearray(length))
            array = self._array(into)
            try:
                request = self._worker.tag_recv_with_handle(array, message)
            except Exception as exc:
                raise PeerLost(f"UCX cannot receive: {exc}") from exc
            moved = Moved(message.sender_tag.value, place, length) if wanted else None
            self._receives.add(_Operation(request, array, moved))

    def settled(self) -> bool:
        sends, receives = self._sends.settled(), self._receives.settled()
        return sends and receives

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        worker, self._worker = self._worker, None
        sends = [send for send in self._sends.take_all() if not send.done()]
        receives = self._receives.take_all()
        close_endpoints()
        in_flight = [*sends, *receives]
        for _ in range(_END_ROUNDS):
            # progress(), unlike progress_once(), also lets ucxx forget the requests that it has cancelled.
            worker.progress()
            if all(operation.done() for operation in in_flight):
                break
        # An endpoint that is closed while it sends keeps those requests for ever.
        if not sends and all(receive.done() for receive in receives):
            return True
        self._in_flight = in_flight
        return False

    def free(self) -> None:
        # Their finalisers would touch the worker, which is no more.
        for operation in self._in_flight:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(operation))
        self._in_flight = []
