"""Tests the client of the engine process: one wake a message, aborts on every path, and bounds for everything."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdserve.api.generation.engine_client import EngineChannel, EngineClient, EngineState, PromptChoices, WantedChoice
from pdserve.api.generation.generation import DEADLINE_GRACE_S, Generation
from pdserve.config import ParallelConfig, SchedulerConfig, StreamConfig
from pdserve.errors import ConfigError, EngineError, InvalidRequest, Unavailable
from pdserve.liveness import loop_names
from pdserve.wire.engine import EngineFailed, EngineStats, FinishReason, RequestOutput, Stats, StepOutput
from pdserve.wire.engine_counts import QueueStats
from pdserve.wire.sampling_params import SamplingParams
from tests.api.behaviour import ENGINE_FAILURE, Behaviour
from tests.api.node import WAIT_S
from tests.api.test_disconnect import engine_config
from tests.terms import made_terms

pytestmark = pytest.mark.integration


def prompt(behaviour: Behaviour, first: int = 0, count: int = 1) -> PromptChoices:
    """A prompt with ``count`` choices that behave alike, numbered from ``first``."""
    choices = tuple(WantedChoice(first + i, behaviour + i) for i in range(count))
    return PromptChoices([1], SamplingParams(max_tokens=50, seed=0), choices)


def client_of(
    model_dir: Path, folder: Path, scheduler: SchedulerConfig | None = None, stream: StreamConfig | None = None
) -> EngineClient:
    command = [sys.executable, "-m", "tests.api.scripted_engine", str(folder / "journal")]
    return EngineClient(engine_config(model_dir, scheduler, stream=stream), command=command)


async def drained(generation: Generation) -> RequestOutput:
    """Returns the first output that ends its choice."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for item in await generation.wait():
                if item.output.finish is not None:
                    return item.output


# ------------------------------------------------------------------ one generation


async def test_outputs_that_pile_up_are_read_at_once() -> None:
    generation = Generation({7: 0, 8: 1}, 60.0, lambda ids: None)
    reader = asyncio.create_task(generation.wait())
    await asyncio.sleep(0)
    for local_id in (7, 8, 7):
        generation.deliver(RequestOutput(local_id, [local_id]))
    items = await reader
    generation.close()
    assert [[item.choice, *item.output.new_token_ids] for item in items] == [[0, 7, 7], [1, 8]]


async def test_the_end_of_a_choice_comes_once_and_close_aborts_the_rest() -> None:
    aborted: list[Sequence[int]] = []

    generation = Generation({1: 0, 2: 1, 3: 2}, 60.0, aborted.append)
    generation.deliver(RequestOutput(1, [], FinishReason.STOP))
    generation.deliver(RequestOutput(1, [], FinishReason.LENGTH))
    generation.deliver(RequestOutput(99, []))
    generation.end_choice(1)
    generation.close()
    generation.close()
    assert [item.output.finish for item in await generation.wait()] == [FinishReason.STOP]
    assert aborted == [[2], [3]]


async def test_a_silent_engine_does_not_outlast_the_deadline() -> None:
    aborted: list[Sequence[int]] = []

    generation = Generation({1: 0}, -DEADLINE_GRACE_S, aborted.append)
    output = await drained(generation)
    generation.close()
    assert output.finish is FinishReason.DEADLINE
    assert aborted == [[1]]


# ------------------------------------------------------------------ the process


async def test_generates_and_stops(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    client = client_of(model_dir, tmp_path)
    try:
        ready = await client.start()
        assert ready.max_model_len == 256
        assert not any(name.startswith("pdserve-") for name in os.listdir(tmp_path)), (
            "the socket's folder is gone as soon as it is connected"
        )
        generation = client.open([prompt(Behaviour.REPLY)], made_terms(10.0))
        assert client.open_requests == 1
        output = await drained(generation)
        generation.close()
        await asyncio.wait_for(client.wait_idle(), WAIT_S)
        pid = client.pid
        assert pid is not None
    finally:
        await client.stop(5.0)
    assert client.state is EngineState.STOPPED
    assert client.failure is None
    finish = output.finish
    assert finish is FinishReason.STOP
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert '"kind":"shutdown"' in (tmp_path / "journal").read_text()


async def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"no folder for the engine's socket can be made: .*No such file"):
        EngineClient(engine_config(tmp_path))


async def test_a_socket_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the engine's socket cannot be made: .*; TMPDIR"):
        EngineChannel(f"ipc://{tmp_path}/gone/engine", lambda _: None, lambda _: None)


@pytest.mark.parametrize(("size", "served"), [(4, [4, 8, 10]), (16, [10]), (0, [10])])
async def test_a_steps_readers_are_served_in_groups_of_the_settings_size(
    size: int, served: list[int], model_dir: Path, tmp_path: Path
) -> None:
    """``served`` says how many of the ten readers have read their token after each turn of the loop."""

    client = client_of(model_dir, tmp_path, stream=StreamConfig(notify_size=size))
    try:
        await client.start()
        silent = [prompt(Behaviour.SILENT)]
        generations = [client.open(silent, made_terms(60.0)) for _ in range(10)]
        readers = [asyncio.create_task(generation.wait()) for generation in generations]
        await asyncio.sleep(0)
        client._handle(StepOutput([RequestOutput(number, [7]) for number in range(1, 11)]))
        counts: list[int] = []
        while not counts or counts[-1] < len(readers):
            await asyncio.sleep(0)
            counts.append(sum(reader.done() for reader in readers))
        for generation in generations:
            generation.close()
    finally:
        await client.stop(5.0)
    assert [count for count in dict.fromkeys(counts) if count] == served


@pytest.mark.parametrize(
    ("behaviour", "message"), [(Behaviour.FAIL, ENGINE_FAILURE), (Behaviour.DIE, "ended with status 7")]
)
async def test_death_of_the_engine_ends_every_request(
    behaviour: Behaviour, message: str, model_dir: Path, tmp_path: Path
) -> None:
    client = client_of(model_dir, tmp_path)
    try:
        await client.start()
        silent = client.open([prompt(Behaviour.SILENT), prompt(Behaviour.SILENT, 1)], made_terms(60.0))
        fatal = client.open([prompt(behaviour)], made_terms(60.0))
        for generation in (silent, fatal):
            output = await drained(generation)
            assert output.finish is FinishReason.ERROR
            assert output.error == "the engine of this node failed"
        assert message in str(await asyncio.wait_for(client.wait_lost(), WAIT_S))
        assert client.open_requests == 0
        with pytest.raises(Unavailable):
            client.open([prompt(Behaviour.REPLY)], made_terms(1.0))
    finally:
        await client.stop(5.0)
    assert client.state is EngineState.LOST


LAST_WORDS = """
import sys, zmq
context = zmq.Context()
socket = context.socket(zmq.PAIR)
socket.connect(sys.argv[1])
for _ in range(int(sys.argv[2])):
    socket.send(bytes.fromhex(sys.argv[3]))
socket.close(60_000)
context.term()
"""


@contextmanager
def busy_cores() -> Iterator[None]:
    """Leaves no core free."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def threads() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


async def test_all_is_heard_that_an_engine_has_said_before_its_end(tmp_path: Path) -> None:
    """ZMQ's own threads come last and no core is free, so the process is gone long before it is heard."""
    said = [EngineFailed(f"{ENGINE_FAILURE} " * 200)] * 200
    with busy_cores():
        for number in range(5):
            heard: list[object] = []
            address, before = f"ipc://{tmp_path}/{number}", threads()
            channel = EngineChannel(address, heard.append, heard.append)
            for thread in threads() - before:
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            words = [address, str(len(said)), msgspec.msgpack.encode(said[0]).hex()]
            engine = await asyncio.create_subprocess_exec(sys.executable, "-c", LAST_WORDS, *words)
            await engine.wait()
            await channel.last_words(WAIT_S)
            channel.close()
            assert heard == said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with status 3"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "SIGKILL"),
        (["/nonexistent/engine"], "cannot start"),
    ],
)
async def test_engine_that_cannot_start(command: list[str], message: str, model_dir: Path) -> None:
    client = EngineClient(engine_config(model_dir), command=command)
    try:
        with pytest.raises(EngineError, match=message):
            await asyncio.wait_for(client.start(), WAIT_S)
    finally:
        await client.stop(5.0)


async def test_engine_that_speaks_nonsense(model_dir: Path) -> None:
    program = (
        "import sys, msgspec, zmq\n"
        "address = msgspec.msgpack.decode(sys.stdin.buffer.read())['address']\n"
        "s = zmq.Context.instance().socket(zmq.PAIR); s.connect(address); s.send(b'nonsense'); s.recv()"
    )

    client = EngineClient(engine_config(model_dir), command=[sys.executable, "-c", program])
    try:
        with pytest.raises(EngineError, match="message that is none"):
            await asyncio.wait_for(client.start(), WAIT_S)
    finally:
        await client.stop(5.0)


async def test_engine_that_does_not_stop_is_killed(model_dir: Path) -> None:
    program = "import sys, time; sys.stdin.buffer.read(); time.sleep(600)"

    client = EngineClient(engine_config(model_dir), command=[sys.executable, "-c", program])
    start = asyncio.create_task(client.start())
    async with asyncio.timeout(WAIT_S):
        while (pid := client.pid) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await asyncio.wait_for(client.stop(0.1), WAIT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


LOOPS = """
import sys, threading
import zmq
from pdserve.config import EngineLaunch
from pdserve.engine.api_channel import ApiChannel
from pdserve.liveness import LifeBoard
from pdserve.process import read_launch
from pdserve.wire.engine import Ready

launch = read_launch(EngineLaunch)
board = LifeBoard(launch.life)

def loop(number):
    with board.sign(number).shown_by_this_thread():
        shown.release()
        while number != int(sys.argv[1]) or threading.Event().wait():
            board.sign(number).show()
            threading.Event().wait(0.05)

shown = threading.Semaphore(0)
for number in range(6):
    threading.Thread(target=loop, args=(number,), daemon=True).start()
    shown.acquire()
numbers = dict.fromkeys(("num_blocks", "block_size", "max_model_len", "max_running", "vocab_size"), 1)
ApiChannel(zmq.Context(), launch.address).send(Ready(control="", fingerprint="", **numbers))
threading.Event().wait()
"""
"""A stand-in for the loops of an engine of two ranks. The one whose number it is given hangs."""


@pytest.mark.parametrize(("number", "name"), loop_names(2).items())
async def test_an_engine_of_which_one_loop_hangs_is_lost_and_killed(number: int, name: str, model_dir: Path) -> None:
    command = [sys.executable, "-c", LOOPS, str(number)]
    two_ranks = replace(engine_config(model_dir), parallel=ParallelConfig(tensor_parallel_size=2))
    client = EngineClient(two_ranks, command=command, silence_s=2.0)
    try:
        await asyncio.wait_for(client.start(), WAIT_S)
        pid = client.pid
        assert pid is not None
        error = await asyncio.wait_for(client.wait_lost(), WAIT_S)
        assert str(error) == f"{name} hangs: no sign of life for 2.0 s"
        assert client.state is EngineState.LOST
    finally:
        await client.stop(5.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("has_peers", [False, True])
async def test_an_engine_with_peers_is_idle_when_it_says_so(has_peers: bool, model_dir: Path, tmp_path: Path) -> None:
    """It works for other engines, too, so the requests that are open here do not show whether it is idle."""

    command = [sys.executable, "-m", "tests.api.scripted_engine", str(tmp_path / "journal")]
    client = EngineClient(replace(engine_config(model_dir), has_peers=has_peers), command=command)
    try:
        await client.start()
        held = client.open([prompt(Behaviour.HOLD)], made_terms(60.0))
        async with asyncio.timeout(WAIT_S):
            while client.stats.queue.running == 0:
                await held.wait()
        # An engine that is stopped cannot say so before the test has looked.
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        held.close()
        idle = asyncio.create_task(client.wait_idle())
        await asyncio.sleep(0)
        assert idle.done() is not has_peers
        os.kill(client.pid, signal.SIGCONT)
        last = client.open([prompt(Behaviour.REPLY)], made_terms(60.0))
        await drained(last)
        last.close()
        await asyncio.wait_for(idle, WAIT_S)
    finally:
        await client.stop(5.0)


async def test_an_engine_that_cannot_answer_yet_is_not_idle(model_dir: Path, tmp_path: Path) -> None:
    """An engine within a step has not told of the prompts of other nodes that came since."""

    command = [sys.executable, "-m", "tests.api.scripted_engine", str(tmp_path / "journal")]
    client = EngineClient(replace(engine_config(model_dir), has_peers=True), command=command)
    try:
        await client.start()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        idle = asyncio.create_task(client.wait_idle())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(idle), 0.1)
        os.kill(client.pid, signal.SIGCONT)
        await asyncio.wait_for(idle, WAIT_S)
    finally:
        await client.stop(5.0)


async def test_an_engine_that_still_sends_blocks_to_others_is_not_idle(model_dir: Path) -> None:
    client = EngineClient(replace(engine_config(model_dir), has_peers=True))
    try:
        idle = asyncio.create_task(client.wait_idle())
        await asyncio.sleep(0)
        client._handle(Stats(EngineStats(queue=QueueStats(pushing=1)), 1))
        await asyncio.sleep(0)
        client._handle(Stats(EngineStats()))
        await asyncio.sleep(0)
        assert not idle.done(), "it has not answered since it fell idle"
        client._handle(Stats(EngineStats(queue=QueueStats(pushing=1)), 2))
        await asyncio.sleep(0)
        assert not idle.done()
        client._handle(Stats(EngineStats()))
        async with asyncio.timeout(WAIT_S):
            for number in itertools.count(2):
                if idle.done():
                    break
                client._handle(Stats(EngineStats(), number))
                await asyncio.sleep(0)
    finally:
        await client.stop(0.0)


async def test_too_many_requests(model_dir: Path, tmp_path: Path) -> None:
    client = client_of(model_dir, tmp_path, SchedulerConfig(max_num_seqs=1, max_waiting=2))
    try:
        await client.start()
        held = [client.open([prompt(Behaviour.SILENT)], made_terms(60.0)) for _ in range(3)]
        with pytest.raises(Unavailable, match="too many") as raised:
            client.open([prompt(Behaviour.REPLY)], made_terms(60.0))
        assert raised.value.retry_after_s is not None
        held[0].close()
        generation = client.open([prompt(Behaviour.REPLY)], made_terms(60.0))
        assert (await drained(generation)).finish is FinishReason.STOP
        generation.close()
    finally:
        await client.stop(5.0)


async def test_a_request_for_many_answers_leaves_the_places_of_others(model_dir: Path, tmp_path: Path) -> None:
    """Further answers are counted apart: a request for one answer is still accepted, and one for many is refused."""

    client = client_of(model_dir, tmp_path, SchedulerConfig(max_num_seqs=2, max_waiting=6))
    reply = prompt(Behaviour.REPLY)
    four, next_four = (prompt(Behaviour.SILENT, first, 4) for first in (0, 4))
    try:
        await client.start()
        with pytest.raises(InvalidRequest, match="at most 9") as refused:
            client.open([prompt(Behaviour.SILENT, i) for i in range(10)], made_terms(60.0))
        assert refused.value.param == "n"
        big = client.open([four, next_four], made_terms(60.0))
        others = [client.open([reply], made_terms(60.0)) for _ in range(7)]
        with pytest.raises(Unavailable, match="too many"):
            client.open([reply], made_terms(60.0))
        for other in others:
            assert (await drained(other)).finish is FinishReason.STOP
            other.close()
        with pytest.raises(Unavailable, match="too many"):
            client.open([four], made_terms(60.0))
        big.close()
        client.open([four], made_terms(60.0)).close()
        assert client.open_requests == 0
    finally:
        await client.stop(5.0)
    submits = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    shared = [submit["group_id"] for submit in submits if submit["kind"] == "submit"]
    assert shared[:3] == [1, 1, 9]
