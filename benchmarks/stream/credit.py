"""Clients tell a mock engine how many tokens they have got, as numbers through a FIFO, so that it can wait for them."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NUMBER = struct.Struct("<Q")
_READ_BYTES = 2**16
# Each side opens the FIFO for both directions, so that it does not wait for the other side to open it.
_MODE = os.O_RDWR | os.O_NONBLOCK


class CreditReader:
    """The engine's end of the FIFO."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tokens = 0

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> int:
        """Returns the tokens that all clients together have got, by the last number that they wrote."""
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, _READ_BYTES)
            (self._tokens,) = _NUMBER.unpack(data[-_NUMBER.size :])
        return self._tokens


class CreditWriter:
    """The clients' end of the FIFO."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._sent = 0

    def tell(self, tokens: int) -> None:
        """Writes the growing number of all clients' tokens. A full FIFO drops a number: send it again."""
        if tokens > self._sent:
            with suppress(BlockingIOError):
                os.write(self._descriptor, _NUMBER.pack(tokens))
                self._sent = tokens


@contextmanager
def credit_of(file: str) -> Iterator[CreditReader | None]:
    """Yields the engine's end of ``file``; None if ``file`` is empty."""
    if not file:
        yield None
        return
    descriptor = os.open(file, _MODE)
    try:
        yield CreditReader(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def credit_to(file: str) -> Iterator[CreditWriter | None]:
    """Yields the clients' end of ``file``; None if ``file`` is empty."""
    if not file:
        yield None
        return
    descriptor = os.open(file, _MODE)
    try:
        yield CreditWriter(descriptor)
    finally:
        os.close(descriptor)
