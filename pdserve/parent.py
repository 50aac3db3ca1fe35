"""Ties a process to its parent: nothing that pdserve starts outlives what started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_PID_ENV = "PDSERVE_PARENT_PID"
"""How ``pdserve up`` tells a child whose end is to be its own."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process (SIGKILL) when process ``parent_pid``, which started it, is gone.

    Ends the process at once if it is gone already. Linux only; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
