"""Has a process give large blocks of memory back to the system as soon as it frees them.

By itself, glibc learns from each large block that is freed to take the next ones from its heap, and then keeps up to
64 MiB free there. So an engine that has computed the log probabilities of one long prompt would stay that much larger,
until chance empties the end of the heap.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

MAPPED_BYTES = 4 * 2**20
"""Blocks of this size have pages of their own. What a step needs for its logits is smaller, unless many decode at
once; new pages for those cost little beside what computes them."""
MOST_FREE_BYTES = 2 * MAPPED_BYTES
"""The heap shrinks when more than this is free at its end."""

_MALLOPT = {-3: MAPPED_BYTES, -1: MOST_FREE_BYTES}
"""``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD`` of glibc."""
_OWN_WISHES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def give_freed_memory_back(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the process does from now on.

    It does not where the environment says what the allocator does, or the C library has no such setting.
    """
    if any(name in environ for name in _OWN_WISHES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in _MALLOPT.items())
