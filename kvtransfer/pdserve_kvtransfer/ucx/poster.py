"""The contract between a UCX link and its poster, which posts its messages, and the choice between the two posters.

Compiled code posts a batch of messages in one call; ucxx's Python objects need five calls for each, but no compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pdserve.compiled_library import BuildError
from pdserve.config import UcxCalls
from pdserve.errors import ConfigError
from pdserve.wire.transfer import LinkAddress, MemoryOffer
from pdserve_kvtransfer.region import Memory
from pdserve_kvtransfer.transport import ArrivedMessage, MovedMessage
from pdserve_kvtransfer.ucx.compiled_poster import PosterLibrary
from pdserve_kvtransfer.ucx.ucxx_poster import UcxxPoster


class Poster(Protocol):
    """The messages of one UCX worker. Endpoints and worker are ucxx's objects, and live longer.

    Methods are as a ``Link``'s.
    """

    @property
    def attached(self) -> int:
        """Ends of links whose blocks do not go through UCX: the receiver copies them out of the sender's memory."""

    def offer(self) -> MemoryOffer | None:
        """What other links may read of this memory until ``end``. Asked for once, if at all."""

    def add_endpoint(self, endpoint: Any, address: LinkAddress, own: int) -> None:
        """Called for each endpoint, in turn, before the first message to it; what it offers may be mapped.

        ``address`` is the other side's, ``own`` the ``link`` of this side's.
        """

    def send(self, places: Sequence[int], length: int, labels: Sequence[int], to: int = 0) -> None:
        """``to`` counts the endpoints in the order in which they were added."""

    def progress(self) -> bool: ...

    def sent(self) -> Sequence[MovedMessage]: ...

    def arrivals(self) -> Sequence[ArrivedMessage]: ...

    def receive(self, places: Sequence[int]) -> None: ...

    def landed(self) -> Sequence[MovedMessage]: ...

    def settled(self) -> bool:
        """Whether everything that is over was reported. To be asked before sleeping."""

    def end(self, close_endpoints: Callable[[], None]) -> bool:
        """Do that, and let what is in flight end. False if some of it does not: the worker is then to be destroyed."""

    def free(self) -> None:
        """After ``end``, and after the worker is destroyed if it is."""


MakePoster: TypeAlias = Callable[[Any, Memory], Poster]
"""``(worker, memory)``; raises TransferError if it cannot reach that kind of memory."""

log = logging.getLogger(__name__)


def chosen_poster(choice: UcxCalls, cache_dir: Path, *, digests: bool = False) -> MakePoster:
    """Compiled now, in about a second, if it is to be and is not below ``cache_dir`` yet.

    ``digests`` is whether to make those of landed blocks at once, while they are in a cache, if that can be done.

    Raises ConfigError if compiled code was asked for by name and cannot be had; if it is only the better choice, the
    log says so.
    """
    if choice is UcxCalls.PYTHON:
        return UcxxPoster
    try:
        return PosterLibrary(cache_dir, digests).poster
    except BuildError as exc:
        if choice is UcxCalls.COMPILED:
            raise ConfigError(f"--ucx-calls compiled: {exc}") from exc
        log.warning("KV blocks are posted from Python instead of compiled code, which costs less CPU time: %s", exc)
        return UcxxPoster
