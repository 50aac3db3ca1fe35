"""Says how much memory a process may still take: the machine's, and that of its control group.

Both versions of control groups are read. What a group has in its file cache is given back when memory is short, so it
counts as free, as the kernel counts it in ``MemAvailable``.
"""

from __future__ import annotations

from pathlib import Path

from pdserve.machine.core_share import control_groups, read_text


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
