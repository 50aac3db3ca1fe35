"""How clients tell a mock engine what they have got, so that it need not run ahead of them: numbers through a FIFO."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NUMBER = struct.Struct("<Q")
_READ_BYTES = 2**16
# Open for both, so that neither side waits for the other one to come.
_MODE = os.O_RDWR | os.O_NONBLOCK


class CreditReader:
    """The engine's side."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._tokens = 0

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> int:
        """The tokens that all clients together have got, by what they have told last."""
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, _READ_BYTES)
            (self._tokens,) = _NUMBER.unpack(data[-_NUMBER.size :])
        return self._tokens


class CreditWriter:
    """The clients' side."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._told = 0

    def tell(self, tokens: int) -> None:
        """Of all clients together, ever growing. A number that finds no room is dropped: tell it again."""
        if tokens > self._told:
            with suppress(BlockingIOError):
                os.write(self._descriptor, _NUMBER.pack(tokens))
                self._told = tokens


@contextmanager
def credit_of(file: str) -> Iterator[CreditReader | None]:
    """None if ``file`` is empty."""
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
    """None if ``file`` is empty."""
    if not file:
        yield None
        return
    descriptor = os.open(file, _MODE)
    try:
        yield CreditWriter(descriptor)
    finally:
        os.close(descriptor)
