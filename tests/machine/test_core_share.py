"""Tests which share of a machine's cores an engine takes, with folders that look like those of control groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pdserve.machine.core_share import CoreShare, cores_within, cpu_quota, machine_id, quota_note, share_cores


def machine(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 0.0),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "150000 100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuset:/x\n2:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/f00\n1:name=systemd:/docker/f00\n0::/docker/f00\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "0::/\nnonsense\n", "sys/fs/cgroup/cpu.max": "many 0"}, 0.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0"}, 0.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000"}, 0.0),
        ({}, 0.0),
    ],
    ids=["none", "own", "above", "v1", "v1-none", "v1-container", "nonsense", "no-time", "no-period", "no-files"],
)
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    assert cpu_quota(machine(tmp_path, files)) == quota


def test_all_containers_of_a_machine_have_one_id(tmp_path: Path) -> None:
    assert machine_id(machine(tmp_path, {"proc/sys/kernel/random/boot_id": "5f0e\n"})) == "5f0e"
    assert machine_id(tmp_path / "other") == ""
    assert len(machine_id()) == 36


ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("asked", "quota", "ranks", "shares"),
    [
        ((), 0.0, 1, [CoreShare((), 8)]),
        ((), 2.5, 1, [CoreShare((), 2)]),
        ((), 0.5, 1, [CoreShare((), 1)]),
        ((), 8.0, 1, [CoreShare((), 8)]),
        ((), 64.0, 1, [CoreShare((), 8)]),
        ((2, 3), 0.0, 1, [CoreShare((2, 3), 2)]),
        ((2, 3), 1.0, 1, [CoreShare((2, 3), 2)]),
        ((), 0.0, 2, [CoreShare((0, 1, 2, 3), 4), CoreShare((4, 5, 6, 7), 4)]),
        ((), 5.0, 2, [CoreShare((), 2), CoreShare((), 2)]),
        ((), 1.0, 3, [CoreShare((), 1)] * 3),
        ((1, 2, 3), 0.0, 2, [CoreShare((1, 2), 2), CoreShare((3,), 1)]),
    ],
)
def test_a_quota_bounds_the_threads_and_cores_that_were_asked_for_go_before_it(
    asked: Sequence[int], quota: float, ranks: int, shares: list[CoreShare]
) -> None:
    assert share_cores(asked, ALL, quota, ranks) == shares


@pytest.mark.parametrize(
    ("asked", "quota", "note"),
    [
        ((), 2.5, "has 2.5 cores of CPU time, so of the 8 cores that this engine finds it uses 2 at a time"),
        ((0, 1, 2), 2.0, "has 2 cores of CPU time and --cores names 3: the kernel stops"),
        ((0, 1), 2.0, ""),
        ((), 8.0, ""),
        ((), 0.0, ""),
    ],
)
def test_an_engine_says_what_a_quota_does_to_it(asked: Sequence[int], quota: float, note: str) -> None:
    said = quota_note(asked, ALL, quota)
    assert note in said
    assert bool(said) == bool(note)


@pytest.mark.parametrize(
    ("quota", "start", "cores"),
    [
        (0.0, 3, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8.0, 3, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2.5, 0, [0, 1]),
        (3.0, 6, [0, 6, 7]),
        (0.5, 9, [1]),
    ],
)
def test_a_clusters_nodes_get_no_more_cores_than_the_quota_has(quota: float, start: int, cores: list[int]) -> None:
    assert cores_within(ALL, quota, start) == cores
