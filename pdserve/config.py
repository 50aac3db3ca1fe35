"""The one typed tree of settings. It is frozen, read once at the edge and passed down; names contain their units.

Each field's metadata carries its flag, help text and range (see ``setting`` below). ``pdserve.settings.load`` fills the
tree from flags, ``PDSERVE_*`` variables and a TOML file; no other module of pdserve reads the environment.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from pdserve.wire.discovery import Role


def setting(
    flag: str,
    help: str,
    default: Any,
    *,
    metavar: str | None = None,
    bare: str | None = None,
    secret: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Returns a dataclass field that users can set: ``--flag``, ``PDSERVE_FLAG``, and ``section.flag`` in TOML.

    ``minimum`` and ``maximum`` are inclusive. ``bare`` is the value that the flag has if none follows it. A ``secret``
    is left out of the dataclass's repr, of ``--help`` and of errors.
    """
    metadata = {
        "flag": flag,
        "help": help,
        "metavar": metavar,
        "bare": bare,
        "secret": secret,
        "minimum": minimum,
        "maximum": maximum,
    }
    return field(default=default, metadata=metadata, repr=not secret)


class Dtype(enum.Enum):
    """The data type of weights, activations and KV cache."""

    BF16 = "bf16"
    FP32 = "fp32"


class Device(enum.Enum):
    """The kind of device that computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Switch(enum.Enum):
    ON = "on"
    OFF = "off"


class Batching(enum.Enum):
    """The time at which waiting requests join the batch."""

    CONTINUOUS = "continuous"
    """Requests join at every step."""
    STATIC = "static"
    """Requests join when the batch before them is over; benchmarks use this as their baseline."""


class Overlap(enum.Enum):
    """Whether the next step is prepared while the current one computes."""

    AUTO = "auto"
    """Steps overlap on GPUs only: on a CPU both need the same cores."""
    ON = "on"
    OFF = "off"


class TpBackend(enum.Enum):
    """The way in which tensor-parallel ranks add up their tensors."""

    AUTO = "auto"
    SHM = "shm"
    """The ranks use memory that they share, on CPUs that keep the order of stores (x86)."""
    GLOO = "gloo"
    """The ranks use torch.distributed, over TCP on the loopback interface."""
    NCCL = "nccl"
    """The ranks use NCCL between GPUs, one for each rank."""


class KvStaging(enum.Enum):
    """Whether KV blocks pass through staging blocks in host memory on their way between two caches."""

    AUTO = "auto"
    """Blocks are staged when the cache is not in host memory."""
    ON = "on"
    """Blocks are always staged: to test or to measure staging without a GPU."""
    OFF = "off"
    """Blocks are never staged: UCX reads and writes the cache itself, also a GPU's (CUDA IPC, GPUDirect RDMA)."""


class UcxCalls(enum.Enum):
    """The code that posts and completes the messages of KV blocks."""

    AUTO = "auto"
    """The code is compiled if there is a compiler, and Python otherwise."""
    COMPILED = "compiled"
    PYTHON = "python"


class CpuKernels(enum.Enum):
    """The kernels of a CPU. ``AUTO`` is compiled C++ if there is a compiler, and plain torch otherwise."""

    AUTO = "auto"
    COMPILED = "compiled"
    TORCH = "torch"


class Disaggregation(enum.Enum):
    """Whether a decode node has prompts computed by prefill nodes."""

    AUTO = "auto"
    """Prefill nodes compute a prompt where that is estimated to be the faster way."""
    ALWAYS = "always"
    """Prefill nodes compute every prompt that lacks more than one block on the decode node."""
    NEVER = "never"


class KvOverlap(enum.Enum):
    """The time at which a prefill node pushes the KV blocks of a prompt that it computes in chunks."""

    AUTO = "auto"
    """Blocks are pushed early if the prompt is long enough for it to pay."""
    ON = "on"
    """The blocks of each chunk are pushed while the next chunk computes."""
    OFF = "off"
    """All blocks are pushed when the prompt is computed."""


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class RoutingPolicy(enum.Enum):
    """The way in which the proxy chooses nodes for a request."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    TWO_CHOICES = "two-choices"
    PREFIX_AFFINITY = "prefix-affinity"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is held."""

    path: str = setting("model", "Hugging Face folder, .gguf file, or 'demo' for SmolLM2-135M-Instruct", "demo")
    served_name: str = setting("served-name", "name that clients ask for; the folder's name if empty", "")
    dtype: Dtype = setting("dtype", "number format of weights and KV cache", Dtype.BF16)
    max_model_len: int = setting(
        "max-model-len", "longest prompt plus output in tokens; 0 takes the model's own", 0, minimum=0
    )
    device: Device = setting("device", "what computes; auto takes a GPU if there is one, and else the CPU", Device.AUTO)
    cuda_graphs: Switch = setting(
        "cuda-graphs", "record decode steps once and replay them; off launches each kernel (on a GPU)", Switch.ON
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = setting("block-size", "tokens in one KV block; equal on all nodes", 16, minimum=1, maximum=1024)
    kv_cache_mib: int = setting("kv-cache-mib", "memory for the KV cache, all ranks together, in MiB", 1024, minimum=1)
    prefix_cache: Switch = setting("prefix-cache", "keep KV blocks for later prompts that begin alike", Switch.ON)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Tensor parallelism: the processes of one node, on one host, that together compute the model."""

    tp: int = setting("tp", "ranks that the model is split over, each a process", 1, minimum=1, maximum=64)
    backend: TpBackend = setting(
        "tp-backend",
        "how ranks add up: on CPUs shm (x86) or gloo, on GPUs nccl; auto takes the fastest",
        TpBackend.AUTO,
    )
    timeout_ms: int = setting(
        "tp-timeout-ms",
        "time that one rank may keep the others waiting before the node ends",
        10_000,
        minimum=100,
        maximum=3_600_000,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one engine step may hold."""

    max_running: int = setting("max-running", "requests that one step may hold", 64, minimum=1)
    max_step_tokens: int = setting(
        "max-step-tokens", "tokens that one step may compute; longer prompts go in chunks", 256, minimum=1
    )
    max_waiting: int = setting(
        "max-waiting",
        "requests that may queue before new ones get 503; their further answers are counted apart",
        1024,
        minimum=0,
    )
    batching: Batching = setting(
        "batching", "when waiting requests join the batch; static is for benchmarks", Batching.CONTINUOUS
    )
    overlap: Overlap = setting(
        "overlap-scheduling",
        "launch a decode step before the tokens of the last one are known (nodes of one rank); auto on GPUs",
        Overlap.AUTO,
    )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between a decode and a prefill engine."""

    host: str = setting("transfer-host", "address that a prefill engine binds its control channel to", "127.0.0.1")
    port: int = setting("transfer-port", "port of that channel; 0 takes a free one", 0, minimum=0, maximum=65535)
    advertise: str = setting(
        "transfer-advertise", "host name or address that decode engines reach it by; the bound one if empty", ""
    )
    heartbeat_ms: int = setting(
        "transfer-heartbeat-ms", "pause between pings while transfers are alive", 500, minimum=10, maximum=60_000
    )
    lease_ms: int = setting(
        "transfer-lease-ms", "silence after which the other engine counts as dead", 3000, minimum=20, maximum=600_000
    )
    prefill_timeout_ms: int = setting(
        "prefill-timeout-ms",
        "time that a prefill node gets for one prompt, beyond what its queue and the prompt's length need, "
        "before the decode node prefills itself",
        30_000,
        minimum=1,
        maximum=3_600_000,
    )
    disaggregation: Disaggregation = setting(
        "disaggregation",
        "which prompts a decode node gives to prefill nodes; auto those that they are estimated to be faster with",
        Disaggregation.AUTO,
    )
    stall_weight: float = setting(
        "stall-weight",
        "seconds of waiting for a first token that one second of a stalled stream counts for, in that estimate",
        2.0,
        minimum=0,
        maximum=1000,
    )
    checksums: Switch = setting(
        "kv-checksums", "whether a decode engine checks every KV block that it receives", Switch.ON
    )
    overlap: KvOverlap = setting(
        "kv-overlap", "push KV blocks while the rest of the prompt computes; auto for long prompts only", KvOverlap.AUTO
    )
    staging: KvStaging = setting(
        "kv-staging",
        "when KV blocks are copied through host memory; auto: where the cache is a GPU's; off needs no checksums there",
        KvStaging.AUTO,
    )
    staging_mib: int = setting(
        "kv-staging-mib", "that host memory, page-locked; transfers share it by turns", 4096, minimum=1
    )
    shared_cache: Switch = setting(
        "kv-shared-cache",
        "let decode engines of the same user on the same host map a prefill engine's KV cache (on a CPU), to read it",
        Switch.ON,
    )
    ucx_calls: UcxCalls = setting(
        "ucx-calls",
        "what posts the messages of KV blocks: compiled C++ (once, by g++), Python, or the better that there is",
        UcxCalls.AUTO,
    )
    ucx_tls: str = setting("ucx-tls", "UCX transports, as UCX_TLS takes them; UCX chooses if empty", "")
    ucx_net_devices: str = setting(
        "ucx-net-devices", "network devices that KV blocks may use, as UCX_NET_DEVICES takes them; all if empty", ""
    )
    ucx_tcp_ports: str = setting(
        "ucx-tcp-ports", "ports for KV blocks over TCP, as 42000-42999; the system chooses if empty", ""
    )


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """One HTTP server."""

    host: str = setting("host", "address to serve HTTP on", "127.0.0.1")
    port: int = setting("port", "port to serve HTTP on; 0 takes a free one", 0, minimum=0, maximum=65535)
    advertise: str = setting(
        "advertise", "URL that the proxy reaches this server by; made from host and port if empty", ""
    )
    keep_alive_s: int = setting(
        "keep-alive-s",
        "seconds that an idle client connection is kept; longer than clients' pools",
        120,
        minimum=1,
        maximum=86_400,
    )
    max_client_connections: int = setting(
        "max-client-connections", "connections held at once; more are refused with 503", 16_384, minimum=1
    )
    write_timeout_s: float = setting(
        "write-timeout-s",
        "seconds that a client may take nothing of a response before it is cut off",
        60.0,
        minimum=0.1,
        maximum=86_400,
    )
    max_body_bytes: int = setting("max-body-bytes", "largest request body that is read", 8 * 2**20, minimum=1024)
    drain_s: float = setting(
        "drain-s", "seconds that running requests get to finish on SIGTERM", 10.0, minimum=0, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How tokens get from a node's engine to its clients. Each part can be turned off, to measure what it gains."""

    batched_dispatch: Switch = setting(
        "batched-dispatch", "one message from the engine a step; off sends one for each token", Switch.ON
    )
    notify_size: int = setting(
        "batch-notify-size",
        "requests that are woken before others get a turn; 0 wakes all of a step at once",
        16,
        minimum=0,
    )
    fast_path: Switch = setting(
        "sse-fast-path", "write plain chunks from encoded parts; off builds each as an object", Switch.ON
    )
    interval: int = setting(
        "stream-interval", "tokens in a chunk of a stream; the first one comes at once", 1, minimum=1
    )


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """Bounds on one client request."""

    timeout_s: float = setting(
        "request-timeout-s", "seconds that a whole request may take", 600.0, minimum=0.1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """A node's side of discovery."""

    proxies: tuple[str, ...] = setting(
        "proxy", "control address of a proxy, tcp://host:port; may be given more than once", ()
    )
    heartbeat_ms: int = setting(
        "heartbeat-ms",
        "pause between greetings of a proxy until it answers; then the proxy tells its own interval",
        1000,
        minimum=10,
        maximum=60_000,
    )
    name: str = setting("name", "this node's name in logs; made from role and host if empty", "")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS towards clients."""

    cert: str = setting("tls-cert", "PEM file of a certificate and its chain; serves HTTPS if given", "")
    key: str = setting("tls-key", "PEM file of its private key, without a passphrase", "")


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """TLS towards nodes and proxies."""

    authorities: str = setting(
        "tls-ca", "PEM file of the certificate authorities of https:// nodes and proxies; the system's if empty", ""
    )


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """The proxy's side of discovery."""

    control_host: str = setting("control-host", "address to take registrations on", "127.0.0.1")
    control_port: int = setting(
        "control-port", "port to take registrations on; 0 takes a free one", 8100, minimum=0, maximum=65535
    )
    heartbeat_ms: int = setting(
        "heartbeat-ms", "pause between heartbeats, which nodes are told and keep", 1000, minimum=10, maximum=60_000
    )
    missed_heartbeats: int = setting(
        "missed-heartbeats", "heartbeats missed in a row before a node is dropped", 3, minimum=1
    )


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The proxy's processes."""

    count: int = setting("workers", "processes that serve clients on the one port", 1, minimum=1, maximum=64)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Which nodes the proxy chooses."""

    policy: RoutingPolicy = setting("policy", "how nodes are chosen for a request", RoutingPolicy.ROUND_ROBIN)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Which clients the proxy serves, and how many requests at once."""

    api_keys: tuple[str, ...] = setting(
        "api-key", "key that clients have to send; may be given more than once; better in a file", (), secret=True
    )
    api_key_file: str = setting("api-key-file", "file of keys that clients may send, one a line, or NAME KEY", "")
    max_in_flight: int = setting(
        "max-in-flight",
        "answers under way at once, n times prompts of each request; more wait; 0 for any number",
        4096,
        minimum=0,
    )
    max_in_flight_per_key: int = setting(
        "max-in-flight-per-key",
        "answers to one API key, under way or waiting, n times prompts of each request; 0 for any number",
        0,
        minimum=0,
    )
    max_queued: int = setting("max-queued", "requests that wait at once; more get 503", 1024, minimum=0)
    max_uploads: int = setting(
        "max-uploads",
        "request bodies that may be on their way at once, a quarter of them from one API key or else client address",
        1024,
        minimum=1,
    )
    body_memory_mib: int = setting(
        "body-memory-mib",
        "memory for request bodies above 64 KiB until a node answers, in MiB; half for one API key or else address",
        1024,
        minimum=1,
    )
    queue_timeout_s: float = setting(
        "queue-timeout-s", "seconds that a request waits for its turn", 30.0, minimum=0.01, maximum=3600
    )


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The proxy's connections to nodes."""

    connect_timeout_s: float = setting(
        "connect-timeout-s", "seconds to connect to a node", 5.0, minimum=0.1, maximum=600
    )
    idle_timeout_s: float = setting(
        "idle-timeout-s",
        "seconds without a byte from a node before it counts as stuck",
        120.0,
        minimum=0.1,
        maximum=86_400,
    )
    max_connections: int = setting("max-connections", "upstream connections kept at most", 8192, minimum=1)


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """What makes a control message believable."""

    secret: str = setting(
        "secret", "cluster secret; better in PDSERVE_SECRET or --secret-file than on a command line", "", secret=True
    )
    secret_file: str = setting("secret-file", "file that holds the cluster secret", "")


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """Which cores the engine may use, and what it computes with on them."""

    cores: tuple[int, ...] = setting("cores", "cores that the engine is pinned to, as 0,1,4-7; all if empty", ())
    kernels: CpuKernels = setting(
        "cpu-kernels",
        "CPU kernels: compiled C++ (once, by g++), plain torch, or the better that there is",
        CpuKernels.AUTO,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is written to stderr."""

    level: LogLevel = setting("log-level", "least severe message that is logged", LogLevel.INFO)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings that the engine process gets as MessagePack at its start, so that it reads none from the outside."""

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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """The message that the API process writes, as MessagePack, to the standard input of the engine process."""

    address: str
    """The ``ipc://`` path in a private folder where the API process has bound a ZMQ PAIR socket for the engine."""
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
    cores: tuple[int, ...]
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """``pdserve prefill``, ``pdserve decode``, ``pdserve mixed``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """``pdserve proxy``."""

    http: HttpConfig = field(default_factory=lambda: HttpConfig(port=8000))
    tls: TlsConfig = field(default_factory=TlsConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many nodes of each role ``pdserve up`` starts, and what for."""

    prefill: int = setting("prefill", "prefill nodes", 1, minimum=0, maximum=256)
    decode: int = setting("decode", "decode nodes", 1, minimum=0, maximum=256)
    mixed: int = setting("mixed", "nodes that prefill and decode in one engine", 0, minimum=0, maximum=256)
    ask: str = setting("ask", "ask this one question, print the answer, and stop", "", metavar="TEXT")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "seconds that all nodes get to come up", 300.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class UpConfig:
    """``pdserve up``: a whole cluster on this machine. ``http`` is the proxy's; the rest goes to every process."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    http: HttpConfig = field(default_factory=lambda: HttpConfig(port=8000))
    stream: StreamConfig = field(default_factory=StreamConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """Where the figures go, beside the table that is printed."""

    json: str = setting(
        "json", "file for the figures as JSON; - or nothing is standard output", "", metavar="FILE", bare="-"
    )


@dataclass(frozen=True, slots=True)
class DiagnosisConfig:
    """What the doctor asks and measures."""

    peers: tuple[str, ...] = setting(
        "peer", "transfer control address of a prefill node, tcp://host:port; may be given more than once", ()
    )
    proxy_url: str = setting("proxy-url", "a proxy, http://host:port, whose prefill nodes are asked too", "")
    probe: Switch = setting(
        "probe", "measure bandwidth and latency to each peer, or between two processes here if there is none", Switch.ON
    )
    probe_mib: int = setting("probe-mib", "what one probe moves, in MiB", 128, minimum=1, maximum=256)
    timeout_s: float = setting(
        "peer-timeout-s", "seconds that a peer gets for each answer", 3.0, minimum=0.1, maximum=60
    )


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """``pdserve doctor``. A model is compared with those of the peers only if it is named."""

    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    cache: CacheConfig = field(default_factory=CacheConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)
