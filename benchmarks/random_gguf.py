"""Writes GGUF files of random numbers for studies: true architectures at small sizes, quantised as people run them.

Blocks are made of random bytes with fitting scales, since nothing is gained by quantising random numbers: files of a
gigabyte take seconds. The tokenizer is that of the packaged demo model, so any server can read the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.checkpoint.model_files import packaged_gguf

_STD = 0.03
"""About the standard deviation of all weights, whatever their format."""
_HALVES: Mapping[Kind, tuple[tuple[int, float], ...]] = {
    Kind.Q8_0: ((0, _STD / 74),),
    Kind.Q4_K: ((0, _STD / 258), (2, 7.5 * _STD / 258)),
    Kind.Q5_K: ((0, _STD / 530), (2, 15.5 * _STD / 530)),
    Kind.Q6_K: ((208, _STD / 1368),),
}
"""Where a block has 16-bit scales, and which: all other bytes may be anything."""
_EXPONENTS = (119, 122)
"""The exponents of MXFP4, its scales."""
FULL_EVERY = 4
"""Every fourth layer of a Qwen3-Next sees the whole context."""


@dataclass(frozen=True, slots=True)
class GgufShape:
    """The sizes of a model of one architecture."""

    arch: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int = 1024
    channels: int = 0
    """A layer's feed-forward part has so many, or each of its experts."""
    experts: int = 0
    chosen: int = 0
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    """Further keys of the architecture."""
    in_eights: bool = False
    """Whether matrices are Q8_0 and experts MXFP4, as those of gpt-oss. All others are a mix like Q4_K_M."""


SHAPES: dict[str, GgufShape] = {
    "phi3": GgufShape(
        "phi3",
        24,
        16,
        4,
        64,
        channels=2816,
        numbers={"rope.dimension_count": 64, "rope.scaling.original_context_length": 4096},
    ),
    "glm4": GgufShape("glm4", 24, 16, 4, 64, channels=2816, numbers={"rope.dimension_count": 32}),
    "olmo2": GgufShape("olmo2", 24, 16, 4, 64, channels=2816),
    "qwen3moe": GgufShape("qwen3moe", 12, 16, 4, 128, channels=512, experts=64, chosen=8),
    "gpt-oss": GgufShape(
        "gpt-oss",
        12,
        16,
        4,
        64,
        channels=1024,
        experts=32,
        chosen=4,
        numbers={
            "attention.sliding_window": 128,
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        in_eights=True,
    ),
    "qwen3next": GgufShape(
        "qwen3next",
        12,
        8,
        2,
        256,
        channels=256,
        experts=64,
        chosen=8,
        numbers={
            "rope.dimension_count": 64,
            "expert_shared_feed_forward_length": 256,
            "full_attention_interval": FULL_EVERY,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 8,
            "ssm.time_step_rank": 16,
            "ssm.inner_size": 16 * 128,
        },
    ),
}
"""The models that studies have: dense ones of 0.4 billion parameters, others of 0.8 to 1.4."""

_Floats = NDArray[np.float32]
_Tensor = tuple[str, tuple[int, ...], Kind | Callable[[np.random.Generator, tuple[int, ...]], _Floats]]
"""A tensor's name, its shape, and the format of its blocks or what makes its numbers."""


def write_gguf(shape: GgufShape, path: Path) -> None:
    """Writes the model, always the same one."""
    writer = GGUFWriter(path, shape.arch)
    tokenizer = {key: value for key, value in read_gguf(packaged_gguf()).metadata.items() if key.startswith("tok")}
    vocabulary = tokenizer["tokenizer.ggml.tokens"]
    assert isinstance(vocabulary, list)
    _add_settings(writer, shape)
    for key, value in tokenizer.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key.endswith("_id"):
            # llama.cpp reads ids of tokens without a sign only.
            writer.add_key_value(key, value, GGUFValueType.UINT32)
        else:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    random = np.random.default_rng(0)
    for name, sizes, made in _tensors(shape, len(vocabulary)):
        if isinstance(made, Kind):
            writer.add_tensor(name, _blocks(random, made, sizes), raw_dtype=made)
        else:
            writer.add_tensor(name, made(random, sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: GGUFWriter, shape: GgufShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.channels)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.channels)
    if "rope.scaling.factor" in shape.numbers:
        writer.add_string(f"{shape.arch}.rope.scaling.type", "yarn")
    for key, value in shape.numbers.items():
        if isinstance(value, float):
            writer.add_float32(f"{shape.arch}.{key}", value)
        else:
            writer.add_uint32(f"{shape.arch}.{key}", value)


def _tensors(shape: GgufShape, vocabulary: int) -> Iterator[_Tensor]:
    embedding, head = (Kind.Q8_0,) * 2 if shape.in_eights else (Kind.Q4_K, Kind.Q6_K)
    yield "token_embd.weight", (vocabulary, shape.hidden), embedding
    yield "output_norm.weight", (shape.hidden,), _near_one
    yield "output.weight", (vocabulary, shape.hidden), head
    for layer in range(shape.layers):
        parts = _PARTS[shape.arch](shape, layer)
        yield from ((f"blk.{layer}.{name}", sizes, made) for name, sizes, made in parts)


def _usual(shape: GgufShape) -> Kind:
    return Kind.Q8_0 if shape.in_eights else Kind.Q4_K


def _finer(shape: GgufShape, layer: int) -> Kind:
    """Returns the format of a layer's values and down projections, of which half of the layers have more bits."""
    eighth = shape.layers // 8
    more = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    return Kind.Q8_0 if shape.in_eights else Kind.Q6_K if more else Kind.Q4_K


def _attention(shape: GgufShape, layer: int, *, query_parts: int = 1) -> Iterator[_Tensor]:
    kind, hidden = _usual(shape), shape.hidden
    yield "attn_q.weight", (query_parts * shape.heads * shape.head_dim, hidden), kind
    yield "attn_k.weight", (shape.kv_heads * shape.head_dim, hidden), kind
    yield "attn_v.weight", (shape.kv_heads * shape.head_dim, hidden), _finer(shape, layer)
    yield "attn_output.weight", (hidden, shape.heads * shape.head_dim), kind


def _norms(shape: GgufShape, *names: str) -> Iterator[_Tensor]:
    yield from ((f"{name}.weight", (shape.hidden,), _near_one) for name in names)


def _head_norms(shape: GgufShape) -> Iterator[_Tensor]:
    yield from ((f"attn_{each}_norm.weight", (shape.head_dim,), _near_one) for each in "qk")


def _fused_mlp(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield "ffn_up.weight", (2 * shape.channels, shape.hidden), _usual(shape)
    yield "ffn_down.weight", (shape.hidden, shape.channels), _finer(shape, layer)


def _experts(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    inner, down = (Kind.MXFP4,) * 2 if shape.in_eights else (Kind.Q4_K, _finer(shape, layer))
    yield "ffn_gate_inp.weight", (shape.experts, shape.hidden), _normal
    for name in ("gate", "up"):
        yield f"ffn_{name}_exps.weight", (shape.experts, shape.channels, shape.hidden), inner
    yield "ffn_down_exps.weight", (shape.experts, shape.hidden, shape.channels), down


def _phi3(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    yield "attn_qkv.weight", ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden), Kind.Q5_K
    yield "attn_output.weight", (shape.hidden, shape.heads * shape.head_dim), _usual(shape)
    yield from _fused_mlp(shape, layer)


def _glm4(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield from _norms(shape, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    yield from _attention(shape, layer)
    yield from _fused_mlp(shape, layer)


def _olmo2(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield from _norms(shape, "post_attention_norm", "post_ffw_norm")
    yield "attn_q_norm.weight", (shape.heads * shape.head_dim,), _near_one
    yield "attn_k_norm.weight", (shape.kv_heads * shape.head_dim,), _near_one
    yield from _attention(shape, layer)
    for name in ("gate", "up"):
        yield f"ffn_{name}.weight", (shape.channels, shape.hidden), _usual(shape)
    yield "ffn_down.weight", (shape.hidden, shape.channels), _finer(shape, layer)


def _qwen3moe(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield from _norms(shape, "attn_norm", "ffn_norm")
    yield from _head_norms(shape)
    yield from _attention(shape, layer)
    yield from _experts(shape, layer)


def _gpt_oss(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield from _norms(shape, "attn_norm", "post_attention_norm")
    yield from _attention(shape, layer)
    yield from _experts(shape, layer)
    keys = shape.kv_heads * shape.head_dim
    for name, size in (("q", shape.heads * shape.head_dim), ("k", keys), ("v", keys), ("output", shape.hidden)):
        yield f"attn_{name}.bias", (size,), _normal
    yield "attn_sinks.weight", (shape.heads,), _normal
    yield "ffn_gate_inp.bias", (shape.experts,), _normal
    for name, size in (("gate", shape.channels), ("up", shape.channels), ("down", shape.hidden)):
        yield f"ffn_{name}_exps.bias", (shape.experts, size), _normal


def _qwen3next(shape: GgufShape, layer: int) -> Iterator[_Tensor]:
    yield from _norms(shape, "attn_norm", "post_attention_norm")
    if (layer + 1) % FULL_EVERY == 0:
        yield from _attention(shape, layer, query_parts=2)
        yield from _head_norms(shape)
    else:
        yield from _delta_net(shape)
    yield from _experts(shape, layer)
    shared = int(shape.numbers["expert_shared_feed_forward_length"])
    for name in ("gate", "up"):
        yield f"ffn_{name}_shexp.weight", (shared, shape.hidden), _usual(shape)
    yield "ffn_down_shexp.weight", (shape.hidden, shared), _finer(shape, layer)
    yield "ffn_gate_inp_shexp.weight", (shape.hidden,), _normal


def _delta_net(shape: GgufShape) -> Iterator[_Tensor]:
    kind, size = _usual(shape), {name: int(value) for name, value in shape.numbers.items()}
    heads, values = size["ssm.time_step_rank"], size["ssm.inner_size"]
    convolved = 2 * size["ssm.group_count"] * size["ssm.state_size"] + values
    yield "attn_qkv.weight", (convolved, shape.hidden), Kind.Q5_K
    yield "attn_gate.weight", (values, shape.hidden), kind
    yield "ssm_conv1d.weight", (convolved, size["ssm.conv_kernel"]), _normal
    yield "ssm_dt.bias", (heads,), _normal
    yield "ssm_a", (heads,), lambda random, sizes: -random.uniform(0.5, 4, sizes).astype(np.float32)
    yield "ssm_ba.weight", (2 * heads, shape.hidden), kind
    yield "ssm_norm.weight", (size["ssm.state_size"],), _near_one
    yield "ssm_out.weight", (shape.hidden, values), kind


_PARTS: Mapping[str, Callable[[GgufShape, int], Iterator[_Tensor]]] = {
    "glm4": _glm4,
    "gpt-oss": _gpt_oss,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen3next,
}


def _blocks(random: np.random.Generator, kind: Kind, sizes: tuple[int, ...]) -> NDArray[np.uint8]:
    elements, width = GGML_QUANT_SIZES[kind]
    *outer, inner = sizes
    count = inner // elements
    blocks = random.integers(0, 256, (*outer, count, width), dtype=np.uint8)
    if kind is Kind.MXFP4:
        blocks[..., 0] = random.integers(*_EXPONENTS, blocks.shape[:-1])
    for at, scale in _HALVES.get(kind, ()):
        blocks[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*outer, count * width)


def _normal(random: np.random.Generator, sizes: tuple[int, ...]) -> _Floats:
    return _STD * random.standard_normal(sizes, np.float32)


def _near_one(random: np.random.Generator, sizes: tuple[int, ...]) -> _Floats:
    return 1 + _normal(random, sizes)
