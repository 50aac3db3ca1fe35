"""The settings of ``pdserve bench``, ``plan profile`` and ``plan memory``: a part of the tree of ``pdserve.config``."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pdserve.config import (
    CacheConfig,
    CpuConfig,
    ModelConfig,
    ReportConfig,
    SchedulerConfig,
    Switch,
    TransferConfig,
    TrustConfig,
    itl_target,
    setting,
    ttft_target,
)


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """The measurements of an engine's parts."""

    batches: tuple[int, ...] = setting("batches", "Decode steps have these numbers of requests.", (1, 4, 8, 16, 32))
    contexts: tuple[int, ...] = setting(
        "contexts", "Each of these requests has these numbers of tokens in the KV cache.", (256, 1024)
    )
    chunks: tuple[int, ...] = setting(
        "chunks", "Prefill steps have these numbers of tokens of a prompt.", (64, 128, 256, 512)
    )
    seconds: float = setting("seconds", "Each measurement takes this many seconds.", 1.0, minimum=0)
    block_size: int = setting("block-size", "A KV block holds this many tokens.", 16, minimum=1, maximum=1024)
    copy_mib: int = setting("copy-mib", "The buffers whose copying is timed have this size, in MiB.", 256, minimum=1)


@dataclass(frozen=True, slots=True)
class BenchEngineConfig:
    """The settings of ``pdserve bench engine``."""

    engine: EngineBenchConfig = field(default_factory=EngineBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The load on a server that speaks OpenAI's API."""

    url: str = setting("url", "The server is at this URL, without /v1.", "http://127.0.0.1:8000", first=True)
    model: str = setting(
        "served-model-name",
        "The benchmark asks for the model of this name. If it is empty, it asks for the server's first.",
        "",
        former="served-name",
    )
    api_keys: tuple[str, ...] = setting("api-key", "The server gets this key, if it wants one.", (), secret=True)
    api_key_file: str = setting("api-key-file", "The server gets the first key in this file.", "", first=True)
    concurrency: tuple[int, ...] = setting(
        "concurrency",
        "This many clients ask at the same time. Several numbers are measured one after the other.",
        (1,),
        first=True,
    )
    beside: str = setting(
        "beside", "The server at this URL, without /v1, gets the same load in turns with the first, for ratios.", ""
    )
    rounds: int = setting("rounds", "Each load is measured this many times; the figures are medians.", 1, minimum=1)
    requests: int = setting(
        "requests",
        "The clients send this many requests in all: with a dataset, so many of its lines or conversations. 0 takes "
        "twice the concurrency and 6, 30 seconds of --request-rate, or the whole dataset.",
        0,
        minimum=0,
        first=True,
    )
    prompt_tokens: int = setting("prompt-tokens", "Each random prompt has this many tokens.", 256, minimum=1)
    output_tokens: int = setting(
        "output-tokens",
        "Each answer has this many tokens; at most so many where the dataset says nothing about it.",
        64,
        minimum=1,
    )
    warm_up: int = setting("warm-up", "The clients send this many requests before the clock starts.", 1, minimum=0)
    seed: int = setting("seed", "The prompts follow from this seed.", 0, minimum=0)
    vocab_size: int = setting(
        "prompt-vocab", "Prompts have token ids below this number, at most the model's own.", 32_000, minimum=4
    )
    timeout_s: float = setting("run-timeout-s", "The run may take this many seconds.", 900.0, minimum=1, maximum=86_400)


@dataclass(frozen=True, slots=True)
class GoodAnswerConfig:
    """The targets of an answer that counts towards goodput. 0 is no target."""

    ttft_ms: float = ttft_target("A good answer has its first token within this many milliseconds.")
    itl_ms: float = itl_target("A good answer has its other tokens this many milliseconds apart, in the mean (TPOT).")


@dataclass(frozen=True, slots=True)
class ArrivalsConfig:
    """When requests are sent."""

    rate: float = setting(
        "request-rate",
        "This many requests are sent in a second, whatever the server does. 0 leaves it to --concurrency, or to the "
        "times in the dataset.",
        0.0,
        minimum=0,
        maximum=1e6,
        first=True,
    )
    burstiness: float = setting(
        "burstiness",
        "With --request-rate, times between requests follow a gamma distribution of this shape: 1 is a Poisson "
        "process, less comes in bursts, more comes evenly.",
        1.0,
        minimum=0.01,
        maximum=1e6,
    )


@dataclass(frozen=True, slots=True)
class DatasetConfig:
    """Requests out of a file, in place of random prompts."""

    file: str = setting(
        "dataset",
        "Requests come from this file: JSON lines or a JSON list of prompts, of messages, of ShareGPT's conversations, "
        "or of a trace in Mooncake's shape.",
        "",
        metavar="FILE",
        first=True,
    )
    speed: float = setting(
        "dataset-speed",
        "The dataset's own times pass so many times as fast. 0 leaves them out.",
        1.0,
        minimum=0,
        maximum=1e6,
    )
    turns: int = setting(
        "dataset-turns", "A conversation has at most so many turns. 0 is no limit; 1 is vLLM's way.", 0, minimum=0
    )
    block_tokens: int = setting(
        "dataset-block-tokens",
        "Each of a trace's hash_ids stands for so many tokens of a prompt.",
        512,
        minimum=1,
        maximum=2**20,
    )


@dataclass(frozen=True, slots=True)
class BenchLoadConfig:
    """The settings of ``pdserve bench load``."""

    load: LoadConfig = field(default_factory=LoadConfig)
    arrivals: ArrivalsConfig = field(default_factory=ArrivalsConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    good: GoodAnswerConfig = field(default_factory=GoodAnswerConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


class CacheMemory(enum.Enum):
    """The memory that holds a benchmark's KV caches."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class TransferBenchConfig:
    """The measurements of the KV transfer between two processes."""

    memory: CacheMemory = setting(
        "memory",
        "The KV caches are in this memory. With a GPU's, the transfer alone is measured, without checksums.",
        CacheMemory.HOST,
    )
    block_kib: tuple[int, ...] = setting("block-kib", "KV blocks have these sizes, in KiB.", (8, 64, 360, 1024, 4096))
    fetch_mib: int = setting(
        "fetch-mib", "One fetch moves this much KV cache, in MiB, and at least 8 blocks.", 64, minimum=1
    )
    repeats: int = setting(
        "repeats", "Blocks of each size are fetched this often, with checksums and without, in turns.", 9, minimum=1
    )
    nixl_command: str = setting(
        "nixl-command",
        "This command measures NIXL and prints its nixl_bw lines. Empty: no NIXL.",
        "",
        metavar="COMMAND",
    )
    decode_s: float = setting(
        "decode-s",
        "Decode steps take this many seconds for each arrival rate. 0 leaves them out.",
        4.0,
        minimum=0,
        maximum=3600,
    )
    decode_batch: int = setting("decode-batch", "Those decode steps have this many requests.", 8, minimum=1)
    decode_context: int = setting("decode-context", "Each of those requests has this many tokens.", 256, minimum=1)
    prefill_tokens_per_s: float = setting(
        "prefill-tokens-per-s",
        "A prefill node computes this many tokens a second, and their blocks arrive as fast.",
        900.0,
        minimum=1,
    )


@dataclass(frozen=True, slots=True)
class BenchTransferConfig:
    """The settings of ``pdserve bench transfer``."""

    bench: TransferBenchConfig = field(default_factory=TransferBenchConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class ProfilingConfig:
    """What nodes of this machine take for steps, transfers and requests, for predictions."""

    out: str = setting("out", "The profile goes to this file.", "profile.json", metavar="FILE", first=True)
    nodes: int = setting(
        "nodes",
        "With 1, the profile holds for one node on this machine; with 2, also for two that divide its cores.",
        2,
        minimum=1,
        maximum=2,
        first=True,
    )
    repeats: int = setting("repeats", "Everything is measured this often, in turns.", 3, minimum=1, maximum=100)
    lend_cores: Switch = setting("lend-cores", "A node without work lends its cores to the other one.", Switch.ON)
    vocab_size: int = setting(
        "prompt-vocab", "Prompts have token ids below this number, at most the model's own.", 32_000, minimum=4
    )
    startup_timeout_s: float = setting(
        "startup-timeout-s", "The nodes get this many seconds to start.", 300.0, minimum=1, maximum=86_400
    )
    limit_s: float = setting(
        "run-timeout-s", "One round of measurements may take this many seconds.", 900.0, minimum=1, maximum=86_400
    )


@dataclass(frozen=True, slots=True)
class PlanProfileConfig:
    """The settings of ``pdserve plan profile``."""

    profile: ProfilingConfig = field(default_factory=ProfilingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cpu: CpuConfig = field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class MemoryPlanConfig:
    """What is asked of a KV cache before a node is there."""

    moved_tokens: int = setting(
        "moved-tokens",
        "A prompt of this many tokens moves to another node. 0: one as long as --max-model-len.",
        0,
        minimum=0,
        first=True,
    )


@dataclass(frozen=True, slots=True)
class PlanMemoryConfig:
    """The settings of ``pdserve plan memory``, which are those that a node gets."""

    memory: MemoryPlanConfig = field(default_factory=MemoryPlanConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """The two reports of one benchmark."""

    old: str = setting("old", "The benchmark's new report is compared with this report, in JSON.", "", metavar="FILE")
    new: str = setting("new", "This report is judged, in JSON.", "", metavar="FILE")
    tolerance: float = setting(
        "tolerance", "A ratio may be worse by this much: 0.1 for a tenth.", 0.1, minimum=0, maximum=0.99
    )


@dataclass(frozen=True, slots=True)
class BenchCompareConfig:
    """The settings of ``pdserve bench compare``."""

    compare: CompareConfig = field(default_factory=CompareConfig)
