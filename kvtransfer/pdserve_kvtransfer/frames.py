"""Opening frames without trusting them: what is not authentic is dropped, counted, and logged now and then."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

from pdserve.errors import WireError
from pdserve.wire.frame import Opener, Purpose
from pdserve_kvtransfer.stats import TransferStats

log = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0

T = TypeVar("T")


class Inbound(Generic[T]):
    """All frames that one engine receives on its transfer control channels."""

    def __init__(self, secret: bytes, messages: type[T], counters: TransferStats) -> None:
        self._opener: Opener[T] = Opener(secret, Purpose.TRANSFER, messages)
        self._counters = counters
        self._next_log = float("-inf")

    def open(self, frame: bytes, now: float) -> T | None:
        try:
            return self._opener.open(frame)
        except WireError as exc:
            self._counters.frames_dropped += 1
            if now >= self._next_log:
                self._next_log = now + _LOG_EVERY_S
                log.warning("dropped a transfer frame (%d so far): %s", self._counters.frames_dropped, exc)
            return None
