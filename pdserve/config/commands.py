"""The settings of the subcommands that start no server of their own, and of ``pdserve up``."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.config.declare import Switch, setting
from pdserve.config.engine import CacheConfig, CpuConfig, GrammarConfig, ParallelConfig, SchedulerConfig, TargetsConfig
from pdserve.config.http import HttpConfig, SecurityConfig, StreamConfig, TrustConfig
from pdserve.config.model import FetchConfig, ModelConfig
from pdserve.config.observability import LogConfig, TraceConfig
from pdserve.config.proxy import StoreConfig
from pdserve.config.requests import MessageConfig, RequestConfig
from pdserve.config.transfer import Disaggregation, TransferConfig


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The nodes that ``pdserve up`` starts, and the question that it asks them."""

    prefill: int = setting("prefill", "The cluster has this many prefill nodes.", 1, minimum=0, maximum=256)
    decode: int = setting("decode", "The cluster has this many decode nodes.", 1, minimum=0, maximum=256)
    mixed: int = setting(
        "mixed", "The cluster has this many nodes that are prefill and decode nodes at once.", 0, minimum=0, maximum=256
    )
    lend_cores: Switch = setting("lend-cores", "Nodes without work lend their cores to the others.", Switch.ON)
    verbose: Switch = setting(
        "verbose", "All lines of all processes are printed, not only warnings and errors.", Switch.OFF, bare="on"
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
class PullConfig:
    """The settings of ``pdserve pull``."""

    model: FetchConfig = field(default_factory=FetchConfig)


@dataclass(frozen=True, slots=True)
class ListingConfig:
    """What is listed, and how."""

    families: Switch = setting(
        "families",
        "The families that can be served are listed, with what they are made of, in place of the models of the cache.",
        Switch.OFF,
        bare="on",
        first=True,
    )
    json: Switch = setting(
        "json",
        "JSON is printed: of the model or, without one, of cache and families.",
        Switch.OFF,
        bare="on",
        first=True,
    )


@dataclass(frozen=True, slots=True)
class ModelsConfig:
    """The settings of ``pdserve models``."""

    listing: ListingConfig = field(default_factory=ListingConfig)
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
        "from", "Rate and lengths are those of the running cluster at this proxy's URL.", "", metavar="URL", first=True
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
