"""Tests that a benchmark's node is ready, or refused, in bounded time, and leaves no process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.bench.programs import running_node
from pdserve.errors import BenchError
from pdserve.process import ChildDied
from tests.processes import clean_environ

pytestmark = pytest.mark.integration


async def enter(flags: list[str], timeout_s: float, **environ: str) -> str:
    async with running_node("node", flags, clean_environ(**environ), timeout_s) as url:
        return url


async def test_it_listens_on_loopback_whatever_the_environment_says(tiny_model: Path, tmp_path: Path) -> None:
    environ = {
        "PDSERVE_HOST": "0.0.0.0",
        "PDSERVE_PROXY": "tcp://127.0.0.1:9",
        "PDSERVE_LOG_LEVEL": "error",
        "PDSERVE_KV_CACHE_MIB": "64",
        "PDSERVE_CORES": str(min(os.sched_getaffinity(0))),
        "XDG_STATE_HOME": str(tmp_path),
    }
    assert (await enter(["--model", str(tiny_model)], 120.0, **environ)).startswith("http://127.0.0.1:")


async def test_a_node_that_ends_tells_why() -> None:
    with pytest.raises(ChildDied, match="there is no model '/nowhere'"):
        await enter(["--model", "/nowhere"], 120.0)


async def test_a_node_that_is_late_is_given_up() -> None:
    with pytest.raises(BenchError, match=r"was not ready after 0\.1 s"):
        await enter([], 0.1)
