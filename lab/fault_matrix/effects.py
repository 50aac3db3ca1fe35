"""Shows that a fault has had its effect: without one, a cell would show nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lab.fault_matrix.stage import ANSWER_S, ENGINE_SILENCE_MS, KNOWN_PORTS, Server, Stage
from tests.cluster.nodes import MODEL, http
from tests.eventually import eventually

KILLED = "was killed by SIGKILL"
NO_LIFE = f"hangs: no sign of life for {ENGINE_SILENCE_MS / 1000} s"
GONE = ("", "Z", "X")
"""The states of a process that has ended."""
TOKENS = 16
"""An answer that is over at its first token ends the transfer of its blocks before the prefill node is done."""


def stops(pid: int) -> None:
    """Waits until a process is stopped that has got SIGSTOP."""
    eventually(lambda: _state(pid) == "T", f"process {pid} is stopped")


def is_still_stopped(pid: int) -> None:
    assert _state(pid) == "T", f"process {pid} has not been stopped all the time: {_state(pid)}"


def _state(pid: int) -> str:
    """Returns the kernel's letter for the state of a process; none if there is no such process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def was_killed(server: Server, pid: int) -> None:
    """Waits until a server has ended whose process ``pid`` was killed, and checks that it did not end by itself.

    A node that drains may not look any more how its engine ends: see ``kills``.
    """
    eventually(lambda: server.process.ended, f"{server.name} has ended")
    if pid == server.process.pid:
        assert server.process.popen.returncode == -signal.SIGKILL, f"{server.name} ended by itself"
    elif not server.draining:
        eventually(lambda: KILLED in server.process.output, f"{server.name} says that a process of it was killed")


def hung(server: Server, engine: int) -> None:
    """Waits until a node has ended itself, and its stopped engine, because that shows no life.

    A node that drains may have ended before it missed that.
    """
    eventually(lambda: server.process.ended, f"{server.name} has ended")
    eventually(lambda: _state(engine) in GONE, f"the engine of {server.name} has ended")
    if not server.draining:
        assert server.process.popen.returncode == 1
        assert NO_LIFE in server.process.output, f"{server.name} says that its engine hangs"


def kills(pid: int) -> None:
    """Kills a process that runs, and waits until it has ended: its parent may not have looked yet."""
    assert _state(pid) not in GONE, f"process {pid} has ended before it is killed"
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: _state(pid) in GONE, f"process {pid} has ended")


def hears_nothing(stage: Stage, server: Server) -> Callable[[], None]:
    """Returns a check that nothing has come to a host that is cut off now, and that somebody has tried to reach it."""
    wire = stage.network.wire
    wire.settle()
    received, paths = server.host.received_bytes, wire.towards(server.name)
    lost = sum(path.lost_own for path in paths)

    def check() -> None:
        eventually(lambda: sum(path.lost_own for path in paths) > lost, f"frames to {server.name} are lost")
        assert server.host.received_bytes == received, f"{server.name} was not cut off"

    return check


def is_slow(stage: Stage, server: Server) -> Callable[[], None]:
    """Returns a check that frames have been late since now."""
    paths = stage.network.wire.around(server.name)
    delayed = sum(path.delayed for path in paths)

    def check() -> None:
        eventually(lambda: sum(path.delayed for path in paths) > delayed, "frames are late")

    return check


class CorruptBlock:
    """A byte of a block changes on its way to a decode node."""

    def __init__(self, stage: Stage, prefill: Server, decode: Server) -> None:
        self._decode = decode
        # Blocks are on their way, so the node may notice the wrong one as soon as there is one.
        self._before = self._noticed()
        path = stage.network.wire.path(prefill.name, decode.name)
        self._corruption = path.corrupt(spared=KNOWN_PORTS)

    def check(self) -> None:
        """Checks that the decode node has noticed it."""
        eventually(lambda: self._corruption.done, "a byte is changed")
        eventually(lambda: self._noticed() > self._before, "the decode node has noticed the wrong block")

    def _noticed(self) -> float:
        return self._decode.metric("kv_transfer_failures_total", reason="corrupt")


class FullDisk:
    """A server whose files cannot grow from now on.

    Servers write a line for each request that ends: a line that is missing is a write that failed.
    """

    def __init__(self, stage: Stage, server: Server, prompt: tuple[int, ...]) -> None:
        """``prompt`` is one with which such a server has some work."""
        self._stage = stage
        self._server = server
        self._prompt = prompt
        self._ended = 0.0 if server.draining else _requests_ended(server)
        self._written = self._size()

    def check(self) -> None:
        """Checks that a request has ended since, and that the server could not write a line of it."""
        if self._server.draining:
            eventually(lambda: self._server.process.ended, f"{self._server.name} has ended")
        else:
            self._until_one_ends(self._ended)
        assert self._size() == self._written, "the disk was not full"

    def check_room(self) -> None:
        """Checks that the server writes lines again, now that there is room."""
        if not self._server.draining:
            self._until_one_ends(_requests_ended(self._server))
            eventually(lambda: self._size() > self._written, f"{self._server.name} writes a line")

    def _size(self) -> int:
        return self._server.process.log.stat().st_size

    def _until_one_ends(self, before: float) -> None:
        proxies = [self._server] if self._server.role == "proxy" else self._stage.proxies[:1]

        def another() -> bool:
            if _requests_ended(self._server) > before:
                return True
            body = {"model": MODEL, "prompt": list(self._prompt), "max_tokens": TOKENS, "ignore_eos": True}
            with suppress(OSError):
                http(proxies[0].url + "/v1/completions", body, timeout_s=ANSWER_S)
            return False

        eventually(another, f"a request ends at {self._server.name}")


def _requests_ended(server: Server) -> float:
    match server.role:
        case "proxy":
            return server.metric("proxy_outcomes_total", outcome="ok")
        case "prefill":
            return server.metric("kv_transfers_total", direction="sent")
        case _:
            return server.metric("request_success_total", finished_reason="length")
