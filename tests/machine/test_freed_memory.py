"""An engine is not larger for good after a large block of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKS = """
import ctypes
from pathlib import Path
from pdserve.machine.memory import give_freed_memory_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def own_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def taken(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block


before = own_mib()
for size in (31 << 20, 30 << 20):  # glibc learns from the first one
    libc.free(taken(size))
print(own_mib() - before)
print(give_freed_memory_back())
print(own_mib() - before)
"""


@pytest.mark.integration
def test_a_large_block_that_was_freed_is_given_back() -> None:
    run = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, timeout=60, check=True)
    kept, had_some, left = run.stdout.split()
    assert float(kept) > 20, "glibc keeps it by itself"
    assert had_some == "True"
    assert float(left) < 5
