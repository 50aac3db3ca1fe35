"""Decides whether a model's quantised weights stay in the blocks of their file."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import Dtype, ModelConfig, Weights
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf
from pdserve_kernels.contract import BLOCK_FORMATS


def keeps_blocks(path: Path, model: ModelConfig, *, kernels: bool) -> bool:
    """Returns whether the model at ``path`` is computed from its file's blocks.

    ``kernels`` says whether there are kernels for that. They compute in bf16; in fp32, all of a token's numbers are to
    be those of the dequantised weights. Raises ModelError if the file cannot be read.
    """
    if not kernels or model.weights is not Weights.AUTO or model.dtype is not Dtype.BF16 or not is_gguf(path):
        return False
    return any(tensor.kind in BLOCK_FORMATS and len(tensor.shape) == 2 for tensor in read_gguf(path).tensors.values())
