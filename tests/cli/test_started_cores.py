"""Runs nodes by hand on one machine: each says which cores it shares, and takes those that are left."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pdserve.machine.core_share import running_engines
from tests.eventually import eventually
from tests.processes import SECRET, pdserve

pytestmark = pytest.mark.integration


def test_nodes_by_hand_take_what_is_left_or_say_what_they_share(tiny_model: Path) -> None:
    """Engines of other tests may run here, too: then a node may find all cores taken."""
    core = min(os.sched_getaffinity(0))
    mixed = ("mixed", "--port", "0", "--model", str(tiny_model), "--kv-cache-mib", "8")
    with pdserve(*mixed, "--cores", str(core), PDSERVE_SECRET=SECRET) as first:
        first.listening()
        (engine,) = engines_below(first.pid)
        with pdserve(*mixed, "--cores", str(core), PDSERVE_SECRET=SECRET) as second:
            second.listening()
        shares = rf"WARNING pdserve\.engine: this engine shares core {core} with the engine of process(es)? ([\d, ]+),"
        found = re.search(shares, second.output)
        assert found is not None, second.output
        shared_with = found[2].split(", ")
        # The line names eight engines of all that there are.
        assert str(engine) in shared_with or len(shared_with) == 8
        with pdserve(*mixed, PDSERVE_SECRET=SECRET) as third:
            left = "which other engines of this machine leave"
            if left in third.wait_for(lambda line: left in line or " shares core" in line):
                eventually(lambda: kept_off(third.pid, core), f"it leaves core {core}")


def kept_off(pid: int, core: int) -> bool:
    """Returns whether the node ``pid`` has an engine that keeps to other cores."""
    engines = engines_below(pid)
    return bool(engines) and all(core not in os.sched_getaffinity(engine) for engine in engines)


def engines_below(pid: int) -> list[int]:
    """Returns the engines that the node ``pid`` has started."""
    return [engine.pid for engine in running_engines() if engine.parent == pid]
