"""Puts simulated parts in place of the real ones: clocks, chance, threads, descriptors, ZMQ, sockets, child processes.

This is the only place that changes the product. Within ``simulated`` the names under which pdserve's modules know such
a part (``time``, ``secrets``, ``zmq`` and so on) stand for the simulated one. Other modules keep the real one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import fcntl
import functools
import importlib
import inspect
import os
import pkgutil
import random
import secrets
import select
import socket
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, ClassVar

import msgspec
import uvicorn.server
import zmq
import zmq.asyncio
from werkzeug.routing import Rule

from lab.simulation.machine.messaging import (
    Descriptors,
    PidFd,
    SimAsyncContext,
    SimContext,
    SimPoller,
    SimShadow,
    select_sockets,
)
from lab.simulation.machine.network import Network, SimListener
from lab.simulation.machine.rank_group import SimBoard, SimLifeBoard
from lab.simulation.machine.virtual_time import WALL_S, SimLoop, SimProcess, SimThread, present_process, present_thread
from pdserve.engine.tp.tp_ranks import RankProcess
from pdserve.liveness import LifeBoard, motion_of
from pdserve.models.tp.rank_board import RankBoard
from pdserve.process import ChildProcess

PACKAGES = ("pdserve", "pdserve_proxy", "pdserve_kvtransfer")
LEAST_SLEEP_S = 0.0005
"""A thread that polls while data moves sleeps for so long. The product's 50 µs would make most of a run's turns."""
LOOK_S = 0.0002
"""A thread has worked for so long since it last asked for how long it has worked: turns take no time here."""
UNUSED = (
    *("pdserve.bench", "pdserve.doctor", "pdserve.plan", "pdserve.cli", "pdserve.__main__", "pdserve.engine.__main__"),
    *("pdserve.models.fallback", "pdserve.models.checkpoint.fallback_config"),
)
"""What no simulated process imports. The models of transformers take seconds."""


class Likeness:
    """A module with some of its names replaced."""

    def __init__(self, module: types.ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class SimFuture(concurrent.futures.Future[Any]):
    """A future for whose result simulated threads wait."""

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            thread = present_thread()
            self.add_done_callback(lambda _: thread.wake())
            while not self.done():
                thread.block(timeout)
        return super().result(0)


class SimCondition:
    """A condition whose lock nobody ever waits for: threads change only where they wait."""

    def __init__(self) -> None:
        self._waiting: list[SimThread] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            thread.wake()

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> None:
        thread = present_thread()
        self._waiting.append(thread)
        try:
            while not predicate():
                thread.block(timeout)
        finally:
            self._waiting.remove(thread)


class SimEvent:
    """An event for which simulated threads wait."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wake()

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_set:
            return True
        thread = present_thread()
        until = None if timeout is None else thread.now() + timeout
        self._waiting.append(thread)
        try:
            while not self._is_set and (until is None or thread.now() < until):
                thread.block(None if until is None else until - thread.now())
        finally:
            self._waiting.remove(thread)
        return self._is_set


class OrderedConnections(dict[Any, None]):
    """A server's connections, which it closes in the order in which they were made: a set has another one each time."""

    def add(self, connection: Any) -> None:
        self[connection] = None

    def discard(self, connection: Any) -> None:
        self.pop(connection, None)


class SimFolder:
    """A temporary folder that is not there."""

    _count = 0
    full: ClassVar[Counter[str]] = Counter()
    """How many faults fill each host's disk."""

    def __init__(self, prefix: str = "") -> None:
        if SimFolder.full[present_process().host]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        SimFolder._count += 1
        self.name = f"/{prefix}{SimFolder._count}"

    def cleanup(self) -> None:
        pass

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.cleanup()


class SimChild:
    """A child process, as ``ChildProcess`` has it.

    As with the real one, the kernel kills the child when its parent ends.
    """

    programs: dict[tuple[str, ...], Callable[[Any], Any]]
    """What runs as each command: a coroutine function, or one that runs in a thread. It gets the launch message."""
    network: Network

    def __init__(
        self, name: str, command: Any, *, launch: Any, pass_fds: Sequence[int] = (), own_session: bool = False
    ) -> None:
        parent = present_process()
        program = SimChild.programs[tuple(command)]
        self.name = name
        short_name = name.removeprefix("the ").removesuffix(" process").removesuffix(" of the proxy")
        self.process = SimProcess(parent.loop, f"{parent.name}'s {short_name}", parent.host)
        self.pid = 1
        self.pidfd = SimContext.descriptors.add(PidFd(self.process))
        for number in pass_fds:
            if number in SimChild.network.shared:
                SimChild.network.shared[number].hold(self.process)
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(launch), type=type(launch))
        self._ended = asyncio.Event()

        def died() -> None:
            parent.loop.call_soon(self._ended.set, context=parent.context)
            parent.on_end.pop(kill, None)

        def kill() -> None:
            self.process.end(-9)

        self.process.on_end[died] = None
        parent.on_end[kill] = None
        parent.children.append(self.process)
        if inspect.iscoroutinefunction(program):
            self.process.start(partial(program, message))
        else:
            self._start_thread(partial(program, message), short_name)
        if parent.ended:
            kill()

    def _start_thread(self, main: Callable[[], None], name: str) -> None:
        def run() -> None:
            status = 1
            try:
                main()
                status = 0
            finally:
                if not SimThread.over:
                    self.process.end(status)

        self.process.start_thread(run, name)

    def terminate(self) -> None:
        if not self.process.ended:
            self.process.terminate()

    def kill(self) -> None:
        self.process.end(-9)

    async def wait(self) -> int:
        await self._ended.wait()
        return self.process.status

    async def end(self, grace_s: float) -> bool:
        by_itself = True
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            by_itself = False
        finally:
            self.process.end(-9)
            await self.wait()
        return by_itself

    def ended(self, within_s: float = 0.0) -> bool:
        poller = SimPoller()
        poller.register(self.pidfd, zmq.POLLIN)
        return bool(poller.poll(within_s * 1000))

    @property
    def ended_by_signal(self) -> bool:
        return self.process.ended and self.process.status < 0

    def reap(self, grace_s: float) -> None:
        if not self.ended(grace_s):
            self.process.end(-9)
        SimContext.descriptors.close(self.pidfd)

    def describe_end(self) -> str:
        return f"{self.name} ended with {self.process.status}"


@functools.cache
def _product() -> tuple[types.ModuleType, ...]:
    """Returns all modules of the product that run in a cluster."""
    for package in PACKAGES:
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            if found.name.startswith(UNUSED) or found.name.endswith("__main__"):
                continue
            importlib.import_module(found.name)
    return tuple(
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in PACKAGES and not name.startswith(UNUSED)
    )


@functools.cache
def _early() -> tuple[tuple[Any, str, Any], ...]:
    """Returns the defaults of functions that took a clock when their module was loaded: owner, name and value."""
    found: list[tuple[Any, str, Any]] = []
    clocks = (time.time, time.monotonic)
    for module in _product():
        for value in list(vars(module).values()):
            functions = [value] if isinstance(value, types.FunctionType) else []
            if isinstance(value, type) and value.__module__ == module.__name__:
                functions = [member for member in vars(value).values() if isinstance(member, types.FunctionType)]
            for function in functions:
                for name, default in (function.__kwdefaults__ or {}).items():
                    if default in clocks:
                        found.append((function, name, default))
                assert not any(default in clocks for default in function.__defaults__ or ()) or _is_positional(function)
    return tuple(found)


def _is_positional(function: types.FunctionType) -> bool:
    _positional[function] = function.__defaults__ or ()
    return True


_builders: dict[tuple[Any, ...], Any] = {}
_positional: dict[types.FunctionType, tuple[Any, ...]] = {}


@contextmanager
def simulated(
    loop: SimLoop,
    network: Network,
    chance: Random,
    programs: dict[tuple[str, ...], Callable[[Any], Any]],
    skew_s: Callable[[], float],
    **names: Any,
) -> Iterator[Descriptors]:
    """Replaces the parts while the block runs.

    ``programs`` are those of child processes, by their commands. ``skew_s`` says by how much the wall clock of the
    process that runs now is wrong. ``names`` are further names to replace, with their
    modules, and ``__`` in place of each dot.
    """
    descriptors = Descriptors()
    SimContext.network, SimContext.descriptors, SimPoller.descriptors = network, descriptors, descriptors
    SimChild.programs, SimChild.network = programs, network
    SimThread.over = False
    SimFolder._count = 0
    SimFolder.full.clear()

    looks = Counter[SimThread]()

    def wall() -> float:
        return WALL_S + loop.time() + skew_s()

    def sleep(seconds: float) -> None:
        present_thread().block(max(seconds, LEAST_SLEEP_S))

    def thread_time() -> float:
        thread = present_thread()
        looks[thread] += 1
        return looks[thread] * LOOK_S

    def eventfd_write(fd: int, value: int) -> None:
        descriptors.fd(fd).write()

    def close(fd: int) -> None:
        if fd in descriptors:
            descriptors.close(fd)
        else:
            os.close(fd)

    clock = Likeness(time, time=wall, monotonic=loop.time, perf_counter=loop.time, sleep=sleep, thread_time=thread_time)
    replaced: list[tuple[Any, Any]] = [
        (time, clock),
        (time.time, wall),
        (time.monotonic, loop.time),
        (secrets, Likeness(secrets, token_bytes=chance.randbytes, randbits=chance.getrandbits)),
        (random, Likeness(random, Random=lambda: Random(chance.getrandbits(64)))),
        (
            os,
            Likeness(
                os,
                eventfd=lambda *_: descriptors.eventfd(),
                eventfd_write=eventfd_write,
                eventfd_read=lambda fd: descriptors.fd(fd).read(),
                close=close,
                urandom=chance.randbytes,
                _exit=lambda status: present_process().exit(status),
            ),
        ),
        (fcntl, Likeness(fcntl, ioctl=lambda fd, *_: network.unread_bytes(fd).to_bytes(4, sys.byteorder))),
        (threading, Likeness(threading, Thread=SimThread, Condition=SimCondition, Event=SimEvent)),
        (concurrent.futures.Future, SimFuture),
        (tempfile, Likeness(tempfile, TemporaryDirectory=SimFolder)),
        (
            zmq,
            Likeness(
                zmq,
                Context=SimContext,
                Poller=SimPoller,
                select=select_sockets,
                Socket=types.SimpleNamespace(shadow=SimShadow),
                asyncio=Likeness(zmq.asyncio, Context=SimAsyncContext),
            ),
        ),
        (select, Likeness(select, poll=SimPoller)),
        (ChildProcess, SimChild),
        (RankBoard, SimBoard),
        (LifeBoard, SimLifeBoard),
        # The kernel knows nothing of simulated threads.
        (motion_of, lambda process, thread: None),
        (_module("pdserve.http.server").bind, lambda config: SimListener(config.host, config.port)),
        (
            _module("pdserve.http.server").bind_shared,
            lambda config, count: network.share(present_process(), config.host, config.port, count),
        ),
        # What this process takes of the machine differs from run to run, and so do the lengths of its numbers.
        (_module("pdserve.metrics")._usual, lambda pid: ()),
        (_module("pdserve.metrics")._threads, lambda pid: ()),
    ]
    names["pdserve_proxy__workers__worker__socket"] = Likeness(socket, socket=network.inherited)
    by_id = {id(real): stand_in for real, stand_in in replaced}
    undo: list[tuple[Any, str, Any]] = []
    for module in _product():
        for name, value in list(vars(module).items()):
            stand_in = by_id.get(id(value))
            if stand_in is not None and not (value is ChildProcess and module.__name__ == "pdserve.process"):
                undo.append((module, name, value))
                setattr(module, name, stand_in)
    for path, stand_in in names.items():
        module_name, _, name = path.rpartition("__")
        module = _module(module_name.replace("__", "."))
        undo.append((module, name, getattr(module, name)))
        setattr(module, name, stand_in)
    for function, name, default in _early():
        function.__kwdefaults__[name] = by_id[id(default)] if id(default) in by_id else _clock_for(default, wall, loop)
    for function, defaults in _positional.items():
        function.__defaults__ = tuple(_clock_for(default, wall, loop) for default in defaults)
    state = uvicorn.server.ServerState
    begin_state = state.__init__

    def begin_ordered_state(self: uvicorn.server.ServerState) -> None:
        begin_state(self)
        self.connections = OrderedConnections()  # type: ignore[assignment]

    state.__init__ = begin_ordered_state  # type: ignore[method-assign]
    compiled, Rule._compile_builder = Rule._compile_builder, _kept_builder(Rule._compile_builder)  # type: ignore[method-assign]
    RankProcess.__bases__ = (SimChild,)
    guard = _module("pdserve.control.connection_guard").ConnectionGuard
    waiting, guard._waiting = guard._waiting, lambda self, descriptor, port: 0
    try:
        yield descriptors
    finally:
        guard._waiting = waiting
        RankProcess.__bases__ = (ChildProcess,)
        Rule._compile_builder = compiled  # type: ignore[method-assign]
        state.__init__ = begin_state  # type: ignore[method-assign]
        for module, name, value in reversed(undo):
            setattr(module, name, value)
        for function, name, default in _early():
            function.__kwdefaults__[name] = default
        for function, defaults in _positional.items():
            function.__defaults__ = defaults


def _kept_builder(compiled: Callable[[Rule, bool], Any]) -> Callable[..., Any]:
    """Returns what compiles a route's builder once: every proxy and node of every run has the same routes."""

    def kept(self: Rule, append_unknown: bool = True) -> Any:
        if self.defaults:
            return compiled(self, append_unknown)
        key = (self.rule, tuple(self._trace), append_unknown)
        if key not in _builders:
            _builders[key] = compiled(self, append_unknown)
        return _builders[key]

    return kept


def _clock_for(default: Any, wall: Callable[[], float], loop: SimLoop) -> Any:
    # Builtin functions are compared, because each look-up may make another object.
    if default == time.time:
        return wall
    return loop.time if default == time.monotonic else default


def _module(name: str) -> Any:
    return importlib.import_module(name)
