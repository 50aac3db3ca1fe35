"""``pdserve.serve`` runs real clusters for programs, and leaves no process behind, whatever ends the block."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pdserve
from tests.cluster.nodes import http
from tests.eventually import eventually
from tests.nightly import nightly
from tests.processes import clean_environ, cluster_processes, command_has, running, wait_until_gone

pytestmark = pytest.mark.integration

ONE_NODE: dict[str, Any] = {
    "prefill": 0,
    "decode": 0,
    "mixed": 1,
    "kv_cache_mib": 64,
    "max_model_len": 512,
    "dtype": "fp32",
}

ENDED = "the cluster was killed by SIGKILL; its last lines:"


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yields an environment by which a cluster's processes are found. All of them must have ended in the end."""
    yield clean_environ(XDG_STATE_HOME=str(tmp_path))
    wait_until_gone(str(tmp_path))


def answer(cluster: pdserve.Cluster) -> str:
    body = {"model": cluster.model, "prompt": "How do you do? " * 8, "max_tokens": 4, "temperature": 0}
    reply = http(f"{cluster.url}/v1/completions", body)
    assert reply.status == 200, reply.body
    text: str = reply.json()["choices"][0]["text"]
    return text


def up_process(marker: Path) -> int:
    """Returns the process of the ``pdserve up`` below a cluster."""
    (pid,) = [pid for pid in cluster_processes(str(marker)) if command_has(pid, "up")]
    return pid


def end_up(cluster: pdserve.Cluster, marker: Path) -> None:
    """Kills the ``pdserve up`` of a cluster, and returns when the cluster's end is told."""
    os.kill(up_process(marker), signal.SIGKILL)
    wait_until_gone(str(marker))
    eventually(partial(has_failed, cluster), "the cluster's end is told")


def has_failed(cluster: pdserve.Cluster) -> bool:
    try:
        cluster.check()
    except pdserve.ClusterFailed:
        return True
    return False


def test_a_program_that_uses_the_command_line_imports_next_to_nothing() -> None:
    program = "import sys, pdserve; assert pdserve.serve; print('torch' in sys.modules)"
    cheap = "import sys, pdserve; print(sorted({'pdserve.serving', 'msgspec'} & set(sys.modules)))"
    for text, printed in ((program, "False"), (cheap, "[]")):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == printed


def test_every_public_name_is_there() -> None:
    assert set(pdserve.__all__) <= set(dir(pdserve))
    assert all(getattr(pdserve, name).__doc__ for name in pdserve.__all__)
    with pytest.raises(AttributeError, match="serv"):
        pdserve.serv  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cach_mib": 1}, "no setting 'kv_cach_mib'; did you mean kv_cache_mib?"),
        ({"ask": "What?"}, "no setting 'ask'"),
        ({"kv_cache_mib": "much"}, "kv_cache_mib: 'much' was given; it takes auto or a whole number"),
        ({"prefill": -1}, "prefill: -1 was given"),
        ({"decode": 0}, "decode and mixed are both 0"),
        ({"policy": "best"}, "policy: 'best' was given"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_starts(
    settings: dict[str, Any], words: str, environ: dict[str, str]
) -> None:
    with pytest.raises(pdserve.ConfigError) as caught:
        pdserve.serve("demo", environ=environ, **settings)
    assert str(caught.value).removeprefix("pdserve.serve has ").startswith(words)


def test_a_cluster_serves_and_says_what_it_is_until_it_ends_which_fails_the_block(
    tiny_model: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    settings = {**ONE_NODE, "prefill": 1, "decode": 1, "mixed": 0, "disaggregation": "always"}
    with (
        pytest.raises(pdserve.ClusterFailed, match=ENDED),
        pdserve.serve(tiny_model, environ=environ, served_model_name="tiny", store=True, **settings) as cluster,
    ):
        assert cluster.model == "tiny"
        assert [(node.name, node.role) for node in cluster.nodes] == [
            ("prefill-0", pdserve.Role.PREFILL),
            ("decode-0", pdserve.Role.DECODE),
        ]
        answer(cluster)
        assert all(http(f"{node.url}/live").status == 200 for node in cluster.nodes)
        assert all(command_has(node.pid, node.name) for node in cluster.nodes)
        assert cluster.logs is not None
        assert cluster.logs.is_relative_to(tmp_path)
        log = cluster.logs / "decode-0.log"
        eventually(lambda: "source=remote" in log.read_text(), "the request is in the decode node's log")
        first = cluster.nodes[1]
        os.kill(first.pid, signal.SIGKILL)
        eventually(lambda: cluster.nodes[1].pid != first.pid, "the node that was started again is told")
        assert http(f"{cluster.nodes[1].url}/live").status == 200
        cluster.check()
        end_up(cluster, tmp_path)


def test_the_thread_that_enters_the_block_may_end_before_it(
    tiny_model: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """A notebook runs each cell in whichever thread it likes, and a block is as long as several cells.

    What fails a block whose cluster has ended is told with the cluster's end.
    """
    # The proxy may still be ending when it is asked.
    with pytest.raises(OSError, match=r"refused|reset") as caught, ExitStack() as stack:
        clusters: list[pdserve.Cluster] = []

        def enter() -> None:
            clusters.append(stack.enter_context(pdserve.serve(tiny_model, environ=environ, **ONE_NODE)))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        texts: list[str] = []
        users = [threading.Thread(target=lambda: texts.append(answer(clusters[0]))) for _ in range(3)]
        for user in users:
            user.start()
        for user in users:
            user.join()
        assert len(set(texts)) == 1, texts
        assert len(texts) == len(users)
        end_up(clusters[0], tmp_path)
        answer(clusters[0])
    assert ENDED in caught.value.__notes__[0]


async def test_an_event_loop_runs_while_a_cluster_starts_and_stops(tiny_model: Path, environ: dict[str, str]) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    turning = asyncio.create_task(turn())
    async with pdserve.serve(tiny_model, environ=environ, **ONE_NODE) as cluster:
        started = turns
        assert started > 20
        assert await asyncio.to_thread(answer, cluster)
        # A block within a running event loop, as in a notebook's cell, needs no loop of its own.
        with pytest.raises(pdserve.ClusterFailed), pdserve.serve("/nowhere", environ=environ):
            pass
        running_again = turns
    assert turns > running_again
    turning.cancel()


async def test_a_task_that_is_cancelled_while_its_cluster_starts_leaves_nothing(
    tiny_model: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    async def use() -> None:
        async with pdserve.serve(tiny_model, environ=environ, **ONE_NODE):
            raise AssertionError("nobody waited for it")

    using = asyncio.create_task(use())
    await asyncio.to_thread(eventually, lambda: len(cluster_processes(str(tmp_path))) >= 2, "its processes start")
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using
    assert cluster_processes(str(tmp_path)) == set()


def test_a_cluster_that_cannot_start_says_why(tmp_path: Path, environ: dict[str, str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(pdserve.ClusterFailed) as caught, pdserve.serve(model, environ=environ, **ONE_NODE):
        raise AssertionError("it serves")
    assert "the cluster ended with status 1; its last lines:" in str(caught.value)
    assert str(model) in str(caught.value)


def test_a_start_has_its_limit(tiny_model: Path, tmp_path: Path, environ: dict[str, str]) -> None:
    with (
        pytest.raises(pdserve.ClusterFailed, match=r"the cluster was not ready after 0\.5 s"),
        pdserve.serve(tiny_model, environ=environ, timeout_s=0.5, **ONE_NODE),
    ):
        raise AssertionError("it serves")
    assert cluster_processes(str(tmp_path)) == set()


PROGRAM = """
import json, pdserve, sys, threading
with pdserve.serve(**json.loads(sys.argv[1])) as cluster:
    print("serves", flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    "number",
    # Python leaves SIGTERM to the kernel, which then does what it does at SIGKILL.
    # In every run, tests/cli/test_chat_cluster.py kills a program while its cluster starts.
    [signal.SIGINT, *map(nightly, (signal.SIGTERM, signal.SIGKILL))],
)
def test_a_program_that_a_signal_ends_takes_its_cluster_with_it(
    number: signal.Signals, tiny_model: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps({"model": str(tiny_model), **ONE_NODE})]
    with running(command, environ) as program:
        program.wait_for(lambda line: line == "serves")
        program.popen.send_signal(number)
        assert program.wait(60) == -number
        if number is signal.SIGINT:
            assert cluster_processes(str(tmp_path)) == set()


def test_a_program_that_ends_within_the_block_takes_its_cluster_with_it(
    tiny_model: Path, environ: dict[str, str]
) -> None:
    """As when a notebook is closed before the cell that would end the cluster."""
    program = """
import json, pdserve, sys
from contextlib import ExitStack
from functools import partial
stack = ExitStack()
cluster = stack.enter_context(pdserve.serve(**json.loads(sys.argv[1])))
print(cluster.url, flush=True)
"""
    command = [sys.executable, "-c", program, json.dumps({"model": str(tiny_model), **ONE_NODE})]
    with running(command, environ) as ended:
        assert ended.wait(120) == 0, ended.output
        assert len(ended.lines) == 1, ended.output
