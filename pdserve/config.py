"""The one typed tree of settings. It is frozen, read once at the edge and passed down; names contain their units.

Each field's metadata carries its flag, help text and range (see ``setting`` below). ``pdserve.settings.load`` fills the
tree from flags, ``PDSERVE_*`` variables and a TOML file; no other module of pdserve reads the environment.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from pdserve.wire.discovery import Role
from pdserve.wire.grammar import MAX_GRAMMAR_BYTES
from pdserve.wire.request_targets import MAX_ITL_MS, MAX_TTFT_MS


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
    former: str = "",
    spellings: dict[str, str] | None = None,
    refused: dict[str, str] | None = None,
    first: bool = False,
) -> Any:
    """Returns a dataclass field that users can set: ``--flag``, ``PDSERVE_FLAG``, and ``section.flag`` in TOML.

    ``minimum`` and ``maximum`` are inclusive. ``bare`` is the value that the flag has if none follows it. A ``secret``
    is left out of the dataclass's repr, of ``--help`` and of errors. ``former`` is the name that the flag had one
    version ago; it is still taken, with a warning. ``spellings`` are other words for a choice's values, and
    ``refused`` says why pdserve has not what other servers have. The short help
    shows what people set ``first``.
    """
    metadata = {
        "flag": flag,
        "help": help,
        "metavar": metavar,
        "bare": bare,
        "secret": secret,
        "minimum": minimum,
        "maximum": maximum,
        "former": former,
        "spellings": spellings or {},
        "refused": refused or {},
        "first": first,
    }
    return field(default=default, metadata=metadata, repr=not secret)


_AUTO = {"auto": "0"}
"""The word for a size that pdserve chooses (``pdserve.models.sizes``)."""


class Dtype(enum.Enum):
    """The data type of weights, activations and KV cache."""

    BF16 = "bfloat16"
    FP32 = "float32"

    @property
    def short(self) -> str:
        """The name in handshakes, file names and figures, which nodes of other versions know: ``bf16`` or ``fp32``."""
        return self.name.lower()


class Weights(enum.Enum):
    """The form in which quantised weights are kept."""

    AUTO = "auto"
    DEQUANTISE = "dequantise"


class Device(enum.Enum):
    """The kind of device that computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Switch(enum.Enum):
    ON = "on"
    OFF = "off"


class MetricsNames(enum.Enum):
    """The names of a node's metrics that vLLM has, too."""

    PDSERVE = "pdserve"
    VLLM = "vllm"
    BOTH = "both"


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


class KvReturn(enum.Enum):
    """Whether decode nodes return the KV blocks of answers to prefill nodes."""

    AUTO = "auto"
    """They do, unless the prefix cache is off."""
    ON = "on"
    OFF = "off"


class KvOverlap(enum.Enum):
    """The time at which a prefill node pushes the KV blocks of a prompt that it computes in chunks."""

    AUTO = "auto"
    """Blocks are pushed early if the prompt is long enough for it to pay."""
    ON = "on"
    """The blocks of each chunk are pushed while the next chunk computes."""
    OFF = "off"
    """All blocks are pushed when the prompt is computed."""


class DrainMode(enum.Enum):
    """What becomes of the answers of a node that is asked to end."""

    MIGRATE = "migrate"
    """Other nodes go on with them."""
    FINISH = "finish"
    """The node finishes them."""


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    TEXT = "text"
    JSON = "json"
    """Each line is an object."""


class RoleChoice(enum.Enum):
    """Who decides which nodes prefill and which decode."""

    FIXED = "fixed"
    """Nodes have the roles that they were started with, or that ``pdserve role`` gave them."""
    AUTO = "auto"
    """The proxy moves nodes between roles by what they measure."""


class PrefillAnswers(enum.Enum):
    """Whether a prefill node that has nothing to prefill answers requests itself."""

    AUTO = "auto"
    """Where it shares no machine with the decode node."""
    ON = "on"
    OFF = "off"


FEW_PROMPTS = 0.3
"""A prefill node that has prompts for a larger share of the time answers nothing. ``pdserve.plan`` goes by it, too."""
NEWEST_SHARE = 0.1
"""The weight of the newest heartbeat in that share: about the last ten count."""
OVERLAP_FROM_TOKENS = 2048
"""Without a setting, the blocks of prompts that are no shorter move while the rest is computed."""


class RoutingPolicy(enum.Enum):
    """The way in which the proxy chooses nodes for a request."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"
    TWO_CHOICES = "two-choices"
    PREFIX_AFFINITY = "prefix-affinity"


class SharedPrefixes(enum.Enum):
    """Which requests may find each other's prompts in prefix caches."""

    KEY = "key"
    """Those with API keys of one owner."""
    ALL = "all"


class StatusPage(enum.Enum):
    """Who may see the proxy's status page."""

    AUTO = "auto"
    """Those on this machine, if the proxy listens on loopback alone; elsewhere those with a key, if there are keys."""
    ON = "on"
    """Whoever may send requests."""
    OFF = "off"


_MODEL_HELP = (
    "The model is a name of the hub (org/name, org/name@revision, org/name:Q4_K_M, org/name/file.gguf), a Hugging Face "
    "folder, a .gguf file, or 'demo' for SmolLM2-135M-Instruct."
)


def _offline() -> Any:
    return setting(
        "offline",
        "No model is fetched: a name of the hub means what is in the cache of Hugging Face models. HF_HUB_OFFLINE does "
        "the same.",
        Switch.OFF,
        bare="on",
        first=True,
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and the device that computes it."""

    path: str = setting("model", _MODEL_HELP, "demo", first=True)
    served_model_name: str = setting(
        "served-model-name",
        "Clients ask for the model by this name. If it is empty, they use the name of the hub as --model has it, "
        "without a revision, or the name of the folder or file.",
        "",
        former="served-name",
        first=True,
    )
    dtype: Dtype = setting(
        "dtype",
        "Weights and KV cache have this number format. 'auto' is bfloat16.",
        Dtype.BF16,
        spellings={"auto": "bfloat16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"},
        refused=dict.fromkeys(("float16", "half", "fp16"), "pdserve computes in bfloat16, which takes as much memory"),
        first=True,
    )
    weights: Weights = setting(
        "weights",
        "'auto' keeps the blocks of a quantised .gguf file where it can (bf16, on a CPU with g++). 'dequantise' "
        "widens them to --dtype.",
        Weights.AUTO,
    )
    max_model_len: int = setting(
        "max-model-len",
        "A prompt and its output have at most this many tokens together. 0 takes the model's own limit, or what the KV "
        "cache holds if that is less.",
        0,
        minimum=0,
        first=True,
    )
    offline: Switch = _offline()
    device: Device = setting(
        "device",
        "This kind of device computes. 'auto' takes a GPU if there is one, and otherwise the CPU.",
        Device.AUTO,
    )
    cuda_graphs: Switch = setting(
        "cuda-graphs", "A GPU's decode steps are recorded once and replayed. 'off' launches each kernel.", Switch.ON
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache, which is divided into blocks."""

    block_size: int = setting(
        "block-size", "A KV block holds this many tokens. All nodes need the same value.", 16, minimum=1, maximum=1024
    )
    kv_cache_mib: int = setting(
        "kv-cache-mib",
        "The KV caches of all ranks together take this much memory, in MiB. No prompt and output are longer together "
        "than what fits. 'auto': on a CPU, half of what the weights leave of --node-memory-mib, but no more than the "
        "largest of 2048, a 16th of that memory and one context of the model; on a GPU, by --gpu-memory-utilization.",
        0,
        minimum=0,
        spellings=_AUTO,
        first=True,
    )
    gpu_memory_utilization: float = setting(
        "gpu-memory-utilization",
        "On GPUs, each rank takes this share of its GPU's memory, for weights, KV cache and all else. 'auto': 0.9, "
        "which pdserve up divides between its nodes, or what --kv-cache-mib says if that is given.",
        0.0,
        minimum=0,
        maximum=0.99,
        spellings=_AUTO,
        first=True,
    )
    node_memory_mib: int = setting(
        "node-memory-mib",
        "On a CPU, automatic sizes count on this much memory for the whole node, in MiB. 'auto': what the machine and "
        "the control group have left when the node starts, which pdserve up divides between its nodes.",
        0,
        minimum=0,
        spellings=_AUTO,
    )
    prefix_cache: Switch = setting(
        "prefix-cache", "The node keeps KV blocks for later prompts that begin alike.", Switch.ON, first=True
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Tensor parallelism: the ranks of one node, on one host, that compute the model together."""

    tensor_parallel_size: int = setting(
        "tensor-parallel-size",
        "The model is split over this many processes (ranks).",
        1,
        minimum=1,
        maximum=64,
        former="tp",
        first=True,
    )
    backend: TpBackend = setting(
        "tp-backend",
        "How ranks add up results: on CPUs shm (x86) or gloo, on GPUs nccl. 'auto' takes the fastest.",
        TpBackend.AUTO,
    )
    timeout_ms: int = setting(
        "tp-timeout-ms",
        "The node ends when a rank keeps the others waiting for this many milliseconds.",
        10_000,
        minimum=100,
        maximum=3_600_000,
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The requests and tokens of an engine's steps."""

    max_num_seqs: int = setting(
        "max-num-seqs",
        "One step has at most this many requests. 'auto': as many as the KV cache has room for, at most 256 on a GPU, "
        "and on a CPU a quarter of --max-num-batched-tokens.",
        0,
        minimum=0,
        former="max-running",
        spellings=_AUTO,
        first=True,
    )
    max_num_batched_tokens: int = setting(
        "max-num-batched-tokens",
        "One step computes at most this many tokens. Longer prompts are computed in chunks. 'auto': 8192 on a GPU, "
        "fewer where its memory is small; on a CPU 32 for each core, from 256 to 2048.",
        0,
        minimum=0,
        former="max-step-tokens",
        spellings=_AUTO,
        first=True,
    )
    max_waiting: int = setting(
        "max-waiting",
        "This many requests may wait before new ones get 503. Their further answers are counted apart.",
        1024,
        minimum=0,
    )
    batching: Batching = setting(
        "batching",
        "Waiting requests join the batch at every step (continuous), or when the batch is over (static, for "
        "benchmarks).",
        Batching.CONTINUOUS,
    )
    overlap: Overlap = setting(
        "overlap-scheduling",
        "A decode step starts before the tokens of the last one are known (nodes with one rank). 'auto' does so on "
        "GPUs.",
        Overlap.AUTO,
    )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between engines, each of which may fetch from any other."""

    host: str = setting(
        "transfer-host",
        "The engine's control channel, where other nodes ask for KV blocks, listens at this address.",
        "127.0.0.1",
        first=True,
    )
    port: int = setting(
        "transfer-port", "The control channel has this port. 0 takes a free one.", 0, minimum=0, maximum=65535
    )
    advertise: str = setting(
        "transfer-advertise",
        "Other engines reach the control channel at this name or address. Empty: the bound one, or this machine's "
        "name if it is bound to all addresses.",
        "",
    )
    heartbeat_ms: int = setting(
        "transfer-heartbeat-ms",
        "Engines pause for this many milliseconds between pings while transfers are alive.",
        500,
        minimum=10,
        maximum=60_000,
    )
    lease_ms: int = setting(
        "transfer-lease-ms",
        "Another engine that is silent for this many milliseconds counts as dead. Raise it if links take longer to "
        "open.",
        3000,
        minimum=20,
        maximum=600_000,
    )
    prefill_timeout_ms: int = setting(
        "prefill-timeout-ms",
        "A prefill node gets this many milliseconds for a prompt, beyond what its queue and the prompt's length "
        "need. Then the decode node computes the prompt.",
        30_000,
        minimum=1,
        maximum=3_600_000,
    )
    disaggregation: Disaggregation = setting(
        "disaggregation",
        "Which prompts a decode node gives to prefill nodes. 'auto' gives those that are estimated to be faster there.",
        Disaggregation.AUTO,
        first=True,
    )
    checksums: Switch = setting("kv-checksums", "The engine checks every KV block that it receives.", Switch.ON)
    overlap: KvOverlap = setting(
        "kv-overlap",
        "KV blocks are sent while the rest of the prompt is computed. 'auto' does so for long prompts.",
        KvOverlap.AUTO,
    )
    kv_return: KvReturn = setting(
        "kv-return",
        "Prefill nodes fetch the KV blocks of answers from decode nodes into their prefix caches, for a conversation's "
        "next turn. 'auto' does so if --prefix-cache is on.",
        KvReturn.AUTO,
    )
    staging: KvStaging = setting(
        "kv-staging",
        "KV blocks are copied through host memory. 'auto' does so for a GPU's cache. On a GPU, 'off' needs "
        "--kv-checksums off.",
        KvStaging.AUTO,
    )
    staging_mib: int = setting(
        "kv-staging-mib",
        "Page-locked host memory for staging, in MiB. Size it for the blocks of all prompts under way.",
        4096,
        minimum=1,
    )
    shared_cache: Switch = setting(
        "kv-shared-cache",
        "Other engines of the same user and host may map this node's KV cache, if it is on a CPU, and read it.",
        Switch.ON,
    )
    ucx_calls: UcxCalls = setting(
        "ucx-calls",
        "The messages of KV blocks are posted by C++, which g++ compiles once, or by Python. 'auto' takes C++ if it "
        "can.",
        UcxCalls.AUTO,
    )
    ucx_register: Switch = setting(
        "ucx-register",
        "KV memory is registered with the network devices as a whole when a link opens. 'off' registers each block "
        "when it first moves.",
        Switch.OFF,
    )
    ucx_tls: str = setting(
        "ucx-tls",
        "UCX uses these transports, written as in UCX_TLS. Empty: UCX chooses.",
        "",
        first=True,
    )
    ucx_net_devices: str = setting(
        "ucx-net-devices",
        "UCX uses these network devices, written as in UCX_NET_DEVICES. Ranks are separated by '/': "
        "mlx5_0:1/mlx5_1:1. Empty: all devices.",
        "",
    )
    ucx_rails: int = setting(
        "ucx-rails",
        "UCX spreads each KV block over at most this many network devices. 0: two for RDMA, one for TCP.",
        0,
        minimum=0,
        maximum=16,
    )
    ucx_tcp_ports: str = setting(
        "ucx-tcp-ports",
        "KV blocks over TCP use these ports, for example 42000-42999. Empty: any.",
        "",
    )


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP server."""

    host: str = setting("host", "The server listens on this address.", "127.0.0.1", first=True)
    port: int = setting(
        "port", "The server listens on this port. 0 takes a free one.", 0, minimum=0, maximum=65535, first=True
    )
    advertise: str = setting(
        "advertise",
        "The proxy reaches this server at this URL. Empty: host and port, with this machine's name if the host means "
        "all addresses.",
        "",
    )
    keep_alive_s: int = setting(
        "keep-alive-s",
        "An idle client connection is closed after this many seconds. Keep it longer than clients' connection pools "
        "do.",
        120,
        minimum=1,
        maximum=86_400,
    )
    max_client_connections: int = setting(
        "max-client-connections",
        "The server has at most this many connections at once, and refuses more with 503.",
        16_384,
        minimum=1,
    )
    write_timeout_s: float = setting(
        "write-timeout-s",
        "A client that takes nothing of a response for this many seconds is cut off.",
        60.0,
        minimum=0.1,
        maximum=86_400,
    )
    cors_origins: tuple[str, ...] = setting(
        "cors-origins",
        "Web pages of these origins may send requests, for example https://chat.example.com. '*' allows all; other "
        "pages are refused.",
        (),
        first=True,
    )
    max_body_bytes: int = setting(
        "max-body-bytes", "A request body has at most this many bytes.", 8 * 2**20, minimum=1024
    )
    drain_s: float = setting(
        "drain-s", "On SIGTERM, running requests get this many seconds to finish.", 10.0, minimum=0, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """The way of tokens from a node's engine to its clients.

    Each part can be turned off, to measure what it gains.
    """

    batched_dispatch: Switch = setting(
        "batched-dispatch", "The engine sends one message a step. 'off' sends one for each token.", Switch.ON
    )
    notify_size: int = setting(
        "batch-notify-size",
        "This many requests are woken before others get a turn. 0 wakes all requests of a step at once.",
        16,
        minimum=0,
    )
    fast_path: Switch = setting(
        "sse-fast-path",
        "Plain chunks are written from encoded parts. 'off' builds each chunk as an object, to see what this gains.",
        Switch.ON,
    )
    interval: int = setting(
        "stream-interval",
        "A chunk of a stream has this many tokens. More take less work and make streams less smooth.",
        1,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class KeptConfig:
    """The answers that a node keeps for clients that ask again, after their proxy or their connection was lost.

    It keeps those whose requests have an idempotency key, or ask for the ids of events.
    """

    answers: int = setting(
        "keep-answers",
        "The node keeps at most this many answers for clients that ask again, and computes at most half of them for "
        "one absent client. 0 keeps none.",
        1024,
        minimum=0,
        maximum=100_000,
    )
    memory_mib: int = setting(
        "keep-answers-mib",
        "Kept answers take at most this much memory, in MiB, and one answer at most an eighth of it.",
        64,
        minimum=1,
        maximum=1_048_576,
    )
    keep_s: float = setting(
        "keep-answers-s",
        "An answer is computed on and kept for this many seconds after its client or its proxy was lost.",
        60.0,
        minimum=0.1,
        maximum=3600,
    )


class ToolFormat(enum.Enum):
    """The form in which a model writes tool calls."""

    AUTO = "auto"
    """The chat template says which one."""
    NONE = "none"
    """No calls are looked for."""
    HERMES = "hermes"
    QWEN_XML = "qwen-xml"
    LLAMA_JSON = "llama-json"
    PYTHONIC = "pythonic"
    MISTRAL = "mistral"
    GEMMA = "gemma"


class ReasoningFormat(enum.Enum):
    """The form in which a model writes what it thinks before it answers."""

    AUTO = "auto"
    """The chat template says which one."""
    NONE = "none"
    """No reasoning is looked for."""
    THINK = "think"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class MessageConfig:
    """How chat answers are taken apart."""

    tool_parser: ToolFormat = setting(
        "tool-parser",
        "The form in which tool calls are read. 'auto' sees it in the chat template, 'none' reads none.",
        ToolFormat.AUTO,
    )
    reasoning_parser: ReasoningFormat = setting(
        "reasoning-parser",
        "The form in which reasoning is read. 'auto' sees it in the chat template, 'none' leaves it in the content.",
        ReasoningFormat.AUTO,
    )


@dataclass(frozen=True, slots=True)
class RequestConfig:
    """The limits of one client request."""

    timeout_s: float = setting(
        "request-timeout-s",
        "A whole request may take this many seconds.",
        600.0,
        minimum=0.1,
        maximum=86_400,
        first=True,
    )


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """The grammars of clients: JSON Schemas, regular expressions and the like that an answer has to follow."""

    max_bytes: int = setting(
        "max-grammar-bytes",
        "A grammar has at most this many bytes. Its rules are bounded as well.",
        2**17,
        minimum=256,
        maximum=MAX_GRAMMAR_BYTES,
    )
    compile_s: float = setting(
        "grammar-compile-s",
        "Compiling a grammar may take this many seconds. Other new grammars wait meanwhile.",
        3.0,
        minimum=0.05,
        maximum=60,
    )
    cached: int = setting(
        "grammar-cache",
        "The outcomes of this many grammars are kept, each with its text.",
        64,
        minimum=1,
        maximum=4096,
    )


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
class TlsConfig:
    """TLS towards clients."""

    cert: str = setting(
        "tls-cert",
        "This PEM file has the certificate and its chain. With it, the proxy serves HTTPS.",
        "",
        first=True,
    )
    key: str = setting(
        "tls-key", "This PEM file has the certificate's private key, without a passphrase.", "", first=True
    )


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """TLS towards nodes and proxies."""

    authorities: str = setting(
        "tls-ca",
        "This PEM file has the authorities for https:// nodes and proxies. Empty: the system's.",
        "",
    )


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """The proxy's side of discovery."""

    control_host: str = setting(
        "control-host", "The proxy takes registrations on this address.", "127.0.0.1", first=True
    )
    control_port: int = setting(
        "control-port",
        "The proxy takes registrations on this port. 0 takes a free one.",
        8100,
        minimum=0,
        maximum=65535,
        first=True,
    )
    heartbeat_ms: int = setting(
        "heartbeat-ms",
        "Nodes send heartbeats this many milliseconds apart. The proxy tells them so.",
        1000,
        minimum=10,
        maximum=60_000,
    )
    missed_heartbeats: int = setting(
        "missed-heartbeats", "A node that misses this many heartbeats in a row is dropped.", 3, minimum=1
    )


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """The proxy's processes."""

    count: int = setting(
        "workers", "This many processes serve clients on the one port.", 1, minimum=1, maximum=64, first=True
    )


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """The way to choose nodes for a request."""

    policy: RoutingPolicy = setting(
        "policy", "The proxy chooses the nodes for a request in this way.", RoutingPolicy.ROUND_ROBIN, first=True
    )
    prefill_answers: PrefillAnswers = setting(
        "prefill-answers",
        "A prefill node without prompts, and less busy than the decode node, answers requests itself. 'auto' does so "
        "unless the two divide the cores of one machine.",
        PrefillAnswers.AUTO,
    )


@dataclass(frozen=True, slots=True)
class TargetsConfig:
    """How soon tokens should come. 0 is no target of the operator's: each part goes by what it measures or knows."""

    target_ttft_ms: float = setting(
        "target-ttft-ms",
        "The first token should come within this many milliseconds. 0: a node takes twice what the prompt takes "
        "alone, --roles auto takes 1000.",
        0.0,
        minimum=0,
        maximum=MAX_TTFT_MS,
        first=True,
    )
    target_itl_ms: float = setting(
        "target-itl-ms",
        "A step in which answers are decoded should take at most this many milliseconds; prompts beside them are cut "
        "to fit. 0: a decode node takes twice a step without prompts, other nodes have no target, --roles auto takes "
        "100.",
        0.0,
        minimum=0,
        maximum=MAX_ITL_MS,
        first=True,
    )


@dataclass(frozen=True, slots=True)
class RolesConfig:
    """The nodes' roles, and how the proxy moves nodes between them."""

    roles: RoleChoice = setting(
        "roles",
        "'auto' moves nodes between prefill and decode by load. Set it at one proxy of a cluster only.",
        RoleChoice.FIXED,
    )
    interval_ms: int = setting(
        "roles-interval-ms",
        "--roles auto looks at the nodes at this interval, in milliseconds.",
        1000,
        minimum=10,
        maximum=600_000,
    )
    looks: int = setting(
        "roles-looks", "A node changes its role when this many looks in a row call for it.", 5, minimum=1, maximum=1000
    )
    rest_s: float = setting(
        "roles-rest-s",
        "After such a change, nodes keep their roles for this many seconds.",
        30.0,
        minimum=0,
        maximum=86_400,
    )


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """The clients that the proxy serves, and how many requests it takes at once."""

    api_keys: tuple[str, ...] = setting(
        "api-key",
        "Clients have to send this key. Better give a file. May be repeated.",
        (),
        secret=True,
        first=True,
    )
    api_key_file: str = setting(
        "api-key-file",
        "Clients have to send a key of this file. Each line is a key, or a name and a key.",
        "",
        first=True,
    )
    share_prefixes: SharedPrefixes = setting(
        "share-prefixes",
        "With API keys, requests find cached prompts of their own key's owner only. 'all': of all keys, which is "
        "faster where keys share long prompts and tells each key's clients what others have sent.",
        SharedPrefixes.KEY,
    )
    max_in_flight: int = setting(
        "max-in-flight",
        "At most this many answers are under way at once; more requests wait. A request counts as often as it asks "
        "for answers. 0: no bound.",
        4096,
        minimum=0,
    )
    max_in_flight_per_key: int = setting(
        "max-in-flight-per-key",
        "At most this many answers of one API key are under way or waiting, at all proxies together. 0: no bound.",
        0,
        minimum=0,
    )
    max_queued: int = setting("max-queued", "At most this many requests wait at once. More get 503.", 1024, minimum=0)
    max_uploads: int = setting(
        "max-uploads",
        "At most this many request bodies are on their way at once, a quarter of them from one client.",
        1024,
        minimum=1,
    )
    body_memory_mib: int = setting(
        "body-memory-mib",
        "Request bodies above 64 KiB take at most this much memory, in MiB, until a node answers; half of it for one "
        "client.",
        1024,
        minimum=1,
    )
    queue_timeout_s: float = setting(
        "queue-timeout-s",
        "A request waits for its turn for at most this many seconds.",
        30.0,
        minimum=0.01,
        maximum=3600,
    )
    priorities: Switch = setting(
        "priorities",
        "Requests may name a priority. 'off' refuses all but 0.",
        Switch.ON,
    )


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The proxy's connections to nodes, and what becomes of a stream whose node is lost."""

    connect_timeout_s: float = setting(
        "connect-timeout-s", "Connecting to a node may take this many seconds.", 5.0, minimum=0.1, maximum=600
    )
    idle_timeout_s: float = setting(
        "idle-timeout-s",
        "A node that sends no byte of an answer for this many seconds counts as stuck.",
        120.0,
        minimum=0.1,
        maximum=86_400,
    )
    max_connections: int = setting(
        "max-connections", "The proxy keeps at most this many connections to nodes.", 8192, minimum=1
    )
    resume: Switch = setting("resume", "When a stream's node is lost, another node goes on with the answer.", Switch.ON)
    resume_wait_s: float = setting(
        "resume-wait-s",
        "A request whose node is lost waits for another node for this many seconds. So does a client that asks for "
        "the rest of an answer.",
        10.0,
        minimum=0.0,
        maximum=86_400,
    )
    suspect_s: float = setting(
        "suspect-s",
        "A request with which two nodes were lost is refused for this many seconds. 0 lets it try again.",
        60.0,
        minimum=0.0,
        maximum=86_400,
    )
    max_resumes: int = setting(
        "max-resumes",
        "At most this many streams are resumed at once; others wait. 0: two for each node that computes prompts.",
        0,
        minimum=0,
    )
    max_moves: int = setting(
        "max-moves",
        "At most this many answers move at once from nodes that drain or run out of KV blocks.",
        4,
        minimum=1,
    )
    journal_mib: int = setting(
        "journal-mib",
        "Journals, from which streams are resumed, take at most this much memory in each proxy process, in MiB, and "
        "one stream's at most a 32nd of it.",
        64,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """The cluster secret, which signs control messages."""

    secret: str = setting(
        "secret",
        "The cluster secret. Better set PDSERVE_SECRET or --secret-file: others can see command lines.",
        "",
        secret=True,
    )
    secret_file: str = setting("secret-file", "This file holds the cluster secret.", "", first=True)


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """The cores that the engine may use, those that it lends, and its kernels on them."""

    cores: tuple[int, ...] = setting(
        "cores",
        "The engine runs on these cores alone, for example 0,1,4-7. Empty: all.",
        (),
        first=True,
    )
    core_ledger: str = setting(
        "core-ledger",
        "Engines of one machine that name the same file lend each other their cores while they sleep. Take a file in "
        "memory, for example in /dev/shm. Empty: no core is lent.",
        "",
        metavar="FILE",
    )
    kernels: CpuKernels = setting(
        "cpu-kernels",
        "The CPU computes with C++ kernels, which g++ compiles once, or with plain torch. 'auto' takes C++ if it can.",
        CpuKernels.AUTO,
    )
    packed_weights_mib: int = setting(
        "packed-weights-mib",
        "Files of packed weights, which engines of a machine share, take at most this many MiB of the cache folder. "
        "The ones used longest ago are removed. 0 keeps none.",
        16384,
        minimum=0,
        maximum=2**24,
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log, which goes to stderr."""

    level: LogLevel = setting("log-level", "Messages below this level are not logged.", LogLevel.INFO, first=True)
    format: LogFormat = setting(
        "log-format",
        "Log lines are text for people, or JSON objects for programs.",
        LogFormat.TEXT,
    )


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """What a node's ``/metrics`` shows."""

    names: MetricsNames = setting(
        "metrics-names",
        "Metrics that vLLM has too have pdserve's names (pdserve_...), vLLM's (vllm:...), or both.",
        MetricsNames.BOTH,
    )


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """What processes remember of requests, and the OpenTelemetry spans that they make of it."""

    kept_lanes: int = setting(
        "kept-timelines",
        "A process remembers this many of its last requests for pdserve trace. 0 remembers none.",
        512,
        minimum=0,
        maximum=100_000,
    )
    otlp_endpoint: str = setting(
        "otlp-endpoint",
        "Spans of requests go to this OpenTelemetry collector, http://host:4318. Needs pdserve[otel]. Empty: no spans.",
        "",
        metavar="URL",
    )
    ratio: float = setting(
        "trace-ratio",
        "This share of the requests without a traceparent header is traced. With one, the client decides.",
        1.0,
        minimum=0,
        maximum=1,
    )

    @property
    def records(self) -> bool:
        """Whether anybody has a use for what is noted of requests."""
        return bool(self.kept_lanes or self.otlp_endpoint)


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
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    has_peers: bool = True
    """Whether the node belongs to a proxy, so that it can fetch KV blocks from other nodes and be fetched from."""
    node: str = ""
    """The node's name, for log lines; empty if it has none of its own."""
    records: bool = False
    """Whether the API process wants the lanes of requests (``pdserve.wire.timeline``)."""


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
    """The rank is kept to these; empty if it may use all that it finds."""
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
    kept: KeptConfig = field(default_factory=KeptConfig)
    message: MessageConfig = field(default_factory=MessageConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The responses that the proxy keeps for clients that ask for them again, or go on from them."""

    store: Switch = setting(
        "store",
        "The proxy keeps the responses of /v1/responses in memory, so that clients can fetch and continue them.",
        Switch.OFF,
        bare="on",
    )
    store_mib: int = setting(
        "store-mib",
        "Stored responses take at most this much memory, in MiB, and one of them at most an eighth of it. The oldest "
        "are removed.",
        256,
        minimum=1,
        maximum=1_048_576,
    )
    responses: int = setting(
        "store-responses", "At most this many responses are kept.", 100_000, minimum=1, maximum=10_000_000
    )
    ttl_s: float = setting(
        "store-ttl-s", "A response is kept for this many seconds.", 3_600.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class StatusConfig:
    """The proxy's page about the cluster, and who may give nodes commands there."""

    page: StatusPage = setting(
        "status-page",
        "Who sees the cluster at / and /status: 'on' all who may send requests, 'off' nobody, 'auto' everybody on "
        "loopback and elsewhere those with a key. If there are admin keys, they need one.",
        StatusPage.AUTO,
        first=True,
    )
    admin_key_file: str = setting(
        "admin-key-file",
        "Owners of the keys in this file see the status page and may drain nodes and change roles there. Each line "
        "is a key, or a name and a key. These are no keys for requests.",
        "",
    )


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The settings of ``pdserve proxy``."""

    http: HttpConfig = field(default_factory=lambda: HttpConfig(port=8000))
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    status: StatusConfig = field(default_factory=StatusConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The nodes that ``pdserve up`` starts, and the question that it asks them."""

    prefill: int = setting("prefill", "The cluster has this many prefill nodes.", 1, minimum=0, maximum=256)
    decode: int = setting("decode", "The cluster has this many decode nodes.", 1, minimum=0, maximum=256)
    mixed: int = setting(
        "mixed", "The cluster has this many nodes that are prefill and decode nodes at once.", 0, minimum=0, maximum=256
    )
    lend_cores: Switch = setting(
        "lend-cores",
        "Nodes without work lend their cores to the others.",
        Switch.ON,
    )
    verbose: Switch = setting(
        "verbose",
        "All lines of all processes are printed, not only warnings and errors.",
        Switch.OFF,
        bare="on",
    )
    ask: str = setting("ask", "pdserve asks this one question, prints the answer, and stops.", "", metavar="TEXT")
    ready_json: Switch = setting(
        "ready-json",
        "A line of JSON says where the nodes are, in place of text: when all are ready, and after each new start.",
        Switch.OFF,
        bare="on",
    )
    startup_timeout_s: float = setting(
        "startup-timeout-s", "All nodes together get this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class UpConfig:
    """The settings of ``pdserve up``, a whole cluster on this machine.

    ``http`` and ``store`` are the proxy's. The other sections go to every process.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    http: HttpConfig = field(default_factory=lambda: HttpConfig(port=8000))
    security: SecurityConfig = field(default_factory=SecurityConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    message: MessageConfig = field(default_factory=MessageConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """The model that is meant, and whether the hub may be asked for it."""

    path: str = setting("model", _MODEL_HELP, "", first=True)
    offline: Switch = _offline()


@dataclass(frozen=True, slots=True)
class PullConfig:
    """The settings of ``pdserve pull``."""

    model: FetchConfig = field(default_factory=FetchConfig)


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """The settings of ``pdserve models``."""

    model: FetchConfig = field(default_factory=FetchConfig)


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """The file for the figures, which are also printed as a table."""

    json: str = setting(
        "json",
        "The figures go to this file as JSON. '-' or no value is standard output.",
        "",
        metavar="FILE",
        bare="-",
        first=True,
    )


@dataclass(frozen=True, slots=True)
class DiagnosisConfig:
    """The peers that the doctor asks, and what it measures."""

    peers: tuple[str, ...] = setting(
        "peer",
        "The doctor asks the prefill node at this transfer control address, tcp://host:port. May be repeated.",
        (),
        first=True,
    )
    proxy_url: str = setting(
        "proxy-url", "The doctor also asks the prefill nodes of this proxy, http://host:port.", "", first=True
    )
    probe: Switch = setting(
        "probe",
        "The doctor measures bandwidth and latency to each peer or, without one, between two processes here.",
        Switch.ON,
    )
    probe_mib: int = setting("probe-mib", "One probe moves this much memory, in MiB.", 128, minimum=1, maximum=256)
    timeout_s: float = setting(
        "peer-timeout-s", "A peer gets this many seconds for each answer.", 3.0, minimum=0.1, maximum=60
    )


@dataclass(frozen=True, slots=True)
class DoctorConfig:
    """The settings of ``pdserve doctor``.

    A model is compared with those of the peers only if it is named.
    """

    diagnosis: DiagnosisConfig = field(default_factory=DiagnosisConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    cache: CacheConfig = field(default_factory=CacheConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class CommandConfig:
    """The node that a command is for, and where it is found."""

    node: str = setting("node", "The command is for the node of this name or URL.", "")
    proxy_url: str = setting(
        "proxy-url", "This proxy knows the node, http://host:port.", "http://127.0.0.1:8000", first=True
    )
    timeout_s: float = setting(
        "command-timeout-s",
        "The proxy and the node get this many seconds for each answer.",
        10.0,
        minimum=0.1,
        maximum=600,
    )


@dataclass(frozen=True, slots=True)
class NewRoleConfig:
    """The role that the node gets."""

    role: str = setting("role", "The node gets this role: prefill, decode or mixed.", "")


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """The settings of ``pdserve role``."""

    command: CommandConfig = field(default_factory=CommandConfig)
    new_role: NewRoleConfig = field(default_factory=NewRoleConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)


@dataclass(frozen=True, slots=True)
class DrainWaitConfig:
    """The wait for a node that drains."""

    wait_s: float = setting(
        "drain-wait-s",
        "The command waits this many seconds for the node to end. 0 does not wait.",
        60.0,
        minimum=0,
        maximum=86_400,
    )


@dataclass(frozen=True, slots=True)
class LiveQuestionConfig:
    """Whom pdserve live asks."""

    pid: int = setting(
        "pid",
        "The process that serves. 1 is the process that a container was started for.",
        1,
        minimum=1,
        maximum=2**22,
        metavar="PID",
    )
    wait_s: float = setting(
        "live-wait-s", "The server has to answer within this many seconds.", 3.0, minimum=0.1, maximum=3600
    )


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """The settings of ``pdserve live``."""

    live: LiveQuestionConfig = field(default_factory=LiveQuestionConfig)


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """The settings of ``pdserve drain``."""

    command: CommandConfig = field(default_factory=CommandConfig)
    drain: DrainWaitConfig = field(default_factory=DrainWaitConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """The proxy whose cluster is shown, and how."""

    proxy_url: str = setting(
        "proxy-url", "This proxy knows the cluster, http://host:port.", "http://127.0.0.1:8000", first=True
    )
    api_keys: tuple[str, ...] = setting(
        "api-key", "The proxy gets this key, if it wants one: an API key or an admin's.", (), secret=True
    )
    api_key_file: str = setting("api-key-file", "The proxy gets the first key in this file.", "", first=True)
    interval_s: float = setting(
        "interval-s", "This many seconds lie between two looks.", 1.0, minimum=0.1, maximum=3600, first=True
    )
    once: Switch = setting(
        "once", "One report is printed, after two looks, so that it has rates.", Switch.OFF, bare="on", first=True
    )
    json: Switch = setting(
        "json", "Each report is printed as one line of JSON, as /status has it.", Switch.OFF, bare="on", first=True
    )
    timeout_s: float = setting(
        "command-timeout-s", "The proxy gets this many seconds for each answer.", 10.0, minimum=0.1, maximum=600
    )


@dataclass(frozen=True, slots=True)
class TopConfig:
    """The settings of ``pdserve top``."""

    watch: WatchConfig = field(default_factory=WatchConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)


@dataclass(frozen=True, slots=True)
class AskedRequestConfig:
    """The request whose timeline is shown, and the proxy that is asked."""

    request: str = setting("request", "This is the x-request-id of the request.", "", metavar="ID", first=True)
    slowest: int = setting(
        "slowest",
        "The slowest requests of the last 64 that ended are listed and drawn, so many of them.",
        0,
        bare="3",
        minimum=0,
        maximum=64,
        first=True,
    )
    failed: int = setting(
        "failed",
        "The last requests that the cluster failed are listed and drawn, so many of them.",
        0,
        bare="5",
        minimum=0,
        maximum=64,
        first=True,
    )
    proxy_url: str = setting(
        "proxy-url", "This proxy had the request, http://host:port.", "http://127.0.0.1:8000", first=True
    )
    api_keys: tuple[str, ...] = setting("api-key", "The proxy gets this key, if it asks for one.", (), secret=True)
    api_key_file: str = setting("api-key-file", "The proxy gets the first key in this file.", "", first=True)
    json: Switch = setting(
        "json", "Each timeline is printed as one line of JSON, as the proxy has it.", Switch.OFF, bare="on", first=True
    )
    timeout_s: float = setting(
        "command-timeout-s", "The proxy gets this many seconds for its answer.", 10.0, minimum=0.1, maximum=600
    )


@dataclass(frozen=True, slots=True)
class RequestTraceConfig:
    """The settings of ``pdserve trace``."""

    asked: AskedRequestConfig = field(default_factory=AskedRequestConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)


@dataclass(frozen=True, slots=True)
class TalkConfig:
    """The server that answers, and how its answers are asked for and shown."""

    url: str = setting(
        "url",
        "This server answers, http://host:port: a proxy, a node, or another one with OpenAI's API. If it is empty, a "
        "cluster runs on this machine as long as the chat does.",
        "",
        first=True,
    )
    api_keys: tuple[str, ...] = setting("api-key", "The server gets this key, if it asks for one.", (), secret=True)
    api_key_file: str = setting("api-key-file", "The server gets the first key in this file.", "", first=True)
    system: str = setting(
        "system",
        "The model reads this text, the system prompt, before the conversation.",
        "",
        metavar="TEXT",
        first=True,
    )
    markdown: Switch = setting(
        "markdown",
        "Answers are shown with their Markdown rendered. Off: as the model writes them, which is also so where the "
        "output is no terminal.",
        Switch.ON,
        first=True,
    )
    temperature: float = setting(
        "temperature",
        "Tokens are chosen at this temperature. 0 takes the likeliest one.",
        0.7,
        minimum=0,
        maximum=2,
        first=True,
    )
    max_tokens: int = setting(
        "max-tokens", "An answer has at most this many tokens. 0 leaves it to the server.", 0, minimum=0, first=True
    )


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The settings of ``pdserve chat``. All but ``talk``, ``trust`` and ``request`` are those of its own cluster."""

    talk: TalkConfig = field(default_factory=TalkConfig)
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    """The load that is expected, and the clusters that are looked at."""

    profile: str = setting(
        "profile",
        "This file says what nodes take on your machines; pdserve plan profile measures it.",
        "profile.json",
        metavar="FILE",
        first=True,
    )
    rate: float = setting(
        "rate",
        "This many requests come in a second, independently of each other.",
        0.0,
        minimum=0,
        maximum=1e6,
        first=True,
    )
    prompts: str = setting(
        "prompt-lengths",
        "Tokens of prompts: 256, or 16-512 (logarithms spread evenly), or several with weights: 64:3,1024-4096:1.",
        "256",
        first=True,
    )
    outputs: str = setting(
        "output-lengths", "Tokens of answers, in the same form as --prompt-lengths.", "64", first=True
    )
    trace: str = setting(
        "trace",
        'The requests come as in this file, one a line: {"at_s": 0.25, "prompt_tokens": 256, "output_tokens": 64}.',
        "",
        metavar="FILE",
        first=True,
    )
    running: str = setting(
        "from",
        "Rate and lengths are those of the running cluster at this proxy's URL.",
        "",
        metavar="URL",
        first=True,
    )
    look_s: float = setting(
        "look-s", "The running cluster's requests are counted for this many seconds.", 30.0, minimum=1, maximum=3600
    )
    percentile: float = setting(
        "percentile",
        "This percentile of TTFT and ITL is to keep the targets.",
        90.0,
        minimum=1,
        maximum=99.9,
        first=True,
    )
    prefill: int = setting(
        "prefill",
        "The cluster has this many prefill nodes. Without any numbers of nodes, the smallest cluster is looked for.",
        0,
        minimum=0,
        maximum=1024,
        first=True,
    )
    decode: int = setting("decode", "It has this many decode nodes.", 0, minimum=0, maximum=1024, first=True)
    mixed: int = setting("mixed", "It has this many mixed nodes.", 0, minimum=0, maximum=1024, first=True)
    most_nodes: int = setting("max-nodes", "No larger cluster is looked at.", 64, minimum=1, maximum=1024, first=True)
    nodes_per_machine: int = setting(
        "nodes-per-machine", "This many nodes divide the cores of one machine.", 1, minimum=1, maximum=2, first=True
    )
    disaggregation: Disaggregation = setting(
        "disaggregation",
        "Which prompts a decode node gives to prefill nodes. 'auto' gives those that are estimated to be faster there.",
        Disaggregation.AUTO,
    )
    requests: int = setting(
        "plan-requests", "The prediction draws this many requests.", 2000, minimum=10, maximum=1_000_000
    )
    seed: int = setting("seed", "The requests follow from this seed.", 0, minimum=0)
    plot: str = setting("plot", "The plot goes to this file, as SVG.", "", metavar="FILE")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """The settings of ``pdserve plan``. The targets are what is wanted, and what the nodes are given."""

    plan: PredictionConfig = field(default_factory=PredictionConfig)
    targets: TargetsConfig = field(default_factory=TargetsConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
