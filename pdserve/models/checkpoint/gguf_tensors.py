"""Reads tensors of a GGUF file by transformers' names, in transformers' order: in blocks, or dequantised one by one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pdserve.config import Dtype, ModelConfig, Weights
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import ROTARY_DIVISORS, gguf_settings
from pdserve.models.checkpoint.gguf_file import GgufTensor, is_gguf, read_gguf
from pdserve.models.checkpoint.mapped_file import MappedFile
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_INNER = INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
AT_ONCE = 2**22
"""The most elements of a large tensor that are dequantised to fp32 at once."""


class GgufTensors:
    """Satisfies ``weights.TensorFiles``."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not a complete GGUF file of a supported architecture."""
        self._path = path
        file = read_gguf(path)
        _, settings = gguf_settings(file)
        self._gemma = file.architecture == "gemma3"
        self._head_dim = settings.head_size()
        self._interleaved = ("q_proj", "k_proj") if file.architecture == "llama" else ()
        inner = GEMMA3_INNER if self._gemma else INNER
        self._tensors = {_name(name, inner): found for name, found in file.tensors.items() if name != ROTARY_DIVISORS}
        try:
            self._mapped = MappedFile(path)
        except (OSError, ValueError) as exc:
            raise ModelError(f"weights in {path} cannot be read: {exc}") from exc
        self._data: np.ndarray = self._mapped.tensor(torch.uint8, 0, self._mapped.size).numpy()

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``weights.TensorFiles``."""
        return self._tensors[name].shape

    def nbytes(self, name: str) -> int:
        """See ``weights.TensorFiles``."""
        return self._stored(name, self._tensors[name]).nbytes

    def unstack(self, name: str, names: Iterable[str]) -> None:
        """See ``weights.TensorFiles``."""
        whole = self._tensors[name]
        each = self.nbytes(name) // whole.shape[0]
        for index, part in enumerate(names):
            self._tensors[part] = GgufTensor(whole.shape[1:], whole.kind, whole.offset + index * each)

    def drop(self) -> None:
        """See ``weights.TensorFiles``."""
        self._mapped.drop()

    def check_formats(self) -> None:
        """See ``weights.TensorFiles``."""
        readable: set[int] = set()
        for name, tensor in self._tensors.items():
            stored = self._stored(name, tensor)
            if tensor.kind not in readable:
                self._plain(name, stored[:1], GGMLQuantizationType(tensor.kind))
                readable.add(tensor.kind)

    def read(self, name: str, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        """See ``weights.TensorFiles``."""
        stored = self._stored(name, self._tensors[name])
        wanted = np.arange(stored.shape[0])[rows]
        if self._interleaves(name):
            wanted = self._interleaving(name, stored.shape[0])[rows]
        kind = GGMLQuantizationType(self._tensors[name].kind)
        each = max(1, AT_ONCE // self._tensors[name].shape[-1])
        parts = [self._plain(name, stored[wanted[i : i + each]], kind) for i in range(0, len(wanted), each)]
        tensor = torch.cat([part.to(dtype) for part in parts]) if len(parts) > 1 else parts[0].to(dtype)
        return tensor if columns == slice(None) else tensor[:, columns].contiguous()

    def read_blocks(self, name: str, rows: slice, columns: slice) -> BlockWeight | None:
        """See ``weights.TensorFiles``."""
        tensor, found = self._tensors[name], self._block_format(name)
        if found is None:
            return None
        first, end, _ = columns.indices(tensor.shape[1])
        if first % found.elements or end % found.elements:
            return None
        stored = self._stored(name, tensor)
        mine = stored[self._interleaving(name, stored.shape[0])[rows]] if self._interleaves(name) else stored[rows]
        if not len(mine) or end <= first:
            return None
        part = slice(first // found.elements * found.block_bytes, end // found.elements * found.block_bytes)
        # A large weight is not copied: what it takes for a moment would stay with the process.
        return BlockWeight(found, torch.from_numpy(mine[:, part]))

    def block_formats(self) -> dict[str, BlockFormat]:
        """Returns the format of each tensor that ``read_blocks`` reads as a whole."""
        found = {name: self._block_format(name) for name in self._tensors}
        return {name: form for name, form in found.items() if form is not None}

    def _block_format(self, name: str) -> BlockFormat | None:
        tensor = self._tensors[name]
        if tensor.kind not in BLOCK_FORMATS or len(tensor.shape) != 2:
            return None
        found = BlockFormat(tensor.kind)
        return None if tensor.shape[1] % found.elements else found

    def _interleaves(self, name: str) -> bool:
        return any(f".{projection}." in name for projection in self._interleaved)

    def _stored(self, name: str, tensor: GgufTensor) -> np.ndarray:
        """Returns a tensor's bytes as ``[rows, bytes of a row]``. Each element of a vector is a row."""
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        except ValueError as exc:
            raise ModelError(f"tensor {name!r} of {self._path} has the unknown number format {tensor.kind}") from exc
        rows = tensor.shape[0]
        elements = prod(tensor.shape[1:])
        if elements * size % block:
            raise ModelError(f"tensor {name!r} of {self._path} does not consist of whole blocks")
        row_bytes = elements * size // block
        if tensor.offset + rows * row_bytes > len(self._data):
            raise ModelError(f"{self._path} is cut short: tensor {name!r} cannot be read")
        return self._data[tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)

    def _plain(self, name: str, stored: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
        try:
            with np.errstate(all="ignore"):  # values that are not finite stay so: the engine notices
                plain = np.array(dequantize(stored, kind), dtype=np.float32)
        except NotImplementedError as exc:
            raise ModelError(f"tensor {name!r} of {self._path} is in {kind.name}, which is not supported") from exc
        tensor = torch.from_numpy(plain)
        if self._gemma and name.endswith("norm.weight"):
            # GGUF stores norm weights as they are applied, transformers stores their difference from one.
            tensor = tensor - 1
        return tensor.flatten() if len(self._tensors[name].shape) == 1 else tensor

    def _interleaving(self, name: str, rows: int) -> np.ndarray:
        """Returns the stored row of each row. GGUF interleaves the two halves of each head of a Llama."""
        if rows % self._head_dim:
            raise ModelError(f"tensor {name!r} of {self._path} has {rows} rows, not whole heads of {self._head_dim}")
        return np.arange(rows).reshape(-1, self._head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def stays_in_blocks(path: Path, model: ModelConfig, *, kernels: bool) -> bool:
    """Returns whether the model at ``path`` is computed from its file's blocks, and not from dequantised weights.

    ``kernels`` says whether there are kernels for that. They compute in bf16; in fp32, all of a token's numbers are to
    be those of the dequantised weights. Raises ModelError if the file cannot be read.
    """
    if not kernels or model.weights is not Weights.AUTO or model.dtype is not Dtype.BF16 or not is_gguf(path):
        return False
    return any(tensor.kind in BLOCK_FORMATS and len(tensor.shape) == 2 for tensor in read_gguf(path).tensors.values())


def _name(name: str, inner: dict[str, str]) -> str:
    """Returns transformers' name of a tensor. A tensor without one keeps its own, which is then reported as unknown."""
    if found := LAYER.fullmatch(name):
        index, part, kind = found.groups()
        return f"model.layers.{index}.{inner.get(part, part)}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{OUTER.get(part, part)}.{kind}"
