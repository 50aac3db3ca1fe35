"""Tests cores, quota, memory and neighbours with made-up ``/proc`` and ``/sys`` files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.doctor.finding import Verdict
from pdserve.doctor.machine import CoreFacts, check_core_ledger, check_cores, read_cores
from pdserve.machine.core_ledger import CoreLedger, CoreState, CoreWord
from pdserve.machine.core_share import RunningEngine
from tests.core_words import write

FINE = CoreFacts(
    allowed=(0, 1),
    machine_cores=4,
    quota=0.0,
    governors=frozenset({"performance"}),
    memory_total=8 * 2**30,
    memory_available=4 * 2**30,
    engines=(RunningEngine(10, frozenset({0})), RunningEngine(11, frozenset({1}))),
)


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_all_is_fine() -> None:
    assert {found.verdict for found in check_cores(FINE)} == {Verdict.OK}


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "advice"),
    [
        (replace(FINE, quota=1.5), "cores", Verdict.WARNING, "--cores with 1"),
        (replace(FINE, allowed=(0, 9)), "cores", Verdict.PROBLEM, "--cores"),
        (replace(FINE, governors=frozenset({"powersave"})), "CPU governor", Verdict.WARNING, "cpupower"),
        (replace(FINE, governors=frozenset()), "CPU governor", Verdict.NOT_APPLICABLE, ""),
        (replace(FINE, memory_available=2**20), "memory", Verdict.WARNING, "--kv-cache-mib"),
        (
            replace(FINE, engines=(RunningEngine(10, frozenset({0, 1})), RunningEngine(11, frozenset({1})))),
            "engines here",
            Verdict.WARNING,
            "--cores",
        ),
        (replace(FINE, engines=()), "engines here", Verdict.OK, ""),
    ],
)
def test_verdicts(facts: CoreFacts, check: str, verdict: Verdict, advice: str) -> None:
    (found,) = [found for found in check_cores(facts) if found.check == check]
    assert found.verdict is verdict
    assert advice in found.advice


def test_two_engines_on_one_core_are_named() -> None:
    engines = (RunningEngine(10, frozenset({0, 1})), RunningEngine(11, frozenset({1})))
    (found,) = [found for found in check_cores(replace(FINE, engines=engines)) if found.check == "engines here"]
    assert "10 and 11 on core 1" in found.seen


def test_an_engine_and_its_ranks_are_found_and_nothing_else(tmp_path: Path) -> None:
    def process(*words: str) -> str:
        return "\0".join(words) + "\0"

    root = machine(
        tmp_path,
        {
            "proc/7/cmdline": process("/usr/bin/python3", "-P", "-m", "pdserve.engine"),
            "proc/7/status": "Name:\tpython3\nCpus_allowed_list:\t0-2,5\n",
            "proc/8/cmdline": process("/usr/bin/python3", "-P", "-m", "pdserve.engine.tp.rank_program"),
            "proc/8/status": "Cpus_allowed_list:\t3\n",
            "proc/9/cmdline": process("/usr/bin/python3", "-m", "pdserve", "decode"),
            "proc/9/status": "Cpus_allowed_list:\t3\n",
            "proc/10/cmdline": process("python3", "-m"),
            "proc/10/status": "",
        },
    )
    assert read_cores((), root).engines == (RunningEngine(7, frozenset({0, 1, 2, 5})), RunningEngine(8, frozenset({3})))


def test_the_quota_is_that_of_the_control_group(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}
    assert read_cores((), machine(tmp_path, files)).quota == 1.5


def test_this_machine_is_read() -> None:
    facts = read_cores(())
    assert facts.allowed == tuple(sorted(os.sched_getaffinity(0)))
    assert 0 < facts.memory_available <= facts.memory_total
    assert read_cores((0,)).allowed == (0,)


def test_the_core_ledger(tmp_path: Path) -> None:
    assert check_core_ledger("").verdict is Verdict.NOT_APPLICABLE
    path = tmp_path / "ledger"
    assert check_core_ledger(str(path)).verdict is Verdict.OK
    assert not path.exists()
    with CoreLedger(path) as ledger:
        cores = len(ledger.read())
        found = check_core_ledger(str(path))
        assert (found.verdict, found.seen) == (Verdict.OK, f"engines: 0; of {cores} cores none has an engine")
        engine = ledger.join(lambda dead: None)
        # Number 9 is no living engine's.
        write(ledger, 0, CoreWord(CoreState.LENT, engine, 9))
        assert check_core_ledger(str(path)).seen == f"engines: 1; of {cores} cores 1 is lent"
        write(ledger, 0, CoreWord(CoreState.SHARED, engine, 9))
        assert check_core_ledger(str(path)).verdict is Verdict.WARNING
    path.write_bytes(b"something else")
    assert check_core_ledger(str(path)).verdict is Verdict.PROBLEM
    # The file system refuses to look.
    assert check_core_ledger(str(tmp_path / ("x" * 300))).verdict is Verdict.PROBLEM
