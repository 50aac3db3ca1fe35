"""The verdict on a soak: what it takes for wrong, lost, leaked and left, and that it takes nothing else for it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import msgspec
import pytest

from lab.soak.clients import Cause, Finding, Manner, Outcome, Tally
from lab.soak.cluster import Part, Server, SoakCluster
from lab.soak.faults import Fault, FaultSchedule, Strike
from lab.soak.observing import Held, Inside, Look, read_inside
from lab.soak.plot import write_plot
from lab.soak.report import (
    MAX_FILES,
    MAX_GROWTH_MIB,
    MAX_NEW_FILES,
    MAX_NEW_THREADS,
    NOISE_MIB,
    accepted_drafts,
    read,
    to_report,
    verdict,
    write,
)
from lab.soak.run import Rest, Soak, SoakPlan

RESTS = 8
HELD = Held(pid=7, files=40, sockets=9, threads=5, rss_mib=200.0, pss_mib=150.0, own_mib=100.0)


def look(at: int, held: Held = HELD) -> Look:
    """Returns a look at a cluster of which two processes are seen, one of which is another one each time."""
    others = msgspec.structs.replace(HELD, pid=100 + at, own_mib=100.0 + 10 * at)
    inside = {"proxy-0": Inside(), "decode-1": Inside(requests=at % 2, blocks_used=0.1, accepted_drafts=at % 4)}
    return Look(60.0 * at, 1000 * at, {"proxy-0": held, "decode-1 engine": others}, inside, 3, 0)


def good() -> Soak:
    soak = Soak(SoakPlan(), asks=84, seconds=600.0, began=1000.0)
    soak.tally.outcomes.update({Outcome.RIGHT: 90, Outcome.LEFT: 8, Outcome.REFUSED: 2})
    soak.strikes.append(Strike(1010.0, Fault.KILL, "decode-1", Part.DECODE, over=1010.0, whole=1015.0))
    soak.looks = [look(at) for at in range(RESTS)]
    soak.rests = [Rest(look(at), 1.0) for at in range(RESTS)]
    return soak


def lose_one(soak: Soak) -> None:
    soak.tally.outcomes[Outcome.LOST] += 1
    soak.tally.findings.append(Finding(1.0, "stream-1", Manner.PATIENT, Outcome.LOST, "status 500: no", "a"))


def give_a_wrong_one(soak: Soak) -> None:
    soak.tally.outcomes[Outcome.WRONG] += 1


def answer_nothing(soak: Soak) -> None:
    soak.tally = Tally()


def never_recover(soak: Soak) -> None:
    soak.strikes[0].failure = "it was not back 120 s later"


def die_by_itself(soak: Soak) -> None:
    soak.surprises.append("decode-0 was killed by SIGSEGV")


def stay_busy(soak: Soak) -> None:
    soak.rests[-1].busy = "decode-0: a block is in use"


def leak_files(soak: Soak) -> None:
    for at, rest in enumerate(soak.rests):
        rest.look = look(at, msgspec.structs.replace(HELD, files=HELD.files + at * MAX_NEW_FILES))


def leak_threads(soak: Soak) -> None:
    for at, rest in enumerate(soak.rests):
        rest.look = look(at, msgspec.structs.replace(HELD, threads=HELD.threads + at * MAX_NEW_THREADS))


def leak_memory(soak: Soak) -> None:
    for at, rest in enumerate(soak.rests):
        rest.look = look(
            at, msgspec.structs.replace(HELD, own_mib=HELD.own_mib + 2.0 * at * MAX_GROWTH_MIB + NOISE_MIB * at / 4)
        )


def rest_too_seldom(soak: Soak) -> None:
    soak.rests = soak.rests[:4]


def keep_no_answer(soak: Soak) -> None:
    soak.tally.causes[Cause.PROXY_LOST] += 1000
    soak.tally.causes[Cause.NOT_KEPT] += 60


def accept_no_draft(soak: Soak) -> None:
    soak.looks = [msgspec.structs.replace(each, inside={"decode-1": Inside()}) for each in soak.looks]


def break_off(soak: Soak) -> None:
    soak.broke_off = "KeyError('choices')"


def leave_shared_memory(soak: Soak) -> None:
    soak.rests[-1].look = msgspec.structs.replace(soak.rests[-1].look, shared_files=MAX_FILES + 1)


def leave_a_folder(soak: Soak) -> None:
    soak.left_at_end.append("pdserve-x in the temporary folder")


def leave_more_files_of_ucx_than_kills_explain(soak: Soak) -> None:
    soak.left_at_end += [f"/dev/shm/ucx_shm_posix_{number}" for number in range(len(soak.strikes) + 1)]


def test_a_run_without_defects_passes() -> None:
    assert [line.text for line in verdict(good()) if not line.ok] == []


@pytest.mark.parametrize(
    "defect",
    [
        lose_one,
        give_a_wrong_one,
        answer_nothing,
        never_recover,
        die_by_itself,
        stay_busy,
        leak_files,
        leak_threads,
        leak_memory,
        rest_too_seldom,
        keep_no_answer,
        accept_no_draft,
        break_off,
        leave_shared_memory,
        leave_a_folder,
        leave_more_files_of_ucx_than_kills_explain,
    ],
)
def test_each_defect_fails_one_line_of_the_verdict(defect: Callable[[Soak], None]) -> None:
    soak = good()
    defect(soak)
    assert [line.ok for line in verdict(soak)].count(False) == 1
    assert not to_report(soak).ok


def test_drafts_are_counted_over_all_boots_of_a_node() -> None:
    soak = good()
    assert accepted_drafts(soak.looks) == 3 + 3


def test_an_idle_server_may_have_accepted_drafts() -> None:
    assert Inside(accepted_drafts=5).idle


def test_what_a_process_needs_at_first_is_no_leak() -> None:
    soak = good()
    for at, rest in enumerate(soak.rests):
        rest.look = look(at, msgspec.structs.replace(HELD, files=HELD.files + 100 * (at > 0)))
    assert all(line.ok for line in verdict(soak))


def test_a_report_can_be_kept_and_drawn(tmp_path: Path) -> None:
    report = to_report(good())
    write(report, tmp_path / "soak.json")
    assert read(tmp_path / "soak.json") == report
    write_plot(report, tmp_path / "soak.svg")
    drawn = (tmp_path / "soak.svg").read_text()
    assert "open descriptors" in drawn
    assert "decode-1 engine" in drawn


def test_a_server_says_what_is_under_way() -> None:
    metrics = """# HELP pdserve_num_requests_running Requests
pdserve_num_requests_running 2.0
pdserve_num_requests_waiting 1.0
pdserve_num_requests_waiting_for_remote_kvs 0.0
pdserve_kv_cache_usage_perc 0.25
pdserve_quarantined_blocks 3.0
pdserve_replayable_answers 4.0
pdserve_spec_decode_num_accepted_tokens_total 0.0
vllm:num_requests_running{engine="0"} 2.0
"""
    found = read_inside(metrics, Part.DECODE)
    assert found is not None
    assert found == Inside(requests=3, blocks_used=0.25, blocks_quarantined=3, replayable_answers=4)
    assert not found.idle
    told = read_inside(metrics.replace("accepted_tokens_total 0.0", "accepted_tokens_total 5.0"), Part.DECODE)
    assert told == msgspec.structs.replace(found, accepted_drafts=5)
    grouped = f'{metrics}pdserve_cache_group_blocks{{group="window 5"}} 90.0\n'
    grouped += 'pdserve_cache_group_free_blocks{group="window 5"} 88.0\n'
    assert read_inside(grouped, Part.DECODE) == msgspec.structs.replace(found, group_blocks_used=2)
    quiet = read_inside("pdserve_proxy_requests_in_flight 0\npdserve_proxy_journal_bytes 0\n", Part.PROXY)
    assert quiet is not None
    assert quiet.idle


@pytest.mark.parametrize("part", Part)
def test_a_page_without_the_metrics_of_its_server_says_nothing(part: Part) -> None:
    assert read_inside("401 no\n", part) is None
    assert read_inside("pdserve_num_requests_running 0.0\npdserve_proxy_journal_bytes 0\n", part) is None


def strike(fault: Fault, server: str) -> Strike:
    part = Part(server.partition("-")[0])
    return Strike(1010.0, fault, server, part, over=1010.0, whole=1015.0)


@pytest.mark.parametrize(
    ("strikes", "lost"),
    [
        ([strike(Fault.KILL, "decode-1"), strike(Fault.CUT, "prefill-0")], 2),
        ([strike(Fault.KILL, "decode-1"), strike(Fault.STOP, "decode-1")], 1),
        ([strike(Fault.KILL, "decode-1"), strike(Fault.STUTTER, "decode-0"), strike(Fault.ROLE, "prefill-0")], 1),
        ([strike(Fault.KILL, "decode-1"), strike(Fault.KILL, "proxy-1")], 1),
    ],
)
def test_a_node_is_lost_once_and_only_by_some_faults(strikes: list[Strike], lost: int) -> None:
    faults = FaultSchedule(cast(SoakCluster, None), seed=1, pause_s=1.0, began=0.0)
    faults.strikes = strikes
    assert faults.lost_nodes(1000.0) == lost
    assert faults.lost_nodes(1020.0) == 0


@pytest.mark.parametrize(
    ("program", "expected", "surprises"), [("exit 3", 3, 0), ("exit 3", 0, 1), ("exit 0", None, 1)]
)
async def test_a_server_has_to_end_as_its_fault_makes_it(
    program: str, expected: int | None, surprises: int, tmp_path: Path
) -> None:
    server = Server("decode-1", Part.DECODE, ["/bin/sh", "-c", program], os.environ, tmp_path / "log")
    if expected is not None:
        server.expect_end(expected)
    server.judge_end(await server.process.wait())
    await server.stop()
    assert len(server.surprises) == surprises


async def test_a_schedule_that_is_cancelled_lets_a_slowed_server_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, sent = asyncio.Event(), list[tuple[int, signal.Signals]]()

    def send(pid: int, number: signal.Signals) -> None:
        sent.append((pid, number))
        stopped.set()

    server = cast(
        Server,
        SimpleNamespace(name="decode-1", part=Part.DECODE, members=lambda: {"decode-1": 7, "decode-1 engine": 8}),
    )
    faults = FaultSchedule(cast(SoakCluster, None), seed=1, pause_s=0.001, began=0.0)
    chosen = iter([(server, Fault.STUTTER)])
    monkeypatch.setattr(faults, "_choose", lambda: next(chosen, None))
    monkeypatch.setattr("lab.soak.faults._signal", send)
    running = asyncio.create_task(faults.run(cast(aiohttp.ClientSession, None), time.monotonic() + 60.0))
    async with asyncio.timeout(30.0):
        await stopped.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sent == [(pid, number) for number in (signal.SIGSTOP, signal.SIGCONT) for pid in (7, 8)]
    assert faults.strikes[0].whole
