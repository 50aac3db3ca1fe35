"""A fault without effect fails its cell."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from lab.fault_matrix import effects
from lab.fault_matrix.effects import hears_nothing, is_slow, is_still_stopped, kills, stops
from lab.fault_matrix.figures import Figures, put_cell, read_figures
from lab.fault_matrix.models import LLAMA, Saved
from lab.fault_matrix.stage import Logged, Server, Stage
from tests.eventually import eventually
from tests.hosts.conftest import possible
from tests.hosts.namespaces import Host, network

__all__ = ["possible"]


def test_a_process_that_goes_on_was_not_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        stops(process.pid)
        is_still_stopped(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T")
        with pytest.raises(AssertionError, match="has not been stopped all the time"):
            is_still_stopped(process.pid)
        process.kill()


def test_a_process_that_has_ended_is_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        kills(process.pid)
        with pytest.raises(AssertionError, match="has ended before it is killed"):
            kills(process.pid)


def test_a_host_that_hears_something_was_not_cut_off(
    possible: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with network("a", "b") as joined:
        a, b = joined.hosts.values()
        process = Logged(["true"], tmp_path / "log")
        stage = Stage(Saved(LLAMA, tmp_path, 1, 1), tmp_path, joined, 1, {"b": Server("b", b, "proxy", process)})
        with bound(b) as heard, bound(a) as said:
            # The first datagram also has the hosts ask for each other's hardware addresses.
            said.sendto(b"1", heard.getsockname())
            assert heard.recv(1) == b"1"
            there, back = joined.wire.between("a", "b")
            there.cut = back.cut = True
            check = hears_nothing(stage, stage.servers["b"])
            monkeypatch.setattr(effects, "eventually", partial(eventually, timeout_s=0.3))
            heard.sendto(b"2", said.getsockname())
            eventually(lambda: back.lost_own, "what the host sends is lost")
            with pytest.raises(AssertionError, match="frames to b are lost"):
                check()
            said.sendto(b"2", heard.getsockname())
            check()
            there.cut = False
            said.sendto(b"3", heard.getsockname())
            assert heard.recv(1) == b"3"
            with pytest.raises(AssertionError, match="b was not cut off"):
                check()
            there.delay_s = 0.001
            check = is_slow(stage, stage.servers["b"])
            said.sendto(b"4", heard.getsockname())
            check()
        process.reap()


def bound(host: Host) -> socket.socket:
    with host.inside():
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.settimeout(30)
        opened.bind((host.address, 7000))
    return opened


def test_new_figures_of_a_cell_replace_its_old_ones_or_join_them(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    put_cell(path, "one", [1.0, 2.0], 1)
    put_cell(path, "other", [3.0], 0)
    put_cell(path, "one", [4.0001], 0, add=True)
    assert read_figures(path) == Figures({"one": [1.0, 2.0, 4.0], "other": [3.0]}, {"one": 1})
    put_cell(path, "one", [5.0], 0)
    put_cell(path, "other", [], 2)
    assert read_figures(path) == Figures({"one": [5.0]}, {"other": 2})
