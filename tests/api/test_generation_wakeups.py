"""Tests that readers which are woken in groups run in order and lose no token."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.api.generation.generation import BatchNotify, Generation, ReadPace
from pdserve.wire.engine import FinishReason, RequestOutput
from tests.api.node import WAIT_S
from tests.examples import examples


@dataclass(eq=False)
class Recorder:
    """Records that it was woken, and that it ran in the loop's next turn, as a task would."""

    name: int
    log: list[str]
    work: Callable[[], None] = lambda: None

    def wake(self) -> None:
        self.log.append(f"wake {self.name}")
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self.log.append(f"run {self.name}")
        self.work()


async def log_of(size: int, count: int, *, at_once: bool) -> list[str]:
    """Returns what happens when ``count`` readers have news, which are told together or one by one in the same turn."""

    log: list[str] = []
    notify = BatchNotify(size)
    for name in range(count):
        notify.add(Recorder(name, log))
        if not at_once:
            notify.notify()
    notify.notify()
    while sum(line.startswith("run") for line in log) < count:
        await asyncio.sleep(0)
        log.append("other")
    return log


@pytest.mark.parametrize("at_once", [True, False])
async def test_groups_work_one_after_the_other_and_others_get_turns(at_once: bool) -> None:
    log = await log_of(2, 5, at_once=at_once)
    assert [line for line in log if line.startswith("wake")] == [f"wake {i}" for i in range(5)]
    assert [line for line in log if line.startswith("run")] == [f"run {i}" for i in range(5)]
    waiting = 0
    for line in log:
        waiting += line.startswith("wake") - line.startswith("run")
        assert waiting <= 2, log
    assert "other" in log[log.index("run 0") : log.index("run 4")]


async def test_without_groups_all_are_woken_before_any_runs() -> None:
    log = await log_of(0, 5, at_once=True)
    assert log[:5] == [f"wake {i}" for i in range(5)]
    assert [line for line in log if line.startswith("run")] == [f"run {i}" for i in range(5)]


def test_the_first_bytes_leave_before_the_last_work_begins() -> None:
    """The test uses a real socket, on the kind of event loop that nodes run on."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def scenario() -> bytes:
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        done = asyncio.Event()
        received = []

        def look() -> None:
            received.append(theirs.recv(10))
            done.set()

        notify = BatchNotify(1)
        for work in (lambda: transport.write(b"first"), lambda: None, look):
            notify.add(Recorder(0, [], work))
        notify.notify()
        await asyncio.wait_for(done.wait(), WAIT_S)
        transport.close()
        return received[0]

    with theirs, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == b"first"


@settings(max_examples=examples(100))
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=6), max_size=8),
)
def test_every_reader_gets_its_tokens_in_order(size: int, interval: int, steps: list[list[tuple[int, bool]]]) -> None:
    """Each step has outputs for five readers. Some steps come together, before any reader has run."""

    async def read(generation: Generation) -> list[int]:
        tokens: list[int] = []
        while True:
            for item in await generation.wait():
                tokens += item.output.new_token_ids
                if item.output.finish is not None:
                    generation.close()
                    return tokens

    async def scenario() -> None:
        notify = BatchNotify(size)
        generations = [Generation({i: 0}, 60.0, lambda ids: None, ReadPace(interval)) for i in range(5)]
        readers = [asyncio.create_task(read(generation)) for generation in generations]
        sent: list[list[int]] = [[] for _ in generations]

        def put(index: int, output: RequestOutput) -> None:
            if generations[index].put(output):
                notify.add(generations[index])

        for number, step in enumerate(steps):
            for index, _ in step:
                put(index, RequestOutput(index, [number]))
                sent[index].append(number)
            notify.notify()
            if any(pause for _, pause in step):
                await asyncio.sleep(0)
        for index in range(5):
            put(index, RequestOutput(index, [], FinishReason.STOP))
        notify.notify()
        assert await asyncio.wait_for(asyncio.gather(*readers), WAIT_S) == sent

    asyncio.run(scenario())


async def test_a_reader_that_leaves_or_fails_while_it_is_to_be_woken() -> None:
    notify = BatchNotify(1)
    generations = [Generation({i: 0}, 60.0, lambda ids: None) for i in range(3)]
    readers = [asyncio.create_task(generation.wait()) for generation in generations]
    await asyncio.sleep(0)
    for index, generation in enumerate(generations):
        generation.put(RequestOutput(index, [7]))
        notify.add(generation)
    notify.notify()
    readers[1].cancel()
    generations[1].close()
    generations[2].deliver(RequestOutput(2, [], FinishReason.ERROR))
    [_, _, items] = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), WAIT_S)
    assert isinstance(items, list)
    assert [item.output.new_token_ids for item in items] == [[7]]
    for generation in generations:
        generation.close()
    await asyncio.sleep(0)
    assert [item.output.finish for item in items] == [FinishReason.ERROR]
