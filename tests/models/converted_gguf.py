"""Writes tiny checkpoints of the families as GGUF files, as llama.cpp's converter does.

Names of tensors and keys are those of the ``gguf`` package, which the converter uses, too. What it does to tensors is
written here once more: rows of queries and keys are permuted, fused tensors are put in the order of their parts, and
experts are stacked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES, ExpertGatingFuncType, RopeScalingType
from gguf.quants import quantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.numpy import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

from tests.models.tiny_families import DEEP_YARN, FULL, GROWING, SLIDING
from tests.tiny_models import LLAMA3_ROPE, SHAPE

SIGMOID = ExpertGatingFuncType.SIGMOID


@dataclass(frozen=True)
class Converted:
    """A case of ``tiny_families``, or of ``tiny_models``, as a file of one architecture."""

    case: str
    """Settings without a key in the format have the values that llama.cpp knows."""
    changes: dict[str, Any]


FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}
CHUNKS_OF_LLAMA4: dict[str, Any] = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
CHUNKS_OF_LLAMA4 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
ALL_SEE: dict[str, Any] = {"layer_types": [FULL] * 3, "num_experts_per_tok": 0}
DENSE_CHANNELS: dict[str, Any] = {"shared_intermediate_size": SHAPE["intermediate_size"]}
"""A dense Granite 4 has this setting twice, and llama.cpp reads the other one."""
GROWING_LATENTS: dict[str, Any] = DEEP_YARN | {"mscale": 1.2, "llama_4_scaling_beta": 0.1}
HALVES: dict[str, Any] = {"head_dim": 12, "partial_rotary_factors": [0.5, 1.0] * 2}
HALVES |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
"""llama.cpp takes it for granted that layers without a window turn half of a head."""
SLOWED: dict[str, Any] = {
    FULL: LLAMA3_ROPE | {"partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 9000.0},
}
KDA_HEADS: dict[str, Any] = {"linear_num_heads": 6, "n_group": 1, "topk_group": 1}
"""llama.cpp takes it for granted that layers with a state have as many heads as the others."""
CONVERTED: dict[str, list[Converted]] = {
    "afmoe": [Converted("trinity", {"num_hidden_layers": 5, "global_attn_every_n_layers": 4, "layer_types": None})],
    "apertus": [Converted("apertus", {})],
    "arcee": [Converted("arcee", {})],
    "chatglm": [Converted("glm", {})],
    "cohere2": [Converted("cohere2", FOUR_LAYERS)],
    "command-r": [Converted("cohere", {}), Converted("cohere-normed", {})],
    "deepseek2": [
        Converted("deepseek-v2", {"n_routed_experts": 6}),
        Converted("deepseek-v2-yarn", {"mlp_bias": False, "rope_parameters": DEEP_YARN | {"mscale": 1.2}}),
        Converted("deepseek-v3", {"rope_parameters": DEEP_YARN | {"mscale": 1.2}}),
        Converted("glm4-moe-lite", {}),
        Converted("youtu", {}),
    ],
    "deepseek32": [Converted("deepseek-v32", {"rope_parameters": DEEP_YARN | {"mscale": 1.2}})],
    "dots1": [Converted("dots1", {})],
    "ernie4_5": [Converted("ernie", {}), Converted("ernie-biased", {})],
    "ernie4_5-moe": [Converted("ernie-moe", {})],
    "exaone": [Converted("exaone", {"attention_bias": False, "mlp_bias": False})],
    "exaone4": [Converted("exaone4", {}), Converted("exaone4-full", {})],
    "exaone-moe": [Converted("exaone-moe", {"n_group": 1, "topk_group": 1})],
    "falcon-h1": [
        Converted("falcon-h1", {"tie_word_embeddings": False}),
        Converted(
            "falcon-h1-normed",
            {"attention_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "projectors_bias": False},
        ),
    ],
    "falcon": [Converted("falcon", {}), Converted("falcon-groups", {})],
    "gemma": [Converted("gemma", {})],
    "gemma2": [Converted("gemma2", {"layer_types": None, "query_pre_attn_scalar": 10})],
    "gemma3n": [Converted("gemma3n", {}), Converted("gemma3n-plain", {"altup_correct_scale": True})],
    "gemma4": [
        Converted("gemma4", {}),
        Converted("gemma4-shared", {}),
        Converted("gemma4-experts", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        Converted("gemma4-unified", {"num_experts": None}),
    ],
    "glm-dsa": [Converted("glm-moe-dsa", {"attention_bias": False})],
    "glm4": [Converted("glm4", {})],
    "glm4moe": [Converted("glm4-moe", {}), Converted("glm4-moe-groups", {})],
    "gpt-oss": [Converted("gpt-oss", {})],
    "gpt2": [Converted("gpt2", {})],
    "gptneox": [Converted("gpt-neox", {}), Converted("gpt-neox-sequential", {})],
    "granite": [Converted("granite", {}), Converted("granitemoehybrid-dense", ALL_SEE | DENSE_CHANNELS)],
    "granitehybrid": [
        Converted("granitemoehybrid", {}),
        Converted("granitemoehybrid-dense", DENSE_CHANNELS | {"position_embedding_type": "nope"}),
        Converted("bamba", {}),
    ],
    "granitemoe": [Converted("granitemoe", {}), Converted("granitemoe-shared", {})],
    "hunyuan-dense": [Converted("hunyuan", {}), Converted("hunyuan-alpha", {})],
    "hunyuan-moe": [Converted("hunyuan-moe", {})],
    "internlm2": [Converted("llama", {})],
    "jais2": [Converted("jais2", {})],
    "lfm2": [Converted("lfm2", {}), Converted("lfm2-biased", {})],
    "lfm2moe": [Converted("lfm2-moe", {})],
    "llama": [Converted("mixtral", {}), Converted("internlm3", {})],
    "llama4": [
        Converted("llama4", CHUNKS_OF_LLAMA4),
        Converted("llama4", CHUNKS_OF_LLAMA4 | {"interleave_moe_layer_step": 2, "num_local_experts": 3}),
    ],
    "jamba": [Converted("jamba", {}), Converted("jamba-dense", {})],
    "kimi-linear": [
        Converted("kimi-linear", KDA_HEADS),
        Converted("kimi-linear", KDA_HEADS | {"q_lora_rank": 14, "num_shared_experts": 2}),
    ],
    "mamba": [Converted("mamba", {}), Converted("falcon-mamba", {})],
    "mamba2": [Converted("mamba2", {}), Converted("mamba2-groups", {})],
    "mimo2": [
        Converted("mimo", {"routed_scaling_factor": None}),
        Converted("mimo-wide", {"routed_scaling_factor": None}),
    ],
    "minicpm3": [Converted("minicpm3", {"dim_model_base": 256})],
    "mistral3": [
        Converted("ministral3-full", {}),
        Converted("ministral3-full", {"rope_parameters": GROWING | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ],
    "mistral4": [
        Converted("mistral4", {"rope_parameters": GROWING_LATENTS}),
        Converted("mistral4", {"rope_parameters": GROWING_LATENTS, "norm_topk_prob": False, "q_lora_rank": None}),
    ],
    "minimax-m2": [Converted("minimax-m2", {})],
    "nemotron": [Converted("nemotron", {})],
    "nemotron_h": [Converted("nemotron-h", {"layers_block_type": ["linear_attention", "mlp", FULL], "head_dim": 12})],
    "nemotron_h_moe": [Converted("nemotron-h", {"layers_block_type": ["linear_attention", "moe", FULL]})],
    "olmo": [Converted("olmo", {})],
    "olmo2": [Converted("olmo2", {}), Converted("olmo3", {})],
    "olmoe": [Converted("olmoe", {})],
    "phi2": [Converted("phi", {})],
    "phi3": [Converted("phi3", {}), Converted("phi3-window", {}), Converted("phi3-long", {})],
    "qwen2moe": [Converted("qwen2-moe", {"mlp_only_layers": []})],
    "qwen2vl": [Converted("qwen2", {})],
    "qwen3vl": [Converted("qwen3", {})],
    "qwen3vlmoe": [Converted("qwen3-moe", {"mlp_only_layers": []})],
    "qwen35": [Converted("qwen3-5", {}), Converted("qwen3-5", {"linear_num_value_heads": 2})],
    "qwen35moe": [Converted("qwen3-5-moe", {})],
    "qwen3moe": [Converted("qwen3-moe", {"mlp_only_layers": []})],
    "qwen3next": [Converted("qwen3-next", {})],
    "seed_oss": [Converted("seed-oss", {})],
    "smollm3": [Converted("smollm3", FOUR_LAYERS | {"no_rope_layers": None})],
    "step35": [
        Converted("step3p7", HALVES),
        Converted("step3p7", {**HALVES, "rope_theta": None, "partial_rotary_factors": None, "rope_parameters": SLOWED}),
    ],
    "stablelm": [Converted("stablelm", {}), Converted("stablelm-parallel", {})],
    "starcoder": [Converted("gpt-bigcode", {})],
    "starcoder2": [Converted("starcoder2", {"sliding_window": None})],
}
"""The cases of each architecture. Those of Llama, Qwen 2, Qwen 3 and Gemma 3 are in ``test_gguf_tensors``, too."""

PERMUTED: tuple[str, ...] = (
    "arcee",
    "granite",
    "granitehybrid",
    "granitemoe",
    "internlm2",
    "llama",
    "mistral3",
    "nemotron_h",
    "nemotron_h_moe",
)
PERMUTED += ("olmo", "smollm3")
"""The architectures whose rotation turns neighbouring channels, and whose checkpoints turn halves of a head."""
SHIFTED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next", "step35")
CORRECTIONS = {
    "e_score_correction_bias": "e_score_correction.bias",
    "expert_bias": "expert_bias.bias",
    "router_bias": "router_bias.bias",
}
"""What tensors of corrections are called, and what the converter calls them."""
GRANITES = ("granite", "granitehybrid", "granitemoe")
NEMOTRONS = ("nemotron_h", "nemotron_h_moe")
QWENS = ("qwen35", "qwen35moe", "qwen3next")
KEPT: tuple[str, ...] = ("shortconv.conv.weight", "ssm_a", "ssm_conv1d.weight", "ssm_d", "ssm_norm.weight")
KEPT += tuple(f"ssm_conv1d_{part}.weight" for part in "qkv")
"""The ends of the names of tensors of two dimensions that stay fp32."""


def save_converted(
    folder: Path,
    path: Path,
    arch: str,
    extra: Callable[[GGUFWriter], object] | None = None,
    quantized: GGMLQuantizationType | None = None,
    which: str = "",
    *,
    together: bool = False,
) -> Path:
    """Saves the checkpoint in ``folder`` as a GGUF file of ``arch``.

    ``extra`` adds to its settings. All matrices but routers have the format ``quantized`` if ``which`` is in their
    names, and all else is fp32. With ``together``, projections of a delta net and from latents stay as the checkpoint
    has them, as in files of the first version.
    """
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    writer = GGUFWriter(path, arch)
    _add_settings(writer, config, arch)
    # The package does not know this architecture yet, whose tensors are called as those of another one.
    named = "glm-dsa" if arch == "deepseek32" else arch
    names = get_tensor_name_map({name: key for key, name in MODEL_ARCH_NAMES.items()}[named], _layers(config))
    tensors = dict(load_file(folder / "model.safetensors"))
    if arch == "step35":
        tensors = {name: each for name, each in tensors.items() if not name.startswith("vi")}
    if arch == "apertus":
        for part in ("alpha_n", "alpha_p", "beta", "eps"):
            each = [f"model.layers.{index}.mlp.act_fn.{part}" for index in range(_layers(config))]
            getattr(writer, f"add_xielu_{part}")([float(tensors.pop(name).item()) for name in each])
    if extra is not None:
        extra(writer)
    for name, tensor in _stacked(tensors).items():
        kept = (together or arch == "minicpm3") and name.endswith(("in_proj_qkvz.weight", "kv_b_proj.weight"))
        for renamed, changed in [(name, tensor)] if kept else _changed(name, tensor, config, arch):
            known = renamed.startswith("blk.")
            found = renamed if known else names.get_name(renamed, try_suffixes=(".weight", ".bias"))
            assert found is not None, renamed
            matrix = changed.ndim > 1 and "gate_inp" not in found and not found.endswith((".bias", *KEPT))
            if quantized is not None and matrix and which in found:
                writer.add_tensor(found, quantize(np.ascontiguousarray(changed), quantized), raw_dtype=quantized)
            else:
                writer.add_tensor(found, np.ascontiguousarray(changed))
    rope = config.get("rope_parameters") or {}
    if arch == "gemma4":
        dims = config["per_layer_config"]["2"]["head_dim"] // 2
        turned = int(dims * rope["full_attention"]["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turned + [1e30] * (dims - turned), np.float32))
    if arch == "step35" and rope[FULL]["rope_type"] == "llama3":
        # The converter counts the frequencies of whole heads, of which these layers turn half.
        of_whole: Any = {**rope, FULL: rope[FULL] | {"partial_rotary_factor": 1.0}}
        whole = Step3p7TextConfig(**(config | {"rope_parameters": of_whole}))
        slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](whole, layer_type=FULL)
        steps = np.arange(0, config["head_dim"], 2) / config["head_dim"]
        writer.add_tensor("rope_freqs.weight", (rope[FULL]["rope_theta"] ** -steps / slowed.numpy()).astype(np.float32))
    if rope.get("rope_type") == "llama3":
        slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder))
        steps = np.arange(0, _head_dim(config), 2) / _head_dim(config)
        writer.add_tensor("rope_freqs.weight", (rope["rope_theta"] ** -steps / slowed.numpy()).astype(np.float32))
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layers(config: dict[str, Any]) -> int:
    return len(config.get("layers_block_type") or ()) or int(_first(config, "num_hidden_layers", "n_layer"))


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _head_dim(config: dict[str, Any]) -> int:
    heads = _first(config, "num_attention_heads", "n_head") or 1
    return int(config.get("head_dim") or _first(config, "hidden_size", "n_embd") // heads)


def _kv_heads(config: dict[str, Any]) -> int:
    heads = int(_first(config, "num_attention_heads", "n_head"))
    if config["model_type"] == "falcon":
        return int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1
    if config["model_type"] == "gpt_bigcode":
        return 1
    if config["model_type"] == "gpt_neox":
        return heads
    return int(_first(config, "num_key_value_heads") or heads)


def _add_settings(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    hidden = _first(config, "hidden_size", "n_embd")
    writer.add_block_count(_layers(config))
    if arch in ("mamba", "mamba2"):
        _add_mamba_alone(writer, config)
        return
    writer.add_context_length(_first(config, "max_position_embeddings", "n_positions", "model_max_length"))
    writer.add_embedding_length(hidden)
    channels = _first(config, "ffn_hidden_size", "intermediate_size_mlp", "intermediate_size", "n_inner")
    if arch != "qwen35moe":
        writer.add_feed_forward_length(channels or 4 * hidden)
    writer.add_head_count(_first(config, "num_attention_heads", "n_head"))
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_eos_token_id(2)
    if config.get("head_dim") and arch != "minicpm3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if (eps := config.get("rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    if arch == "olmo":
        writer.add_layer_norm_eps(1e-5)
    if arch in ("deepseek2", "deepseek32", "glm-dsa", "mistral4"):
        _add_latents(writer, config)
    if arch == "kimi-linear":
        _add_kimi(writer, config)
    if arch == "minicpm3":
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if arch in ("qwen2vl", "qwen3vl", "qwen3vlmoe"):
        writer.add_rope_dimension_sections([24, 20, 20, 0])
    if arch in ("qwen3vl", "qwen3vlmoe"):
        writer.add_num_deepstack_layers(3)
    _add_rotary(writer, config, arch)
    _add_windows(writer, config, arch)
    _add_experts(writer, config, arch)
    if (scale := _first(config, "logits_scaling", "logit_scale")) is not None:
        writer.add_logit_scale(scale)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            getattr(writer, f"add_{name}")(config[name])
    if arch in GRANITES and config["model_type"] != "bamba":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
    if arch == "gemma3n":
        _add_gemma3n(writer, config)
    if arch == "gemma4":
        _add_gemma4(writer, config)
    if arch in QWENS:
        _add_delta_net(writer, config, arch)
    if arch in ("lfm2", "lfm2moe"):
        _add_lfm2(writer, config, arch)
    if arch == "falcon-h1":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_d_ssm"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    if arch == "jamba":
        _add_jamba(writer, config)
    if arch == "step35":
        _add_step35(writer, config)
    if arch == "mimo2":
        _add_mimo(writer, config)
    if config["model_type"] in ("bamba", "granitemoehybrid", "nemotron_h"):
        _add_mamba(writer, config, arch)
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])


def _add_latents(writer: GGUFWriter, config: dict[str, Any]) -> None:
    turned = config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + turned)
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if "index_topk" in config:
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    sparse = config.get("n_routed_experts") is not None
    kinds = config.get("mlp_layer_types") or []
    dense = kinds.count("dense") or config.get("first_k_dense_replace", 0 if sparse else config["num_hidden_layers"])
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    writer.add_expert_shared_count(config.get("n_shared_experts", 0))
    if not sparse:
        return
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] == "glm4_moe_lite":
        # Its configuration has no ``scoring_func``, and the file no key for it. The layer that drafts tokens counts.
        writer.add_block_count(config["num_hidden_layers"] + 1)
        writer.add_nextn_predict_layers(1)
    elif config["model_type"] not in ("deepseek_v2", "mistral4"):
        writer.add_expert_gating_func(SIGMOID)
    if (groups := config["n_group"]) is not None:
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config["topk_group"])


def _add_kimi(writer: GGUFWriter, config: dict[str, Any]) -> None:
    turned, kept = config["qk_rope_head_dim"], config["kv_lora_rank"] + config["qk_rope_head_dim"]
    writer.add_vocab_size(config["vocab_size"])
    writer.add_head_count_kv([1 if kind == FULL else 0 for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_rope_dimension_count(turned)
    writer.add_rope_freq_base(10_000.0)
    writer.add_key_length(kept)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_used_count(config["topk_group"])


def _add_gemma3n(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == SLIDING for kind in config["layer_types"]])
    # Files have a number with a point.
    writer.add_float32("gemma3n.attention.shared_kv_layers", float(config["num_kv_shared_layers"]))
    shares = torch.tensor(config["activation_sparsity_pattern"], dtype=torch.float32)
    writer.add_activation_sparsity_scale(torch.special.ndtri(shares).tolist())


def _add_mimo(writer: GGUFWriter, config: dict[str, Any]) -> None:
    windows = [kind == SLIDING for kind in config["layer_types"]]
    # Three layers that draft tokens have windows.
    every, rope = [*windows, True, True, True], config["rope_parameters"]
    writer.add_block_count(len(every))
    writer.add_nextn_predict_layers(3)
    writer.add_head_count_kv([config["num_key_value_heads"] * (2 if windowed else 1) for windowed in every])
    # The released configuration does not count the newest token.
    writer.add_sliding_window(config["sliding_window"] - 1)
    writer.add_array("mimo2.attention.sliding_window_pattern", [int(each) for each in every])
    writer.add_value_length(config["v_head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope[FULL]["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(rope[SLIDING]["rope_theta"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    # The package has no name for this one yet.
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])


def _add_step35(writer: GGUFWriter, config: dict[str, Any]) -> None:
    windows = [kind == SLIDING for kind in config["layer_types"]]
    heads = (config["num_attention_heads"], config["num_sliding_attention_heads"])
    # The layer that drafts tokens has a window.
    every = [*windows, True]
    writer.add_block_count(len(every))
    writer.add_nextn_predict_layers(1)
    writer.add_head_count([heads[windowed] for windowed in every])
    writer.add_head_count_kv([config["num_key_value_heads"]] * len(every))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(every)
    writer.add_rope_freq_base_swa(config["rope_parameters"][SLIDING]["rope_theta"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_weights_norm(value=True)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    writer.add_moe_every_n_layers(1)
    writer.add_swiglu_clamp_exp([each or 0.0 for each in [*config["swiglu_limits"], None]])
    writer.add_swiglu_clamp_shexp([each or 0.0 for each in [*config["swiglu_limits_shared"], None]])


def _add_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    shared, own = config["num_kv_shared_layers"], config["per_layer_config"]["2"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    for key, dim in (("", own["head_dim"]), ("_swa", config["head_dim"])):
        for name in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{name}{key}")(dim)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if "num_key_value_heads" in own:
        heads = [config["num_key_value_heads"] if each else own["num_key_value_heads"] for each in windows]
        writer.add_head_count_kv(heads)
    if config["use_double_wide_mlp"]:
        channels = config["intermediate_size"]
        writer.add_feed_forward_length([channels] * (len(windows) - shared) + [2 * channels] * shared)


def _add_delta_net(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index(FULL) + 1)
    if arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_lfm2(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_head_count_kv([_kv_heads(config) if kind == FULL else 0 for kind in config["layer_types"]])
    if arch == "lfm2" and config["block_auto_adjust_ff_dim"]:
        channels = int(config["block_ffn_dim_multiplier"] * int(2 * config["intermediate_size"] / 3))
        multiple = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-channels // multiple) * multiple)


def _add_mamba_alone(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(_first(config, "num_heads", "time_step_rank"))
    if config["model_type"] == "mamba2":
        writer.add_ssm_group_count(config["n_groups"])
    else:
        writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_eos_token_id(2)


def _add_jamba(writer: GGUFWriter, config: dict[str, Any]) -> None:
    layers = range(_layers(config))
    seeing = [i % config["attn_layer_period"] == config["attn_layer_offset"] for i in layers]
    writer.add_head_count_kv([_kv_heads(config) if each else 0 for each in seeing])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_dt_rank"])


def _add_mamba(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    layers = range(_layers(config))
    kinds = _first(config, "layers_block_type", "layer_types")
    seeing = [kinds[i] in (FULL, "attention") if kinds else i in config["attn_layer_indices"] for i in layers]
    heads = _first(config, "mamba_n_heads", "mamba_num_heads")
    inner = heads * config["mamba_head_dim"] if arch in NEMOTRONS else config["mamba_expand"] * config["hidden_size"]
    writer.add_ssm_conv_kernel(_first(config, "conv_kernel", "mamba_d_conv"))
    writer.add_ssm_state_size(_first(config, "ssm_state_size", "mamba_d_state"))
    writer.add_ssm_group_count(_first(config, "n_groups", "mamba_n_groups"))
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    writer.add_head_count_kv([_kv_heads(config) if each else 0 for each in seeing])
    # A Nemotron-H turns nothing, and some files of it have this number, and not the channels of a head.
    width = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(width // (2 if config["model_type"] == "bamba" else 1))
    positions = config["model_type"] == "bamba" or arch == "granite"
    writer.add_rope_scaling_finetuned(positions)
    if not positions:
        writer.add_context_length(2**20)
    if (shared := config.get("shared_intermediate_size")) is not None:
        writer.add_expert_shared_feed_forward_length(shared)
    if arch in NEMOTRONS:
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        kind = "moe" if arch == "nemotron_h_moe" else "mlp"
        channels = config["moe_intermediate_size" if kind == "moe" else "intermediate_size"]
        writer.add_feed_forward_length([channels if each == kind else 0 for each in kinds])


def _add_rotary(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta")
    part = _first(rope, "partial_rotary_factor") or config.get("partial_rotary_factor") or config.get("rotary_pct")
    if arch in ("gemma4", "mimo2", "mistral4", "step35"):
        pass
    elif arch == "minimax-m2":
        writer.add_rope_dimension_count(config["rotary_dim"])
    elif part is not None or arch in ("afmoe", "llama", "granite", "smollm3", "cohere2", "phi3"):
        writer.add_rope_dimension_count(int(_head_dim(config) * (part or 1.0)))
    if arch == "hunyuan-dense" and rope.get("alpha"):
        theta *= rope["alpha"] ** (_head_dim(config) / (_head_dim(config) - 2))
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(512)
    if arch in ("command-r", "cohere2"):
        writer.add_rope_scaling_type(RopeScalingType.NONE)
    if arch == "gpt-oss":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "mistral3":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if theta is not None:
        writer.add_rope_freq_base(theta)
    if arch == "phi3":
        original, longest = config["original_max_position_embeddings"], config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope.get("rope_type") == "longrope":
            writer.add_rope_scaling_attn_factors((1 + np.log(longest / original) / np.log(original)) ** 0.5)


def _add_windows(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    if arch in ("afmoe", "gpt-oss", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if arch in ("cohere2", "exaone4", "exaone-moe", "gemma2") or config["model_type"] == "olmo3":
        if config["sliding_window"] is None:
            return
        writer.add_sliding_window(config["sliding_window"])
        if arch not in ("cohere2", "gemma2"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _add_experts(writer: GGUFWriter, config: dict[str, Any], arch: str) -> None:
    count = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if count is None or not config.get("enable_moe_block", True) or arch == "nemotron_h":
        return
    writer.add_expert_count(count)
    used = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    writer.add_expert_used_count(_first(config, *used))
    if arch == "llama4":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if arch in ("gpt-oss", "minimax-m2", "hunyuan-moe", "llama4"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    elif "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if (shared := _first(config, "n_shared_experts", "moe_num_shared_experts", "num_shared_experts")) is not None:
        writer.add_expert_shared_count(shared)
    if arch == "exaone-moe":
        writer.add_expert_shared_feed_forward_length(shared * config["moe_intermediate_size"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_nextn_predict_layers(0)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
    if arch == "afmoe":
        # Its own configuration has what transformers takes for granted: ``route_norm``, and groups.
        writer.add_expert_weights_scale(config["route_scale"])
        writer.add_expert_weights_norm(value=True)
        writer.add_expert_group_count(1)
        writer.add_expert_group_used_count(1)
        writer.add_vocab_size(config["vocab_size"])
    if arch == "hunyuan-moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if shared := _first(config, "shared_expert_intermediate_size", "shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if arch == "nemotron_h_moe":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    if (dense := _first(config, "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")) is not None:
        writer.add_leading_dense_block_count(dense)
    if arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    if arch in ("glm4moe", "dots1", "nemotron_h_moe"):
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if arch in ("afmoe", "glm4moe", "dots1", "kimi-linear", "lfm2moe", "mimo2", "minimax-m2", "step35"):
        writer.add_expert_gating_func(SIGMOID)


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors with all experts of a layer in one."""
    single = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
    found: dict[str, np.ndarray] = {}
    groups: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, tensor in tensors.items():
        if matched := single.fullmatch(name):
            # The converter gives those of a Mixtral the names of Llama's own files.
            stem = matched[1].replace("block_sparse_moe", "mlp") if matched[3] in ("w1", "w2", "w3") else matched[1]
            stem = stem.replace("feed_forward", "mlp").replace("mixer", "mlp").replace("backbone.", "model.")
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(matched[3], matched[3])
            groups.setdefault(f"{stem}.{part}.weight", []).append((int(matched[2]), tensor))
        else:
            found[name] = tensor
    for part in ("altup_projections", "altup_unembed_projections"):
        names = sorted(name for name in found if name.startswith(f"model.{part}."))
        if names:
            found[f"model.{part}.weight"] = np.stack([found.pop(name) for name in names])
    for name, group in groups.items():
        found[name] = np.stack([tensor for _, tensor in sorted(group, key=lambda each: each[0])])
    return found


def _changed(name: str, tensor: np.ndarray, config: dict[str, Any], arch: str) -> list[tuple[str, np.ndarray]]:
    """Returns a tensor as the converter writes it."""
    head_dim, hidden = _head_dim(config), tensor.shape[-1]
    found = re.search(r"layers\.(\d+)\.", name)
    block = f"blk.{found[1]}." if found is not None else ""
    for given, stored in CORRECTIONS.items():
        if name.endswith(given):
            return [(name.replace(given, stored), tensor.reshape(-1))]
    if arch == "falcon-h1":
        tensor = tensor * _falcon_factors(name, config)
    if any(part in name for part in (".linear_attn.", ".mamba.", ".conv.")) or _of_mixer(name, config):
        return _changed_mixer(name, block, tensor, config, arch)
    if arch == "kimi-linear" and ".self_attn." in name and "kv_b_proj" not in name:
        if "conv1d" in name:
            tensor = tensor.reshape(1, len(tensor), 1, -1)
        tensor = -np.exp(tensor) if name.endswith("A_log") else tensor
        return [(name.replace("dt_bias", "dt_proj.bias"), tensor)]
    if arch == "kimi-linear" and re.search(r"block_sparse_moe\.\w+_proj\.", name):
        # transformers alone has this name for a layer without experts.
        return [(name.replace("block_sparse_moe", "mlp"), tensor)]
    if name.endswith("kv_b_proj.weight"):
        plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
        both = tensor.reshape(-1, plain + value, hidden)
        return [
            (name.replace("kv_b_proj", "k_b_proj"), both[:, :plain].swapaxes(1, 2)),
            (name.replace("kv_b_proj", "v_b_proj"), both[:, plain:]),
        ]
    dense = not config.get("num_local_experts", 1)
    if name.endswith("input_linear.weight"):
        kind = "_exps" if tensor.ndim == 3 else "" if dense else "_shexp"
        gate, up = np.split(tensor, 2, axis=-2)
        return [(f"{block}ffn_{part}{kind}.weight", each) for part, each in (("gate", gate), ("up", up))]
    if dense and name.endswith("shared_mlp.output_linear.weight"):
        return [(f"{block}ffn_down.weight", tensor)]
    if arch in ("gpt-oss", "mimo2") and name.endswith(("sinks", "attention_sink_bias")):
        return [(f"{name}.weight", tensor)]
    if arch == "gpt-oss" and ".experts." in name:
        stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
        if stem.endswith("down_proj"):
            return [(f"{stem}.{kind}", rows)]
        of_kinds = (("gate_proj", rows[:, ::2]), ("up_proj", rows[:, 1::2]))
        return [(f"{stem.replace('gate_up_proj', part)}.{kind}", each) for part, each in of_kinds]
    if arch == "gemma3n" and name.endswith("correct_output_scale"):
        return [(f"{name}.weight", tensor)]
    if arch == "gemma4" and name.endswith(("layer_scalar", "_proj")):
        return [(f"{name}.weight", tensor)]
    if arch == "gemma4" and ".router." in name and not name.endswith(".weight"):
        part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        return [(f"blk.{name.split('.')[2]}.{part}.scale", tensor)]
    if arch == "mistral4" and ".experts." in name:
        return [(f"{name}.weight", tensor)]
    if arch == "llama4" and ".experts." in name:
        turned = tensor.swapaxes(1, 2)
        if name.endswith("down_proj"):
            return [(f"{name}.weight", turned)]
        gate, up = np.split(turned, 2, axis=1)
        named = (("gate_proj", gate), ("up_proj", up))
        return [(f"{name.replace('gate_up_proj', part)}.weight", each) for part, each in named]
    if name.endswith("shared_expert_gate.weight"):
        tensor = tensor.reshape(-1)
    if arch in PERMUTED and re.search(r"\.[qk]_proj\.", name):
        halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if arch in SHIFTED and name.endswith("norm.weight"):
        tensor = tensor + 1
    if arch == "gpt2" and tensor.ndim == 2 and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        tensor = tensor.T
    if arch == "gptneox" and "query_key_value" in name:
        heads = config["num_attention_heads"]
        tensor = tensor.reshape(heads, 3, head_dim, -1).swapaxes(0, 1).reshape(tensor.shape)
    if arch == "falcon" and "query_key_value" in name:
        kv_heads = _kv_heads(config)
        each = config["num_attention_heads"] // kv_heads
        groups = tensor.reshape(kv_heads, each + 2, head_dim, hidden)
        thirds = groups[:, :each], groups[:, each : each + 1], groups[:, each + 1 :]
        tensor = np.concatenate([part.reshape(-1, hidden) for part in thirds])
    return [(name, tensor)]


def _falcon_factors(name: str, config: dict[str, Any]) -> np.ndarray:
    """Returns what a tensor of a Falcon-H1 is multiplied by, which the checkpoint has as settings."""
    inputs, gate_and_down = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "down_proj": gate_and_down[1],
        "gate_proj": gate_and_down[0],
        "k_proj": config["key_multiplier"] * inputs,
        "q_proj": inputs,
        "v_proj": inputs,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    found = next((each for part, each in factors.items() if f".{part}." in f".{name}"), 1.0)
    if not name.endswith("mamba.in_proj.weight"):
        return np.array(found, np.float32)
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, groups, groups, config["mamba_n_heads"])
    rows = np.repeat(np.array(config["ssm_multipliers"], np.float32), sizes)
    scaled: np.ndarray = rows[:, None] * np.float32(config["ssm_in_multiplier"])
    return scaled


def _of_mixer(name: str, config: dict[str, Any]) -> bool:
    """Returns whether a tensor of a layer of one part is of its Mamba."""
    found = re.search(r"layers\.(\d+)\.mixer\.", name)
    if config["model_type"] in ("falcon_mamba", "mamba", "mamba2"):
        return found is not None
    return found is not None and config["layers_block_type"][int(found[1])] == "linear_attention"


def _changed_mixer(
    name: str, block: str, tensor: np.ndarray, config: dict[str, Any], arch: str
) -> list[tuple[str, np.ndarray]]:
    """Returns a tensor of a layer with a state as the converter writes it."""
    if arch in ("qwen35", "qwen35moe"):
        tensor = _tiled(name, tensor, config)
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    if "conv" in name and tensor.ndim == 3:
        tensor = tensor.squeeze(1)
    if name.endswith("dt_bias"):
        name = name.replace("dt_bias", "dt_proj.bias")
    if arch not in (*QWENS, "jamba", "mamba") and name.endswith(("A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    if arch not in QWENS and name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        tensor = tensor.reshape(_first(config, "n_groups", "mamba_n_groups"), -1)
    if not name.endswith("in_proj_qkvz.weight"):
        return [(name, tensor)]
    heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
    by_head = tensor.reshape(heads, -1, tensor.shape[-1])
    parts = np.split(by_head, np.cumsum([keys, keys, values]), axis=1)
    query, key, value, gate = (part.reshape(-1, tensor.shape[-1]) for part in parts)
    return [(f"{block}attn_qkv.weight", np.concatenate([query, key, value])), (f"{block}attn_gate.weight", gate)]


def _tiled(name: str, tensor: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Returns a tensor of a delta net with the first value head of each key head first, then the second of each."""
    heads, group = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    if name.endswith("linear_attn.norm.weight"):
        return tensor
    if name.endswith("out_proj.weight"):
        by_head = tensor.reshape(len(tensor), heads, group, -1)
        return by_head.swapaxes(1, 2).reshape(tensor.shape)
    before = 2 * heads * config["linear_key_head_dim"] if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0
    values = tensor[before:]
    turned = values.reshape(heads, group, -1).swapaxes(0, 1).reshape(values.shape)
    return np.concatenate([tensor[:before], turned])
