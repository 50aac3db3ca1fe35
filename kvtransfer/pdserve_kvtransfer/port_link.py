"""What both kinds of port have: one rank's link to another engine, and what rank 0 is told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdserve.errors import PeerLost, TransferError
from pdserve.wire.rank_transfer import CloseLink, LinkBroken, LinkClosed, LinkCommand, LinkOpened, RankReport
from pdserve_kvtransfer.memory import Memory
from pdserve_kvtransfer.transport import Link, Transport

log = logging.getLogger(__name__)

_LOOKS = 32
"""In one turn, at most: other links and the control channel wait meanwhile."""


class PortLink:
    """Open from the start, broken at most once, closed at the end; the port's driver empties ``reports``."""

    def __init__(self, number: int, transport: Transport, memory: Memory) -> None:
        """Raises TransferError if the transport cannot open a link."""
        self.number = number
        self.reports: list[RankReport] = []
        self.link: Link = transport.open_link(memory)
        self.broken = False
        self.reports.append(LinkOpened(number, self.link.address))

    def turn(self, look: Callable[[], bool]) -> bool:
        """``look`` at the link until there is no news, or for long enough. True if there was any.

        Once ``look`` raises anything, or the link says so itself, it is broken.
        """
        return not self.broken and self.attempt(lambda: self._looked(look))

    def _looked(self, look: Callable[[], bool]) -> bool:
        news = False
        for _ in range(_LOOKS):
            if not look():
                break
            news = True
        if self.link.broken():
            raise PeerLost("the connection that carries KV blocks broke")
        return news

    def attempt(self, act: Callable[[], bool]) -> bool:
        """``act``, which concerns this link alone: whatever it raises, this link is broken, and no other.

        False if it raised. What is no TransferError is a defect, and logged with its traceback.
        """
        try:
            return act()
        except TransferError as exc:
            self.found_broken(str(exc))
        except Exception as exc:
            log.exception("link %d failed", self.number)
            self.found_broken(f"{type(exc).__name__}: {exc}")
        return False

    def found_broken(self, reason: str) -> None:
        """It moves nothing any more, and waits to be closed."""
        self.broken = True
        self.reports.append(LinkBroken(self.number, reason))

    def arm(self) -> bool:
        return self.broken or self.attempt(self.link.arm)

    def close(self) -> None:
        """Idempotent. No memory given to the link is touched afterwards."""
        self.broken = True
        self.link.close()

    def handle(self, command: LinkCommand, obey: Callable[[LinkCommand], bool], close: Callable[[], None]) -> None:
        """Have the port ``close`` this link, and report that, or ``attempt`` to ``obey`` any other command."""
        if isinstance(command, CloseLink):
            close()
            self.reports.append(LinkClosed(self.number))
        else:
            self.attempt(lambda: obey(command))
