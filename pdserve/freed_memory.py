"""Gives the memory that a process has freed back to the system.

By itself, glibc keeps up to 64 MiB free at the end of its heap, and whatever is free below a block that is in use. So
an engine that has computed the log probabilities of one long prompt would stay that much larger, until chance empties
the end of the heap. It gives that back while it rests: in a step, new pages would cost up to a twentieth of the time.
A node's API process gives back once, before it serves, what loading has left: 31 of 87 MiB in one try.
"""

from __future__ import annotations

import ctypes

REST_S = 5.0
"""An engine without work for so long gives its free memory back, once."""


def give_freed_memory_back() -> bool:
    """Returns whether the C library can do so, and had memory to give."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1
