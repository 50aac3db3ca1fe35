"""Opening frames without trusting them: what is not authentic is dropped, counted, and logged now and then."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from pdserve.errors import UnreadableMessage, WireError, WrongReceiver
from pdserve.wire.frame import Opened, Opener, Purpose, Secrets
from pdserve_kvtransfer.stats import TransferStats

log = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0

T = TypeVar("T")


class Inbound(Generic[T]):
    """All frames that one engine receives on its transfer control channels."""

    def __init__(self, secret: bytes | Secrets, messages: type[T], counters: TransferStats, boot_id: bytes) -> None:
        """``boot_id`` is this engine's: frames that name another receiver are not opened."""
        self._opener: Opener[T] = Opener(secret, Purpose.TRANSFER, messages, receiver=boot_id)
        self._counters = counters
        self._next_log = float("-inf")

    def open(self, frame: bytes, now: float) -> Opened[T] | UnreadableMessage | WrongReceiver | None:
        """The message, or, for a frame that is authentic nevertheless, why there is none."""
        try:
            return self._opener.open_from(frame)
        except WireError as exc:
            self._counters.frames_dropped += 1
            if now >= self._next_log:
                self._next_log = now + _LOG_EVERY_S
                log.warning("dropped a transfer frame (%d so far): %s", self._counters.frames_dropped, exc)
            return exc if isinstance(exc, UnreadableMessage | WrongReceiver) else None
