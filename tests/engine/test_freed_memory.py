"""An engine is not larger for good after a large block of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdserve.engine.freed_memory import MAPPED_BYTES, give_freed_memory_back

BLOCKS = """
import ctypes, os, sys
from pathlib import Path
from pdserve.engine.freed_memory import give_freed_memory_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def own_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def taken(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block


if sys.argv[1] == "given back":
    assert give_freed_memory_back()
before = own_mib()
for size in (31 << 20, 30 << 20):  # glibc learns from the first one
    block = taken(size)
    libc.free(block)
print(own_mib() - before)
"""


def kept_mib(how: str) -> float:
    """Returns by how much a process is larger that has had a block of 30 MiB."""
    run = subprocess.run([sys.executable, "-c", BLOCKS, how], capture_output=True, text=True, timeout=60, check=True)
    return float(run.stdout)


@pytest.mark.integration
def test_a_large_block_is_given_back_when_it_is_freed() -> None:
    assert kept_mib("as it is") > 20, "glibc keeps it by itself"
    assert kept_mib("given back") < MAPPED_BYTES / 2**20


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_has_said_what_the_allocator_does_is_obeyed(name: str) -> None:
    assert not give_freed_memory_back({name: "1"})
