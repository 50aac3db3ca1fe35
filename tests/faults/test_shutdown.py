"""Tests that a cluster that ends leaves nothing behind, and that an idle one uses no CPU time."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.nodes import cluster
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the folder where the processes that a test starts, and no others, put their sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def unowned(files: set[Path]) -> set[Path]:
    """Returns the files that no living process has open or mapped. Other tests may run at the same time."""
    if not files:
        return files
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used.update(line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines())
            used.update(os.readlink(descriptor) for descriptor in (process / "fd").iterdir())
    return {file for file in files if str(file) not in used}


def test_idle_engines_use_no_cpu_and_sigterm_leaves_nothing(tiny_model: Path, own_temporary_folder: Path) -> None:
    shared_memory = set(SHARED_MEMORY.iterdir())
    with cluster(tiny_model) as made:
        made.complete("Something to move from one node to the other, longer than a block of sixteen.", 4)
        made.until_idle()
        engines = [engine_pid(node) for node in made.nodes]
        start, before = time.monotonic(), sum(map(cpu_seconds, engines))
        time.sleep(3)  # The test measures a time in which nothing happens.
        share = (sum(map(cpu_seconds, engines)) - before) / (time.monotonic() - start)
        assert share < 0.05
        pids = [made.proxy.pid, *(node.process.pid for node in made.nodes), *engines]
        for node in made.nodes:
            node.process.terminate()
        assert [node.process.wait() for node in made.nodes] == [0, 0]
        made.proxy.terminate()
        assert made.proxy.wait() == 0
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")
    # Torch leaves an empty cache folder there.
    assert [path for path in own_temporary_folder.iterdir() if not path.name.startswith("torchinductor")] == []
    eventually(lambda: not unowned(set(SHARED_MEMORY.iterdir()) - shared_memory), "no shared memory is left")
