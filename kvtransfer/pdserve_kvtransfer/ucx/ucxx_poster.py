"""The poster that uses ucxx's Python objects, which needs five calls for each message but no compiler.

``InFlight`` finds the operations that have ended without checking each of them in every turn.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.transfer import LinkAddress, MemoryOffer
from pdserve_kvtransfer.region import Memory, host_bytes
from pdserve_kvtransfer.transport import DISCARD, ArrivedMessage, MovedMessage
from pdserve_kvtransfer.ucx.ucx_library import load_ucxx

CHECKED_AT_ONCE = 16
"""How many of the oldest operations ``InFlight`` checks in a turn."""
_PROGRESS_AT_ONCE = 256
_END_ROUNDS = 200


class SupportsDone(Protocol):
    def done(self) -> bool: ...


T = TypeVar("T", bound=SupportsDone)


class InFlight(Generic[T]):
    """Operations in the order of posting. They end in about that order, so it checks the oldest few alone.

    If the oldest ones are stuck while others behind them have ended, ``settled`` says that more are to be checked.
    """

    def __init__(self) -> None:
        self._open: deque[T] = deque()
        self._thorough = False
        self._seen_all = True

    def __len__(self) -> int:
        return len(self._open)

    def add(self, operation: T) -> None:
        self._open.append(operation)
        self._seen_all = False

    def take_done(self) -> list[T]:
        """Takes the operations that were found to have ended and returns them, oldest first."""
        limit = len(self._open) if self._thorough else CHECKED_AT_ONCE
        done: list[T] = []
        waiting: list[T] = []
        while self._open and len(waiting) < limit:
            operation = self._open.popleft()
            (done if operation.done() else waiting).append(operation)
        self._seen_all = not self._open
        self._thorough = False
        self._open.extendleft(reversed(waiting))
        return done

    def settled(self) -> bool:
        """Returns whether the last ``take_done`` checked all. If not, the next one will.

        It must be asked before sleeping.
        """
        self._thorough = not self._seen_all
        return self._seen_all

    def take_all(self) -> list[T]:
        everything = list(self._open)
        self.clear()
        return everything

    def clear(self) -> None:
        self._open.clear()
        self._seen_all = True


class _Operation:
    """A send or receive. It holds the memory's buffer export for as long as UCX may use it.

    The request itself holds only an address (``borrowed``), so that one that is kept for ever keeps no memory.
    """

    __slots__ = ("_part", "_request", "message")

    def __init__(self, request: Any, part: memoryview, message: MovedMessage | None) -> None:
        self._request = request
        self._part = part
        self.message = message
        """None for a message that is discarded."""

    def done(self) -> bool:
        return bool(self._request.completed)

    def keep_request(self) -> None:
        """Keeps the request for ever, because the worker is destroyed and the request's finaliser would touch it.

        The memory is free: nothing reads or writes it without the worker.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._request))

    def failure(self) -> str | None:
        """Says why the operation ended without moving the bytes; None if it has moved them."""
        try:
            self._request.check_error()
        except Exception as exc:
            return str(exc)
        return None


def borrowed(part: memoryview) -> Any:
    """Returns an object with the bytes of ``part`` that does not keep them: the caller has to."""
    if not part.nbytes:
        return bytearray()
    address = ctypes.addressof(ctypes.c_char.from_buffer(part))
    return (ctypes.c_char * part.nbytes).from_address(address)


class UcxxPoster:
    """A ``poster.Poster`` over ucxx's Python objects.

    No method raises while its own variables name a request. The link may be destroyed by force while the exception is
    handled, and its traceback would let the request be finalised afterwards, in memory that UCX has freed.
    """

    attached = 0

    def __init__(self, context: Any, worker: Any, memory: Memory) -> None:
        own = host_bytes(memory)
        if own is None:
            raise TransferError("a GPU's memory is reached by compiled calls only")
        ucx = load_ucxx()
        from ucxx._lib.arr import Array

        self._tag, self._array = ucx.UCXXTag, Array
        self._any_tag, self._any_mask = ucx.UCXXTag(0), ucx.UCXXTagMask(0)
        self._worker = worker
        self._endpoints: list[Any] = []
        self._memory = own
        self._sends: InFlight[_Operation] = InFlight()
        self._receives: InFlight[_Operation] = InFlight()
        self._arrived: list[Any] = []
        self._in_flight: list[_Operation] = []

    def offer(self) -> MemoryOffer | None:
        return None

    def add_endpoint(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        self._endpoints.append(endpoint)

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        endpoint = self._endpoints[to]
        for place, label in zip(places, labels, strict=True):
            self._sends.add(self._send(endpoint, self._part(place, length), MovedMessage(label, place, length)))

    def _send(self, endpoint: Any, part: memoryview, message: MovedMessage) -> _Operation:
        try:
            request = endpoint.tag_send(self._array(borrowed(part)), self._tag(message.label))
        except Exception as exc:
            raise PeerLost(f"UCX cannot send: {exc}") from exc
        return _Operation(request, part, message)

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

    def sent(self) -> Sequence[MovedMessage]:
        return self._ended(self._sends, "sent")

    def landed(self) -> Sequence[MovedMessage]:
        return self._ended(self._receives, "received")

    def _ended(self, operations: InFlight[_Operation], what: str) -> Sequence[MovedMessage]:
        done = operations.take_done()
        failure = next(filter(None, [operation.failure() for operation in done]), None)
        messages = [operation.message for operation in done if operation.message is not None]
        del done
        if failure is not None:
            raise PeerLost(f"a message could not be {what}: {failure}")
        return messages

    def arrivals(self) -> Sequence[ArrivedMessage]:
        found = []
        while (message := self._worker.tag_probe(self._any_tag, self._any_mask, True)).matched:
            self._arrived.append(message)
            found.append(ArrivedMessage(message.sender_tag.value, message.length))
        return found

    def receive(self, places: Sequence[int]) -> None:
        arrived, self._arrived = self._arrived, []
        for message, place in zip(arrived, places, strict=True):
            wanted = place != DISCARD
            length = message.length
            into = self._part(place, length) if wanted else memoryview(bytearray(length))
            moved = MovedMessage(message.sender_tag.value, place, length) if wanted else None
            self._receives.add(self._receive(message, into, moved))

    def _receive(self, arrived: Any, into: memoryview, message: MovedMessage | None) -> _Operation:
        try:
            request = self._worker.tag_recv_with_handle(self._array(borrowed(into)), arrived)
        except Exception as exc:
            raise PeerLost(f"UCX cannot receive: {exc}") from exc
        return _Operation(request, into, message)

    def settled(self) -> bool:
        sends, receives = self._sends.settled(), self._receives.settled()
        return sends and receives

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        worker, self._worker = self._worker, None
        self._endpoints = []
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
        for operation in self._in_flight:
            operation.keep_request()
        self._in_flight = []
