"""Wakes an idle step loop from other threads and from signal handlers."""

from __future__ import annotations

import os


class WakeUp:
    """An eventfd that any thread or signal handler sets, and that the step loop polls and clears."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
