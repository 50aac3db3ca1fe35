"""Makes one rank's model runner, in the same way on every rank, with the kernel set that the settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pdserve.compiled_library import BuildError
from pdserve.config import CpuKernels, EngineConfig, KvCacheDtype
from pdserve.engine.speculation.draft_model import DraftModel
from pdserve.errors import ConfigError
from pdserve.models.backend import Backend, choose_device, open_backend
from pdserve.models.checkpoint.cached_tokenizer import read_tokenizer
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FallbackConfig
from pdserve.models.checkpoint.weight_file import SMALLEST, kept_weights, weights_name
from pdserve.models.checkpoint.weights import stays_in_blocks
from pdserve.models.layer_groups import layer_groups
from pdserve.models.runner import ModelRunner
from pdserve.models.sizes import draft_blocks
from pdserve.models.tp.shares import ALONE, TpGroup
from pdserve_kernels.contract import BlockKernels, Kernels
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.torch_kernels import TorchKernels

log = logging.getLogger(__name__)


def cpu_kernels(wanted: CpuKernels, cache_dir: Path) -> Kernels:
    """Returns the set that the settings name, compiled now, in ten seconds, if ``cache_dir`` does not have it yet.

    Raises ConfigError if the compiled set is asked for by name and cannot be compiled. Without a name, a warning is
    logged and the plain set is used.
    """
    if wanted is CpuKernels.TORCH:
        return TorchKernels()
    try:
        return CompiledKernels(cache_dir)
    except BuildError as exc:
        if wanted is CpuKernels.COMPILED:
            raise ConfigError(f"--cpu-kernels compiled: {exc}") from exc
        log.warning("the plain torch kernels run instead of the compiled ones, which are faster: %s", exc)
        return TorchKernels()


def load_runner(
    config: EngineConfig,
    decoder: DecoderConfig,
    counts: Sequence[int],
    max_model_len: int,
    tp: TpGroup,
    backend: Backend,
    kv_memory: memoryview | None = None,
    block_kernels: BlockKernels | None = None,
    progress: Callable[[float], None] = lambda share: None,
    *,
    drafts: bool = False,
) -> ModelRunner:
    """Loads one rank's part of the model, with a KV cache of ``counts`` blocks of each group.

    ``drafts`` asks for the layer that drafts tokens, too (``DecoderConfig.has_draft_layer``).

    ``kv_memory`` is where the cache is kept, if not where torch allocates. ``block_kernels`` are
    ``kept_block_kernels``. ``progress`` is called with the share of the bytes that are read.

    Raises ModelError if the folder does not hold the model, or if the model cannot be split over the ranks.
    """
    folder, block_size = Path(config.model_dir), config.cache.block_size
    with packed_weights(config, decoder, tp, backend.kernels, in_blocks=block_kernels is not None):
        return ModelRunner(
            folder,
            decoder,
            config.model.dtype,
            block_size,
            counts[0],
            max_model_len,
            backend.kernels,
            backend.device,
            tp,
            kv_memory,
            block_kernels=block_kernels,
            progress=progress,
            bounded=counts[1:],
            drafts=drafts,
            kv_dtype=config.cache.kv_cache_dtype,
        )


def load_draft_model(
    config: EngineConfig,
    decoder: DecoderConfig,
    max_model_len: int,
    backend: Backend,
    progress: Callable[[float], None] = lambda share: None,
) -> DraftModel:
    """Loads the model of ``--draft-model`` whole on rank 0's device.

    ``decoder`` and ``max_model_len`` are those of the model that it drafts for. Raises ModelError if the files do not
    hold a model, and ConfigError if it cannot draft for that one.
    """
    named = config.scheduler.used_draft_model
    path = Path(named)
    own = read_decoder_config(path)
    if len(layer_groups(own).groups) > 1:
        raise ConfigError(f"--draft-model {named}: a model with windows or recurrent states cannot draft for others")
    check_same_vocabulary(path, Path(config.model_dir), Path(config.cache_dir))
    cache = replace(config.cache, kv_cache_dtype=KvCacheDtype.AUTO)
    config = replace(config, model_dir=named, cache=cache)
    blocks, longest = draft_blocks(config.cache.block_size), min(max_model_len, own.max_positions)
    kernels = kept_block_kernels(config, backend)
    runner = load_runner(config, own, [blocks], longest, ALONE, backend, None, kernels, progress)
    return DraftModel(
        runner, config.cache.block_size, blocks, longest, decoder.vocab_size, config.scheduler.draft_tokens
    )


def check_same_vocabulary(draft: Path, model: Path, cache_dir: Path) -> None:
    """Raises ConfigError unless a model's draft model has its tokens, apart from added ones. Raises ModelError."""
    # Who has no draft model waits for no library of tokenisers.
    from tokenizers import Tokenizer

    own, wanted = (
        Tokenizer.from_str(read_tokenizer(path, cache_dir).backend).get_vocab(with_added_tokens=False)
        for path in (draft, model)
    )
    differing = own.items() ^ wanted.items()
    if differing:
        token, number = min(differing, key=lambda item: item[1])
        holder, other = (draft, model) if own.get(token) == number else (model, draft)
        raise ConfigError(
            f"--draft-model {draft}: the tokeniser is another one than that of {model}: token {number} is {token!r} in "
            f"{holder.name}, and not in {other.name}. A draft model needs the tokeniser of the model"
        )


@contextmanager
def packed_weights(
    config: EngineConfig, decoder: DecoderConfig, tp: TpGroup, kernels: Kernels, *, in_blocks: bool
) -> Iterator[None]:
    """Within the block, kernels that pack weights take one rank's from the file that the machine's engines share.

    They make it if it is not there. Small models, and those that transformers computes, have no such file.
    """
    if not isinstance(kernels, CompiledKernels) or not config.cpu.packed_weights_mib:
        yield
        return
    # Who has nothing to pack waits for nobody: engines that make a file load one after another.
    if isinstance(decoder, FallbackConfig) or not (in_blocks or kernels.packs_linear):
        yield
        return
    model, cache_dir, dtype = Path(config.model_dir), Path(config.cache_dir), config.model.dtype
    name, nbytes = weights_name(model, cache_dir, kernels.packing, dtype.short, tp.rank, tp.size, in_blocks)
    # Packed, a rank's part seldom has fewer bytes than in the file. How many they are shows when they are packed.
    least = nbytes // tp.size
    if least < SMALLEST:
        yield
        return
    own = kernels.memory
    path = cache_dir / "packed-weights" / name
    try:
        with kept_weights(path, least, config.cpu.packed_weights_mib, own, tp.size) as memory:
            kernels.memory = memory
            yield
    finally:
        kernels.memory = own


def kept_block_kernels(config: EngineConfig, backend: Backend) -> BlockKernels | None:
    """Returns the kernels for weights that stay in the blocks of their file, or None if none do. Raises ModelError."""
    kernels = backend.block_kernels
    if kernels is None:
        return None
    stay = stays_in_blocks(Path(config.model_dir), config.model, kernels=True, on_gpu=kernels.on_gpu)
    return kernels if stay else None


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Returns the device that a rank of this node computes on. Raises ConfigError if it cannot be used."""
    return choose_device(config.model.device, rank, config.parallel.tensor_parallel_size)


def rank_backend(config: EngineConfig, device: torch.device) -> Backend:
    """Returns the kernels for a rank's device. Raises ConfigError if there are none."""
    return open_backend(device, partial(cpu_kernels, config.cpu.kernels, Path(config.cache_dir)))
