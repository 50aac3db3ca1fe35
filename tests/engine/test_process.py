"""Tests the engine's process from its API process's side, from the launch message to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    EngineConfig,
    EngineLaunch,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
    StreamConfig,
    Switch,
    TransferConfig,
)
from pdserve.settings import cache_folder
from pdserve.wire.discovery import Role
from pdserve.wire.engine import FromEngine, StepOutput
from pdserve.wire.ids import new_id

WAIT_MS = 30_000
ONE_STEP = """
import sys
from pdserve.engine import process
from pdserve.wire.engine import RequestOutput, StepOutput
process.serve = lambda launch, channel, _: channel.send(StepOutput([RequestOutput(i, [7]) for i in range(5)]))
sys.exit(process.main())
"""
"""A program that runs the real process, whose engine computes one step of five requests."""

CONFIG = EngineConfig(
    role=Role.MIXED,
    boot_id=new_id(),
    secret=b"",
    model_dir="",
    cache_dir=str(cache_folder(os.environ)),
    model=ModelConfig(),
    cache=CacheConfig(),
    scheduler=SchedulerConfig(),
    transfer=TransferConfig(),
    cpu=CpuConfig(),
    log=LogConfig(),
)


@pytest.mark.parametrize(("switch", "sizes"), [(Switch.ON, [5]), (Switch.OFF, [1] * 5)])
def test_the_setting_says_whether_a_step_is_one_message(switch: Switch, sizes: list[int], tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    launch = EngineLaunch(address, replace(CONFIG, stream=StreamConfig(batched_dispatch=switch)))
    with zmq.Context() as context, context.socket(zmq.PAIR) as api:
        api.bind(address)
        done = subprocess.run(
            [sys.executable, "-c", ONE_STEP],
            input=msgspec.msgpack.encode(launch),
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: list[int] = []
        while sum(found) < sum(sizes):
            assert api.poll(WAIT_MS)
            message = msgspec.msgpack.decode(api.recv(), type=FromEngine)
            if isinstance(message, StepOutput):
                found.append(len(message.outputs))
    assert found == sizes
