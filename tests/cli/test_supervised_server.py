"""Tests when a server that dies is started again."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.up.cluster import LocalCluster, NodePlan
from pdserve.cli.up.output import Console
from pdserve.cli.up.supervised_server import FIRST_PAUSE_S, MAX_RESTARTS, STEADY_S, Restarts, SupervisedServer
from pdserve.config import HttpConfig
from pdserve.process import ChildDied
from pdserve.wire.discovery import Role


@given(st.lists(st.floats(0.0, 2 * STEADY_S), max_size=12))
def test_only_steady_service_allows_more_starts(served: list[float]) -> None:
    restarts = Restarts()
    unsteady = 0
    for served_s in served:
        unsteady = 1 if served_s >= STEADY_S else unsteady + 1
        pause_s = restarts.pause_s(served_s)
        if unsteady > MAX_RESTARTS:
            assert pause_s is None
            return
        assert pause_s == FIRST_PAUSE_S * 2 ** (unsteady - 1)


LISTENS = "print('pdserve decode listening url=http://127.0.0.1:1', flush=True); "


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", LISTENS + code)


async def keep(code: str) -> str:
    """Returns what the console shows when such a server, once it has died, is kept by one that runs ``code``."""
    shown = io.StringIO()
    server = SupervisedServer("decode-0", {}, Console(shown, colour=False), program("raise SystemExit(3)"))
    try:
        await server.keep(program(code))
    finally:
        await server.process.end(0.0)
    return shown.getvalue()


async def test_a_server_that_died_is_started_again_until_somebody_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.up.supervised_server.FIRST_PAUSE_S", 0.01)
    shown = await keep("")
    assert "decode-0 ended with status 3" in shown
    assert "decode-0 is started again in 0.01 s" in shown
    assert "decode-0 serves again" in shown
    assert "decode-0 was stopped, and is not started again" in shown


async def test_a_server_that_dies_each_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.up.supervised_server.FIRST_PAUSE_S", 0.01)
    starts = tmp_path / "starts"
    with pytest.raises(ChildDied, match=r"decode-0 has died 4 times .*decode-0 ended with status 7"):
        await keep(f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(7)")
    assert len(starts.read_text()) == MAX_RESTARTS


SERVES = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/live" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"pdserve decode listening url=http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


async def test_a_server_that_is_stopped_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"FIRST_PAUSE_S": 0.01, "PROBE_S": 0.1, "ANSWER_S": 1.0, "STILL_S": 3.0}.items():
        monkeypatch.setattr(f"pdserve.cli.up.supervised_server.{name}", seconds)
    shown = io.StringIO()
    server = SupervisedServer("decode-0", {}, Console(shown, colour=False), (sys.executable, "-c", SERVES))
    try:
        keeping = asyncio.create_task(server.keep(program("")))
        await server.process.listening()
        os.kill(server.process.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            await keeping
    finally:
        await server.process.end(0.0)
    assert "decode-0 does not answer, and is killed" in shown.getvalue()
    assert "decode-0 was killed by SIGKILL" in shown.getvalue()
    assert "decode-0 serves again" in shown.getvalue()


async def test_a_prefill_node_that_dies_each_time_ends_no_node_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.cli.up.supervised_server.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("pdserve.cli.up.supervised_server.STILL_S", 600.0)  # these programs answer nothing
    monkeypatch.setattr("pdserve.cli.up.cluster.proxy_command", lambda *_: program("input()"))
    gate, dies = tmp_path / "gate", "raise SystemExit(7)"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)"
    codes = {Role.PREFILL: dies, Role.DECODE: waits}
    monkeypatch.setattr("pdserve.cli.up.cluster.node_command", lambda node, _: program(codes[node.role]))
    shown = io.StringIO()
    console = Console(shown, colour=False)
    cluster = LocalCluster(console, HttpConfig())
    try:
        for role, code in codes.items():
            server = SupervisedServer(f"{role.value}-0", {}, console, program(code))
            cluster._nodes[server.name] = NodePlan(server.name, role, ()), server
        cluster._proxy = SupervisedServer("proxy", {}, console, program("import time; time.sleep(600)"))
        watching = asyncio.create_task(cluster.watch())
        async with asyncio.timeout(60):
            while "prefill-0 has died 4 times" not in shown.getvalue():  # noqa: ASYNC110 (nobody announces it)
                await asyncio.sleep(0.01)
        assert not watching.done()
        gate.touch()
        async with asyncio.timeout(60):
            assert await watching == "no node is left that answers requests"
    finally:
        await cluster.kill()
