"""How an engine computes: KV cache, scheduler, ranks, CPU, grammars and latency targets."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pdserve.config.declare import AUTO_IS_ZERO, Switch, itl_target, setting, ttft_target
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES


class Batching(enum.Enum):
    """The time at which waiting requests join the batch."""

    CONTINUOUS = "continuous"
    """Requests join at every step."""
    STATIC = "static"
    """Requests join when the batch before them is over; benchmarks use this as their baseline."""


class Speculate(enum.Enum):
    """What guesses the next tokens of answers (``pdserve.engine.speculation``)."""

    AUTO = "auto"
    OFF = "off"
    NGRAM = "ngram"
    MTP = "mtp"


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


class CpuKernels(enum.Enum):
    """The kernels of a CPU. ``AUTO`` is compiled C++ if there is a compiler, and plain torch otherwise."""

    AUTO = "auto"
    COMPILED = "compiled"
    TORCH = "torch"


class KvCacheDtype(enum.Enum):
    """The number format of keys and values in the KV cache."""

    AUTO = "auto"
    """That of the model's other numbers, ``--dtype``."""
    FP8 = "fp8"
    """e4m3, with a power of two for each token, layer and KV head."""


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
        spellings=AUTO_IS_ZERO,
        first=True,
    )
    gpu_memory_utilization: float = setting(
        "gpu-memory-utilization",
        "On GPUs, each rank takes this share of its GPU's memory, for weights, KV cache and all else. 'auto': 0.9, "
        "which pdserve up divides between its nodes, or what --kv-cache-mib says if that is given.",
        0.0,
        minimum=0,
        maximum=0.99,
        spellings=AUTO_IS_ZERO,
        first=True,
    )
    node_memory_mib: int = setting(
        "node-memory-mib",
        "On a CPU, automatic sizes count on this much memory for the whole node, in MiB. 'auto': what the machine and "
        "the control group have left when the node starts, which pdserve up divides between its nodes.",
        0,
        minimum=0,
        spellings=AUTO_IS_ZERO,
    )
    kv_cache_dtype: KvCacheDtype = setting(
        "kv-cache-dtype",
        "Keys and values are stored and sent in this number format. 'auto' is --dtype. 'fp8' (e4m3) takes half the "
        "bytes of bfloat16, and rounds. All nodes need the same value. It is not for recurrent states and models that "
        "transformers computes.",
        KvCacheDtype.AUTO,
        spellings={"fp8_e4m3": "fp8"},
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
        spellings=AUTO_IS_ZERO,
        first=True,
    )
    max_num_batched_tokens: int = setting(
        "max-num-batched-tokens",
        "One step computes at most this many tokens. Longer prompts are computed in chunks. 'auto': 8192 on a GPU, "
        "fewer where its memory is small; on a CPU 32 for each core, from 256 to 2048.",
        0,
        minimum=0,
        former="max-step-tokens",
        spellings=AUTO_IS_ZERO,
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
    speculation: Speculate = setting(
        "speculation",
        "A decode step checks guesses of the next tokens as well (drafts), where they pay: from the request's own text "
        "(ngram), from the model's own MTP layers (mtp), or from both (auto). No answer depends on it.",
        Speculate.AUTO,
        first=True,
    )
    draft_tokens: int = setting(
        "draft-tokens", "A step checks at most this many drafts of one request.", 7, minimum=1, maximum=32
    )
    draft_model: str = setting(
        "draft-model",
        "With --speculation auto, this smaller model guesses tokens, in place of MTP layers. It has the tokeniser of "
        "the model, keeps whole contexts, and is named as --model is.",
        "",
        metavar="MODEL",
    )

    @property
    def speculates(self) -> Speculate:
        """What guesses tokens. In a static batch, which is a baseline of benchmarks, nothing does."""
        return Speculate.OFF if self.batching is Batching.STATIC else self.speculation

    @property
    def used_draft_model(self) -> str:
        """The ``draft_model``, if it is used."""
        return self.draft_model if self.speculates is Speculate.AUTO else ""

    @property
    def most_rows(self) -> int:
        """The most tokens that a step computes as rows of their own: one of each request, and drafts of one."""
        return self.max_num_seqs + (0 if self.speculates is Speculate.OFF else self.draft_tokens)


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
        "grammar-cache", "The outcomes of this many grammars are kept, each with its text.", 64, minimum=1, maximum=4096
    )


@dataclass(frozen=True, slots=True)
class TargetsConfig:
    """How soon tokens should come. 0 is no target of the operator's: each part goes by what it measures or knows."""

    target_ttft_ms: float = ttft_target(
        "The first token should come within this many milliseconds. 0: a node takes twice what the prompt takes "
        "alone, --roles auto takes 1000."
    )
    target_itl_ms: float = itl_target(
        "A step in which answers are decoded should take at most this many milliseconds; prompts beside them are cut "
        "to fit. 0: a decode node takes twice a step without prompts, a mixed node seven times, a prefill node has no "
        "target, --roles auto takes 100."
    )


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """The cores that the engine may use, those that it lends, and its kernels on them."""

    cores: tuple[int, ...] = setting(
        "cores", "The engine runs on these cores alone, for example 0,1,4-7. Empty: all.", (), first=True
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
