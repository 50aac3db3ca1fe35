"""Stop signals as events: the first one, the second one, and a second one that comes too soon to count."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pdserve.signals import stop_signals

WAIT_S = 20.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_means_to_hurry(number: signal.Signals) -> None:
    with stop_signals() as signals:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(signals.drain.wait(), WAIT_S)
        assert not signals.hurry.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(signals.hurry.wait(), WAIT_S)


async def test_a_second_signal_that_comes_too_soon_counts_as_the_first() -> None:
    told = asyncio.Event()
    with stop_signals(apart_s=3600.0) as signals:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(signals.drain.wait(), WAIT_S)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(told.wait(), WAIT_S)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        assert not signals.hurry.is_set()


async def test_when_a_process_drains_already_the_first_signal_means_to_hurry() -> None:
    with stop_signals(signal.SIGHUP, apart_s=3600.0) as signals:
        signals.drain.set()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(signals.hurry.wait(), WAIT_S)
