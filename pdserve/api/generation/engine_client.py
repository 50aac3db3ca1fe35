"""Owns the engine process for the HTTP routes, which open generations at it, and notices when the engine is gone."""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import zmq

from pdserve.api.generation.generation import EACH_TOKEN, BatchNotify, Generation, ReadPace
from pdserve.api.generation.request_log import shutting_down
from pdserve.config import EngineConfig, EngineLaunch, LivenessConfig
from pdserve.errors import ConfigError, EngineError, EngineGone, InvalidRequest, RequestError, Unavailable
from pdserve.liveness import LifeBoard, LifeWatch, loop_names, motion_of
from pdserve.local_socket import bind, folder_of
from pdserve.process import ChildProcess, python_program
from pdserve.wire.discovery import Role
from pdserve.wire.engine import (
    Abort,
    AskStats,
    Assign,
    ChildRequest,
    EngineFailed,
    EngineStats,
    FromEngine,
    Meet,
    Met,
    MoveWanted,
    Ready,
    Recorded,
    Renew,
    RequestOutput,
    Shutdown,
    Starting,
    Stats,
    StepOutput,
    Submit,
    ToEngine,
)
from pdserve.wire.ids import new_id
from pdserve.wire.sampling_params import SamplingParams
from pdserve.wire.terms import PrefillTarget, Terms
from pdserve.wire.timeline import TimelinePart

log = logging.getLogger(__name__)

ENGINE_COMMAND = python_program("pdserve.engine")
SOCKET_NAME = "the engine's socket"
START_SILENCE_S = 600.0
"""An engine may take as long as it needs to start, but must not be silent for so long."""
LAST_WORDS_S = 2.0
"""How long an engine has to exit that has said that it fails, and how long what it said before its end may take."""
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class WantedChoice:
    """One choice that the engine is to generate, or to go on with."""

    index: int
    """The number of the choice among all choices of the client's request."""
    seed: int
    emitted: tuple[int, ...] = ()
    """The tokens that the client has from another node."""


@dataclass(frozen=True, slots=True)
class PromptChoices:
    """One prompt, to which at least one choice is wanted."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    """The sampling parameters of all choices. Each choice has its own seed in place of this one."""
    choices: tuple[WantedChoice, ...]


class EngineState(enum.Enum):
    """``STARTING`` → ``READY`` → ``STOPPED``; from any of the first two to ``LOST``, which is final."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"
    LOST = "lost"


class EngineClient:
    """Owns the child process, the socket and its folder. ``stop`` frees all of it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        silence_s: float = LivenessConfig().silence_ms / 1000,
    ) -> None:
        """Raises ConfigError if the engine's socket cannot be made. Its loops may be silent for ``silence_s``."""
        self._config = config
        self._command = command
        self._silence_s = silence_s
        self._max_open = config.scheduler.max_waiting
        """How many requests may be open. A ready engine's places come on top."""
        self._loop = asyncio.get_running_loop()
        self._state = EngineState.STARTING
        self._ids = itertools.count(1)
        self._open: dict[int, Generation] = {}
        self._unfinished: Counter[Generation] = Counter()
        """How many engine requests are open, for each generation that has any."""
        self._readers = BatchNotify(config.stream.notify_size)
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = asyncio.Event()
        """Set while ``_idle`` is not."""
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._lost: asyncio.Future[EngineError] = self._loop.create_future()
        self._heard = self._loop.time()
        self._folder = folder_of(SOCKET_NAME, prefix="pdserve-")
        self._address = f"ipc://{self._folder.name}/engine"
        self._channel = EngineChannel(self._address, self._handle, self._lose)
        self._loops = loop_names(config.parallel.tensor_parallel_size)
        self._life = LifeBoard.create(len(self._loops))
        self._process: ChildProcess | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._renewed: Renew | None = None
        self._questions = itertools.count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}
        """Who waits for stats, by the number of the question."""
        self._meetings = 0
        self._on_met: Callable[[], None] = lambda: None
        self.stats = EngineStats()
        self.on_part: Callable[[TimelinePart], None] = lambda _: None
        """Gets what the engine remembers of each request that has ended."""

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> EngineError | None:
        """Why the engine is lost; None if it is not."""
        return self._lost.result() if self._lost.done() else None

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """The process id of the engine; None before it runs."""
        return self._process.pid if self._process else None

    def renew(self, secret: bytes) -> None:
        """Lets the engine sign with this cluster secret from now on, or from its start on."""
        self._renewed = Renew(secret)
        if self._state is EngineState.READY:
            self._channel.send(self._renewed)

    def assign(self, role: Role) -> None:
        """Tells the engine the node's new role."""
        if self._state is EngineState.READY:
            self._channel.send(Assign(role))

    def meet(self, nodes: Sequence[PrefillTarget], met: Callable[[], None]) -> None:
        """Has the engine connect to ``nodes``, and calls ``met`` when it has, but for those that it cannot reach.

        A later call takes the place of this one. Nothing bounds how long an engine takes.
        """
        self._meetings += 1
        self._on_met = met
        if self._state is EngineState.READY:
            self._channel.send(Meet(self._meetings, tuple(nodes)))

    async def start(self) -> Ready:
        """Starts the engine and returns when it takes requests.

        Raises EngineError, with the engine's own words where it had any.
        """
        launch, shared = EngineLaunch(self._address, self._life.descriptor, self._config), (self._life.descriptor,)
        name = "the engine process"
        try:
            # A session of its own: Ctrl-C in a terminal reaches this process only, which drains first.
            process = ChildProcess(name, self._command, launch=launch, pass_fds=shared, own_session=True)
        except OSError as exc:
            raise EngineError(f"cannot start the engine process: {exc}") from exc
        self._process = process
        self._watchers = [asyncio.create_task(watch) for watch in (self._watch_end(process), self._watch_life(process))]
        while self._state is EngineState.STARTING:
            left_s = self._heard + START_SILENCE_S - self._loop.time()
            news: list[asyncio.Future[Any]] = [self._ready, self._lost]
            await asyncio.wait(news, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
            if self._state is EngineState.STARTING and self._loop.time() >= self._heard + START_SILENCE_S:
                self._lose(EngineError(f"the engine was silent for {START_SILENCE_S:.0f} s while it started"))
        if self._lost.done():
            raise self._lost.result()
        return self._ready.result()

    def open(self, prompts: Sequence[PromptChoices], terms: Terms, pace: ReadPace = EACH_TOKEN) -> Generation:
        """Submits all ``prompts``; the caller owns the result and must close it. Without any prompt it has no outputs.

        The engine asks the holders that ``terms`` name for blocks of the prompts and of what was emitted. Where the
        terms are ``fetch_only``, nothing is computed: each choice ends, with ``FinishReason.LENGTH``, when the prefix
        cache has what they have. Where they are ``movable``, the engine may ask the result to have the prompts go on
        at a node with more free blocks.

        Raises Unavailable if the engine is not there, or has too many requests already, and InvalidRequest if these
        are more than it ever takes.
        """
        if self._state is not EngineState.READY:
            raise Unavailable(
                f"the engine is {self._state.value}", code="engine_unavailable", retry_after_s=RETRY_AFTER_S
            )
        wanted = [choice for prompt in prompts for choice in prompt.choices]
        self._check_capacity(len(wanted))
        local_ids = [next(self._ids) for _ in wanted]
        numbers = {local_id: choice.index for local_id, choice in zip(local_ids, wanted, strict=True)}
        generation = Generation(numbers, terms.deadline_s, self._abort, pace)
        unused = iter(local_ids)
        for prompt in prompts:
            family = [ChildRequest(next(unused), choice.seed, choice.emitted) for choice in prompt.choices]
            parent, *children = family
            self._open.update((member.local_id, generation) for member in family)
            self._unfinished[generation] += len(family)
            self._note_idle()
            submit = Submit(
                local_id=parent.local_id,
                uuid=new_id(),
                group_id=local_ids[0],
                token_ids=list(prompt.token_ids),
                sampling=msgspec.structs.replace(prompt.sampling, seed=parent.seed),
                emitted=parent.emitted,
                children=tuple(children),
                terms=terms,
            )
            if not self._channel.send(submit):
                generation.close()
                raise Unavailable("the engine is gone", code="engine_unavailable", retry_after_s=RETRY_AFTER_S)
        return generation

    def _check_capacity(self, count: int) -> None:
        """Raises InvalidRequest or Unavailable if ``count`` answers are too many, for this node or for now.

        First answers and further ones (prompts times ``n``) are counted apart, so that a request for hundreds of
        answers takes no place of those who want one.
        """
        if count - 1 > self._max_open:
            raise InvalidRequest(
                f"prompts times 'n' may be at most {self._max_open + 1} on this node; {count} were asked for", param="n"
            )
        if not count:
            return
        further = self.open_requests - len(self._unfinished)
        if len(self._unfinished) >= self._max_open or further + count - 1 > self._max_open:
            raise Unavailable("too many requests are waiting", code="overloaded", retry_after_s=RETRY_AFTER_S)

    async def wait_lost(self) -> EngineError:
        """Waits until the engine has failed or died, and returns why."""
        return await asyncio.shield(self._lost)

    async def wait_idle(self, quiet_s: float = 0.0) -> None:
        """Waits until no request is open. A prefill node, with requests of other engines, waits until it holds none.

        If there are any now, it waits until there have been none for ``quiet_s``. An engine with peers is asked each
        time: within a step it says nothing of what has come since. This never returns if that engine never answers.
        """
        await self._refresh_stats()
        while self._busy.is_set():
            await self._idle.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(quiet_s):
                    await self._busy.wait()
            await self._refresh_stats()

    async def _refresh_stats(self) -> None:
        """Waits until ``stats`` count all prompts of other nodes that had come to the engine before this call."""
        if not self._config.has_peers:
            return
        number = next(self._questions)
        told = self._asked[number] = self._loop.create_future()
        try:
            self._channel.send(AskStats(number))
            await told
        finally:
            del self._asked[number]

    def fail_open(self, failure: RequestError) -> None:
        """Ends every open request with this error."""
        for generation in list(self._unfinished):
            generation.fail(failure)
        self._abort(list(self._open))

    async def stop(self, timeout_s: float) -> None:
        """Asks the engine to end, kills it after ``timeout_s``, and frees everything."""
        asked = self._state is EngineState.READY and self._channel.send(Shutdown())
        grace_s = timeout_s if asked else LAST_WORDS_S if self._state is EngineState.LOST else 0.0
        if self._state is not EngineState.LOST:
            self._state = EngineState.STOPPED
        try:
            if self._process is not None:
                await self._process.end(grace_s)
        finally:
            for watcher in self._watchers:
                watcher.cancel()
            await asyncio.gather(*self._watchers, return_exceptions=True)
            self.fail_open(shutting_down())
            self._channel.close()
            self._folder.cleanup()
            self._life.close()

    # ---------------------------------------------------------------- from the engine

    def _handle(self, message: FromEngine) -> None:
        self._heard = self._loop.time()
        match message:
            case StepOutput(outputs):
                self._hand_out(outputs)
            case MoveWanted(local_id, tokens):
                if generation := self._open.get(local_id):
                    generation.want_move(tokens)
            case Stats(stats, asked):
                self.stats = stats
                self._note_idle()
                for number, told in self._asked.items():
                    if number <= asked and not told.done():
                        told.set_result(None)
            case Met(number):
                if number == self._meetings:
                    self._on_met()
            case Recorded(parts):
                for part in parts:
                    self.on_part(part)
            case Starting(stage):
                log.info("engine: %s", stage)
            case Ready():
                self._become_ready(message)
            case EngineFailed(text):
                self._lose(EngineError(text))

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if generation := self._open.get(output.local_id):
                if output.finish is not None:
                    self._forget(output.local_id)
                if generation.put(output):
                    self._readers.add(generation)
        self._readers.notify()

    def _become_ready(self, ready: Ready) -> None:
        if self._state is EngineState.STARTING:
            self._state = EngineState.READY
            # The engine is connected and needs the socket's name no more. Now not even a SIGKILL leaves a file behind.
            self._folder.cleanup()
            if self._renewed is not None:
                self._channel.send(self._renewed)
            self._max_open += ready.max_running
            self._ready.set_result(ready)

    def _lose(self, error: EngineError) -> None:
        if self._state in (EngineState.LOST, EngineState.STOPPED):
            return
        self._state = EngineState.LOST
        self._lost.set_result(error)
        self.fail_open(EngineGone("the engine of this node failed", code="engine_error"))

    async def _watch_end(self, process: ChildProcess) -> None:
        await process.wait()
        await self._channel.last_words(LAST_WORDS_S)
        self._lose(EngineError(process.describe_end()))

    async def _watch_life(self, process: ChildProcess) -> None:
        """Ends an engine of which a loop hangs: nothing else notices that it is stopped, or waits for ever."""
        await asyncio.wait([self._ready])
        watch = LifeWatch(self._life, self._loops, self._silence_s, motion_of)
        hanging = None
        while hanging is None:
            await asyncio.sleep(watch.every_s)
            hanging = watch.hanging()
        self._lose(EngineError(f"{hanging} hangs: no sign of life for {self._silence_s:.1f} s"))
        # The end breaks its connections to other nodes, which would wait for their leases otherwise.
        process.kill()

    # ---------------------------------------------------------------- bookkeeping

    def _abort(self, local_ids: Sequence[int]) -> None:
        known = [local_id for local_id in local_ids if local_id in self._open]
        for local_id in known:
            self._forget(local_id)
        if known:
            self._channel.send(Abort(known))

    def _forget(self, local_id: int) -> None:
        generation = self._open.pop(local_id)
        self._unfinished[generation] -= 1
        if not self._unfinished[generation]:
            del self._unfinished[generation]
        self._note_idle()

    def _note_idle(self) -> None:
        load = self.stats.load
        # Other nodes' prompts, which no client of this node waits for, count too.
        busy = self._config.has_peers and load.running + load.waiting + self.stats.queue.pushing > 0
        if self._open or busy:
            self._idle.clear()
            self._busy.set()
        else:
            self._busy.clear()
            self._idle.set()


DRAIN_AT_ONCE = 64
"""The number of messages that are handled before other tasks get a turn."""


class EngineChannel:
    """The private socket to the engine, a bound ZMQ PAIR.

    Sending is synchronous, so that a cancelled task can still send an abort on its way out.
    """

    def __init__(
        self, address: str, on_message: Callable[[FromEngine], None], on_garbage: Callable[[EngineError], None]
    ) -> None:
        """Raises ConfigError if the socket cannot be made."""
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        # Unlimited queues: what can be in them is bounded by how many requests the client opens.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            bind(self._socket, address, SOCKET_NAME)
        except ConfigError:
            self._socket.close()
            self._context.term()
            raise
        self._news = asyncio.Event()
        self._fd = cast("int", self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._hear)

    def send(self, message: ToEngine) -> bool:
        """Sends ``message``. Returns False if there is no engine (any more) to take it."""
        if self._socket.closed:
            return False
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # ZMQ's descriptor signals edges only, and sending may have swallowed one.
        self._loop.call_soon(self._drain)
        return True

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close()
            self._context.term()

    async def last_words(self, within_s: float) -> None:
        """Handles all that a process has sent that has ended.

        The kernel may still have a part of it when the process is gone. ZMQ reads the end of the connection behind it,
        and takes nothing to send any more then.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._socket.closed and self._socket.poll(0, zmq.POLLOUT):
                    self._news.clear()
                    if not self._drain():
                        await self._news.wait()
        while self._drain():
            pass

    def _hear(self) -> None:
        self._news.set()
        self._drain()

    def _drain(self) -> bool:
        """Handles what has arrived, at most ``DRAIN_AT_ONCE`` messages. Returns whether there may be more."""
        for _ in range(DRAIN_AT_ONCE):
            if self._socket.closed:
                return False
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._handle(frame)
        self._loop.call_soon(self._drain)
        return True

    def _handle(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            self._on_garbage(EngineError(f"the engine sent a message that is none: {exc}"))
            return
        self._on_message(message)
