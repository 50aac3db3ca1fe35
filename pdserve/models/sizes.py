"""Chooses the sizes that no setting gives: a node's KV cache, the tokens of a step and the places of a batch.

Everything here is a function of numbers: what the model takes, what the settings ask for, and what the device has. A
size that is asked for is never changed. Nothing here loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.config import CacheConfig, SchedulerConfig
from pdserve.errors import ConfigError
from pdserve.machine.memory import MIB
from pdserve.models.layer_groups import LEAST_STATES

PROCESS_BYTES = 512 * MIB
"""What a node's processes take on a CPU beside weights and KV cache; each further rank takes it once more."""
LEAST_PROCESS_BYTES = 256 * MIB
"""They never take less, so a machine with less is refused."""
LEAST_CACHE_MIB = 128
"""A CPU's KV cache has at least this, whatever the memory is."""
USUAL_CACHE_BYTES = 2 * 2**30
"""A CPU's KV cache has at most this, unless one context of the model, or a ``LARGE_MACHINE``th of the memory, is more.

To take it costs a start 0.4 s for each GiB.
"""
LARGE_MACHINE = 16

CPU_STEP_TOKENS = 256
"""Steps on a few cores. One core takes about 0.4 s for so many tokens of a model of 135M parameters."""
TOKENS_A_CORE = 32
CPU_MOST_TOKENS = 2048
CPU_PLACE_TOKENS = 128
"""A CPU's KV cache has so many tokens for each place of the batch."""
CPU_TOKENS_A_PLACE = 4
"""A CPU's step has so many tokens for each place, so that prompts go on while the batch is full."""
PLACE_STATES = 5
"""A cache has so many states for each place of the batch: see ``group_sizes``."""
WINDOW_ENDS = 64
"""A window begins and ends in the middle of blocks, which have at most so many tokens more."""
LEAST_PLACES = 16
MOST_PLACES = 256

DRAFT_CACHE_TOKENS = 2**14
"""The cache of a draft model holds so many tokens, of all requests together."""

GPU_ONLY = (
    "--gpu-memory-utilization is for GPUs, and this engine computes on the CPU: --kv-cache-mib says how much memory "
    "its KV cache takes"
)
GPU_SHARE = 0.9
GPU_STEP_TOKENS = 8192
GPU_LEAST_TOKENS = 512
GPU_LEAST_PLACES = 16
GPU_PLACE_TOKENS = 256
"""A GPU's KV cache has so many tokens for each place of the batch."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes on a node, all ranks together."""

    weights: int
    """The bytes of its weights."""
    token: int
    """The bytes of one token in the KV cache, in layers that keep whole contexts."""
    positions: int
    """The longest prompt and output that it knows, in tokens."""
    window_token: int = 0
    """The bytes of one token in layers with a window."""
    window: int = 0
    """The longest window, in tokens."""
    state: int = 0
    """The bytes of a request's state, which does not grow."""
    draft: int = 0
    """The bytes of a draft model beside it, weights and KV cache."""

    def place_bytes(self, tokens: int) -> int:
        """Returns what the cache takes for each place of a batch, with so many tokens."""
        return tokens * (self.token + self.window_token) + PLACE_STATES * self.state

    def context_bytes(self, tokens: int) -> int:
        """Returns the bytes of the smallest cache in which a context of so many tokens can be computed."""
        seen = min(tokens, self.window + CPU_MOST_TOKENS + WINDOW_ENDS)
        return tokens * self.token + seen * self.window_token + LEAST_STATES * self.state

    def fitting_tokens(self, nbytes: int) -> int:
        """Returns how many tokens a context may have in a cache of so many bytes."""
        beside = self.context_bytes(self.positions) - self.positions * self.token
        return max(0, nbytes - beside) // self.token if self.token else self.positions


def fitting_context(
    cache: CacheConfig, asked: int, max_positions: int, num_blocks: int, block_bytes: int, beside: int = 0
) -> tuple[int, str]:
    """Returns how many tokens a prompt and its output may have, and why that is less than the model's, if it is.

    ``asked`` is ``--max-model-len``, and ``block_bytes`` are those of one block of whole contexts on all ranks, beside
    which the cache has ``beside`` for windows and states. Raises ConfigError if the model knows fewer tokens than are
    asked for, or the cache holds fewer.
    """
    if asked > max_positions:
        raise ConfigError(f"--max-model-len is {asked}, but the model knows only {max_positions} positions")
    fitting = num_blocks * cache.block_size
    wanted = asked or max_positions
    share = cache.gpu_memory_utilization
    given = f"--gpu-memory-utilization {share:g}" if share else f"--kv-cache-mib {cache.kv_cache_mib}"
    needed = f"{wanted} take {whole_mib(math.ceil(wanted / cache.block_size) * block_bytes + beside)} MiB"
    if fitting < 2 or asked > fitting:
        raise ConfigError(
            f"the KV cache ({given}) holds {fitting} tokens, which is less than one request needs"
            + (f" (--max-model-len {asked})" if asked else "")
            + f": {needed}"
        )
    if wanted <= fitting:
        return wanted, ""
    return fitting, (
        f"the KV cache ({given}) holds {fitting} tokens, so a prompt and its output have at most that many; the model "
        f"knows {max_positions}: {needed}, so raise {given.split()[0]}, or say --max-model-len {fitting}"
    )


def cpu_cache(model: ModelSize, cache: CacheConfig, max_model_len: int, memory: int, ranks: int) -> CacheConfig:
    """Returns ``cache`` with a size for a CPU whose node may take ``memory`` bytes; 0 if nobody knows how many.

    It is half of what weights and processes leave, so that the machine has to write no memory to its disk. A context
    that is asked for gets what it takes, up to all of it. Raises ConfigError if that is not enough.
    """
    if cache.kv_cache_mib:
        return cache
    if max_model_len > model.positions:
        raise ConfigError(f"--max-model-len is {max_model_len}, but the model knows only {model.positions} positions")
    context = model.context_bytes(max_model_len or model.positions)
    taken = model.weights + model.draft + ranks * PROCESS_BYTES
    left = max(LEAST_CACHE_MIB * MIB, memory - taken) if memory else USUAL_CACHE_BYTES
    if max_model_len and context > left:
        raise ConfigError(
            f"--max-model-len {max_model_len} takes {whole_mib(context)} MiB of KV cache, and {left // MIB} MiB are "
            f"left for it: {memory // MIB} are available, and the weights take {whole_mib(model.weights)}"
            f"{_draft_words(model)}. "
            f"--max-model-len {model.fitting_tokens(left)} fits, and --kv-cache-mib goes before what is counted here"
        )
    size = min(left // 2, max(USUAL_CACHE_BYTES, left // LARGE_MACHINE, context))
    # A block more than the context: the last one may be partly used.
    needed = context + cache.block_size * (model.token + model.window_token) if max_model_len else 0
    return replace(cache, kv_cache_mib=max(LEAST_CACHE_MIB, size // MIB, whole_mib(needed)))


def cpu_scheduler(model: ModelSize, scheduler: SchedulerConfig, cache_bytes: int, cores: int) -> SchedulerConfig:
    """Returns ``scheduler`` with the sizes that it lacks, for a CPU whose engine computes on ``cores`` cores."""
    tokens = scheduler.max_num_batched_tokens
    if not tokens:
        by_cores = min(CPU_MOST_TOKENS, max(CPU_STEP_TOKENS, TOKENS_A_CORE * cores))
        tokens = max(by_cores, 2 * scheduler.max_num_seqs)
    fitting = cache_bytes // model.place_bytes(CPU_PLACE_TOKENS)
    most = min(MOST_PLACES, max(1, tokens // CPU_TOKENS_A_PLACE))
    places = scheduler.max_num_seqs or min(most, max(LEAST_PLACES, fitting))
    return replace(scheduler, max_num_seqs=places, max_num_batched_tokens=tokens)


def gpu_share(cache: CacheConfig) -> float:
    """Returns the share of a GPU's memory that a rank takes; 0 if the size of its KV cache is given instead."""
    return cache.gpu_memory_utilization or (0.0 if cache.kv_cache_mib else GPU_SHARE)


def gpu_budget(share: float, total: int, free: int) -> int:
    """Returns the bytes that a rank may take, of a GPU with ``total`` bytes of which ``free`` are left.

    It is ``share`` of all, or less where others have taken so much that not a tenth of the memory would stay free (with
    a ``share`` above 0.9, what that leaves).
    """
    spare = min(1 - GPU_SHARE, 1 - share)
    return math.floor(min(share * total, free - spare * total))


def gpu_scheduler(
    scheduler: SchedulerConfig,
    token_bytes: int,
    left_after: Callable[[SchedulerConfig], int],
    state_bytes: int = 0,
) -> SchedulerConfig:
    """Returns ``scheduler`` with the sizes that it lacks, for a GPU.

    ``left_after`` says how many bytes steps of a size leave for the KV cache, which takes ``token_bytes`` for each
    token on one rank, and ``state_bytes`` for each state. The largest step that takes no more than a third of what the
    smallest one leaves is chosen first, and then the most places of which each has room for ``GPU_PLACE_TOKENS`` and
    for its states.
    """
    asked_tokens, asked_places = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    most_tokens = max(GPU_STEP_TOKENS, 2 * asked_places)
    steps = [asked_tokens] if asked_tokens else _halved(most_tokens, max(GPU_LEAST_TOKENS, 2 * asked_places))
    most_places = max(1, min(MOST_PLACES, steps[0] // 2))
    places = [asked_places] if asked_places else _halved(most_places, min(GPU_LEAST_PLACES, most_places))
    sized = [
        [replace(scheduler, max_num_seqs=count, max_num_batched_tokens=tokens) for count in places] for tokens in steps
    ]
    smallest = left_after(sized[-1][-1])
    of_one_step = next((row for row in sized if 3 * left_after(row[-1]) >= 2 * smallest), sized[-1])
    place_bytes = GPU_PLACE_TOKENS * token_bytes + PLACE_STATES * state_bytes
    return next((one for one in of_one_step if left_after(one) >= one.max_num_seqs * place_bytes), of_one_step[-1])


def _halved(most: int, least: int) -> list[int]:
    """Returns ``most``, half of it and so on, down to ``least``."""
    sizes = [most]
    while sizes[-1] // 2 >= least:
        sizes.append(sizes[-1] // 2)
    return sizes


def check_weights(model: ModelSize, memory: int, ranks: int) -> None:
    """Raises ConfigError if the weights alone need more than the ``memory`` bytes that this machine has left."""
    needed = model.weights + model.draft + ranks * LEAST_PROCESS_BYTES
    if memory and needed > memory:
        raise ConfigError(
            f"the memory is too small for this model: its weights take {whole_mib(model.weights)} MiB"
            f"{_draft_words(model)} and the node's processes at least {ranks * LEAST_PROCESS_BYTES // MIB}, and "
            f"{memory // MIB} MiB are available; a GGUF file with 4-bit weights takes a quarter of bfloat16"
        )


def _draft_words(model: ModelSize) -> str:
    return f", the draft model {whole_mib(model.draft)}" if model.draft else ""


def draft_blocks(block_size: int) -> int:
    """Returns how many blocks of so many tokens the cache of a draft model has."""
    return -(-DRAFT_CACHE_TOKENS // block_size)


def whole_mib(nbytes: int) -> int:
    """Returns how many MiB hold ``nbytes``."""
    return -(-nbytes // MIB)
