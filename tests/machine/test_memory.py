"""Tests how much memory a node counts on, with folders that look like those of control groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.machine.memory import available_memory

MEMINFO = {"proc/meminfo": "MemTotal:       32000 kB\nMemAvailable:    20000 kB\n"}
FREE = 20_000 * 1024


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, FREE),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max"}, FREE),
        # What a group has in its file cache is given back.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "5000",
                "sys/fs/cgroup/a/memory.current": "4000",
                "sys/fs/cgroup/a/memory.stat": "anon 1000\nfile 3000\ninactive_file 2500\n",
                "sys/fs/cgroup/a/b/memory.max": "9000",
                "sys/fs/cgroup/a/b/memory.current": "100",
            },
            3500,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/f00\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            4500,
        ),
        # Version 1 without a limit has a number that no machine reaches.
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000",
            },
            FREE,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "3000",
                "sys/fs/cgroup/memory.current": "4000",
            },
            0,
        ),
        ({"proc/meminfo": "nonsense\n"}, 0),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: Mapping[str, str], expected: int) -> None:
    for name, text in {**MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(tmp_path) == expected


def test_this_machine_has_some() -> None:
    assert available_memory() > 2**20
