"""Says in which form a model's weights are, for people."""

from __future__ import annotations

import math
from pathlib import Path

from pdserve.config import ModelConfig, Weights
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf


def weights_words(path: Path, model: ModelConfig) -> str:
    """Returns in which form a model's weights are: ``bfloat16``, or ``GGUF, Q4_K, Q6_K``, the most used form first."""
    if not is_gguf(path):
        return model.dtype.value
    # The package takes a tenth of a second to load, which a folder's model does without.
    from gguf.constants import GGMLQuantizationType

    tensors = [tensor for tensor in read_gguf(path).tensors.values() if len(tensor.shape) == 2]
    kinds: dict[int, int] = {}
    for tensor in tensors:
        kinds[tensor.kind] = kinds.get(tensor.kind, 0) + math.prod(tensor.shape)
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    named = [known.get(kind, f"type {kind}") for kind in sorted(kinds, key=lambda kind: -kinds[kind])[:3]]
    words = "GGUF, " + ", ".join(named)
    return words if model.weights is Weights.AUTO else f"{words}, widened to {model.dtype.value}"
