"""Runs a node's API process: starts engine, HTTP server and registration in this order, and ends them in reverse."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import uvloop

from pdserve.api.generation.engine_client import ENGINE_COMMAND, EngineClient
from pdserve.api.generation.request_log import shutting_down
from pdserve.api.message.formats import formats_of
from pdserve.api.node.commands import CommandGate, NodeCommands, is_confined
from pdserve.api.node.node_metrics import MetricsScale, NodeMetrics
from pdserve.api.node.registration import Registration
from pdserve.api.node.serving_node import NodePhase, ServingNode, TicketGate
from pdserve.api.replay.replayable_answers import UNREAD_SHARE, ReplayableAnswers, ReplayLimits, ReplayMetrics
from pdserve.api.requests.grammar_check import GrammarCheck
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.api.routes.app import create_app
from pdserve.config import DrainMode, EngineConfig, NodeConfig
from pdserve.control.frame import Secrets
from pdserve.errors import PdserveError
from pdserve.http.server import HttpServer, bind, url_of
from pdserve.log_format import name_node
from pdserve.machine.memory import give_freed_memory_back, give_large_blocks_back
from pdserve.metrics import BuildInfo, ProcessMetrics, installed
from pdserve.models.checkpoint.gguf.file import forget_gguf
from pdserve.models.checkpoint.weight_form import weights_words
from pdserve.process import set_up_logging, share_interpreter
from pdserve.settings import is_loopback
from pdserve.signals import Reread, StopSignals, on_hangup, stop_signals
from pdserve.tracing.tracing import SpanCounts, Tracing
from pdserve.wire.discovery import Capacity, NodeInfo, NodeLoad, NodeSizes, Role
from pdserve.wire.engine import Ready
from pdserve.wire.ids import new_id
from pdserve.wire.version import INSTALLED_VERSION, SPOKEN

log = logging.getLogger(__name__)

ENGINE_STOP_S = 5.0
DEREGISTER_S = 2.0
MOVED_S = 1.0
"""A node that drains stays for so long after its last stream has moved, whose last blocks the new node fetches."""
EXIT_OK = 0
EXIT_FAILED = 1

T = TypeVar("T")


def serve(
    role: Role,
    config: NodeConfig,
    secret: bytes,
    model_dir: Path,
    cache_dir: Path,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    read_secret: Callable[[], bytes] | None = None,
) -> int:
    """Runs one node until SIGTERM or SIGINT. Returns the exit status: 0 after a drain, 1 if anything failed.

    On SIGHUP it calls ``read_secret`` for the secret from then on.
    """
    set_up_logging(config.log, "api", node=config.discovery.name)
    share_interpreter()
    give_large_blocks_back()
    node = NodeServer(role, config, secret, model_dir, cache_dir, engine_command, read_secret)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(node.run())
    except PdserveError as exc:
        log.error("%s", exc)
        return EXIT_FAILED


def answers_hash(config: NodeConfig, chat_template: str) -> str:
    """Returns a hash of the settings that decide which requests a node takes, and how it answers them."""
    limits = (config.http.max_body_bytes, config.model.max_model_len)
    parts = (config.message, config.grammar, config.request, config.scheduler, config.stream, config.replay, limits)
    return hashlib.blake2b(f"{parts} {chat_template}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeServer:
    """The settings that one node is made from."""

    role: Role
    config: NodeConfig
    secret: bytes
    model_dir: Path
    cache_dir: Path
    engine_command: Sequence[str]
    read_secret: Callable[[], bytes] | None = None

    async def run(self) -> int:
        """Raises PdserveError if the node cannot start, or its engine dies."""
        with stop_signals() as signals, bind(self.config.http) as listener, ExitStack() as stack:
            boot_id, secrets = new_id(), Secrets(self.secret)
            engine = EngineClient(
                self._engine_config(boot_id),
                command=self.engine_command,
                silence_s=self.config.liveness.silence_ms / 1000,
            )
            if self.read_secret is not None:
                stack.enter_context(on_hangup(partial(_renew, self.read_secret, secrets, engine)))
            try:
                started = await _unless(signals.drain, self._start(engine))
                if started is not None:
                    await self._serve(engine, *started, boot_id, listener, signals, secrets)
            finally:
                await engine.stop(ENGINE_STOP_S)
        return EXIT_OK

    async def _start(self, engine: EngineClient) -> tuple[Ready, Tokenizer]:
        # A prefill node has a tokenizer too: it may become a decode node at any time.
        starting = asyncio.create_task(engine.start())
        loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, self.model_dir, self.cache_dir))
        try:
            await asyncio.wait([starting, loading], return_when=asyncio.FIRST_EXCEPTION)
            if loading.done() and (error := loading.exception()) is not None:
                raise error
            return await starting, await loading
        finally:
            starting.cancel()
            loading.cancel()
            await asyncio.gather(starting, loading, return_exceptions=True)

    async def _serve(
        self,
        engine: EngineClient,
        ready: Ready,
        tokenizer: Tokenizer,
        boot_id: bytes,
        listener: socket.socket,
        signals: StopSignals,
        secrets: Secrets,
    ) -> None:
        url = self.config.http.advertise.rstrip("/") or url_of(listener, wildcard=socket.gethostname())
        info = self._info(ready, tokenizer, boot_id, url)
        kept, places = self.config.replay, ready.max_running // UNREAD_SHARE
        replayable = ReplayableAnswers(ReplayLimits(kept.answers, kept.memory_mib * 2**20, kept.keep_s, places))
        name_node(info.name)
        spans = SpanCounts("pdserve")
        grammars = GrammarCheck(self.model_dir, self.config.grammar, cache_dir=self.cache_dir)
        metrics = self._metrics(info, engine, ready, replayable, spans, grammars)
        registering = self._registration(info, engine, metrics, secrets)
        state = self._state(info, engine, ready, tokenizer, metrics, grammars, registering, secrets, replayable)
        engine.on_part = state.keep_engine_part
        commands, commanded = None, asyncio.Event()
        if registering is not None:
            gate = CommandGate(secrets, boot_id)
            confined = is_confined(self.role, self.config.transfer, self.config.discovery)
            commands = NodeCommands(state, gate, registering.announce, commanded.set, confined=confined)
        http = HttpServer(create_app(state, commands), listener, self.config.http)
        forget_gguf()
        # The present objects live as long as the process. To search them for garbage would delay tokens.
        gc.collect()
        gc.freeze()
        give_freed_memory_back()  # what loading has left free below what is in use
        described = {"pdserve.process": "node", "pdserve.node": info.name}
        async with state.tracing.exporting(described, spans):
            serving = await http.start()
            registration = asyncio.create_task(_registered(registering), name="registration")
            try:
                for line in state.sizes.lines:
                    log.info("%s", line)
                log.info("pdserve %s listening url=%s", self.role.value, url)
                drains = _first(signals.drain.wait(), commanded.wait())
                await _first(drains, engine.wait_lost(), _ended(serving), _ended(registration))
                state.phase = NodePhase.DRAINING
                state.replayable.drain()
                if not (signals.drain.is_set() or commanded.is_set()):
                    await _cancelled(registration)
                    self._raise_failure(engine, registration)
                if registering is not None and self.config.discovery.drain is DrainMode.MIGRATE:
                    registering.drain()
                    await self._drain(engine, signals, MOVED_S)
                else:
                    await _cancelled(registration)
                    await self._drain(engine, signals)
                if engine.failure is not None:
                    raise engine.failure
            finally:
                state.phase = NodePhase.DRAINING
                await _cancelled(registration)
                engine.fail_open(shutting_down())
                await http.stop()
                state.preparer.close()
                state.grammars.close()

    async def _drain(self, engine: EngineClient, signals: StopSignals, quiet_s: float = 0.0) -> None:
        """Waits until nothing runs, and nothing has for ``quiet_s`` if anything ran in the beginning."""
        drain_s = self.config.http.drain_s
        log.info(
            "draining: what runs has %.1f s to finish%s", drain_s, ", or to move to other nodes" if quiet_s else ""
        )
        try:
            async with asyncio.timeout(drain_s):
                await _first(engine.wait_idle(quiet_s), signals.hurry.wait(), engine.wait_lost())
        except TimeoutError:
            log.warning("drain: not everything finished in time")

    def _raise_failure(self, engine: EngineClient, registration: asyncio.Task[None]) -> None:
        if registration.done() and not registration.cancelled() and (error := registration.exception()) is not None:
            raise error
        if engine.failure is None:
            raise PdserveError("the HTTP server ended by itself")

    def _registration(
        self, info: NodeInfo, engine: EngineClient, metrics: NodeMetrics, secrets: Secrets
    ) -> Registration | None:
        """Returns the registration at the proxies, or None for a node that clients talk to directly."""
        discovery = self.config.discovery
        if not discovery.proxies:
            if not is_loopback(self.config.http.host):
                log.warning(
                    "whoever reaches this node may use it, because --host is %s and a node takes no API keys: put a "
                    "proxy with --api-key-file before it, or say --host 127.0.0.1",
                    self.config.http.host,
                )
            return None
        for warning in out_of_reach(info, discovery.proxies):
            log.warning("%s", warning)

        def load() -> NodeLoad:
            return msgspec.structs.replace(engine.stats.load, gaps=metrics.requests.gaps)

        return Registration(
            info,
            discovery.proxies,
            secrets,
            discovery.heartbeat_ms,
            load,
            resolve_s=discovery.resolve_s,
            meet=engine.meet,
        )

    def _engine_config(self, boot_id: bytes) -> EngineConfig:
        config = self.config
        return EngineConfig(
            role=self.role,
            boot_id=boot_id,
            secret=self.secret,
            model_dir=str(self.model_dir),
            cache_dir=str(self.cache_dir),
            model=config.model,
            cache=config.cache,
            scheduler=config.scheduler,
            transfer=config.transfer,
            cpu=config.cpu,
            log=config.log,
            targets=config.targets,
            parallel=config.parallel,
            stream=config.stream,
            has_peers=bool(config.discovery.proxies),
            node=config.discovery.name,
            records=config.trace.records,
        )

    def _info(self, ready: Ready, tokenizer: Tokenizer, boot_id: bytes, url: str) -> NodeInfo:
        return NodeInfo(
            protocol=SPOKEN.newest,
            oldest_protocol=SPOKEN.oldest,
            name=self.config.discovery.name or f"{self.role.value}-{url.partition('://')[2]}",
            boot_id=boot_id,
            role=self.role,
            url=url,
            control=ready.control,
            model=self.config.model.served_model_name or self.model_dir.name,
            fingerprint=ready.fingerprint,
            capacity=Capacity(
                max_running=ready.max_running,
                num_blocks=ready.num_blocks,
                block_size=ready.block_size,
                max_model_len=ready.max_model_len,
                groups=ready.cache_groups,
            ),
            kernels=ready.kernels,
            version=INSTALLED_VERSION,
            compute=ready.compute,
            answers=answers_hash(self.config, tokenizer.chat_template or ""),
            formats=formats_of(tokenizer.chat_template, self.config.message).label,
        )

    def _state(
        self,
        info: NodeInfo,
        engine: EngineClient,
        ready: Ready,
        tokenizer: Tokenizer,
        metrics: NodeMetrics,
        grammars: GrammarCheck,
        registration: Registration | None,
        secrets: Secrets,
        replayable: ReplayableAnswers,
    ) -> ServingNode:
        return ServingNode(
            name=info.name,
            role=self.role,
            model=info.model,
            engine=engine,
            ready=ready,
            sizes=self._sizes(info.model, ready),
            tokenizer=tokenizer,
            tickets=TicketGate(secrets, info.boot_id) if self.config.discovery.proxies else None,
            metrics=metrics,
            timeout_s=self.config.request.timeout_s,
            max_body_bytes=self.config.http.max_body_bytes,
            stream=self.config.stream,
            formats=formats_of(tokenizer.chat_template, self.config.message),
            grammars=grammars,
            prefix_cache=self.config.cache.prefix_cache,
            tracing=Tracing(self.config.trace),
            replayable=replayable,
            unaccepted=lambda: None if registration is None else registration.unaccepted,
            connecting=lambda: registration is not None and registration.connecting,
        )

    def _sizes(self, model: str, ready: Ready) -> NodeSizes:
        return NodeSizes(
            model=model,
            format=weights_words(self.model_dir, self.config.model, on_gpu=ready.compute is None),
            device=ready.device,
            kernels=ready.kernels.partition(",")[0],
            ranks=self.config.parallel.tensor_parallel_size,
            kv_mib=round(ready.kv_bytes / 2**20),
            kv_tokens=ready.num_blocks * ready.block_size,
            context=ready.max_model_len,
            places=ready.max_running,
            step_tokens=ready.step_tokens,
        )

    def _metrics(
        self,
        info: NodeInfo,
        engine: EngineClient,
        ready: Ready,
        replayable: ReplayableAnswers,
        spans: SpanCounts,
        grammars: GrammarCheck,
    ) -> NodeMetrics:
        own = {"api": os.getpid(), **ready.process_ids}

        def processes() -> dict[str, int]:
            pid = grammars.process_id
            return own if pid is None else {**own, "grammars": pid}

        build = BuildInfo(
            torch=installed("torch"), ucx=ready.ucx, transports=self.config.transfer.ucx_tls, kernels=ready.kernels
        )
        scale = MetricsScale(self.config.request.timeout_s, ready.max_model_len)
        others = (ProcessMetrics(processes), build, ReplayMetrics(replayable), spans)
        return NodeMetrics(lambda: engine.stats, info.model, scale, self.config.metrics.names, others)


async def _registered(registration: Registration | None) -> None:
    """Keeps the node registered for as long as it runs."""
    if registration is None:
        await asyncio.Event().wait()
    else:
        await registration.run()


def _renew(read_secret: Callable[[], bytes], secrets: Secrets, engine: EngineClient) -> Reread:
    before, secret = secrets.lines, read_secret()
    secrets.renew(secret)
    engine.renew(secret)
    return Reread(f"{len(secrets.lines)} cluster secret(s)", secrets.lines != before)


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Waits until one of ``waits`` is over, and cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of ``work``, or None if ``event`` came first and ``work`` was cancelled."""
    task = asyncio.ensure_future(work)
    await _first(event.wait(), _ended(task))
    if not task.done():
        await _cancelled(task)
        return None
    return task.result()


async def _ended(task: asyncio.Task[Any]) -> None:
    """Waits until the task has ended, in any way. If the wait is cancelled, the task goes on."""
    await asyncio.wait([task])


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancels the task and waits for its end, for at most ``DEREGISTER_S``."""
    task.cancel()
    await asyncio.wait([task], timeout=DEREGISTER_S)


def out_of_reach(node: NodeInfo, proxies: Sequence[str]) -> list[str]:
    """Returns a warning for each address of the node on loopback, if a proxy has an address that is not there."""
    elsewhere = [proxy for proxy in proxies if not is_loopback(_host(proxy))]
    if not elsewhere:
        return []
    found = []
    if is_loopback(_host(node.url)):
        found.append(
            f"proxies will send requests to {node.url}, which only this machine reaches, and {elsewhere[0]} may be on "
            "another: give --host (0.0.0.0 is all addresses), and --advertise if they know this machine by another name"
        )
    if node.role.prefills and is_loopback(_host(node.control)):
        found.append(
            f"decode nodes will fetch KV blocks from {node.control}, which only this machine reaches: give "
            "--transfer-host, and --transfer-advertise if they know this machine by another name"
        )
    return found


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""
