"""Gives the memory that a process has freed back to the system.

By itself, glibc keeps up to 64 MiB free at the end of its heap, and whatever is free below a block that is in use. So
an engine that has computed the log probabilities of one long prompt would stay that much larger, until chance empties
the end of the heap. It gives that back while it rests: in a step, new pages would cost up to a twentieth of the time.
A node's API process gives back once, before it serves, what loading has left: 31 of 87 MiB in one try. Those who take
clients' requests need large blocks for huge bodies alone: one of 7.5 MB left such a process 100 MiB larger.
"""

from __future__ import annotations

import ctypes

REST_S = 5.0
"""An engine without work for so long gives its free memory back, once."""
LARGE_BYTES = 2**20
"""A request's body, and what is made of it, is larger only where it is huge: pages of its own cost nothing then."""
KEPT_BYTES = 2**23
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def give_freed_memory_back() -> bool:
    """Returns whether the C library can do so, and had memory to give."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


def give_large_blocks_back() -> None:
    """Has the C library give each large block back as soon as it is freed, for a process that needs few of them.

    By itself, glibc keeps blocks of up to 32 MiB for later ones as soon as one was freed, in the heap of each thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)  # The line before has set it to 128 KiB, for good.
