"""What both kinds of port have: one rank's link to another engine, and what rank 0 is told of it."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.errors import PeerLost
from pdserve.wire.rank_transfer import LinkBroken, LinkClosed, LinkOpened, RankReport
from pdserve_kvtransfer.memory import Memory
from pdserve_kvtransfer.transport import Link, Transport

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

        Once ``look`` raises PeerLost, or the link says so itself, it is broken.
        """
        if self.broken:
            return False
        news = False
        try:
            for _ in range(_LOOKS):
                if not look():
                    break
                news = True
            if self.link.broken():
                raise PeerLost("the connection that carries KV blocks broke")
        except PeerLost as exc:
            self.found_broken(str(exc))
            return False
        return news

    def found_broken(self, reason: str) -> None:
        """It moves nothing any more, and waits to be closed."""
        self.broken = True
        self.reports.append(LinkBroken(self.number, reason))

    def arm(self) -> bool:
        return self.broken or self.link.arm()

    def close(self) -> None:
        """Idempotent. No memory given to the link is touched afterwards."""
        self.broken = True
        self.link.close()

    def report_closed(self) -> None:
        self.reports.append(LinkClosed(self.number))
