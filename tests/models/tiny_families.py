"""Tiny random checkpoints of every family that has a recipe, written by transformers itself.

``python -m tests.models.tiny_families CASE`` prints the names and shapes of the tensors of one.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from pdserve.models.checkpoint.safetensors.files import SafetensorsFiles
from pdserve.models.table import COMPOSITES, FAMILIES
from tests.tiny_models import FAMILIES as OLDER
from tests.tiny_models import (
    LLAMA3_ROPE,
    SHAPE,
    WINDOW,
    add_chat_tokenizer,
    auto_class,
    save_tiny_model,
    shrink_embeddings,
)

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [SLIDING, FULL, SLIDING]
HEADS = {name: value for name, value in SHAPE.items() if name != "head_dim"}
"""A shape whose heads share the hidden channels."""
GPT: dict[str, Any] = {"vocab_size": 512, "n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 512, "n_inner": 96}
GPT |= {"initializer_range": 0.4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MIMO: dict[str, Any] = SHAPE | DEEPSEEK_EXPERTS | {"head_dim": 12, "v_head_dim": 8, "attention_value_scale": 0.6}
MIMO |= {"num_attention_heads": 8, "n_group": 4, "topk_group": 2, "sliding_window": WINDOW, "layer_types": KINDS}
MIMO |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "routed_scaling_factor": 1.5}
"""Values are narrower than keys, a third of which are turned, and layers with windows have twice the KV heads."""
HY3: dict[str, Any] = SHAPE | EXPERTS | {"num_shared_experts": 2, "moe_intermediate_size": 24}
HY3 |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "initializer_range": 0.15}
TRINITY: dict[str, Any] = SHAPE | EXPERTS | {"moe_intermediate_size": 24, "num_dense_layers": 1, "mup_enabled": True}
TRINITY |= {"sliding_window": WINDOW, "global_attn_every_n_layers": 2, "route_scale": 1.7, "initializer_range": 0.15}
LFM3: dict[str, Any] = SHAPE | {"sliding_window": WINDOW, "num_hidden_layers": 5, "conv_L_cache": 4}
LAGUNA: dict[str, Any] = SHAPE | EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36}
LAGUNA |= {"sliding_window": WINDOW, "layer_types": KINDS, "num_attention_heads_per_layer": [8, 6, 8]}
LAGUNA |= {"initializer_range": 0.15, "moe_routed_scaling_factor": 1.7}
LAGUNA["rope_parameters"] = {
    FULL: {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.4},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
"""Bounds that many scores and logits of a random model come near."""
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
SWASH: dict[str, Any] = HEADS | GRANITE | {"sliding_window": WINDOW}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}
"""Queries of later positions are longer."""
LLAMA4 = SHAPE | {"num_hidden_layers": 4, "intermediate_size_mlp": 80, "num_local_experts": 4}
LLAMA4 |= {"attention_chunk_size": 7, "floor_scale": 9, "attn_scale": 0.3}
"""Chunks are shorter than prompts and no multiple of a block. The last layer sees all."""
GEMMA4 = SHAPE | {"num_hidden_layers": 6, "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL] * 2}
GEMMA4 |= {"num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24, "vocab_size_per_layer_input": 512}
GEMMA4 |= {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0}
GEMMA3N: dict[str, Any] = SHAPE | {"num_hidden_layers": 6, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 3}
GEMMA3N |= {"num_kv_shared_layers": 2, "laurel_rank": 5, "hidden_size_per_layer_input": 6, "altup_num_inputs": 4}
GEMMA3N |= {"intermediate_size": [96, 60, 96, 96, 96, 120], "final_logit_softcapping": 5.0}
GEMMA3N |= {"activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.3, 0.0, 0.8], "vocab_size_per_layer_input": 400}
OSS: dict[str, Any] = SHAPE | {
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
DELTA: dict[str, Any] = SHAPE | {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4},
}
STATES = ["linear_attention", FULL, "linear_attention"]
QWEN4: dict[str, Any] = DELTA | EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36}
QWEN4 |= {"hc_count": 3, "hc_lowrank": 14, "indexer_n_heads": 24, "indexer_kv_heads": 1, "indexer_head_dim": 8}
QWEN4 |= {"indexer_budget": 9, "indexer_compress_ratio": 3, "ple_layer_ids": [1, 3], "ple_embed_dim": 24}
QWEN4 |= {"heads_per_ngram": 3, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 16}
QWEN4 |= {"ple_conv_kernel_size": 3, "split_ngram_parts": 5, "pad_token_id": None, "initializer_range": 0.15}
"""Tokens see three of the blocks of 3 tokens, by as many scores as ``INDEXED`` has."""
OLMO_HYBRID: dict[str, Any] = HEADS | {"layer_types": STATES, "pad_token_id": None}
LFM: dict[str, Any] = HEADS | {"layer_types": ["conv", FULL, "conv"]}
MAMBA: dict[str, Any] = {"mamba_n_heads": 10, "mamba_d_head": 12, "mamba_d_state": 8}
FALCON_H1: dict[str, Any] = HEADS | {
    "mamba_n_heads": 12,
    "mamba_d_ssm": 96,
    "mamba_d_state": 8,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 1.4,
    "ssm_multipliers": [0.9, 1.2, 0.6, 1.1, 0.8],
    "mlp_multipliers": [1.6, 0.7],
}
BIASED = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
JAMBA: dict[str, Any] = {"hidden_size": 48, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
MAMBA2: dict[str, Any] = {name: SHAPE[name] for name in ("vocab_size", "num_hidden_layers")}
MAMBA2 |= {"hidden_size": 48, "num_heads": 8, "head_dim": 12, "state_size": 8, "n_groups": 1}
MAMBA1: dict[str, Any] = {name: SHAPE[name] for name in ("vocab_size", "num_hidden_layers")}
MAMBA1 |= {"hidden_size": 48, "state_size": 8}
NEMOTRON_H: dict[str, Any] = SHAPE | {
    # With larger numbers, the sums of steps that transformers takes the exponents of have errors that show.
    "initializer_range": 0.15,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 36,
}
LATENTS: dict[str, Any] = HEADS | {"num_key_value_heads": 6, "kv_lora_rank": 20, "q_lora_rank": 14, "v_head_dim": 10}
LATENTS |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
MLA: dict[str, Any] = LATENTS | DEEPSEEK_EXPERTS
LONGCAT: dict[str, Any] = {name: value for name, value in LATENTS.items() if name != "num_hidden_layers"}
LONGCAT |= {"num_layers": 2, "head_dim": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 24, "n_routed_experts": 6}
LONGCAT |= {"moe_topk": 4, "zero_expert_num": 4, "routed_scaling_factor": 1.7, "initializer_range": 0.15}
INDEXED: dict[str, Any] = MLA | {"index_topk": 9, "index_n_heads": 24, "index_head_dim": 12}
INDEXED |= {"pad_token_id": None}
"""Tokens attend to fewer than a test's prompts have, also within its chunks. Many scores would be 0 with few heads, or
for a token without an embedding, as padding has none, and transformers does not say which of equal ones it takes."""
V4: dict[str, Any] = SHAPE | DEEPSEEK_EXPERTS | {"head_dim": 20, "partial_rotary_factor": 0.4, "q_lora_rank": 14}
V4 |= {"num_hidden_layers": 4, "sliding_window": WINDOW, "o_groups": 2, "o_lora_rank": 10, "hc_mult": 3}
V4 |= {"index_topk": 5, "index_n_heads": 24, "index_head_dim": 12, "pad_token_id": None, "num_key_value_heads": 1}
V4["layer_types"] = [SLIDING, *(f"{kind}_attention" for kind in ("heavily_compressed", *["compressed_sparse"] * 2))]
V4["mlp_layer_types"] = ["hash_moe", "moe", "hash_moe", "moe"]
V4["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 7}
"""Entries for as many tokens as a block has, and for a number that blocks do not divide."""
HY4: dict[str, Any] = INDEXED | {"rms_norm_eps": 0.02, "hc_mult": 3, "hc_magnitude": 1.6, "hc_eps": 0.05}
GLM5: dict[str, Any] = INDEXED | {"qk_rope_head_dim": 0, "num_hidden_layers": 5, "index_kpool": 3}
GLM5 |= {"hc_mult": 3, "rms_norm_eps": 0.02}
GLM5 |= {"layer_types": [f"{kind}_attention" for kind in ("linear", "indexed", "linear", "indexed", "indexed")]}
GLM5 |= {"indexer_types": ["full"] * 4 + ["shared"], "mlp_layer_types": ["dense", "sparse", "dense", *["sparse"] * 2]}
GLM5 |= {"linear_num_heads": 4, "linear_head_dim": 12, "linear_conv_kernel_dim": 3, "n_group": 4, "topk_group": 2}
"""Pools of more tokens than divide a block."""
AXK2: dict[str, Any] = INDEXED | {"gated_norm_rank": 5, "rope_parameters": {"rope_type": "default"}}
KIMI: dict[str, Any] = LATENTS | EXPERTS | {"q_lora_rank": None, "moe_intermediate_size": 24, "layer_types": STATES}
KIMI |= {"linear_num_heads": 4, "linear_head_dim": 12, "linear_conv_kernel_dim": 3}
LING3: dict[str, Any] = LATENTS | EXPERTS | {"q_lora_rank": None, "moe_intermediate_size": 24, "layer_types": STATES}
LING3 |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 12, "short_conv_kernel_size": 3}
PIXTRAL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28}
PIXTRAL |= {"num_attention_heads": 2, "patch_size": 14, "model_type": "pixtral"}
LARGE4: dict[str, Any] = {name: value for name, value in INDEXED.items() if name != "q_lora_rank"}
LARGE4 |= {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 0], "kv_source_layers": [0, 1, 2, 1, 1]}
LARGE4 |= {"first_k_dense_replace": 0}
LARGE4 |= {"indexer_types": ["full", "full", "shared", "shared", "full"], "final_logit_softcapping": 20.0}
"""Two layers have the latents of an earlier one, of which one has index keys of its own."""
M3: dict[str, Any] = SHAPE | {"head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 6}
M3 |= {"dense_intermediate_size": 96, "shared_intermediate_size": 36, "intermediate_size": 24}
M3 |= {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 3, "index_topk_blocks": 3}
M3 |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "initializer_range": 0.15}
M3["layer_types"] = [FULL, "minimax_m3_sparse", "minimax_m3_sparse"]
M3["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
"""Tokens attend to fewer blocks than prompts have. The cache's blocks are no multiple of them."""
SMALL_VISION: dict[str, Any] = {name: value for name, value in PIXTRAL.items() if name != "model_type"}
DEEP_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("llama4_text", LLAMA4 | {"rope_parameters": LLAMA3_ROPE, "num_experts_per_tok": 2}),
    "llama4-dense": ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False}),
    "llama4-full": ("llama4_text", LLAMA4 | {"attention_chunk_size": None, "attn_temperature_tuning": False}),
    "ministral": ("ministral", SHAPE | {"sliding_window": WINDOW, "layer_types": KINDS}),
    "ministral3": ("ministral3", SHAPE | {"rope_parameters": GROWING, "sliding_window": WINDOW}),
    "ministral3-full": ("ministral3", SHAPE | {"rope_parameters": GROWING}),
    "mistral4": (
        "mistral4",
        MLA | {"n_group": 2, "topk_group": 1, "rope_parameters": GROWING, "first_k_dense_replace": 1},
    ),
    "mistral4-halves": (
        "mistral4",
        MLA
        | {"rope_parameters": GROWING | DEEP_YARN, "rope_interleave": False, "attention_bias": True}
        | {"q_lora_rank": None, "norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
    ),
    "mistral-large4": ("mistral_large4", {"text_config": LARGE4, "vision_config": PIXTRAL}),
    "mistral-large4-groups": (
        "mistral_large4",
        {
            "text_config": LARGE4
            | {"no_rope_layers": [1, 1, 0, 1, 1], "kv_source_layers": [0, 1, 2, 1, 4], "indexer_types": ["full"] * 5}
            | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 2}
            | {
                "attention_bias": True,
                "rope_parameters": DEEP_YARN,
                "mlp_layer_types": ["sparse", "dense"] * 2 + ["dense"],
            }
            | {"rms_norm_eps": 0.01, "index_topk": 100},
            "vision_config": PIXTRAL,
        },
    ),
    "mixtral": ("mixtral", HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", HEADS | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2-moe": (
        "qwen2_moe",
        HEADS | EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "mlp_only_layers": [1]},
    ),
    "flint": (
        "flint",
        SHAPE
        | EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "sliding_window": WINDOW}
        | {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "gpt-oss": ("gpt_oss", OSS | {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": WINDOW}),
    "gpt-oss-full": ("gpt_oss", OSS | {"num_local_experts": 4, "layer_types": [FULL] * 3, "attention_bias": False}),
    "qwen3-next": (
        "qwen3_next",
        DELTA | EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36},
    ),
    "qwen3-next-dense": ("qwen3_next", DELTA | {"mlp_only_layers": [0, 1, 2], "linear_num_value_heads": 2}),
    "qwen3-5": ("qwen3_5_text", DELTA),
    "qwen3-5-moe": (
        "qwen3_5_moe_text",
        DELTA | EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36},
    ),
    "qwen4-exp": ("qwen4_exp_text", QWEN4),
    "qwen4-exp-wide": (
        "qwen4_exp_text",
        QWEN4
        | {"layer_types": None, "num_hidden_layers": 5, "ple_layer_ids": [2], "hc_count": 2, "ngram_size": 2}
        | {"indexer_budget": 100, "indexer_compress_ratio": 5, "output_gate_type": "sigmoid", "attention_bias": True}
        | {"norm_topk_prob": False, "ple_embed_dim": None, "heads_per_ngram": 5, "ple_conv_kernel_size": 4},
    ),
    "lara": (
        "lara_mini",
        DELTA
        | EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "sliding_window": WINDOW}
        | {"layer_types": None, "num_hidden_layers": 4, "rope_parameters": {"rope_type": "default"}},
    ),
    "lfm2": ("lfm2", LFM | {"block_multiple_of": 8}),
    "lfm2-biased": ("lfm2", LFM | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
    "lfm3": ("lfm3", LFM3),
    "lfm3-plain": ("lfm3", LFM3 | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True}),
    "lfm2-moe": ("lfm2_moe", LFM | EXPERTS | {"num_dense_layers": 1, "moe_intermediate_size": 24}),
    "granitemoehybrid": (
        "granitemoehybrid",
        HEADS | GRANITE | MAMBA | {"num_local_experts": 4, "layer_types": STATES, "shared_intermediate_size": 40},
    ),
    "granitemoehybrid-dense": (
        "granitemoehybrid",
        HEADS
        | MAMBA
        | {"num_local_experts": 0, "layer_types": STATES, "position_embedding_type": "rope", "mamba_n_groups": 2},
    ),
    "bamba": ("bamba", HEADS | MAMBA | {"attn_layer_indices": [1], "hidden_size": 48, "mamba_n_heads": 8}),
    "falcon-h1": ("falcon_h1", FALCON_H1),
    "falcon-h1-normed": (
        "falcon_h1",
        FALCON_H1 | BIASED | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
    "falcon-h1-plain": ("falcon_h1", HEADS | {"mamba_rms_norm": True, "mamba_n_heads": 8, "mamba_d_ssm": None}),
    "jamba": ("jamba", HEADS | JAMBA | {"num_experts": 4}),
    "jamba-dense": (
        "jamba",
        HEADS | JAMBA | {"num_experts": 1, "mamba_d_state": 5, "mamba_dt_rank": 7, "mamba_proj_bias": True},
    ),
    "mamba": ("mamba", MAMBA1),
    "falcon-mamba": (
        "falcon_mamba",
        MAMBA1 | {"state_size": 5, "time_step_rank": 7, "use_bias": True, "tie_word_embeddings": False},
    ),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-groups": (
        "mamba2",
        MAMBA2 | {"n_groups": 3, "num_heads": 12, "hidden_size": 72, "use_bias": True, "tie_word_embeddings": True},
    ),
    "nemotron-h": (
        "nemotron_h",
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "moe", FULL, "mlp", "linear_attention"]},
    ),
    "gemma": ("gemma", SHAPE),
    "gemma2": ("gemma2", SHAPE | CAPS | {"sliding_window": WINDOW, "query_pre_attn_scalar": 17}),
    "gemma2-unbounded": ("gemma2", SHAPE | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-plain": (
        "gemma3n_text",
        GEMMA3N
        | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None, "altup_correct_scale": False}
        | {"altup_active_idx": 1, "altup_num_inputs": 3, "intermediate_size": 96, "vocab_size_per_layer_input": 600},
    ),
    "gemma4": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-shared": (
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6},
    ),
    "gemma4-unified": ("gemma4_unified_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-experts": ("gemma4_text", GEMMA4 | {"enable_moe_block": True}),
    "vaultgemma": ("vaultgemma", SHAPE | CAPS | {"sliding_window": WINDOW}),
    "phi": ("phi", HEADS | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}),
    "phi-normed": ("phi", HEADS | {"qk_layernorm": True, "partial_rotary_factor": 0.4}),
    "phi3": ("phi3", HEADS | {"original_max_position_embeddings": 512}),
    "phi3-window": ("phi3", HEADS | {"sliding_window": WINDOW, "original_max_position_embeddings": 512}),
    "phi3-long": ("phi3", HEADS | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}),
    "glm": ("glm", SHAPE | {"head_dim": 12}),
    "glm4": ("glm4", SHAPE | {"head_dim": 12}),
    "glm4-moe": ("glm4_moe", HEADS | DEEPSEEK_EXPERTS | {"use_qk_norm": True, "attention_bias": True, "head_dim": 12}),
    "glm4-moe-groups": (
        "glm4_moe",
        HEADS
        | DEEPSEEK_EXPERTS
        | {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "head_dim": 12},
    ),
    "sarvam-moe": ("sarvam_moe", HEADS | DEEPSEEK_EXPERTS | {"head_dim": 12, "use_qkv_bias": True, "num_experts": 8}),
    "solar-open": ("solar_open", SHAPE | DEEPSEEK_EXPERTS),
    "deepseek-v2": ("deepseek_v2", MLA | {"first_k_dense_replace": 1, "n_shared_experts": 2, "q_lora_rank": None}),
    "deepseek-v2-yarn": (
        "deepseek_v2",
        MLA
        | {"attention_bias": True, "mlp_bias": True, "routed_scaling_factor": 2.5, "rope_parameters": DEEP_YARN}
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3": ("deepseek_v3", MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        MLA | {"n_group": 1, "topk_group": 1, "rope_parameters": DEEP_YARN, "rope_interleave": False},
    ),
    "deepseek-v32": (
        "deepseek_v32",
        INDEXED | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rope_parameters": DEEP_YARN},
    ),
    "glm-moe-dsa": ("glm_moe_dsa", INDEXED | {"attention_bias": True, "indexer_types": ["full", "full", "shared"]}),
    "glm4-moe-lite": ("glm4_moe_lite", MLA | {"attention_bias": True}),
    "axk1": ("axk1", MLA | {"n_group": 2, "topk_group": 1}),
    "axk2": ("axk2", AXK2),
    "axk2-dense": ("axk2", AXK2 | {"mlp_layer_types": ["dense"] * 3, "attention_bias": True, "index_topk": 100}),
    "hy4": ("hy_v4", HY4 | {"n_group": 4, "topk_group": 2}),
    "hy4-yarn": (
        "hy_v4",
        HY4
        | {"rope_parameters": DEEP_YARN, "attention_bias": True, "indexer_types": ["full", "shared", "full"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2, "norm_topk_prob": False}
        | {"index_topk": 100, "hc_mult": 2},
    ),
    "sarvam-mla": ("sarvam_mla", MLA | {"q_lora_rank": None}),
    "deepseek-v4": ("deepseek_v4", V4),
    "deepseek-v4-yarn": (
        "deepseek_v4",
        V4
        | {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 2}, "index_topk": 99}
        | {"rope_scaling": DEEP_YARN, "layer_types": V4["layer_types"][:0:-1], "num_hidden_layers": 3, "hc_mult": 2}
        | {"mlp_layer_types": ["hash_moe", "moe", "moe"], "sliding_window": 3},
    ),
    "kimi-linear": ("kimi_linear", KIMI | {"n_group": 4, "topk_group": 2}),
    "kimi-linear-dense": (
        "kimi_linear",
        KIMI | {"mlp_layer_types": ["dense"] * 3, "q_lora_rank": 14, "attention_bias": True},
    ),
    "kimi-linear-raw": (
        "kimi_linear",
        KIMI
        | {"moe_renormalize": False, "num_shared_experts": 2, "layer_types": None, "linear_num_heads": 7}
        | {"linear_attn_config": {"kda_layers": [2, 3], "full_attn_layers": [1], "num_heads": 2, "head_dim": 20}},
    ),
    "ling3": ("bailing_hybrid", LING3 | {"n_group": 4, "topk_group": 2}),
    "ling3-unbounded": ("bailing_hybrid", LING3 | {"kda_safe_gate": False, "q_lora_rank": 14, "attention_bias": True}),
    "longcat": ("longcat_flash", LONGCAT),
    "longcat-biased": ("longcat_flash", LONGCAT | {"attention_bias": True, "zero_expert_num": 0}),
    "minicpm3": ("minicpm3", LATENTS | {"dim_model_base": 20, "tie_word_embeddings": False}),
    "youtu": ("youtu", LATENTS | {"attention_bias": True}),
    "olmo": ("olmo", HEADS),
    "olmo2": ("olmo2", HEADS),
    "olmo3": ("olmo3", HEADS | {"sliding_window": WINDOW, "layer_types": KINDS}),
    "olmo-hybrid": ("olmo_hybrid", OLMO_HYBRID | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo-hybrid-turned": (
        "olmo_hybrid",
        OLMO_HYBRID | {"linear_num_key_heads": 2, "linear_value_head_dim": 7, "linear_allow_neg_eigval": False},
    ),
    "olmoe": ("olmoe", HEADS | EXPERTS),
    "flex-olmo": ("flex_olmo", HEADS | EXPERTS),
    "cohere": ("cohere", HEADS),
    "cohere-normed": ("cohere", HEADS | {"use_qk_norm": True}),
    "cohere2": ("cohere2", HEADS | {"sliding_window": WINDOW, "layer_types": KINDS}),
    "cohere2-moe": (
        "cohere2_moe",
        SHAPE | EXPERTS | {"sliding_window": WINDOW, "num_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "cohere2-moe-sigmoid": (
        "cohere2_moe",
        SHAPE
        | EXPERTS
        | {"sliding_window": WINDOW, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum"}
        | {"expert_selection_fn": "sigmoid", "rms_norm_eps": 1e-4, "layer_types": KINDS}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "prefix_dense_sliding_window_pattern": 2}
        | {"prefix_dense_intermediate_size": 40},
    ),
    "granite": ("granite", HEADS | GRANITE),
    "granitemoe": ("granitemoe", HEADS | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "granitemoe-shared": (
        "granitemoeshared",
        HEADS | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 36},
    ),
    "granitemoe-not-shared": ("granitemoeshared", HEADS | GRANITE | {"num_local_experts": 6}),
    "granite-swash": ("granite_swa", SWASH | {"layer_rope_theta": [0, 9000.0, 70_000.0]}),
    "granitemoe-swash": (
        "granitemoe_swa",
        SWASH
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 36, "layer_types": KINDS},
    ),
    "smollm3": ("smollm3", HEADS | {"no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "smollm3",
        HEADS | {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": KINDS},
    ),
    "exaone": ("exaone", HEADS | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "exaone4": ("exaone4", HEADS | {"sliding_window": WINDOW, "layer_types": KINDS}),
    "exaone4-full": ("exaone4", HEADS | {"sliding_window": None, "layer_types": [FULL] * 3}),
    "exaone-moe": (
        "exaone_moe",
        HEADS
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "sliding_window": WINDOW, "layer_types": KINDS},
    ),
    "kolibri": (
        "kolibri1",
        SHAPE
        | EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "norm_topk_prob": True}
        | {"sliding_window": WINDOW, "layer_types": KINDS},
    ),
    "hy3": ("hy_v3", HY3),
    "iquest-coder": ("iquestcoder", SHAPE),
    "laguna": ("laguna", LAGUNA),
    "laguna-channels": ("laguna", LAGUNA | {"gating": "per-element", "num_attention_heads_per_layer": None}),
    "trinity": ("afmoe", TRINITY),
    "mimo": ("mimo_v2_flash", MIMO),
    "mimo-wide": ("mimo_v2_flash", MIMO | {"v_head_dim": 12}),
    "mimo-dense": (
        "mimo_v2_flash",
        MIMO | {"mlp_layer_types": ["dense"] * 3, "attention_value_scale": None, "attention_bias": True},
    ),
    "seed-oss": ("seed_oss", SHAPE | {"attention_out_bias": True}),
    "ernie": ("ernie4_5", SHAPE),
    "ernie-biased": ("ernie4_5", SHAPE | {"use_bias": True}),
    "minimax": (
        "minimax",
        SHAPE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "block_size": 8}
        | {"full_attn_alpha_factor": 1.4, "full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 0.8}
        | {"linear_attn_beta_factor": 1.3, "mlp_alpha_factor": 1.2, "mlp_beta_factor": 0.9, "initializer_range": 0.15},
    ),
    "minimax-window": (
        "minimax",
        SHAPE
        # transformers takes the length of a context from the first layer.
        | {"num_local_experts": 4, "sliding_window": WINDOW, "layer_types": [FULL, "linear_attention", FULL]}
        | {"initializer_range": 0.15},
    ),
    "minimax-m2": (
        "minimax_m2",
        SHAPE | {"head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 6},
    ),
    "minimax-m3": ("minimax_m3_vl", {"text_config": M3, "vision_config": SMALL_VISION, "projector_hidden_size": 16}),
    "minimax-m3-local": (
        "minimax_m3_vl",
        {
            "text_config": M3
            | {"index_local_blocks": 2, "index_block_size": 8, "index_topk_blocks": 3, "num_key_value_heads": 1}
            | {"index_n_heads": 1, "layer_types": ["minimax_m3_sparse"] * 2 + [FULL], "head_dim": 10}
            | {"index_head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 9e3}, "rotary_dim": 10}
            | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
            "vision_config": SMALL_VISION,
            "projector_hidden_size": 16,
        },
    ),
    "arcee": ("arcee", HEADS | {"hidden_act": "relu2"}),
    "helium": ("helium", HEADS | {"head_dim": 10}),
    "cwm": ("cwm", SHAPE | {"sliding_window": WINDOW, "layer_types": KINDS, "rope_parameters": LLAMA3_ROPE}),
    "ernie-moe": (
        "ernie4_5_moe",
        HEADS | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
    ),
    "ernie-moe-biased": (
        "ernie4_5_moe",
        HEADS | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "use_bias": True},
    ),
    "hunyuan": ("hunyuan_v1_dense", SHAPE),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        SHAPE | {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", SHAPE | {"num_experts": 8, "moe_topk": 3}),
    "dots1": ("dots1", HEADS | DEEPSEEK_EXPERTS | {"n_shared_experts": 2, "first_k_dense_replace": 1}),
    "hyperclovax": ("hyperclovax", SHAPE | {"residual_multiplier": 0.7, "logits_scaling": 0.5}),
    "hyperclovax-two-norms": ("hyperclovax", SHAPE | {"use_post_norm": False, "residual_multiplier": 0.5}),
    "apertus": ("apertus", HEADS | {"hidden_act": "xielu"}),
    "nanochat": ("nanochat", HEADS | {"hidden_act": "relu2"}),
    "starcoder2": ("starcoder2", HEADS | {"sliding_window": WINDOW}),
    "stablelm": ("stablelm", HEADS | {"use_qkv_bias": True, "partial_rotary_factor": 0.4}),
    "stablelm-parallel": ("stablelm", HEADS | {"use_parallel_residual": True, "partial_rotary_factor": 0.4}),
    "nemotron": ("nemotron", HEADS | {"hidden_act": "relu2", "partial_rotary_factor": 0.4}),
    "jais2": ("jais2", HEADS | {"hidden_act": "relu2"}),
    "persimmon": ("persimmon", HEADS | {"hidden_act": "relu2", "partial_rotary_factor": 0.4}),
    "gpt-neox": ("gpt_neox", HEADS | {"rotary_pct": 0.4}),
    "gpt-neox-sequential": ("gpt_neox", HEADS | {"rotary_pct": 0.4, "use_parallel_residual": False}),
    "gpt2": ("gpt2", GPT),
    "gpt-bigcode": ("gpt_bigcode", GPT),
    "gpt-bigcode-heads": ("gpt_bigcode", GPT | {"multi_query": False}),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "opt": ("opt", HEADS | {"ffn_dim": 96, "word_embed_proj_dim": 60}),
    "falcon": ("falcon", HEADS),
    "falcon-heads": ("falcon", HEADS | {"multi_query": False, "bias": True}),
    "falcon-sequential": ("falcon", HEADS | {"parallel_attn": False}),
    "falcon-groups": ("falcon", HEADS | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "internlm3": ("internlm3", SHAPE | {"attention_bias": True, "mlp_bias": True}),
}
"""The ``model_type`` and settings of each case: of the whole, if its text part is in no model of its own.

Windows are shorter than prompts; scores of experts are corrected.
"""


def config_of(case: str, **changes: object) -> PretrainedConfig:
    family, settings = CASES[case]
    if family in COMPOSITES:
        settings, changes = settings | {"text_config": settings["text_config"] | changes}, {}
    # transformers writes into what it is given, and cases share parts.
    return CONFIG_MAPPING[family](**deepcopy(settings | changes))


def text_part(case: str) -> tuple[str, dict[str, Any]]:
    """Returns the family of a case's text part, and its settings."""
    family, settings = CASES[case]
    return (COMPOSITES[family].text, settings["text_config"]) if family in COMPOSITES else (family, settings)


def save_tiny(case: str, folder: Path, **changes: object) -> Path:
    """Saves a random model in ``folder``, always the same one. ``changes`` are settings in place of the case's."""
    saved_tiny(case, folder, **changes)
    return folder


def saved_tiny(case: str, folder: Path, **changes: object) -> PreTrainedModel:
    """Does what ``save_tiny`` does, and returns transformers' model, which need not be loaded then."""
    torch.manual_seed(sum(case.encode()))
    config = config_of(case, **changes)
    model: PreTrainedModel = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    saved = model.state_dict().keys()
    derived = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in saved}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("tid2eid"):
            # Each token has as many experts as it is sent to.
            tensor.copy_(torch.rand(len(tensor), model.config.num_local_experts).argsort(1)[:, : tensor.shape[1]])
        elif name.endswith("ple.conv1d.weight"):
            # transformers begins with zeros.
            torch.nn.init.uniform_(tensor.data, -0.5, 0.5)
        elif "correction" in name:
            # Some corrected scores are below 0.
            torch.nn.init.uniform_(tensor.data, -1.5, 1.5)
        elif "softmax_scaling" in name or name.endswith(".alpha"):
            torch.nn.init.uniform_(tensor.data, 0.2, 0.6)
        elif tensor.is_floating_point() and name.endswith(("bias", "sinks")) and "dt_" not in name:
            # Large ones of one sign would give every position the same token.
            torch.nn.init.uniform_(tensor.data, -0.3, 0.3)
        elif tensor.is_floating_point() and (name.endswith(("bias", "scale", "layer_scalar")) or "norm" in name):
            torch.nn.init.uniform_(tensor.data, 0.5, 1.5)
    # What is not saved stays as a model has it that is loaded.
    for name, buffer in derived.items():
        model.get_buffer(name).copy_(buffer)
    if model.config.tie_word_embeddings:
        shrink_embeddings(model)
    model.save_pretrained(folder)
    return model


def save_case(case: str, folder: Path) -> Path:
    """Saves one of the cases of this module, or of ``tiny_models``."""
    return save_tiny(case, folder) if case in CASES else save_tiny_model(case, folder)


def case_of_each_family() -> dict[str, str]:
    """Returns the first case of each family."""
    older = {config.model_type: case for case, config in reversed(OLDER.items()) if config.model_type in FAMILIES}
    return older | {family: case for case, (family, _) in reversed(CASES.items())}


def save_tiny_chat_family(tokenizer: Path, case: str, folder: Path, **changes: object) -> Path:
    """Saves what ``save_tiny`` does, with what ``add_chat_tokenizer`` gives it."""
    return add_chat_tokenizer(tokenizer, save_tiny(case, folder, **changes))


def families_without_a_case() -> set[str]:
    return set(FAMILIES) - case_of_each_family().keys()


def print_tensors(case: str) -> None:
    with TemporaryDirectory() as folder:
        files = SafetensorsFiles(save_tiny(case, Path(folder)))
        for name in sorted(files.names()):
            print(name, list(files.shape(name)))


if __name__ == "__main__":
    print_tensors(sys.argv[1])
