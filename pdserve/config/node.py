"""The settings of a node, and what its processes get of them at their start."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pdserve.config.declare import setting
from pdserve.config.engine import CacheConfig, CpuConfig, GrammarConfig, ParallelConfig, SchedulerConfig, TargetsConfig
from pdserve.config.http import HttpConfig, SecurityConfig, StreamConfig
from pdserve.config.model import ModelConfig
from pdserve.config.observability import LogConfig, MetricsConfig, TraceConfig
from pdserve.config.requests import MessageConfig, ReplayConfig, RequestConfig
from pdserve.config.transfer import TransferConfig
from pdserve.wire.discovery import Role


class DrainMode(enum.Enum):
    """What becomes of the answers of a node that is asked to end."""

    MIGRATE = "migrate"
    """Other nodes go on with them."""
    FINISH = "finish"
    """The node finishes them."""


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """The node's side of discovery."""

    proxies: tuple[str, ...] = setting(
        "proxy",
        "The node registers at this control address of a proxy, tcp://host:port. A name may have the addresses of "
        "several proxies. May be repeated.",
        (),
        first=True,
    )
    resolve_s: float = setting(
        "proxy-resolve-s",
        "Names in --proxy are looked up again after this many seconds.",
        5.0,
        minimum=0.1,
        maximum=3600,
    )
    heartbeat_ms: int = setting(
        "heartbeat-ms",
        "Until a proxy answers, the node greets it at this interval, in milliseconds. Then the proxy sets the "
        "interval.",
        1000,
        minimum=10,
        maximum=60_000,
    )
    name: str = setting("name", "The node's name. Empty: made from role and host.", "", first=True)
    drain: DrainMode = setting(
        "drain",
        "On SIGTERM, 'migrate' moves running streams to other nodes. 'finish' lets the node finish them.",
        DrainMode.MIGRATE,
        first=True,
    )


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """How a node notices that its engine hangs."""

    silence_ms: int = setting(
        "engine-silence-ms",
        "A node ends when its engine, a rank or a transfer thread shows no life for this many milliseconds; while it "
        "computes, for twelve times as long.",
        5000,
        minimum=2000,
        maximum=3_600_000,
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings that the engine process gets as MessagePack at its start, so that it reads none itself."""

    role: Role
    boot_id: bytes
    secret: bytes = field(repr=False)
    model_dir: str
    cache_dir: str
    """The user's folder for files that pdserve can make again."""
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    transfer: TransferConfig
    cpu: CpuConfig
    log: LogConfig
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    has_peers: bool = True
    """Whether the node belongs to a proxy, so that it can fetch KV blocks from other nodes and be fetched from."""
    node: str = ""
    """The node's name, for log lines; empty if it has none of its own."""
    records: bool = False
    """Whether the API process wants the timelines of requests (``pdserve.wire.timeline``)."""


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """The message that the API process writes, as MessagePack, to the standard input of the engine process."""

    address: str
    """The ``ipc://`` path in a private folder where the API process has bound a ZMQ PAIR socket for the engine."""
    life: int
    """The inherited descriptor of the memory in which the engine's loops show life."""
    config: EngineConfig

    @property
    def folder(self) -> str:
        """The private folder. The API process removes it and its content once the engine is ready or gone."""
        return self.address.removeprefix("ipc://").rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """The message that rank 0, the engine process, writes as MessagePack to each other rank's standard input."""

    rank: int
    address: str
    """The ``ipc://`` path in a private folder where rank 0 has bound a ZMQ PAIR socket for this rank."""
    transfer_address: str
    """The ``ipc://`` path in that folder that this rank binds for its KV transfer."""
    rendezvous: str
    """The file at which the ranks meet. It is the same for all, and in the same folder."""
    board: int
    """The inherited descriptor of the memory that the ranks share."""
    wake_fd: int
    """The inherited eventfd that wakes rank 0's step loop."""
    life: int
    """The inherited descriptor of the memory in which the engine's loops show life."""
    cores: tuple[int, ...]
    """The rank is pinned to these; empty if it may use all that it finds."""
    threads: int
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The settings of ``pdserve prefill``, ``pdserve decode`` and ``pdserve mixed``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    message: MessageConfig = field(default_factory=MessageConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)
