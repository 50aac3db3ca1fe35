"""Writes a model folder of a given shape with random weights, for timings of sizes that no demo model has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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


def write_random_model(shape: Shape, folder: Path) -> None:
    """Writes a Hugging Face folder in bf16, with one file for each layer; ``LLAMA_8B`` takes 16 GB."""
    config = {
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
    (folder / "config.json").write_text(json.dumps(config))
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    files = {}
    for number, tensors in enumerate(_shards(shape)):
        file = f"model-{number:05}.safetensors"
        save_file({name: _filled(pattern, size) for name, size in tensors.items()}, folder / file)
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


def _filled(pattern: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=pattern.dtype)
    count = size[0] * size[1]
    return pattern.repeat(-(-count // len(pattern)))[:count].view(size)
