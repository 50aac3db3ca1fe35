"""Builds one configuration out of all sources, and refuses one that contradicts itself or has a wrong form."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pdserve.config import (
    CacheConfig,
    ChatConfig,
    ClusterConfig,
    DiagnosisConfig,
    DiscoveryConfig,
    DoctorConfig,
    DrainConfig,
    HttpConfig,
    LiveConfig,
    ModelsConfig,
    NodeConfig,
    PlanConfig,
    ProxyConfig,
    PullConfig,
    RequestTraceConfig,
    RoleConfig,
    SchedulerConfig,
    TlsConfig,
    TopConfig,
    TraceConfig,
    TransferConfig,
    UpConfig,
)
from pdserve.config.bench import (
    BenchCompareConfig,
    BenchEngineConfig,
    BenchLoadConfig,
    BenchTransferConfig,
    EngineBenchConfig,
    LoadConfig,
    PlanMemoryConfig,
    PlanProfileConfig,
    TransferBenchConfig,
)
from pdserve.errors import ConfigError
from pdserve.settings.setting import Setting, build, settings_of, to_text
from pdserve.settings.sources import CommandLine, current_environ, from_environ, from_file, from_flags

_OTEL_PACKAGES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_DEVICES = re.compile(r"\^?[^\s,^/]+(,[^\s,^/]+)*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+")
_PORTS = re.compile(r"(?P<first>[0-9]{1,5})-(?P<last>[0-9]{1,5})")

CONFIGS: Mapping[str, type] = {
    **dict.fromkeys(("up", "serve"), UpConfig),
    "pull": PullConfig,
    "models": ModelsConfig,
    "chat": ChatConfig,
    "proxy": ProxyConfig,
    **dict.fromkeys(("prefill", "decode", "mixed"), NodeConfig),
    "role": RoleConfig,
    "drain": DrainConfig,
    "top": TopConfig,
    "live": LiveConfig,
    "trace": RequestTraceConfig,
    "doctor": DoctorConfig,
    "plan": PlanConfig,
    "plan profile": PlanProfileConfig,
    "plan memory": PlanMemoryConfig,
    "bench engine": BenchEngineConfig,
    "bench load": BenchLoadConfig,
    "bench transfer": BenchTransferConfig,
    "bench compare": BenchCompareConfig,
}
"""The settings of each subcommand that has some."""
ROOTS = tuple(dict.fromkeys(CONFIGS.values()))
"""The root dataclasses of all subcommands: a setting that one of them has is not a misspelling for the others."""

POSITIONAL: Mapping[type, Sequence[str]] = {
    **dict.fromkeys((NodeConfig, UpConfig, PullConfig, ModelsConfig), ("model",)),
    **dict.fromkeys((BenchEngineConfig, BenchTransferConfig, PlanProfileConfig, PlanMemoryConfig), ("model",)),
    RoleConfig: ("node", "role"),
    DrainConfig: ("node",),
    RequestTraceConfig: ("request",),
    BenchCompareConfig: ("old", "new"),
}
"""The settings that may stand without their flags, in this order, for the subcommands that have some."""

T = TypeVar("T")


def check(config: Any) -> None:
    """Raises ConfigError for the first section of ``config`` that cannot work."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        check_section = _CHECKS.get(type(values))
        if check_section is not None:
            check_section(values)


def _cache(cache: CacheConfig) -> None:
    if cache.block_size & (cache.block_size - 1):
        raise ConfigError(f"--block-size: {cache.block_size} was given; it takes a power of two")


def _transfer(transfer: TransferConfig) -> None:
    if 2 * transfer.heartbeat_ms > transfer.lease_ms:
        raise ConfigError(
            f"--transfer-lease-ms ({transfer.lease_ms}) has to be at least twice --transfer-heartbeat-ms "
            f"({transfer.heartbeat_ms}), or one late ping ends a transfer"
        )
    if transfer.ucx_net_devices and not all(map(_DEVICES.fullmatch, transfer.ucx_net_devices.split("/"))):
        raise ConfigError(
            f"--ucx-net-devices: {transfer.ucx_net_devices!r} was given; it takes names like eth0,mlx5_0:1, or "
            "^docker0, for all ranks, or for each rank, with slashes between: mlx5_0:1/mlx5_1:1"
        )
    if transfer.ucx_tcp_ports:
        _check_ports("--ucx-tcp-ports", transfer.ucx_tcp_ports)


def _check_ports(flag: str, ports: str) -> None:
    match = _PORTS.fullmatch(ports)
    if match is None or not 0 < int(match["first"]) <= int(match["last"]) < 2**16:
        raise ConfigError(f"{flag}: {ports!r} was given; it takes a range like 42000-42999, of ports from 1 to 65535")


def _scheduler(scheduler: SchedulerConfig) -> None:
    tokens = scheduler.max_num_batched_tokens
    if tokens and tokens < 2 * max(1, scheduler.max_num_seqs):
        raise ConfigError(
            f"--max-num-batched-tokens ({scheduler.max_num_batched_tokens}) has to be at least twice --max-num-seqs "
            f"({scheduler.max_num_seqs}): each running request takes one of them, and prompts need the rest"
        )


def _http(http: HttpConfig) -> None:
    if http.advertise:
        _check_url("--advertise", http.advertise, schemes=("http", "https"), example="http://10.0.0.7:8001")
    if not http.host:
        raise ConfigError("--host: an empty address was given; it takes one like 127.0.0.1, or 0.0.0.0 for all")
    for origin in http.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origins: {origin!r} was given; it takes '*', or origins like https://chat.example.com and "
                "http://localhost:3000, without a path"
            )


def _tls(tls: TlsConfig) -> None:
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("--tls-cert and --tls-key go together: one of them is missing")


def _discovery(discovery: DiscoveryConfig) -> None:
    for proxy in discovery.proxies:
        _check_url("--proxy", proxy, schemes=("tcp",), example="tcp://127.0.0.1:8100")


def _diagnosis(diagnosis: DiagnosisConfig) -> None:
    for peer in diagnosis.peers:
        _check_url("--peer", peer, schemes=("tcp",), example="tcp://10.0.0.7:8200")
    if diagnosis.proxy_url:
        _check_url("--proxy-url", diagnosis.proxy_url, schemes=("http", "https"), example="http://10.0.0.1:8000")


def _cluster(cluster: ClusterConfig) -> None:
    if cluster.decode + cluster.mixed == 0:
        raise ConfigError("--decode and --mixed are both 0: nothing would answer requests")
    if cluster.decode and not cluster.prefill + cluster.mixed:
        raise ConfigError(
            f"--decode is {cluster.decode}, --prefill and --mixed are 0: without a node that prefills, the proxy gives "
            "decode nodes no requests; --mixed nodes need none"
        )


def _engine_bench(engine: EngineBenchConfig) -> None:
    check_counts("--batches", engine.batches)
    check_counts("--contexts", engine.contexts)
    check_counts("--chunks", engine.chunks)


def _transfer_bench(bench: TransferBenchConfig) -> None:
    check_counts("--block-kib", bench.block_kib)


def _load(load: LoadConfig) -> None:
    check_counts("--concurrency", load.concurrency)
    for flag, url in (("--url", load.url), ("--beside", load.beside or load.url)):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{flag}: {url!r} was given; it takes an address like http://127.0.0.1:8000")


def check_counts(flag: str, counts: tuple[int, ...]) -> None:
    """Raises ConfigError unless there are counts, all of at least 1."""
    if not counts or min(counts) < 1:
        raise ConfigError(f"{flag}: it takes one or more numbers of at least 1, like 1,4,16")


def _check_url(flag: str, url: str, *, schemes: tuple[str, ...], example: str) -> None:
    try:
        parts = urlsplit(url)
        complete = parts.scheme in schemes and bool(parts.hostname) and parts.port is not None
        bare = parts.path in ("", "/") and not parts.query and not parts.username
    except ValueError:
        complete = bare = False
    if not (complete and bare):
        raise ConfigError(f"{flag}: {url!r} was given; it takes an address like {example}")


def _trace(trace: TraceConfig) -> None:
    endpoint = trace.otlp_endpoint
    if not endpoint:
        return
    if not endpoint.startswith(("http://", "https://")) or not urlsplit(endpoint).hostname:
        raise ConfigError(f"--otlp-endpoint: {endpoint!r} was given; it takes a URL like http://collector:4318")
    if not all(map(find_spec, _OTEL_PACKAGES)):
        raise ConfigError("--otlp-endpoint needs more packages: pip install 'pdserve[otel]'")


_CHECKS: dict[type, Callable[[Any], None]] = {
    CacheConfig: _cache,
    SchedulerConfig: _scheduler,
    TransferConfig: _transfer,
    HttpConfig: _http,
    TlsConfig: _tls,
    DiscoveryConfig: _discovery,
    DiagnosisConfig: _diagnosis,
    ClusterConfig: _cluster,
    EngineBenchConfig: _engine_bench,
    LoadConfig: _load,
    TransferBenchConfig: _transfer_bench,
    TraceConfig: _trace,
}


def load(root: type[T], argv: Sequence[str], environ: Mapping[str, str], *, prog: str, description: str = "") -> T:
    """Returns a ``root`` filled from ``argv``, then ``PDSERVE_*`` of ``environ``, then the TOML file, then defaults.

    Prints help and exits for ``--help``. Raises ConfigError, which names the setting, where it was given, what was
    given and what would be right.
    """
    return load_with_file(root, argv, environ, prog=prog, description=description)[0]


def load_with_file(
    root: type[T],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str = "",
    roots: Sequence[type] = ROOTS,
) -> tuple[T, str]:
    """Returns what ``load`` returns, and the path of the TOML file that was read; empty if there was none.

    Environment and file may have settings of all ``roots``.
    """
    settings = settings_of(root)
    every = [setting for known in {root: None, **dict.fromkeys(roots)} for setting in settings_of(known)]
    by_flag: dict[str, Setting] = {setting.flag: setting for setting in every}
    flags, flags_file = from_flags(CommandLine(prog, description, settings, POSITIONAL.get(root, ())), argv, by_flag)
    variables, environ_file = from_environ(settings, environ, by_flag)
    file = flags_file or environ_file
    stored = from_file(settings, Path(file), every) if file else {}
    config = build(root, {**stored, **variables, **flags})
    check(config)
    return config, file


def with_current_names(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` with the names of today for variables that had other ones, each with a warning."""
    return current_environ(environ, [setting for root in ROOTS for setting in settings_of(root)])


def to_environ(config: object) -> dict[str, str]:
    """Returns the ``PDSERVE_*`` variables that give another process the settings of ``config``, without its secrets."""
    return {
        setting.env: to_text(getattr(getattr(config, setting.section), setting.field))
        for setting in settings_of(type(config))
        if not setting.secret
    }
