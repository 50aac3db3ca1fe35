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

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf.architectures import (
    ALTUP,
    ALTUP_ENDS,
    ALTUP_SCALE,
    ATTENTION,
    BESIDE_EXPERTS,
    FEED_FORWARD,
    LOW_RANK,
    NORMS,
    OUTER,
    PART_OF_EXPERTS,
    PART_OF_SHARED,
    PER_LAYER,
    PER_LAYER_INPUT,
    Architecture,
)
from pdserve.models.checkpoint.gguf.file import GgufFile, GgufTensor, read_gguf
from pdserve.models.checkpoint.gguf.latents import latent_tensors
from pdserve.models.checkpoint.gguf.settings import (
    LONG_FACTORS,
    ROTARY_DIVISORS,
    SHORT_FACTORS,
    architecture_of,
    gguf_recipe,
    gguf_settings,
)
from pdserve.models.checkpoint.gguf.states import MixerTensor, gated_norm, mixer_tensors
from pdserve.models.checkpoint.weight_file import MappedFile
from pdserve.models.recipe import AltUpRecipe, ExpertsRecipe, LayerRecipe, MlpBesideExperts, MlpRecipe, ModelRecipe
from pdserve_kernels.contract import BLOCK_FORMATS, BlockFormat, BlockWeight
from pdserve_kernels.feed_forward import Activation

OF_POSITIONS = frozenset({ROTARY_DIVISORS, LONG_FACTORS, SHORT_FACTORS})
"""Tensors that are settings, and no weights."""
XIELU_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of a learned activation. The first two are vectors of one."""
AT_ONCE = 2**22
"""The most elements of a large tensor that are dequantised to fp32 at once."""


class GgufTensors:
    """Satisfies ``weights.TensorFiles``."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file is not a complete GGUF file of a supported architecture."""
        self._path = path
        file = read_gguf(path)
        try:
            self._mapped = [MappedFile(part) for part in file.parts]
        except (OSError, ValueError) as exc:
            raise ModelError(f"weights in {path} cannot be read: {exc}") from exc
        self._data = [part.tensor(torch.uint8, 0, part.size).numpy() for part in self._mapped]
        # Before anything is counted by shapes, which a file may make up.
        for name, tensor in file.tensors.items():
            self._stored(name, tensor)
        _, settings = gguf_settings(file)
        known, recipe = architecture_of(file), gguf_recipe(file, settings)
        self._tensors = gguf_tensors(file, recipe)
        mixing = list(_mixer_tensors(file, recipe))
        self._rows = _rows_of_mixers(file, mixing)
        """The stored row of each row, for tensors whose rows have another order, or are some of those of a tensor."""
        self._rates = frozenset(name for name, _, tensor in mixing if tensor.rate)
        self._shifted = _shifted(self._tensors, recipe) if known.shifted_norms else frozenset[str]()
        if known.permuted:
            self._rows |= self._permuted(recipe, settings.head_size())
        self._single = dict(_learned_activations(file, recipe))

    def names(self) -> Iterable[str]:
        return [*self._tensors, *self._single]

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``weights.TensorFiles``."""
        if name in self._single:
            return tuple(self._single[name].shape)
        shape = self._tensors[name].shape
        return shape if name not in self._rows else (len(self._rows[name]), *shape[1:])

    def nbytes(self, name: str) -> int:
        """See ``weights.TensorFiles``."""
        if name in self._single:
            return 0
        stored = self._stored(name, self._tensors[name])
        return stored.nbytes if name not in self._rows else len(self._rows[name]) * stored.shape[1]

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
        if name in self._single:
            return self._single[name].to(dtype)
        stored = self._stored(name, self._tensors[name])
        order = self._rows.get(name)
        wanted = (np.arange(stored.shape[0]) if order is None else order)[rows]
        kind = GGMLQuantizationType(self._tensors[name].kind)
        each = max(1, AT_ONCE // self._tensors[name].shape[-1])
        parts = [self._plain(name, stored[wanted[i : i + each]], kind) for i in range(0, len(wanted), each)]
        tensor = torch.cat([part.to(dtype) for part in parts]) if len(parts) > 1 else parts[0].to(dtype)
        return tensor if columns == slice(None) else tensor[:, columns].contiguous()

    def read_blocks(
        self, name: str, rows: slice, columns: slice, *, turned: bool = False, on_gpu: bool = False
    ) -> BlockWeight | None:
        """See ``weights.TensorFiles``."""
        found = self._block_format(name) if name in self._tensors else None
        if found is None or turned:
            return None
        tensor = self._tensors[name]
        first, end, _ = columns.indices(tensor.shape[1])
        if first % found.elements or end % found.elements:
            return None
        stored = self._stored(name, tensor)
        order = self._rows.get(name)
        mine = stored[rows] if order is None else stored[order[rows]]
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
        if name in self._shifted:
            # GGUF stores norm weights as they are applied, transformers stores their difference from one.
            tensor = tensor - 1
        if name in self._rates:
            tensor = (-tensor).log()
        return tensor.reshape(len(stored), *self._tensors[name].shape[1:])

    def _permuted(self, recipe: ModelRecipe, head_dim: int) -> dict[str, np.ndarray]:
        """Returns the stored row of each row of queries and keys. GGUF interleaves the two halves of each head."""
        found: dict[str, np.ndarray] = {}
        orders: dict[int, np.ndarray] = {}
        for name in _queries_and_keys(recipe):
            if name not in self._tensors:
                continue
            rows = self._tensors[name].shape[0]
            if rows % head_dim:
                raise ModelError(f"tensor {name!r} of {self._path} has {rows} rows, not whole heads of {head_dim}")
            if rows not in orders:
                orders[rows] = np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
            found[name] = orders[rows]
        return found


def _learned_activations(file: GgufFile, recipe: ModelRecipe) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the numbers of activations, which are keys of the file and tensors of the recipe. Raises ModelError."""
    for index, layer in enumerate(recipe.layers):
        part = layer.feed_forward
        if not isinstance(part, MlpRecipe) or part.activation is not Activation.XIELU:
            continue
        for name in XIELU_NUMBERS:
            given = file.get(f"xielu.{name}", list)
            if len(given) != len(recipe.layers) or not all(isinstance(each, float) for each in given):
                raise ModelError(f"xielu.{name} of {file.path} has no number for each of {len(recipe.layers)} layers")
            value = torch.tensor([given[index]] if name in XIELU_NUMBERS[:2] else given[index])
            yield f"{recipe.layer_prefix}{index}.mlp.act_fn.{name}", value


def _queries_and_keys(recipe: ModelRecipe) -> Iterator[str]:
    for index, layer in enumerate(recipe.layers):
        if layer.attention is not None:
            for name in (layer.attention.query, layer.attention.key):
                yield from (f"{recipe.layer_prefix}{index}.{name}.{kind}" for kind in ("weight", "bias"))


def _mixer_tensors(file: GgufFile, recipe: ModelRecipe) -> Iterator[tuple[str, str, MixerTensor]]:
    """Returns the tensors of mixers that the file has: each one's name by the recipe and there, and how it is."""
    for index, layer in enumerate(recipe.layers):
        block, prefix = f"blk.{index}.", f"{recipe.layer_prefix}{index}."
        for tensor in mixer_tensors(file, block, layer.mixer) if layer.mixer is not None else ():
            if block + tensor.stored in file.tensors:
                yield prefix + tensor.name, block + tensor.stored, tensor


def _rows_of_mixers(file: GgufFile, mixing: Iterable[tuple[str, str, MixerTensor]]) -> dict[str, np.ndarray]:
    """Returns the stored row of each row of those tensors whose rows are in another order.

    Raises ModelError if a tensor of the file has other rows than these.
    """
    found: dict[str, np.ndarray] = {}
    counts: dict[str, int] = {}
    orders: dict[tuple[int, ...], np.ndarray] = {}
    for name, stored, tensor in mixing:
        if tensor.rows:
            if tensor.rows not in orders:
                orders[tensor.rows] = np.array(tensor.rows)
            found[name] = orders[tensor.rows]
            counts[stored] = counts.get(stored, 0) + len(tensor.rows)
    for stored, count in counts.items():
        if file.tensors[stored].shape[0] != count:
            rows = file.tensors[stored].shape[0]
            raise ModelError(f"tensor {stored!r} of {file.path} has {rows} rows; its settings need {count}")
    return found


def _shifted(names: Iterable[str], recipe: ModelRecipe) -> frozenset[str]:
    """Returns the norms that are stored as they are applied."""
    kept = {
        f"{recipe.layer_prefix}{index}.{gated_norm(layer.mixer)}.weight"
        for index, layer in enumerate(recipe.layers)
        if layer.mixer is not None
    }
    return frozenset(name for name in names if name.endswith("norm.weight")) - kept


def gguf_tensors(file: GgufFile, recipe: ModelRecipe) -> dict[str, GgufTensor]:
    """Returns the file's tensors by the names of ``recipe``. Stacked experts become one tensor each.

    A tensor without such a name keeps its own, which is then reported as unknown.
    """
    known = architecture_of(file)
    names = {part: getattr(recipe, name) for part, name in OUTER.items()} | {known.last_norm: recipe.last_norm}
    if recipe.positions is not None:
        names["position_embd"] = recipe.positions.name
    if recipe.per_layer is not None:
        names |= {part: getattr(recipe.per_layer, name) for part, name in PER_LAYER.items()}
    whole: dict[str, str] = {}
    streams = recipe.layers[0].streams
    products = ALTUP_ENDS if isinstance(streams, AltUpRecipe) else {}
    for index, layer in enumerate(recipe.layers):
        block, prefix = f"blk.{index}.", f"{recipe.layer_prefix}{index}."
        names |= {block + part: prefix + name for part, name in _layer_names(layer, known).items()}
        whole |= {block + part: prefix + name for part, name in _whole_names(layer).items()}
    in_heads = dict(_tensors_in_heads(file, recipe))
    drafting = tuple(f"blk.{index}." for index in range(len(recipe.layers), file.own("block_count", int)))
    found: dict[str, GgufTensor] = {}
    mixing: set[str] = set()
    for name, stored, part_of_mixer in _mixer_tensors(file, recipe):
        mixing.add(stored)
        found[name] = _shaped(file.tensors[stored], part_of_mixer.shape)
    for name, tensor in file.tensors.items():
        if name in OF_POSITIONS or name in mixing or (drafting and name.startswith(drafting)):
            continue
        part, _, kind = name.rpartition(".")
        if name in products and len(tensor.shape) == 3:
            for number, each in enumerate(_unstacked(file.path, name, tensor)):
                found[f"{getattr(streams, products[name])}.{number}.weight"] = each
        elif name in whole:
            found[whole[name]] = tensor
        elif part in in_heads:
            found[f"{names[part]}.{kind}"] = _shaped(tensor, in_heads[part])
        elif part.endswith(".exp_probs_b") and part in names:
            found[names[part]] = _shaped(tensor, _correction_shape(recipe, part))
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
    if attention is not None and attention.latent is not None:
        names |= latent_tensors(attention)
    elif attention is not None:
        names |= {key: getattr(attention, name) for key, name in ATTENTION.items() if getattr(attention, name)}
    if attention is not None and attention.norms is not None:
        names |= {"attn_q_norm": attention.norms.query, "attn_k_norm": attention.norms.key}
    if attention is not None and attention.gate is not None and attention.gate.name:
        names["attn_gate"] = attention.gate.name
    if layer.per_layer is not None:
        names |= {key: getattr(layer.per_layer, name) for key, name in PER_LAYER_INPUT.items()}
    if isinstance(layer.streams, AltUpRecipe):
        names |= {key: f"{layer.streams.layer}.{name}" for key, name in ALTUP.items()}
    if layer.beside is not None:
        names |= {key: getattr(layer.beside, name) for key, name in LOW_RANK.items()}
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


def _tensors_in_heads(file: GgufFile, recipe: ModelRecipe) -> Iterator[tuple[str, tuple[int, int]]]:
    """Returns the file's names of tensors with a dimension of heads, and their shape as matrices."""
    for index, layer in enumerate(recipe.layers):
        latent = None if layer.attention is None else layer.attention.latent
        if latent is not None and latent.key_up:
            heads = file.own("attention.head_count", int)
            yield f"blk.{index}.attn_k_b", (heads * latent.rank, latent.plain)
            yield f"blk.{index}.attn_v_b", (heads * latent.value, latent.rank)


def _mlp_names(part: MlpRecipe, end: str = "") -> dict[str, str]:
    names = {key + end: getattr(part, name) for key, name in FEED_FORWARD.items() if getattr(part, name)}
    # One tensor of all experts has a name of its own; that of a single part has the name of the second half.
    fused = f"ffn_gate_up{end}" if end == PART_OF_EXPERTS else f"ffn_up{end}"
    return names | ({fused: part.fused} if part.fused else {})


def _whole_names(layer: LayerRecipe) -> dict[str, str]:
    """Returns the recipe's names of a layer's tensors that have no ``.weight`` behind them, by the file's names."""
    names = {"layer_output_scale.weight": layer.factor} if layer.factor else {}
    if isinstance(layer.streams, AltUpRecipe):
        stored, name = ALTUP_SCALE
        names[stored] = f"{layer.streams.layer}.{name}"
    if layer.attention is not None and layer.mixer is not None:
        # llama.cpp writes this norm of a Falcon-H1 without the ending.
        names["ffn_norm"] = f"{layer.norms[1]}.weight"
    if layer.attention is not None and layer.attention.sinks:
        names["attn_sinks.weight"] = layer.attention.sinks
    if isinstance(layer.feed_forward, MlpBesideExperts):
        names["ffn_gate_inp.scale"] = layer.feed_forward.router_weights
        names["ffn_down_exps.scale"] = layer.feed_forward.experts.factors
    return names


def _shaped(tensor: GgufTensor, shape: tuple[int, ...]) -> GgufTensor:
    """Returns the tensor in this shape, if that is one of as many numbers."""
    return replace(tensor, shape=shape) if shape and prod(shape) == prod(tensor.shape) else tensor


def _correction_shape(recipe: ModelRecipe, name: str) -> tuple[int, ...]:
    part = recipe.layers[int(name.split(".")[1])].feed_forward
    assert isinstance(part, ExpertsRecipe)
    return part.correction_shape or (part.count,)


def _unstacked(path: Path, name: str, tensor: GgufTensor) -> Iterator[GgufTensor]:
    """Returns the tensors that the file has as one, of each expert or product. Raises ModelError."""
    count, *shape = tensor.shape
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    except ValueError as exc:
        raise ModelError(f"tensor {name!r} of {path} has the unknown number format {tensor.kind}") from exc
    if shape[-1] % block:
        raise ModelError(f"tensor {name!r} of {path} does not consist of whole blocks")
    nbytes = prod(shape) // block * size
    for number in range(count):
        yield replace(tensor, shape=tuple(shape), offset=tensor.offset + number * nbytes)
