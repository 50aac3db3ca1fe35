"""Writes models in the shape of a Llama with random weights, plain or quantised, whatever their size."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

_PATTERN = 2**20 + 7
"""The number of weights after which they repeat: drawing billions takes minutes. It is no multiple of a row."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama, in the names of its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int = 131_072


LLAMA_8B = Shape(4096, 14_336, 32, 32, 8, 128, 128_256)


class Stored(enum.Enum):
    """How a random model's matrices but its embedding and head are stored."""

    BF16 = "bf16"
    INT4 = "4 bits"
    """As compressed-tensors has them, with a scale for 128 inputs."""
    FP8 = "FP8"
    """In e4m3, with a scale for 128 × 128 numbers."""


_GROUP = 128
QUANTISATION: Mapping[Stored, Mapping[str, object]] = {
    Stored.INT4: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}},
        },
    },
    Stored.FP8: {"quant_method": "fp8", "weight_block_size": [_GROUP, _GROUP], "fmt": "e4m3"},
}


def write_random_model(shape: Shape, folder: Path, stored: Stored = Stored.BF16) -> None:
    """Writes a Hugging Face folder, with one file for each layer; ``LLAMA_8B`` takes 16 GB in bf16."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **asdict(shape),
    }
    if stored is not Stored.BF16:
        config["quantization_config"] = QUANTISATION[stored]
    shards = (
        {name: (size, stored if name.endswith("proj.weight") else Stored.BF16) for name, size in tensors.items()}
        for tensors in _shards(shape)
    )
    write_shards(config, (random_tensors(shard) for shard in shards), folder)


def write_shards(config: Mapping[str, object], shards: Iterable[Mapping[str, torch.Tensor]], folder: Path) -> None:
    """Writes a Hugging Face folder, with one file for each of ``shards``."""
    (folder / "config.json").write_text(json.dumps(config))
    files = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        save_file(dict(tensors), folder / file)
        files.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _shards(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    hidden, inner, vocab = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for index in range(shape.num_hidden_layers):
        layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        yield {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}


def random_tensors(weights: Mapping[str, tuple[tuple[int, ...], Stored]]) -> dict[str, torch.Tensor]:
    """Returns the tensors of weights of these sizes, by name. The numbers of matrices have a deviation of some 0.02."""
    numbers = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0))
    made: dict[str, torch.Tensor] = {}
    for name, (size, stored) in weights.items():
        made |= _stored(name, numbers, size, stored)
    return made


def _stored(name: str, numbers: torch.Tensor, size: tuple[int, ...], stored: Stored) -> dict[str, torch.Tensor]:
    """Returns the tensors of one weight, whose numbers have a deviation of some 0.02."""
    if len(size) == 1:
        return {name: torch.ones(size, dtype=torch.bfloat16)}
    outputs, inputs = size
    groups = -(-inputs // _GROUP)
    match stored:
        case Stored.BF16:
            return {name: filled(numbers.mul(0.02).to(torch.bfloat16), size)}
        case Stored.FP8:
            scales = torch.full((-(-outputs // _GROUP), groups), 0.02)
            return {name: filled(numbers.to(torch.float8_e4m3fn), size), f"{name}_scale_inv": scales}
        case Stored.INT4:
            # The bits of random numbers in fp32 are random where their last ones are.
            words = numbers.view(torch.int32) ^ numbers.view(torch.int32).roll(1) << 16
            return {
                f"{name}_packed": filled(words, (outputs, inputs // 8)),
                f"{name}_scale": torch.full((outputs, groups), 0.004, dtype=torch.bfloat16),
                f"{name}_shape": torch.tensor(size),
            }


def filled(pattern: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor of ``size`` with the numbers of ``pattern``, ``[numbers]``, again and again."""
    count = prod(size)
    return pattern.repeat(-(-count // len(pattern)))[:count].view(size)
