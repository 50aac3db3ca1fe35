"""Tests the life of a transfer thread."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from pdserve.config import TransferConfig
from pdserve.errors import TransferError
from pdserve.liveness import LifeBoard, LifeWatch, loop_names, motion_of, transfer_loop
from pdserve.process import SWITCH_INTERVAL_S
from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer import ranks, transport
from pdserve_kvtransfer.configuration import configured_ucx, side_settings
from pdserve_kvtransfer.events import FetchLanded, FirstTokenArrived, PushWanted, TransferThreadDied
from pdserve_kvtransfer.thread import TransferThread
from pdserve_kvtransfer.transport import BusyPoll, StepUnderWay
from tests.eventually import eventually
from tests.kvtransfer.inproc import Fabric, InprocLink, InprocTransport
from tests.kvtransfer.rig import CONFIG, SECRET, SPEC, Engine, Pair, engine, pair


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def transfer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-transfer"]


def close_in_the_middle() -> None:
    with pair() as rig:
        rig.fetch((0, 1, 2))
        wanted = rig.prefill.next(PushWanted)
        rig.prefill.thread.push(wanted.transfer_id, 0, (0, 1))


def test_close_with_live_transfers_leaves_nothing() -> None:
    close_in_the_middle()  # Now everything is open that libraries open only once.
    before = open_files()
    for _ in range(5):
        close_in_the_middle()
    assert not transfer_threads()
    # A link has a dozen files. UCX's own thread may stay after a worker was destroyed by force, with five files in all.
    eventually(lambda: open_files() <= before + 5)


def test_close_is_idempotent() -> None:
    made = Engine()
    made.close()
    made.close()


def test_commands_after_close_do_nothing() -> None:
    with pair() as rig:
        order = rig.order((0,))
        rig.decode.close()
        rig.decode.thread.fetch(order)
        rig.decode.thread.cancel_fetch(order.transfer_id)
        assert rig.decode.quiet()


def test_a_taken_port_is_an_error_of_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = TransferConfig(port=taken.getsockname()[1])
        with pytest.raises(TransferError, match=f"cannot bind .* 127.0.0.1:{config.port}"):
            Engine(config=config)
    eventually(lambda: not transfer_threads())


def test_unknown_transports_are_an_error_of_ours() -> None:
    with pytest.raises(TransferError):
        Engine(config=TransferConfig(ucx_tls="no_such_transport"))
    eventually(lambda: not transfer_threads())


def test_beyond_this_machine_needs_a_secret() -> None:
    with pytest.raises(TransferError, match="secret"):
        Engine(config=TransferConfig(host="0.0.0.0"), secret=b"")


def test_the_advertised_name_is_used() -> None:
    with engine(config=TransferConfig(host="localhost", advertise="prefill-0.example")) as prefill:
        host, _, port = prefill.address.rpartition(":")
        assert host == "tcp://prefill-0.example"
        assert int(port) > 0


def test_who_is_bound_to_all_addresses_tells_the_machines_name() -> None:
    with engine(config=TransferConfig(host="0.0.0.0")) as prefill:
        assert prefill.address.rpartition(":")[0] == f"tcp://{socket.gethostname()}"


def test_orders_that_contradict_themselves_are_refused() -> None:
    with engine() as prefill, engine(num_blocks=8) as decode:
        rig = Pair(prefill, decode)
        for block_ids in ((), (0, 0), (8,), (-1,)):
            with pytest.raises(ValueError):
                decode.thread.fetch(rig.order(block_ids))
        good = rig.order((0, 1))
        decode.thread.fetch(good)
        with pytest.raises(ValueError, match="already"):
            decode.thread.fetch(good)
        with pytest.raises(ValueError, match="no block 99"):
            prefill.thread.push(good.transfer_id, 0, (99,))


def test_a_thread_that_cannot_close_a_link_says_so_and_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is then unknown whether anything still writes to the engine's memory."""

    def breaks(link: InprocLink) -> bool:
        raise RuntimeError("a bug")

    fabric = Fabric()
    with pair(transport=lambda: InprocTransport(fabric)) as rig:
        monkeypatch.setattr(InprocLink, "progress", breaks)
        monkeypatch.setattr(InprocLink, "close", breaks)
        rig.fetch((0,))
        events = [rig.decode.take()]
        while not isinstance(events[-1], TransferThreadDied):
            events.append(rig.decode.take())
        assert events[-1] == TransferThreadDied("RuntimeError: a bug")
        eventually(lambda: not rig.decode.thread.alive)


@pytest.mark.parametrize(("before", "after"), [(5e-3, SWITCH_INTERVAL_S), (1e-4, 1e-4)])
def test_a_thread_that_computes_lets_the_transfer_thread_in(before: float, after: float) -> None:
    """The engine shortens Python's switch interval of 5 ms, and keeps one that is shorter still."""
    former = sys.getswitchinterval()
    sys.setswitchinterval(before)
    try:
        with engine():
            assert sys.getswitchinterval() == pytest.approx(after, rel=0.05)
    finally:
        sys.setswitchinterval(former)


def test_idle_costs_no_cpu() -> None:
    with pair() as rig:
        transfer = rig.fetch((0,))
        rig.prefill.next(PushWanted)
        rig.decode.thread.cancel_fetch(transfer)
        eventually(lambda: not rig.decode.quiet())
        start, used = time.monotonic(), time.process_time()
        assert not threading.Event().wait(0.5)
        assert time.process_time() - used < 0.1 * (time.monotonic() - start)


def _hang(until: threading.Event) -> None:
    until.wait()


def test_a_thread_shows_life_while_it_is_idle_and_none_when_it_hangs() -> None:
    hold = threading.Event()
    with closing(LifeBoard.create(len(loop_names(1)))) as board, engine() as prefill:
        thread = TransferThread(
            boot_id=b"d" * 16,
            secret=SECRET,
            spec=SPEC,
            region=prefill.region,
            settings=side_settings(CONFIG),
            transport=partial(configured_ucx, CONFIG),
            wake=partial(_hang, hold),
            life=board.sign(transfer_loop(0)),
        )
        thread.start()
        try:
            first = board.shown(transfer_loop(0))
            assert first is not None
            assert first.thread == thread.native_id
            eventually(lambda: board.shown(transfer_loop(0)) != first, "the idle thread shows life")
            order = Pair(prefill, prefill).order((0,))
            thread.fetch(replace(order, transfer_id=TransferId(new_id(), 0, b"d" * 16)))
            prefill.thread.fail_push(prefill.next(PushWanted).transfer_id, "no")
            watch, looks = LifeWatch(board, loop_names(1), 1.0, motion_of), threading.Event()

            def hanging() -> str | None:
                looks.wait(watch.every_s)
                return watch.hanging()

            assert eventually(hanging) == "the engine's KV transfer"
        finally:
            hold.set()
            thread.close(5.0)
        assert board.shown(transfer_loop(0)) is None


def test_wake_is_called_after_events_were_queued() -> None:
    seen: list[int] = []

    def wake() -> None:
        seen.append(len(thread.events()))

    with engine() as prefill:
        thread = TransferThread(
            boot_id=b"d" * 16,
            secret=SECRET,
            spec=SPEC,
            region=prefill.region,
            settings=side_settings(CONFIG),
            transport=partial(configured_ucx, CONFIG),
            wake=wake,
        )
        thread.start()
        try:
            order = Pair(prefill, prefill).order((0,))
            thread.fetch(replace(order, transfer_id=TransferId(new_id(), 0, b"d" * 16)))
            wanted = prefill.next(PushWanted)
            prefill.thread.fail_push(wanted.transfer_id, "no")
            eventually(lambda: seen == [1])
        finally:
            thread.close(5.0)


class ThreadTime:
    """Stands in for ``time``: a thread that uses its core until it sleeps."""

    def __init__(self) -> None:
        self.used = 5.0
        self.slept = 0.0

    def thread_time(self) -> float:
        return self.used

    def monotonic(self) -> float:
        return self.used + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.mark.parametrize("turn_s", [20e-6, 1e-3, 3e-3])
def test_a_thread_that_moves_blocks_leaves_most_of_its_core_to_a_step_that_decodes(
    turn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = ThreadTime()
    monkeypatch.setattr(transport, "time", time)
    step = StepUnderWay()
    poll = BusyPoll(step)
    for decodes in (False, True, False):
        step.decodes, time.slept = decodes, 0.0
        began = time.used
        for _ in range(200):
            time.used += turn_s
            assert poll.again(True, True, 0.0)
        used = time.used - began
        assert (4 * used < time.slept <= 5 * used) if decodes else not time.slept


def test_a_link_is_polled_for_a_short_time_only_beside_a_step_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    time = ThreadTime()
    monkeypatch.setattr(ranks, "time", time)
    made = InprocTransport(Fabric())
    link = ranks.RankLink(1, made, memoryview(bytearray(64)))
    polls = {True: 0, False: 0}

    def poll() -> bool:
        time.used += 0.6e-3
        polls[made.step.decodes] += 1
        return True

    for made.step.decodes in polls:
        assert link.turn(poll)
    assert 1 < polls[True] < 4 < polls[False]


def test_blocks_land_while_a_step_decodes() -> None:
    step = StepUnderWay()
    step.decodes = True
    with engine() as prefill, engine(step=step) as decode:
        rig = Pair(prefill, decode)
        rig.fetch((0, 1, 2))
        wanted = rig.prefill.next(PushWanted)
        rig.prefill.thread.push(wanted.transfer_id, 0, (0, 1, 2))
        rig.prefill.thread.first_token(wanted.transfer_id, (SampledToken(7),), 0)
        rig.decode.next(FirstTokenArrived)
        rig.decode.next(FetchLanded)
