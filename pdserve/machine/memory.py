"""Says how much memory a process may still take, and gives the memory that it has freed back to the system.

What it may take is what the machine has, and its control group. Both versions of control groups are read. What a group
has in its file cache is freed when memory is short, so it counts as free, as the kernel counts it in
``MemAvailable``.

By itself, glibc keeps up to 64 MiB free at the end of its heap, and whatever is free below a block that is in use. So
an engine that has computed the log probabilities of one long prompt would stay that much larger, until chance empties
the end of the heap. It gives that back while it rests: in a step, new pages would cost up to a twentieth of the time.
A node's API process gives back once, before it serves, what loading has left: 31 of 87 MiB in one try. Those who take
clients' requests need large blocks for huge bodies alone: one of 7.5 MB left such a process 100 MiB larger.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from pdserve.machine.core_share import control_groups, read_text

MIB = 2**20

REST_S = 5.0
"""An engine without work for so long gives its free memory back, once."""
LARGE_BYTES = 2**20
"""A request's body, and what is made of it, is larger only where it is huge: pages of its own cost nothing then."""
TRIM_BYTES = 2**23
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that are free now, on this machine and in this control group and those above it.

    ``root`` is where ``proc`` and ``sys`` are. 0 means that nothing says how much is free.
    """
    free = [_machine(root), *(_group(folder) for folder in control_groups(root, "memory"))]
    return min((bytes_free for bytes_free in free if bytes_free is not None), default=0)


def _machine(root: Path) -> int | None:
    return _numbers(root / "proc/meminfo").get("MemAvailable:")


def _group(folder: Path) -> int | None:
    """Returns the bytes that a control group has left; None without a limit."""
    limit, used, cache = _number(folder / "memory.max"), _number(folder / "memory.current"), "inactive_file"
    if limit is None:
        limit, cache = _number(folder / "memory.limit_in_bytes"), "total_inactive_file"
        used = _number(folder / "memory.usage_in_bytes")
    if limit is None:
        return None
    in_use = (used or 0) - _numbers(folder / "memory.stat").get(cache, 0)
    return max(0, limit - max(0, in_use))


def _number(file: Path) -> int | None:
    text = read_text(file)
    # Without a limit, version 2 has "max".
    return int(text) if text.isdecimal() else None


def _numbers(file: Path) -> dict[str, int]:
    """Returns the numbers of a file of the kernel by their names; those in kB as bytes."""
    lines = (line.split() for line in read_text(file).splitlines())
    return {
        words[0]: int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }


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
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)  # The line before has set it to 128 KiB, for good.
