"""Reads tensors of a GGUF file by transformers' names, in transformers' order: in blocks, or dequantised one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pdserve.config import Dtype, ModelConfig, Weights
from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_architectures import (
    ATTENTION,
    BESIDE_EXPERTS,
    FEED_FORWARD,
    NORMS,
    OUTER,
    PART_OF_EXPERTS,
    PART_OF_SHARED,
    PER_LAYER,
    PER_LAYER_INPUT,
    Architecture,
)
from pdserve.models.checkpoint.gguf_file import GgufFile, GgufTensor, is_gguf, read_gguf
from pdserve.models.checkpoint.gguf_settings import (
    LONG_FACTORS,
    ROTARY_DIVISORS,
    SHORT_FACTORS,
    architecture_of,
    gguf_recipe,
    gguf_settings,
)
from pdserve.models.checkpoint.mapped_file import MappedFile
from pdserve.models.recipe import ExpertsRecipe, LayerRecipe, MlpBesideExperts, MlpRecipe, ModelRecipe
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight

OF_POSITIONS = frozenset({ROTARY_DIVISORS, LONG_FACTORS, SHORT_FACTORS})
"""Tensors that are settings, and no weights."""
AT_ONCE = 2**22
"""The most elements of a large tensor that are dequantised to fp32 at once."""


class GgufTensors:
    """Satisfies ``weights.TensorFiles``."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not a complete GGUF file of a supported architecture."""
        self._path = path
        file = read_gguf(path)
        _, settings = gguf_settings(file)
        known, recipe = architecture_of(file), gguf_recipe(file, settings)
        self._shifted, self._head_dim = known.shifted_norms, settings.head_size()
        self._tensors = gguf_tensors(file, recipe)
        self._interleaved: frozenset[str] = frozenset()
        if known.permuted:
            each = ((index, layer.attention) for index, layer in enumerate(recipe.layers))
            self._interleaved = frozenset(
                f"{recipe.layer_prefix}{index}.{name}."
                for index, part in each
                if part is not None
                for name in (part.query, part.key)
            )
        try:
            self._mapped = [MappedFile(part) for part in file.parts]
        except (OSError, ValueError) as exc:
            raise ModelError(f"weights in {path} cannot be read: {exc}") from exc
        self._data = [part.tensor(torch.uint8, 0, part.size).numpy() for part in self._mapped]

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
        self._tensors |= zip(names, _unstacked(self._path, name, self._tensors[name]), strict=True)

    def drop(self) -> None:
        """See ``weights.TensorFiles``."""
        for part in self._mapped:
            part.drop()

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
        return f"{name.rpartition('.')[0]}." in self._interleaved

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
        data = self._data[tensor.part]
        if tensor.offset + rows * row_bytes > len(data):
            raise ModelError(f"{self._path} is cut short: tensor {name!r} cannot be read")
        return data[tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)

    def _plain(self, name: str, stored: np.ndarray, kind: GGMLQuantizationType) -> torch.Tensor:
        try:
            with np.errstate(all="ignore"):  # values that are not finite stay so: the engine notices
                plain = np.array(dequantize(stored, kind), dtype=np.float32)
        except NotImplementedError as exc:
            raise ModelError(f"tensor {name!r} of {self._path} is in {kind.name}, which is not supported") from exc
        tensor = torch.from_numpy(plain)
        if self._shifted and name.endswith("norm.weight"):
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
    return any(tensor.kind in BLOCK_FORMATS and len(tensor.shape) > 1 for tensor in read_gguf(path).tensors.values())


def gguf_tensors(file: GgufFile, recipe: ModelRecipe) -> dict[str, GgufTensor]:
    """Returns the file's tensors by the names of ``recipe``. Stacked experts become one tensor each.

    A tensor without such a name keeps its own, which is then reported as unknown.
    """
    known = architecture_of(file)
    names = {part: getattr(recipe, name) for part, name in OUTER.items()}
    if recipe.positions is not None:
        names["position_embd"] = recipe.positions.name
    if recipe.per_layer is not None:
        names |= {part: getattr(recipe.per_layer, name) for part, name in PER_LAYER.items()}
    whole: dict[str, str] = {}
    for index, layer in enumerate(recipe.layers):
        block, prefix = f"blk.{index}.", f"{recipe.layer_prefix}{index}."
        names |= {block + part: prefix + name for part, name in _layer_names(layer, known).items()}
        whole |= {block + part: prefix + name for part, name in _whole_names(layer).items()}
    drafting = tuple(f"blk.{index}." for index in range(len(recipe.layers), file.own("block_count", int)))
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if name in OF_POSITIONS or (drafting and name.startswith(drafting)):
            continue
        part, _, kind = name.rpartition(".")
        if name in whole:
            found[whole[name]] = tensor
        elif part.endswith(".exp_probs_b") and part in names:
            shape = _correction_shape(recipe, part)
            found[names[part]] = replace(tensor, shape=shape) if prod(shape) == prod(tensor.shape) else tensor
        elif part.endswith(PART_OF_EXPERTS) and part in names and len(tensor.shape) == (2 if kind == "bias" else 3):
            for expert, each in enumerate(_unstacked(file.path, name, tensor)):
                found[f"{names[part].replace('{}', str(expert))}.{kind}"] = each
        elif part.endswith(".ffn_gate_inp_shexp") and len(tensor.shape) == 1:
            found[f"{names.get(part, part)}.{kind}"] = replace(tensor, shape=(1, *tensor.shape))
        else:
            found[f"{names.get(part, part)}.{kind}"] = tensor
    return found


def _layer_names(layer: LayerRecipe, known: Architecture) -> dict[str, str]:
    """Returns the recipe's names of a layer's tensors, by the file's names."""
    attention, part = layer.attention, layer.feed_forward
    usual = NORMS[layer.order][: len(layer.norms)]
    names = dict(zip(known.norms if len(known.norms) == len(usual) else usual, layer.norms, strict=True))
    if attention is not None:
        names |= {key: getattr(attention, name) for key, name in ATTENTION.items() if getattr(attention, name)}
    if attention is not None and attention.norms is not None:
        names |= {"attn_q_norm": attention.norms.query, "attn_k_norm": attention.norms.key}
    if layer.per_layer is not None:
        names |= {key: getattr(layer.per_layer, name) for key, name in PER_LAYER_INPUT.items()}
    if isinstance(part, MlpRecipe):
        return names | _mlp_names(part)
    if isinstance(part, MlpBesideExperts):
        names |= _mlp_names(part.mlp) | {key: getattr(part, name) for key, name in BESIDE_EXPERTS.items()}
        part = part.experts
    if part is None:
        return names
    names |= {"ffn_gate_inp": part.router, **_mlp_names(part.expert, PART_OF_EXPERTS)}
    if part.correction:
        names["exp_probs_b"] = part.correction
    if part.shared is not None:
        names |= _mlp_names(part.shared, PART_OF_SHARED)
    if part.shared_gate:
        names["ffn_gate_inp_shexp"] = part.shared_gate
    return names


def _mlp_names(part: MlpRecipe, end: str = "") -> dict[str, str]:
    names = {key + end: getattr(part, name) for key, name in FEED_FORWARD.items() if getattr(part, name)}
    # One tensor of all experts has a name of its own; that of a single part has the name of the second half.
    fused = f"ffn_gate_up{end}" if end == PART_OF_EXPERTS else f"ffn_up{end}"
    return names | ({fused: part.fused} if part.fused else {})


def _whole_names(layer: LayerRecipe) -> dict[str, str]:
    """Returns the recipe's names of a layer's tensors that have no ``.weight`` behind them, by the file's names."""
    names = {"layer_output_scale.weight": layer.factor} if layer.factor else {}
    if layer.attention is not None and layer.attention.sinks:
        names["attn_sinks.weight"] = layer.attention.sinks
    if isinstance(layer.feed_forward, MlpBesideExperts):
        names["ffn_gate_inp.scale"] = layer.feed_forward.router_weights
        names["ffn_down_exps.scale"] = layer.feed_forward.experts.factors
    return names


def _correction_shape(recipe: ModelRecipe, name: str) -> tuple[int, ...]:
    part = recipe.layers[int(name.split(".")[1])].feed_forward
    assert isinstance(part, ExpertsRecipe)
    return part.correction_shape or (part.count,)


def _unstacked(path: Path, name: str, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Returns the tensor of each expert, of which the file has one after another. Raises ModelError."""
    count, *shape = tensor.shape
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    except ValueError as exc:
        raise ModelError(f"tensor {name!r} of {path} has the unknown number format {tensor.kind}") from exc
    if shape[-1] % block:
        raise ModelError(f"tensor {name!r} of {path} does not consist of whole blocks")
    nbytes = prod(shape) // block * size
    for expert in range(count):
        yield replace(tensor, shape=tuple(shape), offset=tensor.offset + expert * nbytes)
