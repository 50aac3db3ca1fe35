"""Tests which cores an engine takes where others run, and what it says if it shares some."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.machine.core_share import RunningEngine, core_list, core_words, cores_left, other_engines, sharing_note


def engine(pid: int, *cores: int) -> RunningEngine:
    return RunningEngine(pid, frozenset(cores))


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [0, 1, 2, 3]),
        ([engine(9, 0)], [1, 2, 3]),
        ([engine(9, 0), engine(10, 2, 3, 7)], [1]),
        # An engine that may use all cores keeps none of them from others, and a machine that is full has none left.
        ([engine(9, 0, 1, 2, 3, 4)], [0, 1, 2, 3]),
        ([engine(9, 0, 1, 2, 3), engine(10, 1)], [0, 2, 3]),
        ([engine(9, 0, 1), engine(10, 2, 3)], [0, 1, 2, 3]),
    ],
)
def test_a_node_takes_the_cores_that_others_leave(others: list[RunningEngine], left: list[int]) -> None:
    assert cores_left([0, 1, 2, 3], others) == left


def test_shared_cores_are_told_with_the_processes_and_the_flag() -> None:
    assert sharing_note([0, 1], [engine(9, 2)]) == ""
    note = sharing_note([0, 1, 2], [engine(9, 2), engine(10, 0, 1, 2, 3), engine(11, 4)])
    assert note.startswith("this engine shares cores 0-2 with the engine of processes 9, 10, ")
    assert note.endswith("with --cores")
    assert "shares core 2 with the engine of process 9," in sharing_note([2], [engine(9, 2)])


def test_an_engines_own_ranks_are_no_others(tmp_path: Path) -> None:
    programs = {
        5: ("pdserve.engine", 1),
        6: ("pdserve.engine.tp.rank_program", 5),
        7: ("pdserve.engine", 1),
        8: ("x", 1),
    }
    for pid, (module, parent) in programs.items():
        folder = tmp_path / f"proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"\0".join([b"python", b"-P", b"-m", module.encode()]))
        (folder / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\nCpus_allowed_list:\t0,2-3\n")
    assert other_engines(5, tmp_path) == [RunningEngine(7, frozenset({0, 2, 3}), 1)]


def test_cores_are_written_as_the_kernel_writes_them() -> None:
    assert core_words([0, 2, 3, 4, 9]) == "0,2-4,9"
    assert core_list("0,2-4,9") == {0, 2, 3, 4, 9}
    assert core_list("") == frozenset()
