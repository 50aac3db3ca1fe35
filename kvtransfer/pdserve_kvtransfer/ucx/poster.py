"""The contract between a UCX link and the poster of its messages.

``CompiledPoster`` posts a batch of messages in one call. ``UcxxPoster`` needs five calls for each message, but no
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from pdserve.wire.transfer import LinkAddress, MemoryOffer
from pdserve_kvtransfer.region import Memory
from pdserve_kvtransfer.transport import ArrivedMessage, MovedMessage


class Poster(Protocol):
    """Posts the messages of one UCX worker. Endpoints and worker are ucxx's objects and outlive the poster.

    Methods without a docstring are those of a ``Link``.
    """

    @property
    def attached(self) -> int:
        """How many ends of links have blocks that the receiver copies out of the sender's memory, not through UCX."""

    def offer(self) -> MemoryOffer | None:
        """Returns what other links may read of this memory until ``end``. It is called at most once."""

    def add_endpoint(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        """Adds the next endpoint, before the first message to it. The memory that it offers may be mapped.

        ``address`` is the other side's address. ``own`` is the ``link`` of this side's address.
        """

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        """``to`` counts the endpoints in the order in which they were added."""

    def progress(self) -> bool: ...

    def sent(self) -> Sequence[MovedMessage]: ...

    def arrivals(self) -> Sequence[ArrivedMessage]: ...

    def receive(self, places: Sequence[int]) -> None: ...

    def landed(self) -> Sequence[MovedMessage]: ...

    def settled(self) -> bool:
        """Returns whether everything that is over was reported. It must be asked before sleeping."""

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        """Closes the endpoints and lets what is in flight end.

        Returns False if some of it does not end. The worker must then be destroyed.
        """

    def free(self) -> None:
        """Frees the poster, after ``end`` and after the worker is destroyed, if it is."""


MakePoster: TypeAlias = Callable[[Any, Any, Memory], Poster]
"""Makes a poster of ``(context, worker, memory)``.

It raises TransferError if the poster cannot reach that kind of memory.
"""
