"""Says whether a model is computed from blocks: those of its GGUF file, or those that quantised weights become."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pdserve.config import Dtype, ModelConfig, Weights
from pdserve.models.checkpoint.config_reading import quantisation_of
from pdserve.models.checkpoint.gguf_file import is_gguf, read_gguf
from pdserve.models.checkpoint.gguf_tensors import GgufTensors
from pdserve.models.checkpoint.safetensors_files import SafetensorsFiles
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat


def stays_in_blocks(path: Path, model: ModelConfig, *, kernels: bool) -> bool:
    """Returns whether the model at ``path`` is computed from blocks, and not from dequantised weights.

    ``kernels`` says whether there are kernels for that. They compute in bf16; in fp32, all of a token's numbers are to
    be those of the dequantised weights. Raises ModelError if the file cannot be read.
    """
    if not kernels or model.weights is not Weights.AUTO or model.dtype is not Dtype.BF16:
        return False
    if not is_gguf(path):
        return bool(block_formats(path))
    return any(tensor.kind in BLOCK_FORMATS and len(tensor.shape) > 1 for tensor in read_gguf(path).tensors.values())


def block_formats(path: Path) -> Mapping[str, BlockFormat]:
    """Returns the format of each tensor that is read as blocks, by transformers' names. Raises ModelError."""
    if is_gguf(path):
        return GgufTensors(path).block_formats()
    quantisation = quantisation_of(path)
    return {} if quantisation is None else SafetensorsFiles(path, quantisation).block_formats()
