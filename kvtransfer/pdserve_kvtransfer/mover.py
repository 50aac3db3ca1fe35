"""The contract between a UCX link and what posts its messages, in compiled code or in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from pdserve.wire.link_address import LinkAddress, MemoryOffer
from pdserve_kvtransfer.memory import Memory
from pdserve_kvtransfer.transport import Arrival, Moved


class Mover(Protocol):
    """The messages of one UCX worker. Endpoints and worker are ucxx's objects, and live longer.

    Methods are as a ``Link``'s.
    """

    @property
    def attached(self) -> int:
        """Ends of links whose blocks do not go through UCX: the receiver copies them out of the sender's memory."""

    def offer(self) -> MemoryOffer | None:
        """What other links may read of this memory until ``end``. Asked for once, if at all."""

    def meet(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        """Called for each endpoint, in turn, before the first message to it; what it offers may be mapped.

        ``address`` is the other side's, ``own`` the ``link`` of this side's.
        """

    def send(self, endpoint: Any, places: Sequence[int], length: int, labels: Sequence[int]) -> None: ...

    def progress(self) -> bool: ...

    def sent(self) -> Sequence[Moved]: ...

    def arrivals(self) -> Sequence[Arrival]: ...

    def receive(self, places: Sequence[int]) -> None: ...

    def landed(self) -> Sequence[Moved]: ...

    def settled(self) -> bool:
        """Whether everything that is over was reported. To be asked before sleeping."""

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        """Do that, and let what is in flight end. False if some of it does not: the worker is then to be destroyed."""

    def free(self) -> None:
        """After ``end``, and after the worker is destroyed if it is."""


MakeMover: TypeAlias = Callable[[Any, Memory], Mover]
"""``(worker, memory)``; raises TransferError if it cannot reach that kind of memory."""
