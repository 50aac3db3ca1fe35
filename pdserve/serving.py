"""A cluster on this machine for a program in Python: ``pdserve.serve``.

It runs ``pdserve up`` as a child process and stops it at the end of a block. Clients speak HTTP to it, as they do to
every other cluster. A thread starts the child and waits for its end, because the kernel ends a child of pdserve's when
the thread that started it ends. So a cluster lives as long as its block or its program, whichever thread has entered
the block, and it needs no event loop of the caller's.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import enum
import logging
import os
import re
import subprocess
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from pdserve.config import NodeConfig, ProxyConfig, UpConfig
from pdserve.errors import ClusterFailed, ConfigError
from pdserve.log_format import as_text
from pdserve.process import ServerProcess, pdserve_command
from pdserve.settings import load
from pdserve.settings.setting import env_name, settings_of, to_text
from pdserve.settings.sources import suggestion
from pdserve.wire.discovery import Role

log = logging.getLogger(__name__)

SettingValue: TypeAlias = str | float | Path | enum.Enum | Sequence[str] | Sequence[int]
"""The value of a setting. True and False mean on and off; a sequence is for a setting that takes a list."""

_NOT_HERE = frozenset({"model", "prefill", "decode", "mixed", "port", "ask", "ready-json", "startup-timeout-s"})
"""The flags of ``pdserve up`` that are parameters of ``serve`` by themselves, or mean nothing here."""
_STOP_MARGIN_S = 45.0
"""Seconds that the cluster has to stop, after those that its running requests have."""
LONGEST_START_S = 86_400
"""The child's own limit, which begins later than that of ``serve``, has to end after it."""
_KILLED_S = 10.0
"""A killed child is waited for so long."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a cluster on this machine."""

    name: str
    """Its name in logs, metrics and errors, such as ``decode-0``."""
    role: Role
    """The role that it was started with."""
    url: str
    """Where it answers ``/metrics`` and ``/live``. Clients send their requests to the cluster's URL instead."""
    pid: int
    """The number of its process."""


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What ``pdserve up --ready-json`` says of its cluster, for the program that has started it.

    It is one line of JSON: when all nodes are ready, and again whenever a node was started again.
    """

    url: str
    """The proxy's URL, without ``/v1``."""
    model: str
    """The name that requests give for the model."""
    logs: str
    """The folder with the log of each process, such as ``decode-0.log``; empty if there is none."""
    nodes: tuple[Node, ...]


class Cluster:
    """A cluster that runs. Every thread may use it."""

    def __init__(self, child: ClusterChild) -> None:
        self._child = child

    @property
    def url(self) -> str:
        """The address for clients, without ``/v1``: ``OpenAI(base_url=cluster.url + "/v1", api_key="none")``."""
        return self._child.reported().url

    @property
    def model(self) -> str:
        """The name that requests give for the model."""
        return self._child.reported().model

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, prefill nodes first. One that died and was started again has another ``url`` and ``pid``."""
        return self._child.reported().nodes

    @property
    def logs(self) -> Path | None:
        """The folder with the log of each process, such as ``decode-0.log``; None if none is written."""
        logs = self._child.reported().logs
        return Path(logs) if logs else None

    def check(self) -> None:
        """Raises ClusterFailed, with the last lines of the cluster's output, if the cluster has ended by itself."""
        self._child.check()

    def __repr__(self) -> str:
        return f"<pdserve cluster {self.url}: {self.model} on {', '.join(node.name for node in self.nodes)}>"


class ClusterBlock(AbstractContextManager[Cluster], AbstractAsyncContextManager[Cluster]):
    """A cluster that one ``with`` or ``async with`` block starts and stops."""

    def __init__(self, child: ClusterChild) -> None:
        self._block, self._async_block = _serving(child), _aserving(child)

    def __enter__(self) -> Cluster:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)

    async def __aenter__(self) -> Cluster:
        return await self._async_block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._async_block.__aexit__(kind, error, trace)


def serve(
    model: str | Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    mixed: int = 0,
    port: int = 0,
    timeout_s: float = 300.0,
    environ: Mapping[str, str] | None = None,
    **settings: SettingValue,
) -> ClusterBlock:
    """Serves ``model`` on this machine within a ``with`` or ``async with`` block, which gets a ``Cluster``.

    ``model`` is what ``pdserve up`` takes: a folder, a GGUF file or a name. ``prefill``, ``decode`` and ``mixed`` are
    numbers of nodes. The cluster listens on ``port``, or on a free port for 0, of the loopback address. It has to be
    ready within ``timeout_s`` seconds. ``environ`` stands in place of this process's environment. ``settings`` are all
    other settings of ``pdserve up``, of the proxy and of the nodes, by the names of their flags: ``kv_cache_mib=256``
    is ``--kv-cache-mib 256``.

    Raises ConfigError for a wrong setting, before anything starts. The block raises ClusterFailed, with the last lines
    of the cluster's output, if the cluster is not ready in time, and at its end if the cluster has ended by itself; an
    exception that leaves the block gets the same words as a note. All that the cluster prints goes to the logger
    ``pdserve.serving``.

    However the block is left, the cluster's processes have ended afterwards. Running requests get ``drain_s`` seconds
    first; a KeyboardInterrupt or a cancellation in this time ends them at once. If this process ends without leaving
    the block, the kernel kills the cluster.
    """
    given = {**(os.environ if environ is None else environ), **_variables(settings)}
    counts = ("--prefill", str(prefill), "--decode", str(decode), "--mixed", str(mixed))
    flags = ("--model", str(model), *counts, "--port", str(port), "--ask", "", "--ready-json", "on")
    try:
        config = load(UpConfig, flags, given, prog="pdserve.serve")
        for root in (NodeConfig, ProxyConfig):
            load(root, (), given, prog="pdserve.serve")
    except ConfigError as exc:
        raise ConfigError(_with_names_of_arguments(str(exc), settings)) from exc
    command = pdserve_command("up", *flags, "--startup-timeout-s", str(LONGEST_START_S))
    return ClusterBlock(ClusterChild(command, given, timeout_s, config.http.drain_s + _STOP_MARGIN_S))


def _variables(settings: Mapping[str, SettingValue]) -> dict[str, str]:
    """Returns the environment variables that give ``settings``. Raises ConfigError for a name that is no setting's."""
    roots = (UpConfig, NodeConfig, ProxyConfig)
    known = {setting.flag for root in roots for setting in settings_of(root)} - _NOT_HERE | {"config"}
    for name in settings:
        if name.replace("_", "-") not in known:
            names = [flag.replace("-", "_") for flag in known]
            raise ConfigError(f"pdserve.serve has no setting {name!r}{suggestion(name, names)}")
    return {env_name(name): _text(value) for name, value in settings.items()}


def _with_names_of_arguments(words: str, settings: Mapping[str, SettingValue]) -> str:
    """Returns ``words`` with the names by which a program gave its settings, in place of variables and flags."""
    for name in settings:
        words = re.sub(rf"\b{env_name(name)}\b", name, words)
    return re.sub(r"--(prefill|decode|mixed|port)\b(?!-)", r"\1", words)


def _text(value: SettingValue) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return to_text(value if isinstance(value, str | Path | enum.Enum | float | int) else tuple(value))


@contextmanager
def _serving(child: ClusterChild) -> Generator[Cluster]:
    try:
        child.start()
        yield child.cluster()
        child.check()
    except BaseException as error:
        child.explain(error)
        raise
    finally:
        child.end()


@asynccontextmanager
async def _aserving(child: ClusterChild) -> AsyncGenerator[Cluster]:
    try:
        child.start()
        await _await(child.ready, child.start_s)
        yield child.cluster(0.0)
        child.check()
    except BaseException as error:
        child.explain(error)
        raise
    finally:
        try:
            child.stop()
            await _await(child.ended, child.stop_s)
        finally:
            child.kill()


def _wait(event: Future[None], within_s: float) -> None:
    concurrent.futures.wait([event], within_s)


async def _await(event: Future[None], within_s: float) -> None:
    # Unlike wait_for, this does not cancel what it waits for.
    await asyncio.wait([asyncio.wrap_future(event)], timeout=within_s)


class ClusterChild:
    """A ``pdserve up`` with ``--ready-json``, and the thread that starts it and waits for its end."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        start_s: float,
        stop_s: float,
        stderr: int = subprocess.STDOUT,
    ) -> None:
        """``stderr`` is a file for what it writes there; by default its lines are logged and are part of an error."""
        self.start_s = start_s
        self.stop_s = stop_s
        self.ready: Future[None] = Future()
        """Done when the cluster is ready or has failed."""
        self.ended: Future[None] = Future()
        """Done when the child has ended, after which it has no process any more."""
        self._command = command
        self._environ = environ
        self._stderr = stderr
        self._report: ClusterReport | None = None
        self._failure: ClusterFailed | None = None
        self._last_line = ""
        self._to_stop: Future[None] = Future()
        self._to_kill: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="pdserve.serve", daemon=True)

    def start(self) -> None:
        # A program may end within its block. The thread stands still when Python has begun to take modules apart.
        atexit.register(self.end)
        self._thread.start()

    def stop(self) -> None:
        """Has the child stop in order. Without a child nothing happens."""
        if self._thread.ident is None:
            _set(self.ended)
        _set(self._to_stop)

    def kill(self) -> None:
        """Ends the child at once, unless it has ended."""
        _set(self._to_kill)
        _wait(self.ended, _KILLED_S)
        atexit.unregister(self.end)

    def end(self) -> None:
        """Stops the child, and kills it if that takes too long or is interrupted."""
        try:
            self.stop()
            _wait(self.ended, self.stop_s)
        finally:
            self.kill()

    def reported(self) -> ClusterReport:
        """Returns what the child has said last. It must have been ready."""
        assert self._report is not None, "a Cluster is made when its child is ready"
        return self._report

    def cluster(self, within_s: float | None = None) -> Cluster:
        """Returns the cluster once it is ready, which it has to be in this time, by default its own; blocks.

        Raises ClusterFailed if it is not.
        """
        _wait(self.ready, self.start_s if within_s is None else within_s)
        self.check()
        if self._report is None:
            last = f"; its last line: {self._last_line}" if self._last_line else ""
            raise ClusterFailed(f"the cluster was not ready after {self.start_s:g} s{last}")
        return Cluster(self)

    def check(self) -> None:
        """Raises ClusterFailed if the child has ended by itself."""
        if self._failure is not None:
            raise self._failure

    def explain(self, error: BaseException) -> None:
        """Notes at ``error`` that the child has ended by itself, if it has."""
        if self._failure is not None and error is not self._failure:
            error.add_note(str(self._failure))

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except OSError as exc:
            self._failure = ClusterFailed(f"the cluster's process cannot be started: {exc}")
        finally:
            _set(self.ready)
            _set(self.ended)

    async def _keep(self) -> None:
        """Runs the child until it ends or is to stop."""
        server = ServerProcess("the cluster", self._command, self._environ, self._take, self._stderr)
        stop, kill = asyncio.wrap_future(self._to_stop), asyncio.wrap_future(self._to_kill)
        try:
            await _first(asyncio.ensure_future(server.wait()), stop)
            if not server.alive and not stop.done():
                has_lines = self._stderr == subprocess.STDOUT
                self._failure = ClusterFailed(str(server.died()) if has_lines else server.describe_end())
                _set(self.ready)
        finally:
            stopping = asyncio.ensure_future(server.stop(self.stop_s))
            await _first(stopping, kill)
            if not stopping.done():
                server.kill()
            await stopping
            # Whoever sets them from now on finds no event loop.
            stop.cancel()
            kill.cancel()

    def _take(self, _: str, line: str) -> None:
        with suppress(msgspec.DecodeError):
            self._report = msgspec.json.decode(line, type=ClusterReport)
            _set(self.ready)
            return
        self._last_line = as_text(line)
        log.info("%s", self._last_line)


def _set(event: Future[None]) -> None:
    with suppress(concurrent.futures.InvalidStateError):
        event.set_result(None)


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
