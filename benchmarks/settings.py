"""The settings of the studies."""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    ModelConfig,
    ReportConfig,
    SchedulerConfig,
    Switch,
    setting,
)
from pdserve.config.bench import EngineBenchConfig
from pdserve.errors import ConfigError
from pdserve.settings.load import check_counts

_SHAPE = re.compile(r"mix|[1-9][0-9]{0,6}/[1-9][0-9]{0,6}")


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """The requests of a benchmark: random prompts, the same for the same seed."""

    seed: int = setting("seed", "Prompts and lengths follow from this seed.", 0, minimum=0)
    min_prompt_tokens: int = setting("min-prompt-tokens", "The shortest prompt has this many tokens.", 16, minimum=1)
    max_prompt_tokens: int = setting("max-prompt-tokens", "The longest prompt has this many tokens.", 128, minimum=1)
    min_output_tokens: int = setting("min-output-tokens", "The shortest answer has this many tokens.", 16, minimum=1)
    max_output_tokens: int = setting("max-output-tokens", "The longest answer has this many tokens.", 256, minimum=1)
    vocab_size: int = setting(
        "prompt-vocab",
        "Prompts have token ids below this number, at most the model's own.",
        32_000,
        minimum=4,
    )


@dataclass(frozen=True, slots=True)
class BatchingBenchConfig:
    """Continuous against static batching."""

    concurrency: tuple[int, ...] = setting(
        "concurrency", "Runs have these numbers of clients at the same time.", (1, 2, 4, 8, 16, 32)
    )
    requests: int = setting(
        "requests", "A run has this many requests. 0 takes 3 times the concurrency, at least 12.", 0, minimum=0
    )
    repeats: int = setting(
        "repeats",
        "Each mode runs this often at each concurrency, in turns.",
        2,
        minimum=1,
    )
    plot: str = setting("plot", "The plot goes to this file, as PNG.", "", metavar="FILE")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "Both nodes together get this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting(
        "run-timeout-s", "One run may take this many seconds.", 900.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchBatchingConfig:
    """The settings of ``benchmarks batching``."""

    batching: BatchingBenchConfig = field(default_factory=BatchingBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class StreamBenchConfig:
    """The host's side of streaming, with a mock engine behind it."""

    streams: tuple[int, ...] = setting(
        "streams", "Runs have these numbers of streams at the same time.", (64, 256, 1024, 2048)
    )
    variants: tuple[str, ...] = setting(
        "variants",
        "These parts of the text path are on: off, on, parts joined by +, or on-PART. Empty: all.",
        (),
    )
    rate: int = setting("rate", "All streams of a paced run get this many tokens a second together.", 16_000, minimum=1)
    seconds: float = setting("seconds", "All streams of a run are under way for this many seconds.", 2.5, minimum=0.01)
    repeats: int = setting(
        "repeats",
        "Each variant runs this often, in turns. The median of each figure is shown.",
        1,
        minimum=1,
        maximum=100,
    )
    plot: str = setting("plot", "The plot goes to this file, as PNG.", "", metavar="FILE")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "All nodes together get this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting(
        "run-timeout-s", "One run may take this many seconds.", 120.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchStreamConfig:
    """The settings of ``benchmarks stream``."""

    streaming: StreamBenchConfig = field(default_factory=StreamBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, slots=True)
class ProxyBenchConfig:
    """The measurements of a proxy in front of backends that answer at once."""

    peer_command: str = setting(
        "peer-command",
        "This command runs another router, which is measured in the same run. {prefill} and {decode} stand for the "
        "backends' URLs, {port} and {port2} for free ports. Empty: none.",
        "",
        metavar="COMMAND",
    )
    connections: int = setting("connections", "This many clients ask at the same time.", 64, minimum=1)
    chunks: int = setting("chunks", "Each stream has this many chunks.", 64, minimum=1)
    seconds: float = setting("seconds", "Each run's requests begin within this many seconds.", 4.0, minimum=0.1)
    repeats: int = setting(
        "repeats", "Each system runs this often, in turns. Medians are shown.", 3, minimum=1, maximum=100
    )
    rate: int = setting("rate", "Latency is measured at this many requests a second.", 500, minimum=1)
    streams: int = setting(
        "streams", "Delays between chunks are measured with this many streams at once.", 2048, minimum=1
    )
    gap_ms: int = setting(
        "gap-ms", "The chunks of such a stream are this many milliseconds apart.", 200, minimum=1, maximum=60_000
    )
    idle: int = setting("idle", "Latency is measured beside this many idle connections.", 10_000, minimum=1)
    startup_timeout_s: float = setting(
        "startup-timeout-s", "All servers together get this many seconds to start.", 60.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting(
        "run-timeout-s", "One run may take this many seconds.", 120.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchProxyConfig:
    """The settings of ``benchmarks proxy``."""

    proxying: ProxyBenchConfig = field(default_factory=ProxyBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


@dataclass(frozen=True, slots=True)
class FailoverBenchConfig:
    """A cluster on this machine, whose decode nodes are killed, stopped or drained under running streams."""

    rounds: int = setting("rounds", "This many faults happen, one after the other.", 20, minimum=1)
    faults: tuple[str, ...] = setting(
        "faults",
        "These happen to a decode node, in turns: kill (SIGKILL), hang (SIGSTOP) or drain (SIGTERM).",
        ("kill", "hang"),
    )
    prefill: int = setting("prefill", "The cluster has this many prefill nodes.", 1, minimum=0)
    decode: int = setting("decode", "The cluster has this many decode nodes.", 2, minimum=2)
    clients: int = setting("clients", "Each round has this many streams.", 4, minimum=1)
    prompt_tokens: int = setting("prompt-tokens", "Each prompt has this many tokens.", 256, minimum=1)
    output_tokens: int = setting("output-tokens", "Each answer has this many tokens.", 128, minimum=2)
    vocab_size: int = setting(
        "prompt-vocab", "Prompts have token ids below this number, at most the model's own.", 32_000, minimum=4
    )
    plain: int = setting("plain", "This many of the decode nodes have --speculation off.", 0, minimum=0)
    seed: int = setting("seed", "Prompts and faults follow from this seed.", 0, minimum=0)
    startup_timeout_s: float = setting(
        "startup-timeout-s", "All nodes together get this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )
    limit_s: float = setting(
        "round-timeout-s", "One round may take this many seconds.", 120.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchFailoverConfig:
    """``benchmarks failover``."""

    failover: FailoverBenchConfig = field(default_factory=FailoverBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class RolesBenchConfig:
    """Three nodes whose steps wait, under a load that shifts between long prompts and long answers."""

    splits: tuple[str, ...] = setting(
        "splits",
        "These clusters are measured, one after the other: PREFILL+DECODE numbers of nodes, or auto.",
        ("1+2", "2+1", "auto"),
    )
    cycles: int = setting("cycles", "A phase of long prompts and one of long answers come this often.", 1, minimum=1)
    phase_s: float = setting(
        "phase-s", "Each phase has requests for this many seconds.", 60.0, minimum=0.1, maximum=86_400
    )
    prompt_rate: float = setting(
        "prompt-rate", "In a phase of long prompts, this many requests come in a second.", 1.1, minimum=0.01
    )
    long_prompt: int = setting("long-prompt", "A long prompt has this many tokens.", 1024, minimum=1)
    short_answer: int = setting("short-answer", "The answer to it has this many tokens.", 16, minimum=1)
    answer_rate: float = setting(
        "answer-rate", "In a phase of long answers, this many requests come in a second.", 1.3, minimum=0.01
    )
    short_prompt: int = setting("short-prompt", "A short prompt has this many tokens.", 64, minimum=1)
    long_answer: int = setting("long-answer", "The answer to it has this many tokens.", 128, minimum=2)
    ttft_ms: float = setting(
        "bench-ttft-ms", "A good request has its first token in this time.", 5000.0, minimum=1, maximum=86_400_000
    )
    itl_ms: float = setting(
        "bench-itl-ms",
        "A good request has its other tokens this far apart, in the mean.",
        80.0,
        minimum=0.1,
        maximum=86_400_000,
    )
    step_ms: float = setting("step-ms", "Each step takes this many milliseconds.", 15.0, minimum=0, maximum=60_000)
    row_ms: float = setting(
        "row-ms", "Each request that decodes adds this many milliseconds to a step.", 5.0, minimum=0, maximum=60_000
    )
    prompt_tokens_per_s: float = setting(
        "pace-tokens-per-s", "Prompts add to a step: one second for this many tokens.", 800.0, minimum=1
    )
    max_num_seqs: int = setting("bench-max-num-seqs", "One step has at most this many requests.", 32, minimum=1)
    seed: int = setting("seed", "The prompts and the times of the requests follow from this seed.", 0, minimum=0)
    vocab_size: int = setting("prompt-vocab", "Prompts are made of token ids below this number.", 1000, minimum=4)
    startup_timeout_s: float = setting(
        "startup-timeout-s",
        "All nodes of a cluster together get this many seconds to start.",
        300.0,
        minimum=1,
        maximum=86_400,
    )
    limit_s: float = setting(
        "run-timeout-s",
        "After the last phase, answers have this many seconds to end.",
        120.0,
        minimum=1,
        maximum=86_400,
    )


@dataclass(frozen=True, slots=True)
class BenchRolesConfig:
    """The settings of ``benchmarks roles``."""

    splits: RolesBenchConfig = field(default_factory=RolesBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


@dataclass(frozen=True, slots=True)
class TurnsBenchConfig:
    """Conversations with two clusters on this machine, one of which returns the KV blocks of answers."""

    conversations: int = setting("conversations", "Each cluster has this many conversations.", 6, minimum=1)
    turns: int = setting("turns", "A conversation has this many turns.", 5, minimum=1)
    decode: int = setting("decode", "Each cluster has this many decode nodes, beside one prefill node.", 1, minimum=1)
    first_tokens: int = setting("first-tokens", "The first prompt has this many tokens.", 256, minimum=1)
    new_tokens: int = setting("new-tokens", "Each later turn adds this many tokens.", 32, minimum=1)
    output_tokens: int = setting("output-tokens", "Each answer has this many tokens.", 192, minimum=2)
    hybrid_layers: int = setting(
        "hybrid-layers",
        "A random model of Qwen3-Next's kind with this many layers is served, with the tokenizer of --model. Each "
        "fourth layer keeps whole contexts, and the others a state. 0 serves --model.",
        0,
        minimum=0,
        maximum=96,
    )
    pause_s: float = setting(
        "pause-s", "A client waits this many seconds between two turns.", 0.5, minimum=0, maximum=86_400
    )
    vocab_size: int = setting(
        "prompt-vocab",
        "Prompts have token ids below this number, at most the model's own.",
        32_000,
        minimum=4,
    )
    seed: int = setting("seed", "Prompts follow from this seed.", 0, minimum=0)
    startup_timeout_s: float = setting(
        "startup-timeout-s", "All nodes get this many seconds to come up.", 300.0, minimum=1, maximum=86_400
    )
    limit_s: float = setting(
        "answer-timeout-s", "One answer may take this many seconds.", 120.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchTurnsConfig:
    """The settings of ``benchmarks turns``."""

    turns: TurnsBenchConfig = field(default_factory=TurnsBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class SpeculationBenchConfig:
    """Requests whose answers repeat much, and others, with speculation and without."""

    rounds: int = setting("rounds", "Each request is answered this often with and without.", 2, minimum=1)
    clients: tuple[int, ...] = setting("clients", "Requests come from these numbers of clients.", (1, 8))
    prompts: int = setting("prompts", "At most this many prompts of each kind are sent.", 10, minimum=1)
    output_tokens: int = setting("output-tokens", "An answer has at most this many tokens.", 256, minimum=2)
    plot: str = setting("plot", "The plot goes to this file, as PNG.", "", metavar="FILE")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "All nodes get this many seconds to come up.", 300.0, minimum=1, maximum=86_400
    )
    limit_s: float = setting(
        "answer-timeout-s", "One answer may take this many seconds.", 300.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchSpeculationConfig:
    """The settings of ``benchmarks speculation``."""

    speculation: SpeculationBenchConfig = field(default_factory=SpeculationBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class FamiliesBenchConfig:
    """Families with a recipe beside the same models in transformers' code, in bf16 on a CPU."""

    families: tuple[str, ...] = setting(
        "families", "The families that are measured.", ("phi3", "olmo2", "qwen2_moe"), first=True
    )
    batches: tuple[int, ...] = setting("batches", "Decode steps have these numbers of requests.", (1, 8, 16))
    context: int = setting("context", "A request of a decode step has this many tokens.", 320, minimum=2)
    chunk: int = setting("chunk", "A prefill step has this many tokens.", 256, minimum=2)
    rounds: int = setting("rounds", "Each step is timed this often, after one that warms up.", 4, minimum=1)
    threads: int = setting("threads", "Steps are computed by this many threads.", 1, minimum=1)
    layers: int = setting("layers", "Models have this many layers. 0 takes those of their shapes.", 0, minimum=0)


@dataclass(frozen=True, slots=True)
class BenchFamiliesConfig:
    """The settings of ``benchmarks families``."""

    families: FamiliesBenchConfig = field(default_factory=FamiliesBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


@dataclass(frozen=True, slots=True)
class BenchGpuShapesConfig:
    """The settings of ``benchmarks gpu-shapes``, whose models have batches, contexts and chunks of their own."""

    engine: EngineBenchConfig = field(default_factory=EngineBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, slots=True)
class HostBenchConfig:
    """The time that a step takes of the step loop's thread, without a model."""

    requests: tuple[int, ...] = setting("requests", "Decode steps have these numbers of requests.", (1, 64, 256))
    contexts: tuple[int, ...] = setting(
        "contexts", "Each of these requests has about these numbers of tokens.", (1024, 8192, 32768)
    )
    block_size: int = setting("block-size", "A KV block holds this many tokens.", 16, minimum=1, maximum=1024)


@dataclass(frozen=True, slots=True)
class BenchHostConfig:
    """The settings of ``benchmarks host``."""

    host: HostBenchConfig = field(default_factory=HostBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


@dataclass(frozen=True, slots=True)
class LentCoresBenchConfig:
    """Steps with cores that another engine lends, and how soon that has its cores back."""

    context: int = setting("context", "The request of the decode step has this many tokens.", 256, minimum=2)
    chunks: tuple[int, ...] = setting(
        "chunks", "Prefill steps have these numbers of tokens of a prompt.", (64, 128, 256, 512)
    )
    seconds: float = setting("seconds", "Each measurement takes this many seconds.", 1.0, minimum=0)
    block_size: int = setting("block-size", "A KV block holds this many tokens.", 16, minimum=1, maximum=1024)


@dataclass(frozen=True, slots=True)
class BenchLentCoresConfig:
    """The settings of ``benchmarks lent-cores``."""

    lent: LentCoresBenchConfig = field(default_factory=LentCoresBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass(frozen=True, slots=True)
class GgufServersBenchConfig:
    """A node beside another server that reads the same random GGUF file."""

    shapes: tuple[str, ...] = setting(
        "shapes",
        "The models that are measured, by their architecture.",
        ("phi3", "glm4", "olmo2", "qwen3moe", "gpt-oss", "qwen3next"),
        first=True,
    )
    peer_command: str = setting(
        "peer-command",
        "The other server, as a command; {model} is the file, and {port} where it has to listen.",
        "llama-server -m {model} --port {port} -np 16 -c 16384 --no-cache-prompt --cache-ram 0",
        metavar="COMMAND",
    )
    clients: tuple[int, ...] = setting("clients", "So many clients ask at a time.", (1, 8, 16))
    requests: int = setting("requests", "Each client sends this many requests in a round.", 2, minimum=1)
    prompt_tokens: int = setting("prompt-tokens", "A prompt has this many tokens.", 256, minimum=1)
    output_tokens: int = setting("output-tokens", "An answer has this many tokens.", 64, minimum=1)
    rounds: int = setting("rounds", "Each server has its turn this often.", 3, minimum=1)
    startup_timeout_s: float = setting("startup-timeout-s", "A server must answer within this many seconds.", 120.0)
    run_timeout_s: float = setting("run-timeout-s", "A turn may take this many seconds.", 600.0)


@dataclass(frozen=True, slots=True)
class BenchGgufServersConfig:
    """The settings of ``benchmarks gguf-servers``."""

    servers: GgufServersBenchConfig = field(default_factory=GgufServersBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


@dataclass(frozen=True, slots=True)
class PlanBenchConfig:
    """How far predictions are from what a mixed node, and a prefill and a decode node, then do."""

    profile: str = setting(
        "profile",
        "Predictions use this profile. Empty: the mean of those that the benchmark measures.",
        "",
        metavar="FILE",
    )
    keep_profile: str = setting("keep-profile", "The first profile goes to this file.", "", metavar="FILE")
    prompts: str = setting("prompt-lengths", "Tokens of prompts, in the form of pdserve plan.", "64-512")
    outputs: str = setting("output-lengths", "Tokens of answers, in the same form.", "16-128")
    rate_percents: tuple[int, ...] = setting(
        "rate-percents",
        "Requests come at these rates, in percent of the most that the mixed node is predicted to answer.",
        (20, 50, 80, 120),
    )
    seconds: float = setting(
        "seconds", "The requests of a run come within this many seconds.", 20.0, minimum=1, maximum=3600
    )
    repeats: int = setting(
        "repeats",
        "Each system has each rate this often, in turns.",
        5,
        minimum=1,
        maximum=100,
    )
    seed: int = setting("seed", "The requests follow from this seed.", 0, minimum=0)
    vocab_size: int = setting("prompt-vocab", "Prompts are made of token ids below this number.", 32_000, minimum=4)
    plot: str = setting("plot", "The plot goes to this file, as SVG.", "", metavar="FILE")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "The nodes get this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting(
        "run-timeout-s", "One run may take this many seconds.", 900.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchPlanConfig:
    """The settings of ``benchmarks plan``."""

    plan: PlanBenchConfig = field(default_factory=PlanBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


class GoodputSystem(enum.Enum):
    """A system that ``benchmarks goodput`` starts."""

    MIXED = "mixed"
    """One mixed node with all cores."""
    ALWAYS = "always"
    """A prefill node and a decode node that share the cores, with ``--disaggregation always``."""
    AUTO = "auto"
    """The same with ``--disaggregation auto``."""


@dataclass(frozen=True, slots=True)
class GoodputBenchConfig:
    """Answers within latency targets, from one mixed node and from a prefill and a decode node on the same cores."""

    systems: tuple[str, ...] = setting(
        "systems",
        "These systems are measured, in turns: mixed (one node with all cores), always and auto (a prefill and a "
        "decode node that divide them, with this --disaggregation). The first one sets targets and rates.",
        tuple(system.value for system in GoodputSystem),
    )
    add: tuple[str, ...] = setting(
        "add",
        "These servers are measured in the same turns: any that speak OpenAI's API. They have to be up.",
        (),
        metavar="NAME=URL",
    )
    shapes: tuple[str, ...] = setting(
        "shapes",
        "Requests have these shapes: PROMPT/ANSWER in tokens, or mix: many short ones and few long ones.",
        ("256/64", "64/256", "1024/32", "mix"),
    )
    concurrency: tuple[int, ...] = setting("concurrency", "Closed loops have these numbers of clients.", (1, 4, 8, 16))
    rate_percents: tuple[int, ...] = setting(
        "rate-percents",
        "Open loops have these rates, in percent of what the first system does with the most clients.",
        (50, 75, 100, 125),
    )
    seconds: float = setting(
        "seconds", "The requests of a run begin within this many seconds.", 8.0, minimum=0.1, maximum=3600
    )
    repeats: int = setting("repeats", "Each system has each load this often, in turns.", 5, minimum=1, maximum=100)
    ttft_ms: float = setting(
        "bench-ttft-ms",
        "A good answer has its first token in this time. 0 takes 4 times the mean without other load.",
        0.0,
        minimum=0,
        maximum=86_400_000,
    )
    tight_itl_ms: float = setting(
        "tight-itl-ms",
        "The tight target has the other tokens this far apart. 0 takes twice the median without other load.",
        0.0,
        minimum=0,
        maximum=86_400_000,
    )
    loose_itl_ms: float = setting(
        "loose-itl-ms",
        "The loose target has the other tokens this far apart. 0 takes 5 times the median without other load.",
        0.0,
        minimum=0,
        maximum=86_400_000,
    )
    tell: Switch = setting(
        "tell",
        "Each load runs twice, and requests name the targets by which their answers are good. 'off': all systems use "
        "their own targets.",
        Switch.OFF,
    )
    lend_cores: Switch = setting(
        "lend-cores",
        "The nodes of a system lend each other their cores, as under pdserve up.",
        Switch.ON,
    )
    plot: str = setting("plot", "Both plots go to this folder, as SVG.", "", metavar="FOLDER")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "Each system gets this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting(
        "run-timeout-s", "One run may take this many seconds.", 600.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class BenchGoodputConfig:
    """The settings of ``benchmarks goodput``."""

    goodput: GoodputBenchConfig = field(default_factory=GoodputBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    workload: WorkloadConfig = field(
        default_factory=lambda: WorkloadConfig(min_prompt_tokens=32, max_prompt_tokens=1024)
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


def check(config: Any) -> None:
    """Raises ConfigError for the first section of a study's settings that cannot work."""
    for section in dataclasses.fields(config):
        match getattr(config, section.name):
            case WorkloadConfig() as workload:
                _check_workload(workload)
            case BatchingBenchConfig(concurrency=concurrency):
                check_counts("--concurrency", concurrency)
            case SpeculationBenchConfig(clients=clients):
                check_counts("--clients", clients)
            case FamiliesBenchConfig(batches=batches):
                check_counts("--batches", batches)
            case HostBenchConfig(requests=requests, contexts=contexts):
                check_counts("--requests", requests)
                check_counts("--contexts", contexts)
            case LentCoresBenchConfig(chunks=chunks):
                check_counts("--chunks", chunks)
            case StreamBenchConfig(streams=streams):
                check_counts("--streams", streams)
            case GoodputBenchConfig() as goodput:
                _check_goodput(goodput)


def _check_workload(workload: WorkloadConfig) -> None:
    for what, least, most in (
        ("prompt", workload.min_prompt_tokens, workload.max_prompt_tokens),
        ("output", workload.min_output_tokens, workload.max_output_tokens),
    ):
        if least > most:
            raise ConfigError(f"--min-{what}-tokens ({least}) is above --max-{what}-tokens ({most})")


def _check_goodput(goodput: GoodputBenchConfig) -> None:
    known = [system.value for system in GoodputSystem]
    if len(set(goodput.systems)) < len(goodput.systems) or set(goodput.systems) - set(known):
        raise ConfigError(
            f"--systems: {','.join(goodput.systems)!r} was given; it takes names out of {', '.join(known)}, each once"
        )
    if not (goodput.systems or goodput.add):
        raise ConfigError("--systems and --add are both empty: there is nothing to measure")
    for shape in goodput.shapes:
        if not _SHAPE.fullmatch(shape):
            raise ConfigError(f"--shapes: {shape!r} was given; it takes shapes like 256/64, and mix")
    if not goodput.shapes:
        raise ConfigError("--shapes: it takes one or more shapes like 256/64, and mix")
    names = [*goodput.systems]
    for added in goodput.add:
        name, _, url = added.partition("=")
        if not name or name in names or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(
                f"--add: {added!r} was given; it takes a new name and an address, like vllm=http://127.0.0.1:8001"
            )
        names.append(name)
    check_counts("--concurrency", goodput.concurrency)
    check_counts("--rate-percents", goodput.rate_percents)
