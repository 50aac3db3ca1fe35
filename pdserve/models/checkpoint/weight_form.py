"""Says in which form a model's weights are, and how much memory a model takes, by its files' headers, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import CacheConfig, CpuKernels, Dtype, KvCacheDtype, ModelConfig, Weights
from pdserve.errors import ModelError
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.checkpoint.gguf.file import is_gguf, read_gguf
from pdserve.models.checkpoint.model_files import weight_files
from pdserve.models.checkpoint.safetensors.header import read_header
from pdserve.models.checkpoint.safetensors.quantisation import ANY_FAMILY, FORMS, Quantisation, read_quantisation
from pdserve.models.checkpoint.safetensors.quantised_tensors import FoundTensors, QuantisedTensor, quantised_tensors
from pdserve.models.layer_groups import FP8_BYTES, GroupSize, group_sizes
from pdserve.models.sizes import ModelSize, draft_blocks
from pdserve.wire.cache_groups import Keep

ITEM_BYTES = {Dtype.BF16: 2, Dtype.FP32: 4}
GPU_BITS: Mapping[int, float] = {
    2: 4.5,
    3: 5.0,
    6: 5.5,
    7: 6.0,
    8: 8.5,
    12: 4.625,
    13: 5.625,
    14: 6.5625,
    20: 4.5,
    23: 4.3125,
    39: 4.25,
}
"""The bits of a number that stays packed on a GPU, with its part of the scales, by the number of its GGUF format."""


def cache_item_bytes(dtype: Dtype, kv_dtype: KvCacheDtype) -> int:
    """Returns the bytes of one number of a key in the cache of a model with numbers of ``dtype``."""
    return FP8_BYTES if kv_dtype is KvCacheDtype.FP8 else ITEM_BYTES[dtype]


def weights_words(path: Path, model: ModelConfig, *, on_gpu: bool = False) -> str:
    """Returns in which form a model's weights are: ``bfloat16``, or ``GGUF, Q4_K, Q6_K``, the most used form first.

    ``on_gpu`` says whether a GPU computes.
    """
    if not is_gguf(path):
        quantisation = _quantisation(path)
        return (
            model.dtype.value
            if quantisation is None
            else f"{quantisation.method}, {_becomes_words(path, model, on_gpu=on_gpu)}"
        )
    # The package takes a tenth of a second to load, which a folder's model does without.
    from gguf.constants import GGMLQuantizationType

    tensors = [tensor for tensor in read_gguf(path).tensors.values() if len(tensor.shape) > 1]
    kinds: dict[int, int] = {}
    for tensor in tensors:
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + math.prod(tensor.shape)
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    named = [known.get(kind, f"type {kind}") for kind in sorted(kinds, key=lambda kind: -kinds[kind])[:3]]
    words = "GGUF, " + ", ".join(named)
    return words if model.weights is Weights.AUTO else f"{words}, widened to {model.dtype.value}"


def model_size(
    path: Path, decoder: DecoderConfig, model: ModelConfig, kernels: CpuKernels, kv_dtype: KvCacheDtype, draft: int = 0
) -> ModelSize:
    """Returns what the model takes on a CPU, with a draft model of ``draft`` bytes beside it.

    Raises ModelError if its files cannot be read.
    """
    # Entries that stand for several tokens need blocks of several.
    size = CacheConfig().block_size
    groups = group_sizes(decoder, cache_item_bytes(model.dtype, kv_dtype), size)
    return model_size_of(weight_bytes(path, model, kernels), groups, size, decoder.max_positions, draft)


@dataclass(frozen=True, slots=True)
class DraftModelSize:
    """The bytes that a draft model takes on a CPU, beside the model that it drafts for."""

    weights: int
    cache: int
    """Those of its KV cache, whose size no setting changes."""

    @property
    def total(self) -> int:
        return self.weights + self.cache


def draft_model_size(
    path: Path, decoder: DecoderConfig, model: ModelConfig, kernels: CpuKernels, block_size: int
) -> DraftModelSize:
    """Returns what the draft model at ``path`` takes, with the settings of the model that it drafts for.

    Raises ModelError if its files cannot be read.
    """
    whole, *_ = group_sizes(decoder, ITEM_BYTES[model.dtype], block_size)
    return DraftModelSize(weight_bytes(path, model, kernels), draft_blocks(block_size) * whole.block_bytes)


def model_size_of(
    weights: int, groups: Sequence[GroupSize], block_size: int, positions: int, draft: int = 0
) -> ModelSize:
    """Returns what a model takes whose cache has ``groups``, all ranks together, beside ``draft`` bytes."""
    windows = [group for group in groups if group.keep is Keep.WINDOW]
    return ModelSize(
        weights=weights,
        token=groups[0].block_bytes // block_size,
        positions=positions,
        window_token=sum(group.block_bytes for group in windows) // block_size,
        window=max((group.window for group in windows), default=0),
        state=sum(group.block_bytes for group in groups if group.keep is Keep.LATEST),
        draft=draft,
    )


def weight_bytes(path: Path, model: ModelConfig, kernels: CpuKernels) -> int:
    """Returns the bytes of the weights in memory on a CPU. Raises ModelError if the files cannot be read.

    Quantised weights stay in blocks, or become blocks, where the settings allow it, and are widened elsewhere.
    """
    if not _stay_in_blocks(model) or kernels is CpuKernels.TORCH:
        return parameters(path) * ITEM_BYTES[model.dtype]
    if is_gguf(path):
        return sum(part.stat().st_size for part in read_gguf(path).parts)
    plain, quantised = _tensors(path)
    return int(
        plain * ITEM_BYTES[model.dtype]
        + sum(math.prod(each.shape) * each.held_bits(on_gpu=False) / 8 for each in quantised)
    )


def gpu_weight_bytes(path: Path, model: ModelConfig) -> int:
    """Returns the bytes of the weights in memory on a GPU. Raises ModelError if the files cannot be read."""
    if not _stay_in_blocks(model):
        return parameters(path) * ITEM_BYTES[model.dtype]
    wide = 8.0 * ITEM_BYTES[model.dtype]
    if not is_gguf(path):
        plain, quantised = _tensors(path)
        return int((plain * wide + sum(math.prod(each.shape) * each.held_bits(on_gpu=True) for each in quantised)) / 8)
    bits = 0.0
    for tensor in read_gguf(path).tensors.values():
        packed = GPU_BITS.get(tensor.kind, wide) if len(tensor.shape) > 1 else wide
        bits += math.prod(tensor.shape) * packed
    return int(bits / 8)


def _stay_in_blocks(model: ModelConfig) -> bool:
    return model.weights is Weights.AUTO and model.dtype is Dtype.BF16


def parameters(path: Path) -> int:
    """Returns how many numbers the tensors of a folder or GGUF file hold. Raises ModelError if they cannot be read."""
    if is_gguf(path):
        return sum(math.prod(tensor.shape) for tensor in read_gguf(path).tensors.values())
    plain, quantised = _tensors(path)
    return plain + sum(math.prod(each.shape) for each in quantised)


def _tensors(folder: Path) -> tuple[int, list[QuantisedTensor]]:
    """Returns how many numbers the plain tensors of a folder have, and its quantised weights. Raises ModelError."""
    tensors = {name: tensor for file in weight_files(folder) for name, tensor in read_header(file).items()}
    try:
        found = quantised_tensors(tensors, _quantisation(folder))
    except ModelError:
        found = FoundTensors({}, frozenset())
    others = found.unused.union(*(each.parts for each in found.quantised.values()))
    plain = sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name not in others)
    return plain, list(found.quantised.values())


def _quantisation(folder: Path) -> Quantisation | None:
    """Returns how weights are quantised. What is refused, is refused where a model is read; transformers knows more."""
    try:
        return read_quantisation(folder, ANY_FAMILY)
    except ModelError:
        return None


def _becomes_words(folder: Path, model: ModelConfig, *, on_gpu: bool) -> str:
    if model.weights is not Weights.AUTO or model.dtype is not Dtype.BF16:
        return f"widened to {model.dtype.value}"
    _, quantised = _tensors(folder)
    names = sorted({FORMS[each.form].on(gpu=on_gpu).blocks or model.dtype.value for each in quantised})
    return f"in {', '.join(names)}"
