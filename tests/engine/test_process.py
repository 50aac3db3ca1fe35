"""Tests the engine's process from its API process's side, from the launch message to the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
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
from pdserve.liveness import LifeBoard, loop_names
from pdserve.settings import cache_folder
from pdserve.wire.discovery import Role
from pdserve.wire.engine import EngineFailed, FromEngine, StepOutput
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

FAILS = """
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from pdserve.engine import process
from pdserve.wire.engine import Ready

def fail():
    raise RuntimeError("a step failed")

def say_farewell():
    print("farewell", flush=True)

numbers = dict.fromkeys(("num_blocks", "block_size", "max_model_len", "max_running", "vocab_size"), 1)
engine = SimpleNamespace(
    loop=SimpleNamespace(run=fail, stop=None),
    cores=SimpleNamespace(close=say_farewell),
    connector=SimpleNamespace(close=say_farewell),
    ready=Ready(control="", fingerprint="", **numbers),
)
process.import_torch = lambda: None
sys.modules |= {
    "torch": SimpleNamespace(set_num_threads=lambda _: None, get_num_threads=lambda: 1),
    "pdserve.engine.assembly": SimpleNamespace(assemble=lambda *_: engine),
    "pdserve.engine.runner_loading": SimpleNamespace(rank_device=lambda *_: SimpleNamespace(type="cpu")),
    "pdserve.engine.tp.tp_runner": SimpleNamespace(joined_group=lambda *_: nullcontext()),
}
sys.exit(process.main())
"""
"""A program that runs the real process, whose engine fails in its first step. To load libraries would take seconds."""

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


def test_torch_is_loaded_only_once_the_process_has_its_cores() -> None:
    """torch sizes its threads by the cores that it finds, and until it is loaded, the start says so."""
    program = "import sys, pdserve.engine.process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(("switch", "sizes"), [(Switch.ON, [5]), (Switch.OFF, [1] * 5)])
def test_the_setting_says_whether_a_step_is_one_message(switch: Switch, sizes: list[int], tmp_path: Path) -> None:
    launch = replace(CONFIG, stream=StreamConfig(batched_dispatch=switch))
    with launched(ONE_STEP, launch, tmp_path) as (done, messages):
        assert done.returncode == 0, done.stderr
        found: list[int] = []
        while sum(found) < sum(sizes):
            message = next(messages)
            if isinstance(message, StepOutput):
                found.append(len(message.outputs))
    assert found == sizes


def test_an_engine_that_fails_says_so_to_its_node_and_to_no_peer(tmp_path: Path) -> None:
    """A farewell would hide from its peers that the node is lost with the request that they are waiting for."""
    with launched(FAILS, CONFIG, tmp_path) as (done, messages):
        assert (done.returncode, done.stdout) == (1, b""), done.stderr
        failure = next(message for message in messages if isinstance(message, EngineFailed))
    assert failure.message == "RuntimeError: a step failed"
    assert b"Traceback" in done.stderr


@contextmanager
def launched(
    program: str, config: EngineConfig, folder: Path
) -> Iterator[tuple[subprocess.CompletedProcess[bytes], Iterator[FromEngine]]]:
    """Runs a program to its end, and yields that and the messages that it has sent."""
    address = f"ipc://{folder}/engine"
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as api,
        closing(LifeBoard.create(len(loop_names(1)))) as life,
    ):
        api.bind(address)

        def messages() -> Iterator[FromEngine]:
            while api.poll(WAIT_MS):
                yield msgspec.msgpack.decode(api.recv(), type=FromEngine)

        done = subprocess.run(
            [sys.executable, "-c", program],
            input=msgspec.msgpack.encode(EngineLaunch(address, life.descriptor, config)),
            pass_fds=(life.descriptor,),
            capture_output=True,
            timeout=120,
            check=False,
        )
        yield done, messages()
