"""An asyncio loop on virtual time, the processes whose code runs on it, and their threads.

One loop runs all processes of the simulated cluster. Each callback belongs to the process in whose context it was
scheduled. A process that is stopped keeps its callbacks until it goes on, and those of one that was killed are dropped.
Nothing waits in reality: when no callback is due, the clock jumps to the next timer.

A thread is a greenlet. It runs until it waits, as on a real machine with one core, and then the loop goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import heapq
import itertools
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import greenlet

from pdserve.errors import PdserveError

START_S = 1_000.0
"""The monotonic clock begins with this time, as a machine's does that has run for a while."""
WALL_S = 1_800_000_000.0
"""The wall clock's time when the monotonic clock shows 0."""
MAX_TURNS = 300_000
"""No run takes so many turns, unless something goes round and round."""
PROCESS: contextvars.ContextVar[SimProcess | None] = contextvars.ContextVar("PROCESS", default=None)


class Stuck(Exception):
    """Something waits, and nothing will ever happen."""


class Events:
    """What has happened: lines that a person can read, and a hash of these and of everything that was delivered."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now: Callable[[], float] = lambda: START_S
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, what: str) -> None:
        line = f"{self.now() - START_S:10.6f} {what}"
        self.lines.append(line)
        self._hash.update(line.encode())

    def delivered(self, source: str, target: str, what: bytes) -> None:
        """Adds to the hash what one process got from another one."""
        self._hash.update(b"%.9f %b %b %b" % (self.now(), source.encode(), target.encode(), what))


class SimLoop(asyncio.BaseEventLoop):
    """The loop. Callbacks run in the order in which they became due, timers of one time in that of their making."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events
        events.now = self.time
        self.hub = greenlet.getcurrent()
        self.until = float("inf")
        """The time at which ``Stuck`` ends the run."""
        self.turns = 0
        self.readers: dict[int, Callable[[], None]] = {}
        self.after_turn: Callable[[], None] = lambda: None
        self.connect: Callable[..., Coroutine[Any, Any, Any]]
        self.serve: Callable[..., Coroutine[Any, Any, Any]]
        self._now = START_S
        self._due: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self.set_task_factory(_tasks_of_processes)
        self.set_exception_handler(self._note_exception)
        self.failures: list[str] = []
        """The exceptions that no code has taken."""
        self.processes: list[SimProcess] = []

    @property
    def timers(self) -> list[tuple[float, int, asyncio.TimerHandle]]:
        """Those that are still to come."""
        return [timer for timer in self._timers if not timer[2].cancelled()]

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer stays in the queue until its time."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Runs the function at once: no time passes in it."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:
            future.set_exception(exc)
        return future

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self.readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        process = present_process()
        process.handlers[int(sig)] = lambda: self.call_soon(callback, *args, context=process.context)

    def remove_signal_handler(self, sig: int) -> bool:
        return present_process().handlers.pop(int(sig), None) is not None

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return await self.connect(factory, host, port)

    async def create_server(self, factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:  # type: ignore[override]
        return await self.serve(factory, sock)

    def drop_tasks(self) -> None:
        """Closes the coroutines of tasks that are left, innermost frames last, and forgets everything that waits."""
        self._due.clear()
        self._timers.clear()
        for process in self.processes:
            for task in list(process.tasks):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                with contextlib.suppress(BaseException):
                    process.context.run(task.get_coro().close)
            process.tasks.clear()
        self._due.clear()

    def _run_once(self) -> None:
        while not self._due:
            if not self._timers:
                raise Stuck("nothing will ever happen again")
            when, _, timer = heapq.heappop(self._timers)
            if timer.cancelled():
                continue
            if when > self.until:
                self._now = self.until
                raise Stuck(f"the run is not over after {self.until - START_S:.0f} s")
            self._now = max(self._now, when)
            self._due.append(timer)
        handle = self._due.popleft()
        if handle.cancelled():
            return
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is not None and not process.running:
            process.hold(handle)
            return
        self.turns += 1
        if self.turns > MAX_TURNS:
            raise Stuck(f"the run is not over after {MAX_TURNS} turns")
        if process is not None:
            process.step()
            if process.ended:
                return
        handle._run()
        self.after_turn()

    def _process_events(self, event_list: Any) -> None:
        """There are no descriptors."""

    def _write_to_self(self) -> None:
        """Nothing waits in reality."""

    def _note_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        exc = context.get("exception")
        self.failures.append(f"{context.get('message')}: {exc!r} {context.get('task') or context.get('handle') or ''}")


def _tasks_of_processes(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
    """Makes a task that lives until the end of the run, so that no finaliser runs in a process that was killed."""
    task = asyncio.Task(coro, loop=loop, **more)
    process = PROCESS.get()
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(lambda done: process.tasks.pop(done, None))
    return task


class WallClocks:
    """By how much the wall clock of each host is wrong."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._skews: dict[str, float] = {}
        self._stood: dict[str, list[float]] = {}

    def skew(self, host: str, by_s: float) -> None:
        self._skews[host] = self._skews.get(host, 0.0) + by_s

    def stand(self, host: str) -> None:
        """Lets the clock stand still, until ``go_on`` has been called as often. Then it is right again."""
        self._stood.setdefault(host, []).append(self._loop.time())

    def go_on(self, host: str) -> None:
        self._stood[host].pop()

    def wrong_s(self, host: str) -> float:
        stood = self._stood.get(host)
        return self._skews.get(host, 0.0) + (stood[0] - self._loop.time() if stood else 0.0)


class SimProcess:
    """One process of a simulated machine.

    RUNNING ⇄ STOPPED     SIGSTOP and SIGCONT
       └────────┴──▶ ENDED     by itself, or by SIGKILL
    """

    def __init__(self, loop: SimLoop, name: str, host: str) -> None:
        self.loop = loop
        self.name = name
        self.host = host
        self.running = True
        self.ended = False
        self.status = 0
        self.failure: Exception | None = None
        """What its program has ended with, if it has failed."""
        self.ended_s = float("inf")
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.threads: list[SimThread] = []
        self.handlers: dict[int, Callable[[], object]] = {}
        self.on_end: dict[Callable[[], None], None] = {}
        """What happens when the process has ended: the kernel closes what it had open."""
        self.children: list[SimProcess] = []
        """The processes that it has started, whether they have ended or not."""
        self.context = contextvars.Context()
        self.context.run(PROCESS.set, self)
        loop.processes.append(self)
        self.crash_after = 0
        """After so many more steps it is killed in the middle of what it does; never if 0."""
        self.on_crash: Callable[[], None] = lambda: None
        self.was_stopped = False
        """Whether it was ever stopped."""
        self._stopped_before_s = 0.0
        self._stop_began_s = 0.0
        self._held: deque[asyncio.Handle] = deque()
        self._stops = 0

    @property
    def child(self) -> SimProcess | None:
        """The process that it has started last, if there is one."""
        return self.children[-1] if self.children else None

    def hold(self, handle: asyncio.Handle) -> None:
        if not self.ended:
            self._held.append(handle)

    def start(self, main: Callable[[], Coroutine[Any, Any, int]]) -> None:
        """Runs a program that is a coroutine. The process ends with it."""

        async def run() -> None:
            try:
                status = await main()
            except Exception as exc:
                if SimThread.over:
                    return
                what = f"{self.name} fails: {'; '.join(f'{type(each).__name__}: {each}' for each in _leaves(exc))}"
                self.loop.events.add(what)
                # The command line says in one line what a PdserveError is about. Any other one is a crash.
                if not isinstance(exc, PdserveError):
                    self.loop.failures.append(what)
                self.failure, status = exc, 1
            self.end(status)

        def begin() -> None:
            self.main = self.loop.create_task(run())

        self.loop.call_soon(begin, context=self.context)

    def start_thread(self, main: Callable[[], None], name: str) -> SimThread:
        """Runs a program that waits in its calls."""
        made: list[SimThread] = []
        self.context.run(lambda: made.append(SimThread(target=main, name=name)))
        made[0].begin(self)
        return made[0]

    @property
    def stopped_s(self) -> float:
        """It has been stopped for so long, in all."""
        return self._stopped_before_s + (self.loop.time() - self._stop_began_s if self._stops else 0.0)

    def stop(self) -> None:
        """Does what SIGSTOP does, until ``go_on`` has been called as often."""
        if not self._stops:
            self._stop_began_s = self.loop.time()
        self._stops += 1
        self.was_stopped = True
        self.running = False

    def go_on(self) -> None:
        """Does what SIGCONT does."""
        self._stops -= 1
        if self._stops:
            return
        self._stopped_before_s += self.loop.time() - self._stop_began_s
        if self.ended:
            return
        self.running = True
        held, self._held = self._held, deque()
        self.loop._due.extend(held)

    def step(self) -> None:
        """Counts a resumption of one of its tasks or threads, or something that leaves it: a crash may come here."""
        if self.crash_after:
            self.crash_after -= 1
            if not self.crash_after and not self.ended:
                self.crash()

    def crash_no_more(self) -> None:
        """Takes a crash back that has not come yet."""
        self.crash_after = 0

    def crash(self) -> None:
        """Kills the process in the middle of what it does.

        If it is one of its threads that runs, that never goes on. A callback goes on to its end, but nothing that it
        does leaves the process.
        """
        self.on_crash()
        self.end(-9)
        if greenlet.getcurrent() is not self.loop.hub and present_process() is self:
            self.loop.hub.switch()

    def exit(self, status: int) -> None:
        """Does what ``os._exit`` does, for the thread that runs."""
        self.end(status)
        self.loop.hub.switch()

    def signal(self, number: int) -> None:
        handler = self.handlers.get(number)
        if handler is not None:
            handler()

    def terminate(self) -> None:
        """Sends SIGTERM, which ends a process that does not handle it."""
        if signal.SIGTERM in self.handlers:
            self.signal(signal.SIGTERM)
        else:
            self.end(-signal.SIGTERM)

    def end(self, status: int) -> None:
        """Ends the process at once, wherever it is."""
        if self.ended:
            return
        self.running, self.ended, self.status, self.ended_s = False, True, status, self.loop.time()
        self._held.clear()
        self.loop.events.add(f"{self.name} ended with {status}")
        for action in list(self.on_end):
            action()
        self.on_end.clear()


def _leaves(exc: BaseException) -> list[BaseException]:
    """Returns the exceptions of a group, or the one that is none."""
    if isinstance(exc, BaseExceptionGroup):
        return [leaf for each in exc.exceptions for leaf in _leaves(each)]
    return [exc]


def present_process() -> SimProcess:
    process = PROCESS.get()
    assert process is not None, "no process runs"
    return process


class SimThread:
    """A thread, as ``threading.Thread`` has it. It waits only in ``block``."""

    over = False
    """Whether the run is over, so that threads that still wait have to end."""

    def __init__(self, target: Callable[[], object], name: str = "", daemon: bool = True) -> None:
        self.name = name
        self.ident: int | None = None
        self.native_id = 0
        self._target = target
        self._woken = False
        self._blocked = False
        self._joined: list[SimThread] = []

    def start(self) -> None:
        self.begin(present_process())

    def begin(self, process: SimProcess) -> None:
        self._process = process
        self._loop = process.loop
        self.ident = 1
        # Whoever starts a thread, it is the loop that goes on when the thread waits.
        self._greenlet = greenlet.greenlet(self._run, parent=self._loop.hub)
        context = contextvars.Context()
        context.run(PROCESS.set, process)
        self._greenlet.gr_context = context
        _threads[self._greenlet] = self
        process.threads.append(self)
        self._loop.call_soon(self._switch, context=process.context)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._greenlet.dead

    def join(self, timeout: float | None = None) -> None:
        waiting = present_thread()
        self._joined.append(waiting)
        until = None if timeout is None else self._loop.time() + timeout
        while self.is_alive() and (until is None or self._loop.time() < until):
            waiting.block(None if until is None else until - self._loop.time())

    def now(self) -> float:
        return self._loop.time()

    def block(self, timeout_s: float | None) -> None:
        """Waits until ``wake`` is called, or for so long. Only the thread itself calls it."""
        if SimThread.over:
            raise greenlet.GreenletExit
        assert greenlet.getcurrent() is self._greenlet
        timer = None if timeout_s is None else self._loop.call_later(timeout_s, self.wake)
        self._blocked = True
        self._loop.hub.switch()
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        if self._blocked and not self._woken:
            self._woken = True
            self._loop.call_soon(self._switch, context=self._process.context)

    def kill(self) -> None:
        """Ends the thread after the run."""
        if not self._greenlet.dead:
            self._greenlet.throw(greenlet.GreenletExit)

    def _switch(self) -> None:
        self._blocked = self._woken = False
        self._greenlet.switch()

    def _run(self) -> None:
        try:
            self._target()
        except greenlet.GreenletExit:
            pass
        except Exception as exc:
            self._loop.failures.append(f"thread {self.name} of {self._process.name}: {type(exc).__name__}: {exc}")
        finally:
            _threads.pop(self._greenlet, None)
            for waiting in self._joined:
                waiting.wake()


_threads: dict[Any, SimThread] = {}


def present_thread() -> SimThread:
    """Returns the thread that runs now. The loop's own thread must not wait."""
    thread = _threads.get(greenlet.getcurrent())
    assert thread is not None, "the event loop would wait"
    return thread
