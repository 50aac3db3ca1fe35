"""``pdserve up`` runs a whole cluster on this machine, in real processes."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import signal
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from pdserve.cli.chat.server import Access, AskFailed, Server, ask, latency_line
from pdserve.cli.servers import check_http
from pdserve.cli.start_checks import check_model, check_positions
from pdserve.cli.up.cluster import LocalCluster, child_environ, plan_nodes
from pdserve.cli.up.kernel_compiler import compiling_kernels, may_have_gpu
from pdserve.cli.up.output import Console, server_logs
from pdserve.compiled_library import Compiling
from pdserve.config import HttpConfig, LogLevel, NodeConfig, ProxyConfig, Switch, UpConfig
from pdserve.http.tls import trusting_only
from pdserve.hub.finding import find_model, with_found_draft_model
from pdserve.machine.core_ledger import private_ledger
from pdserve.machine.core_share import cores_within, cpu_quota
from pdserve.machine.memory import MIB, available_memory
from pdserve.models.sizes import GPU_SHARE
from pdserve.process import ChildDied
from pdserve.serving import ClusterReport
from pdserve.settings import cache_folder, load, load_with_file, resolve_secret, state_folder, with_current_names
from pdserve.signals import ended_in_order, stop_signals
from pdserve_proxy.credentials import ApiKeys, read_admin_keys, read_api_keys
from pdserve_proxy.status.access import StatusAccess

PROXY_BYTES = 256 * MIB
"""What the proxy and this process take."""
_REMEMBERED_STARTS = 32
_APART_S = 0.5
"""Some senders signal both a process and its group, so a second signal that comes this soon counts as the first one."""
_DESCRIPTION = (
    "Starts a proxy and nodes as separate processes, divides the cores between the nodes, and stops all in order. "
    "Settings of nodes and proxy that are not listed here can be given in the environment or the file of --config."
)


def run(argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "pdserve up") -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP, or until the answer to ``--ask``; returns the exit status."""
    environ = with_current_names(environ)
    config, file = load_with_file(UpConfig, argv, environ, prog=prog, description=_DESCRIPTION)
    check_http(config.http)
    secret = _secret(config, environ)
    cache_dir = cache_folder(environ)
    node = load(NodeConfig, [], child_environ(config, environ, secret, file), prog="pdserve decode")
    with ended_in_order(), compiling_kernels(node, cache_dir) as compiling, private_ledger() as ledger:
        found = find_model(config.model, environ)
        name = config.model.served_model_name or found.name
        config = replace(config, model=replace(config.model, path=str(found.path), served_model_name=name))
        config = replace(config, scheduler=with_found_draft_model(config.scheduler, config.model, environ))
        config = _fitted(config, node, found.path)
        inherited = child_environ(config, environ, secret, file, ledger)
        access = _Access(api_key(inherited), proxy_tls(inherited), status_is_shown(inherited, config.http))
        with _console(config, environ) as console:
            times = StartTimes(cache_dir)
            return asyncio.run(_serve(config, inherited, access, console, compiling, times))


def serve(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs ``pdserve serve``, which is ``pdserve up`` by the name that other servers have for it."""
    return run(argv, environ, prog="pdserve serve")


@contextmanager
def _console(config: UpConfig, environ: Mapping[str, str]) -> Iterator[Console]:
    """Yields a console that prints warnings and errors of all processes, and has files keep all that they write.

    With ``--verbose``, or where no file can be written, it prints everything.
    """
    terminal = sys.stderr.isatty() and environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
    colour = terminal and "NO_COLOR" not in environ
    level = config.log.level
    with ExitStack() as stack:
        if config.cluster.verbose is Switch.ON:
            yield Console(sys.stderr, colour=colour, level=level)
            return
        folder = state_folder(environ) / "logs"
        try:
            logs = stack.enter_context(server_logs(folder, lambda text: console.say(text)))
        except OSError as exc:
            console = Console(sys.stderr, colour=colour, level=level)
            console.say(f"all lines are printed, because they cannot be written to {folder}: {exc.strerror}")
            yield console
            return
        console = Console(
            sys.stderr, colour=colour, level=_quieter(level), keep=logs.write, terminal=terminal, logs=str(logs.folder)
        )
        console.say(f"logs: {logs.folder}")
        yield console


def _fitted(config: UpConfig, node: NodeConfig, model: Path) -> UpConfig:
    """Returns ``config`` with each node's part of this machine's memory, from which nodes choose their sizes.

    Raises ConfigError or ModelError if the model or the context that is asked for cannot be had.
    """
    cache, nodes = config.cache, config.cluster.prefill + config.cluster.decode + config.cluster.mixed
    available = available_memory()
    # 0 means that nobody knows.
    left = max(nodes * MIB, available - PROXY_BYTES) if available else 0
    if not cache.gpu_memory_utilization and not cache.kv_cache_mib:
        # All nodes of one machine compute on the same GPUs.
        share = math.floor(1000 * GPU_SHARE / nodes) / 1000
        part = cache.node_memory_mib or left // nodes // MIB
        cache = replace(cache, gpu_memory_utilization=share, node_memory_mib=part)
    if may_have_gpu(node):
        check_positions(model, config.model)
    else:
        ranks = config.parallel.tensor_parallel_size
        part, draft_model = cache.node_memory_mib * MIB or left, config.scheduler.used_draft_model
        check_model(model, config.model, cache, node.cpu.kernels, ranks, left, part, draft_model)
    return replace(config, cache=cache)


def _quieter(level: LogLevel) -> LogLevel:
    return LogLevel.WARNING if level in (LogLevel.DEBUG, LogLevel.INFO) else level


@dataclass(frozen=True, slots=True)
class _Access:
    """What the proxy requires of its clients."""

    key: str = field(repr=False)
    """The API key; empty if the proxy requires none."""
    tls: ssl.SSLContext | None
    """The TLS context of requests to the proxy; None if it serves HTTP."""
    shows_status: bool
    """Whether it has a status page."""


def api_key(environ: Mapping[str, str]) -> str:
    """Returns a key that a proxy with these settings accepts; empty if it requires none. Raises ConfigError."""
    keys = read_api_keys(load(ProxyConfig, [], environ, prog="pdserve proxy").admission)
    return keys[0].key if keys else ""


def status_is_shown(environ: Mapping[str, str], http: HttpConfig) -> bool:
    """Returns whether a proxy with these settings, at the address of ``http``, shows its status. Raises ConfigError."""
    config = load(ProxyConfig, [], environ, prog="pdserve proxy")
    keys, admins = ApiKeys(read_api_keys(config.admission)), ApiKeys(read_admin_keys(config.status))
    return StatusAccess(config.status.page, http, keys, admins).shown


def proxy_tls(environ: Mapping[str, str]) -> ssl.SSLContext | None:
    """Returns the TLS context for a proxy with these settings on this machine; None without HTTPS. Raises ConfigError.

    The proxy's certificate may be for another name than the loopback address, and this machine may not know its
    authority.
    """
    certificate = load(ProxyConfig, [], environ, prog="pdserve proxy").tls.cert
    return trusting_only(certificate) if certificate else None


def _secret(config: UpConfig, environ: Mapping[str, str]) -> str:
    """Returns the user's secret, or a new one that only this cluster knows."""
    if config.security.secret or config.security.secret_file:
        return resolve_secret(config.security, [], state_folder(environ)).decode()
    return secrets.token_hex(32)


async def _serve(
    config: UpConfig,
    environ: Mapping[str, str],
    access: _Access,
    console: Console,
    compiling: Callable[[], Compiling | None],
    times: StartTimes,
) -> int:
    what = _what_starts(config)
    cluster = LocalCluster(console, config.http, access.tls, compiling, times.expected(what))
    with stop_signals(signal.SIGHUP, apart_s=_APART_S) as signals:
        started = partial(times.note, what)
        work = asyncio.create_task(_work(cluster, config, environ, access, console, started))
        stop = asyncio.create_task(signals.drain.wait())
        try:
            await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return 130 if config.cluster.ask else 0
        finally:
            # From here on, every signal means to hurry.
            signals.drain.set()
            work.cancel()
            stop.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            await _stop(cluster, config.http.drain_s, signals.hurry, console)


async def _stop(cluster: LocalCluster, drain_s: float, hurry: asyncio.Event, console: Console) -> None:
    """Stops the cluster, or kills it as soon as ``hurry`` is set."""
    stopping = asyncio.create_task(cluster.stop(drain_s))
    hurrying = asyncio.create_task(hurry.wait())
    await asyncio.wait([stopping, hurrying], return_when=asyncio.FIRST_COMPLETED)
    if hurry.is_set():
        console.say("killing")
        await cluster.kill()
    hurrying.cancel()
    await stopping


def _what_starts(config: UpConfig) -> str:
    """Returns what decides how long a start takes: the model, its form and the nodes."""
    cluster, model = config.cluster, config.model
    nodes = f"{cluster.prefill}+{cluster.decode}+{cluster.mixed}x{config.parallel.tensor_parallel_size}"
    return f"{model.path} {model.dtype.value} {model.weights.value} {model.device.value} {nodes}"


async def _work(
    cluster: LocalCluster,
    config: UpConfig,
    environ: Mapping[str, str],
    access: _Access,
    console: Console,
    started: Callable[[float], None],
) -> int:
    nodes = plan_nodes(config.cluster, _cores(console))
    try:
        async with asyncio.timeout(config.cluster.startup_timeout_s):
            await cluster.start(nodes, environ)
        if not cluster.compiled:
            started(console.elapsed_s)
        if config.cluster.ask:
            return await _ask(cluster.url, config, access, console)
    except TimeoutError:
        console.say(f"not ready after {config.cluster.startup_timeout_s:.0f} s; giving up")
        return 1
    except (ChildDied, AskFailed) as error:
        console.say(str(error))
        return 1
    if config.cluster.ready_json is Switch.ON:
        report = partial(_report, cluster, config.model.served_model_name, console.logs)
        report()
        console.say(await cluster.watch(report))
    else:
        _welcome(cluster.url, config.model.served_model_name, access)
        console.say(await cluster.watch())
    return 1


def _report(cluster: LocalCluster, model: str, logs: str) -> None:
    report = ClusterReport(cluster.url, model, logs, cluster.nodes)
    # Somebody may have read the first line and no more.
    with suppress(OSError):
        print(msgspec.json.encode(report).decode(), flush=True)


def _cores(console: Console) -> list[int]:
    """Returns the cores for the nodes: no more than the control group has CPU time for."""
    allowed, quota = sorted(os.sched_getaffinity(0)), cpu_quota()
    cores = cores_within(allowed, quota, secrets.randbelow(len(allowed)))
    if len(cores) < len(allowed):
        console.say(
            f"the control group has {quota:g} cores of CPU time: the nodes divide {','.join(map(str, cores))} of the "
            f"{len(allowed)} cores that are here"
        )
    return cores


async def _ask(url: str, config: UpConfig, access: _Access, console: Console) -> int:
    def show(text: str) -> None:
        print(text, end="", flush=True)

    console.say(f"asking {config.model.served_model_name}: {config.cluster.ask}")
    to = Access(access.key, access.tls, config.request.timeout_s)
    with console.held():
        try:
            answer = await ask(Server(url, config.model.served_model_name, False, to), config.cluster.ask, show)
        finally:
            print(flush=True)
        print(latency_line(answer, None), flush=True)
    return 0


def _welcome(url: str, model: str, access: _Access) -> None:
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    headers = "-H 'content-type: application/json'" + (" -H 'authorization: Bearer YOUR_KEY'" if access.key else "")
    status = f"Status page: {url}/  (in a terminal: pdserve top --proxy-url {url})\n" if access.shows_status else ""
    key = " --api-key YOUR_KEY" if access.key else ""
    chat = f"To chat in another terminal: pdserve chat {url}{key}\n"
    print(f"\nOpenAI-compatible API: {url}/v1\n{status}{chat}Ctrl-C ends the cluster.\n", flush=True)
    print(f"  curl -N {url}/v1/chat/completions {headers} \\\n    -d '{body}'\n", flush=True)


class StartTimes:
    """The times of the last starts, in a file of the user's cache folder. What cannot be read is not known."""

    def __init__(self, cache_dir: Path) -> None:
        self._path = cache_dir / "start-times.json"

    def expected(self, what: str) -> float | None:
        """Returns how many seconds the last start of ``what`` took; None if nobody knows."""
        return self._read().get(what)

    def note(self, what: str, took_s: float) -> None:
        """Writes down the time of a start, and forgets those that are longest ago."""
        times = self._read()
        times.pop(what, None)
        times[what] = round(took_s, 1)
        newest = dict(list(times.items())[-_REMEMBERED_STARTS:])
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(newest))
            draft.replace(self._path)

    def _read(self) -> dict[str, float]:
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
        return {}
