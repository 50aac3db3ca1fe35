"""A cluster that ends, and one that does nothing, leave no trace."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Cluster, cluster
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def running(demo_model: Path) -> Iterator[Cluster]:
    with cluster(demo_model) as made:
        yield made


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the processes that a test starts, and no others, put their sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_sigterm_ends_every_process_and_leaves_nothing(demo_model: Path, own_temporary_folder: Path) -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    with cluster(demo_model) as made:
        made.complete("Something to move from one node to the other, longer than a block of sixteen.", 4)
        pids = [made.proxy.pid, *(node.process.pid for node in made.nodes), *(engine_pid(node) for node in made.nodes)]
        for node in made.nodes:
            node.process.terminate()
        assert [node.process.wait() for node in made.nodes] == [0, 0]
        made.proxy.terminate()
        assert made.proxy.wait() == 0
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")
    # torch leaves an empty cache folder of its own there.
    assert [path for path in own_temporary_folder.iterdir() if not path.name.startswith("torchinductor")] == []
    assert set(Path("/dev/shm").iterdir()) - shared_memory == set()


def test_engine_dies_with_its_api_process(running: Cluster) -> None:
    pids = [engine_pid(node) for node in running.nodes]
    for node in running.nodes:
        os.kill(node.process.pid, signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in pids), "the engines are gone")


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def test_an_idle_engine_uses_no_cpu(running: Cluster) -> None:
    running.complete("Something to move from one node to the other, longer than a block of sixteen.", 4)
    running.until_idle()
    pids = [engine_pid(node) for node in running.nodes]
    start, before = time.monotonic(), sum(map(cpu_seconds, pids))
    time.sleep(3)  # nothing happens in it: that is what is measured
    share = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - start)
    assert share < 0.05
