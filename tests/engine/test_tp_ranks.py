"""Tests ranks, rank 0 in this process and the others in real ones: their results, and how their end is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from pdserve.bench.engine.subject import bounded_counts, other_tables
from pdserve.config import (
    EngineConfig,
    TpBackend,
)
from pdserve.engine.runner_loading import load_runner, rank_backend, rank_device
from pdserve.engine.tp import tp_ranks
from pdserve.engine.tp.rank_channel import OrderChannel, RankChannel
from pdserve.engine.tp.tp_ranks import Ranks
from pdserve.engine.tp.tp_runner import TpRunner, joined_group
from pdserve.errors import MalformedFrame, RankLost
from pdserve.models.backend import CPU
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import DraftRow, StepRow
from pdserve.models.tp.shares import ALONE
from pdserve.wire.rank import Arrived, Capture, Captured, Clear, Loaded, LoadModel, Numbered, Stop
from pdserve.wire.sampling_params import SamplingParams
from tests.cluster.process_forks import forks
from tests.engine.started_ranks import TIMEOUT_MS, engine_config, started
from tests.engine.test_step_loop import MAX_LEN, engine, prompt
from tests.eventually import eventually
from tests.forks import program_of
from tests.models.tiny_drafting import save_tiny_drafting
from tests.models.tiny_families import save_tiny
from tests.processes import alive
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration

BLOCKS = 16


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the other ranks be forks. Those of the test that ends rank 0 start as they always do."""
    command = forks().command("pdserve.engine.tp.rank_program")
    monkeypatch.setattr(tp_ranks, "Ranks", partial(Ranks, command=command))


@contextmanager
def running(
    config: EngineConfig, blocks: int = BLOCKS, max_model_len: int = 64, *, drafts: bool = False
) -> Iterator[tuple[Ranks, TpRunner]]:
    decoder, device = read_decoder_config(Path(config.model_dir)), rank_device(config, 0)
    with started(config) as ranks, joined_group(config, ranks, device) as group:
        bounded = bounded_counts(decoder, blocks, 1)
        ranks.tell(LoadModel(blocks, max_model_len, tuple(bounded), drafts))
        backend = rank_backend(config, device)
        own = load_runner(config, decoder, (blocks, *bounded), max_model_len, group, backend, drafts=drafts)
        ranks.wait_for(Loaded)
        yield ranks, TpRunner(own, ranks, group)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("windows", [False, True])
def test_steps_copies_and_clearings_are_those_of_one_rank_and_a_death_is_heard_of(
    folder: Path, tmp_path: Path, windows: bool
) -> None:
    config = engine_config(save_tiny("ministral", tmp_path) if windows else folder)
    decoder = read_decoder_config(Path(config.model_dir))
    counts = (BLOCKS, *bounded_counts(decoder, BLOCKS, 1))
    alone = load_runner(config, decoder, counts, 64, ALONE, rank_backend(config, CPU))
    bounded = alone.cache.groups[1:]
    assert len(bounded) == windows

    def row(token_ids: list[int], start: int, blocks: range) -> StepRow:
        return StepRow(token_ids, start, blocks, True, others=other_tables(bounded, blocks, 0))

    prompt, copied = list(range(20, 31)), row([7], 11, range(3, 6))
    sources = [*range(3), *(block for group in bounded for block in group.ids[:3])]
    lost = threading.Event()
    with (
        pytest.raises(RankLost, match=r"rank 1 \(process \d+\) was killed by SIGKILL"),
        running(config) as (ranks, runner),
    ):
        for one in (alone, runner):
            one.run([row(prompt, 0, range(3))])
            one.copy_blocks(sources, [block + 3 for block in sources])
            one.clear(sources)
        torch.testing.assert_close(runner.run([copied]), alone.run([copied]), rtol=1e-4, atol=1e-3)
        zeroed = row([7], 11, range(3))
        torch.testing.assert_close(runner.run([zeroed]), alone.run([zeroed]), rtol=1e-4, atol=1e-3)
        ranks.check()
        ranks.notify(lost.set)
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert lost.wait(30)
        ranks.check()


def test_drafts_are_those_of_one_rank(tmp_path: Path) -> None:
    config = engine_config(save_tiny_drafting("deepseek-v3", tmp_path))
    decoder = read_decoder_config(Path(config.model_dir))
    alone = load_runner(config, decoder, (BLOCKS,), 64, ALONE, rank_backend(config, CPU), drafts=True)
    prompt = list(range(20, 31))
    with running(config, drafts=True) as (_, runner):
        for one in (alone, runner):
            one.run([StepRow(prompt, 0, range(3, 6), False)])
            assert one.draft([DraftRow(0, [*prompt[1:], 7], False)], 3) == []
        found = []
        for one in (alone, runner):
            table = [3, 4, 5]
            one.run([StepRow([9], 0, [8], True), StepRow([7], 11, table, True)])
            # It has grown since the step, so that there are places for all drafts.
            table.append(6)
            found.append(one.draft([DraftRow(0, [10], True), DraftRow(1, [8], True)], 3))
    assert found[0] == found[1]
    assert [len(drafts) for drafts in found[0]] == [3, 3]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    program = program_of(pid)
    os.kill(program, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(program, signal.SIGCONT)


def test_blocks_are_written_on_every_rank_before_anybody_can_give_them_away(folder: Path) -> None:
    """Otherwise a late rank would destroy what a KV transfer has put into them meanwhile."""
    with running(engine_config(folder)) as (ranks, runner), ThreadPoolExecutor(1) as pool:

        def write() -> None:
            runner.clear([0])
            runner.copy_blocks([1], [2])

        with stopped(ranks.pids[0]):
            late = pool.submit(write)
            with pytest.raises(TimeoutError):
                late.result(TIMEOUT_MS / 4000)
        late.result(30)
        with stopped(ranks.pids[0]), pytest.raises(RankLost, match="did not write its KV blocks"):
            pool.submit(write).result(30)


def test_choices_and_penalties_are_those_of_one_rank_and_a_cpu_records_no_steps(folder: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    ]
    asked = [
        (prompt(7 + 4 * i), SamplingParams(max_tokens=12, seed=i, ignore_eos=True, **kind), [50, 60][:i])
        for i, kind in enumerate(kinds)
    ]
    with engine(folder, overlap=False) as client:
        wanted = client.together(asked)
    config = engine_config(folder)
    with running(config, blocks=64, max_model_len=128) as (ranks, runner):
        with engine(folder, overlap=False, several_ranks=runner) as client:
            got = client.together(asked)
        ranks.tell(Capture(4))
        with pytest.raises(RankLost, match=r"rank 1 .* failed: rank 0 sent Capture to a rank whose steps cannot be"):
            ranks.wait_for(Captured)
    assert len(got) == 6
    assert {i: answer.tokens for i, answer in got.items()} == {i: answer.tokens for i, answer in wanted.items()}
    there, here = (
        [one.prompt_logprobs for one in answers[2].outputs if one.prompt_logprobs] for answers in (got, wanted)
    )
    assert there[0].num_tokens == len(asked[1][0]) - 1
    assert [token.chosen for token in there[0].tokens(0, MAX_LEN)] == pytest.approx(
        [token.chosen for token in here[0].tokens(0, MAX_LEN)], abs=1e-4
    )


def test_a_rank_that_hangs_in_gloo_is_named(folder: Path) -> None:
    with (
        pytest.raises(RankLost, match=r"rank 1 hangs: no sign of it for 1\.0 s"),
        running(engine_config(folder, TpBackend.GLOO)) as (ranks, runner),
    ):
        runner.run([StepRow([7], 0, [0], True)])
        os.kill(program_of(ranks.pids[0]), signal.SIGSTOP)
        runner.run([StepRow([7], 1, [0], True)])


def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    config = engine_config(tmp_path)
    with (
        pytest.raises(RankLost, match=r"rank 1 .* is not a readable Hugging Face model folder"),
        started(config) as ranks,
    ):
        ranks.wait_for(Arrived)
        ranks.tell(LoadModel(BLOCKS, 64))
        ranks.wait_for(Loaded)


def test_a_rank_ends_with_rank_0() -> None:
    script = (
        "import time; from pathlib import Path; from tests.engine.started_ranks import engine_config, started\n"
        "with started(engine_config(Path('/nowhere'))) as ranks: print(*ranks.pids, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        (other_rank,) = (int(pid) for pid in rank_0.stdout.readline().split())
        assert alive(other_rank)
        rank_0.kill()
    eventually(lambda: not alive(other_rank), "the rank is gone")


def test_a_lost_order_is_an_error(tmp_path: Path) -> None:
    with zmq.Context() as context:
        address = f"ipc://{tmp_path}/rank"
        ours, theirs = RankChannel(context, address), OrderChannel(context, address)
        try:
            theirs.send(Arrived())
            assert ours.socket.poll(20_000)
            for numbered in (Numbered(1, Clear([3])), Numbered(3, Stop())):
                ours.send(msgspec.msgpack.encode(numbered))
            assert theirs.receive() == Clear([3])
            with pytest.raises(MalformedFrame, match="message 3 from rank 0 came in place of 2"):
                theirs.receive()
        finally:
            ours.close(0)
            theirs.close(0)
