"""Writes GGUF files of the tiny models, as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def save_tiny_gguf(
    folder: Path,
    path: Path,
    extra: dict[str, Any] | None = None,
    architecture: str | None = None,
    quantized: GGMLQuantizationType | None = None,
    rope_freqs: list[float] | None = None,
    widths: tuple[int, ...] = (96,),
    others: dict[str, GGMLQuantizationType] | None = None,
    split: int = 0,
) -> Path:
    """Saves the tiny model in ``folder`` as one GGUF file.

    ``extra`` is added to the metadata. ``quantized`` is the format of the matrices whose rows have a number of elements
    that is among ``widths``: 96 is that of the down projection. The projections in ``others`` have another format. All
    other tensors are fp32. With ``split``, there are several files of so many tensors, of which the first is returned.
    """
    config = json.loads((folder / "config.json").read_text())
    gemma = config["model_type"] == "gemma3_text"
    arch = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(path, architecture or arch, split_max_tensors=split)
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
    }
    if gemma:
        numbers["attention.sliding_window"] = config["sliding_window"]
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name}", number)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    rotary = config["rope_parameters"]
    rotary = rotary.get("full_attention", rotary)
    writer.add_float32(f"{arch}.rope.freq_base", rotary["rope_theta"])
    if rotary["rope_type"] == "linear":
        writer.add_string(f"{arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{arch}.rope.scaling.factor", rotary["factor"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", config["eos_token_id"])
    for name, value in (extra or {}).items():
        writer.add_key_value(name, value, _kind(value))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for name, tensor in load_file(folder / "model.safetensors").items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            halves = tensor.reshape(-1, 2, config["head_dim"] // 2, *tensor.shape[1:])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
        if gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        kind = (others or {}).get(name.split(".")[-2], quantized)
        if kind is not None and tensor.ndim == 2 and tensor.shape[-1] in widths:
            writer.add_tensor(_name(name, gemma), quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name, gemma), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def _name(name: str, gemma: bool) -> str:
    part, _, kind = name.rpartition(".")
    if part in OUTER:
        return f"{OUTER[part]}.{kind}"
    _, _, index, inner = part.split(".", 3)
    if gemma and inner == "post_attention_layernorm":
        return f"blk.{index}.post_attention_norm.{kind}"
    return f"blk.{index}.{INNER[inner]}.{kind}"


def _kind(value: Any) -> GGUFValueType:
    return {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}[type(value)]
