"""The settings of ``pdserve bench``: its part of the tree that ``pdserve.config`` begins."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pdserve.config import CacheConfig, CpuConfig, ModelConfig, ReportConfig, TransferConfig, setting


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """The requests of a benchmark: random prompts, the same for the same seed."""

    seed: int = setting("seed", "of prompts and lengths", 0, minimum=0)
    requests: int = setting("requests", "requests of a run; 0 takes 3 times the concurrency, at least 12", 0, minimum=0)
    min_prompt_tokens: int = setting("min-prompt-tokens", "shortest prompt", 16, minimum=1)
    max_prompt_tokens: int = setting("max-prompt-tokens", "longest prompt", 128, minimum=1)
    min_output_tokens: int = setting("min-output-tokens", "shortest answer", 16, minimum=1)
    max_output_tokens: int = setting("max-output-tokens", "longest answer", 256, minimum=1)
    vocab_size: int = setting(
        "prompt-vocab", "prompts are made of token ids below this; at most the model's own", 32_000, minimum=4
    )


@dataclass(frozen=True, slots=True)
class BatchingBenchConfig:
    """Continuous against static batching."""

    concurrency: tuple[int, ...] = setting(
        "concurrency", "clients at the same time, for each run", (1, 2, 4, 8, 16, 32)
    )
    repeats: int = setting(
        "repeats",
        "runs of each mode at each concurrency, in turns so that both see the same disturbances",
        2,
        minimum=1,
    )
    plot: str = setting("plot", "file for the plot, PNG", "", metavar="FILE")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "seconds that both nodes get to come up", 300.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting("run-timeout-s", "seconds that one run may take", 900.0, minimum=1, maximum=86_400)


@dataclass(frozen=True, slots=True)
class BenchBatchingConfig:
    """``pdserve bench batching``."""

    report: ReportConfig = field(default_factory=ReportConfig)
    batching: BatchingBenchConfig = field(default_factory=BatchingBenchConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """What is measured of an engine's parts."""

    batches: tuple[int, ...] = setting("batches", "requests in a decode step", (1, 4, 8, 16, 32))
    contexts: tuple[int, ...] = setting("contexts", "tokens that each of them has in the KV cache", (256, 1024))
    chunks: tuple[int, ...] = setting("chunks", "tokens of a prompt in a prefill step", (64, 128, 256, 512))
    seconds: float = setting("seconds", "time for each measurement", 1.0, minimum=0)
    block_size: int = setting("block-size", "tokens in one KV block", 16, minimum=1, maximum=1024)
    copy_mib: int = setting("copy-mib", "size of the buffers whose copying is timed, in MiB", 256, minimum=1)


@dataclass(frozen=True, slots=True)
class BenchEngineConfig:
    """``pdserve bench engine``."""

    report: ReportConfig = field(default_factory=ReportConfig)
    engine: EngineBenchConfig = field(default_factory=EngineBenchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Load on any server that speaks OpenAI's API."""

    url: str = setting("url", "the server, without /v1", "http://127.0.0.1:8000")
    model: str = setting("served-name", "name of the model to ask for; the server's first if empty", "")
    concurrency: int = setting("concurrency", "clients at the same time", 1, minimum=1)
    requests: int = setting("requests", "requests in all; 0 takes twice the concurrency and 6", 0, minimum=0)
    prompt_tokens: int = setting("prompt-tokens", "tokens of each prompt", 256, minimum=1)
    output_tokens: int = setting("output-tokens", "tokens of each answer", 64, minimum=1)
    warm_up: int = setting("warm-up", "requests before the clock starts", 1, minimum=0)
    seed: int = setting("seed", "of the prompts", 0, minimum=0)
    vocab_size: int = setting(
        "prompt-vocab", "prompts are made of token ids below this; at most the model's own", 32_000, minimum=4
    )
    timeout_s: float = setting("run-timeout-s", "seconds that the run may take", 900.0, minimum=1, maximum=86_400)


@dataclass(frozen=True, slots=True)
class BenchLoadConfig:
    """``pdserve bench load``."""

    report: ReportConfig = field(default_factory=ReportConfig)
    load: LoadConfig = field(default_factory=LoadConfig)


@dataclass(frozen=True, slots=True)
class StreamBenchConfig:
    """The host's side of streaming, with a mock engine behind it."""

    streams: tuple[int, ...] = setting("streams", "streams at the same time, for each run", (64, 256, 1024, 2048))
    variants: tuple[str, ...] = setting(
        "variants", "which parts of the text path are on: off, on, parts joined by +, or on-PART; all if empty", ()
    )
    rate: int = setting("rate", "tokens a second of all streams together in paced runs", 16_000, minimum=1)
    seconds: float = setting("seconds", "for which all streams of a run are under way", 2.5, minimum=0.01)
    repeats: int = setting(
        "repeats", "runs of each variant, in turns; of each figure the median is shown", 1, minimum=1, maximum=100
    )
    plot: str = setting("plot", "file for the plot, PNG", "", metavar="FILE")
    startup_timeout_s: float = setting(
        "startup-timeout-s", "seconds that all nodes get to come up", 300.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting("run-timeout-s", "seconds that one run may take", 120.0, minimum=1, maximum=86_400)


@dataclass(frozen=True, slots=True)
class BenchStreamConfig:
    """``pdserve bench stream``."""

    report: ReportConfig = field(default_factory=ReportConfig)
    streaming: StreamBenchConfig = field(default_factory=StreamBenchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)


class CacheMemory(enum.Enum):
    """The memory that holds a benchmark's KV caches."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class TransferBenchConfig:
    """How the KV transfer between two processes is measured."""

    memory: CacheMemory = setting(
        "memory",
        "where the KV caches are; of a GPU's the transfer alone is measured, without checksums",
        CacheMemory.HOST,
    )
    block_kib: tuple[int, ...] = setting("block-kib", "sizes of a KV block, in KiB", (8, 64, 360, 1024, 4096))
    fetch_mib: int = setting("fetch-mib", "KV cache that one fetch moves, in MiB, at least 8 blocks", 64, minimum=1)
    repeats: int = setting("repeats", "fetches of each size, with checksums and without, in turns", 9, minimum=1)
    nixl_command: str = setting(
        "nixl-command", "command that measures NIXL and prints its nixl_bw lines; none if empty", "", metavar="COMMAND"
    )
    decode_s: float = setting(
        "decode-s", "seconds of decode steps for each arrival rate; 0 leaves them out", 4.0, minimum=0, maximum=3600
    )
    decode_batch: int = setting("decode-batch", "requests in those decode steps", 8, minimum=1)
    decode_context: int = setting("decode-context", "tokens that each of them has", 256, minimum=1)
    prefill_tokens_per_s: float = setting(
        "prefill-tokens-per-s", "what a prefill node computes, and so what arrives", 900.0, minimum=1
    )


@dataclass(frozen=True, slots=True)
class BenchTransferConfig:
    """``pdserve bench transfer``."""

    report: ReportConfig = field(default_factory=ReportConfig)
    bench: TransferBenchConfig = field(default_factory=TransferBenchConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class ProxyBenchConfig:
    """A proxy before backends that answer at once."""

    peer_command: str = setting(
        "peer-command",
        "another router to measure in the same run; {prefill} and {decode} stand for the backends' URLs, {port} for "
        "where it has to listen, {port2} for another free port; none if empty",
        "",
        metavar="COMMAND",
    )
    connections: int = setting("connections", "clients at the same time", 64, minimum=1)
    chunks: int = setting("chunks", "of each stream", 64, minimum=1)
    seconds: float = setting("seconds", "in which each run's requests begin", 4.0, minimum=0.1)
    repeats: int = setting("repeats", "runs of each system, in turns; medians are shown", 3, minimum=1, maximum=100)
    rate: int = setting("rate", "requests a second where latency is measured", 500, minimum=1)
    streams: int = setting("streams", "streams at once where delays between chunks are measured", 2048, minimum=1)
    gap_ms: int = setting(
        "gap-ms", "from one chunk to the next of such a stream, in ms", 200, minimum=1, maximum=60_000
    )
    idle: int = setting("idle", "idle connections beside which latency is measured", 10_000, minimum=1)
    startup_timeout_s: float = setting(
        "startup-timeout-s", "seconds that all servers get to come up", 60.0, minimum=1, maximum=86_400
    )
    run_timeout_s: float = setting("run-timeout-s", "seconds that one run may take", 120.0, minimum=1, maximum=86_400)


@dataclass(frozen=True, slots=True)
class BenchProxyConfig:
    """``pdserve bench proxy``."""

    report: ReportConfig = field(default_factory=ReportConfig)
    proxying: ProxyBenchConfig = field(default_factory=ProxyBenchConfig)


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """Two reports of one benchmark."""

    old: str = setting("old", "report to compare with, JSON", "", metavar="FILE")
    new: str = setting("new", "report to judge, JSON", "", metavar="FILE")
    tolerance: float = setting(
        "tolerance", "by how much a ratio may be worse: 0.1 for a tenth", 0.1, minimum=0, maximum=0.99
    )


@dataclass(frozen=True, slots=True)
class BenchCompareConfig:
    """``pdserve bench compare``."""

    compare: CompareConfig = field(default_factory=CompareConfig)
