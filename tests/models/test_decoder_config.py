from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import RwkvConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.recipe import MlpRecipe
from tests.models.tiny_families import save_tiny
from tests.tiny_models import FAMILIES, WINDOW, save_tiny_model


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_shape_is_read(tmp_path: Path, family: str) -> None:
    config = read_decoder_config(save_tiny_model(family, tmp_path))
    assert (config.heads, config.kv_heads, config.head_dim, config.num_layers) == (6, 2, 10, 3)
    assert config.max_positions == 512
    assert config.eos_token_ids == {2}


def test_several_end_of_sequence_ids(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_decoder_config(folder).eos_token_ids == {2, 7}


def test_rules_for_tokens_that_no_answer_follows_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny_model("llama", tmp_path)
    generation = {"eos_token_id": 2, "temperature": 0.6, "repetition_penalty": 1.0, "min_length": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    read_decoder_config(folder)
    assert not caplog.messages
    rules = {"repetition_penalty": 1.05, "suppress_tokens": [7]}
    (folder / "generation_config.json").write_text(json.dumps(generation | rules))
    read_decoder_config(folder)
    (warning,) = caplog.messages
    assert "has suppress_tokens [7], repetition_penalty 1.05, which no answer follows" in warning


def windows(folder: Path) -> tuple[int | None, ...]:
    return read_decoder_config(folder).windows


def test_windows_are_those_of_transformers(tmp_path: Path) -> None:
    assert windows(save_tiny_model("mistral-window", tmp_path / "mistral")) == (WINDOW, WINDOW, WINDOW)
    assert windows(save_tiny_model("qwen2-window", tmp_path / "qwen2")) == (None, WINDOW, WINDOW)
    assert windows(save_tiny_model("qwen3-window", tmp_path / "qwen3")) == (WINDOW, None, WINDOW)
    assert windows(save_tiny_model("gemma3", tmp_path / "gemma3")) == (WINDOW, WINDOW, None)
    assert windows(save_tiny_model("llama", tmp_path / "llama")) == (None, None, None)


def test_unused_sliding_window_is_none(tmp_path: Path) -> None:
    folder = edited(save_tiny_model("qwen2", tmp_path), sliding_window=128, use_sliding_window=False)
    assert windows(folder) == (None, None, None)


def test_layers_of_another_kind_are_refused(tmp_path: Path) -> None:
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(ModelError, match="layer_types"):
        windows(edited(save_tiny_model("qwen3", tmp_path), layer_types=kinds))


def test_unsupported_family_names_the_supported_ones(tmp_path: Path) -> None:
    folder = edited(save_tiny_model("llama", tmp_path), model_type="vit")
    with pytest.raises(ModelError, match=r"'vit'.*llama.*qwen3.*attention interface"):
        read_decoder_config(folder)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    RwkvConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="rwkv model cannot be served: states are not served yet"):
        read_decoder_config(tmp_path)


V4: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 8}
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
QWEN4: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
QWEN4 |= {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
QWEN4 |= {"indexer_budget": 64, "indexer_compress_ratio": 4}
ODD: dict[str, Any] = {"hidden_size": 0, "num_attention_heads": 0, "num_key_value_heads": 0, "kv_channels": 0}


@pytest.mark.integration
def test_every_decoder_of_transformers_is_accepted_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """No configuration raises an error of transformers' own code."""
    accepted: set[str] = set()
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for values in ({}, SMALL, ODD):
            (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | values))
            try:
                found = read_decoder_config(tmp_path)
            except ModelError as exc:
                assert " " in str(exc)
                continue
            accepted.add(found.family)
            assert min(found.vocab_size, found.num_layers, found.heads, found.kv_heads, found.head_dim) >= 1, family
    assert {"gpt2", "mixtral", "glm4", "olmo2", "starcoder2", "qwen3_moe"} <= accepted


@pytest.mark.parametrize(
    ("family", "values", "match"),
    [
        ("longcat_flash", SMALL | {"zero_expert_type": "drop"}, "zero_expert_type 'drop' is not supported"),
        ("longcat_flash", SMALL | {"router_bias": True}, "router_bias of a LongCat has to be false"),
        ("longcat_flash", SMALL | {"mla_scale_q_lora": False}, "mla_scale_q_lora of a LongCat has to be true"),
        ("longcat_flash", SMALL | {"qk_head_dim": 100}, "qk_head_dim 100 is not the sum of"),
        ("longcat_flash", SMALL | {"q_lora_rank": None}, "q_lora_rank, the channels that queries come from"),
        ("cohere2_moe", SMALL | {"expert_selection_fn": "top"}, "expert_selection_fn 'top' is not supported"),
        ("cohere2_moe", SMALL | {"shared_expert_combination_strategy": "max"}, "'max' is not supported"),
        ("granite_swa", SMALL | {"layer_rope_theta": [0]}, "layer_rope_theta must have a number for each of 2 layers"),
        ("olmo_hybrid", SMALL | {"layer_types": ["full_attention"] * 2}, "must have both 'full_attention' and"),
        ("lara_mini", SMALL | {"layer_types": ["full_attention"]}, "'sliding_attention' and 'linear_attention' for"),
        (
            "mimo_v2_flash",
            SMALL | {"num_key_value_heads": 4},
            "4 heads cannot share the 8 KV heads of layers with windows",
        ),
        ("mimo_v2_flash", SMALL | {"v_head_dim": 200}, "v_head_dim 200 is above head_dim, 192"),
        ("mimo_v2_flash", SMALL | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of a MiMo V2"),
        ("mimo_v2_flash", SMALL | {"rope_parameters": {"full_attention": {}}}, "nothing for 'sliding_attention'"),
        ("mimo_v2_flash", SMALL | {"head_dim": 22, "v_head_dim": 8}, "7 of 22 channels of a head cannot be turned"),
        ("mimo_v2_flash", SMALL | {"hybrid_layer_pattern": [0, 0]}, r"it has to be \[0, 1\]"),
        ("mimo_v2_flash", SMALL | {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads 2 is not supported"),
        ("mimo_v2_flash", SMALL | {"add_full_attention_sink_bias": True}, "it has to be False"),
        ("mimo_v2_flash", SMALL | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 'dense' or 'sparse'"),
        (
            "minimax_m3_vl_text",
            SMALL,
            "a minimax_m3_vl_text model cannot be served: a text part in a folder of its own",
        ),
        ("deepseek_v4", SMALL, r"4 heads are not 8 equal groups \(o_groups\)"),
        (
            "deepseek_v4",
            V4 | {"scoring_func": "softmax"},
            "scoring_func 'softmax' is not supported; supported: 'sqrtso",
        ),
        ("deepseek_v4", V4 | {"norm_topk_prob": False}, "norm_topk_prob False is not supported; supported: True"),
        ("deepseek_v4", V4 | {"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported; supported: 10.0"),
        ("deepseek_v4", V4 | {"layer_types": ["full_attention"] * 2}, "layer_types must be one of 'sliding_attention'"),
        ("deepseek_v4", V4 | {"compress_ratios": [4, 8]}, "layer_types must be one of 'sliding_attention'"),
        ("deepseek_v4", V4 | {"mlp_layer_types": ["moe"]}, "mlp_layer_types must be 'hash_moe' or 'moe' for each"),
        (
            "deepseek_v4",
            V4 | {"rope_parameters": {"main": {}, "compress": {"partial_rotary_factor": 0.125}}},
            "partial_rotary_factor None of rope_parameters turns other channels than 64",
        ),
        ("deepseek_v4", V4 | {"index_head_dim": 62}, "heads of 62 channels cannot turn 64 of them"),
        ("deepseek_v32", SMALL | {"q_lora_rank": None}, "q_lora_rank, the channels that the queries of an"),
        ("deepseek_v32", SMALL | {"index_head_dim": 62}, "heads of 62 channels cannot turn 64 of them"),
        ("deepseek_v32", SMALL | {"layer_types": ["full_attention"]}, "layer_types must be 'indexed_attention' for"),
        ("deepseek_v32", SMALL | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 'dense' or 'sparse'"),
        ("glm_moe_dsa", SMALL | {"indexer_types": ["shared", "full"]}, "indexer_types must be 'full' or 'shared'"),
        ("glm_moe_dsa", SMALL | {"index_topk_pattern": "FX"}, "indexer_types must be 'full' or 'shared' for each"),
        ("kimi_linear", SMALL | {"mla_use_nope": False}, "mla_use_nope False is not supported; supported: True"),
        ("kimi_linear", SMALL | {"mla_use_output_gate": True}, "mla_use_output_gate True is not supported"),
        ("kimi_linear", SMALL | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is"),
        ("kimi_linear", SMALL | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        ("kimi_linear", SMALL | {"routed_expert_hidden_size": 8}, "routed_expert_hidden_size 8 is not supported"),
        ("kimi_linear", SMALL | {"attn_res_block_size": 3}, "attn_res_block_size 3 is not supported"),
        ("kimi_linear", SMALL | {"hidden_act": "situ"}, "hidden_act 'situ' is not supported"),
        ("kimi_linear", SMALL | {"use_grouped_topk": False, "num_expert_group": 2}, "not supported with 2 groups"),
        ("kimi_linear", SMALL | {"linear_attn_config": {"gate_lower_bound": -5}}, "unknown field `gate_lower_bound`"),
        ("kimi_linear", SMALL | {"layer_types": ["linear_attention"]}, "layer_types must be one of 'full_attention'"),
        ("kimi_linear", SMALL | {"layer_types": ["sliding_attention"] * 2}, "for each of 2 layers"),
        ("kimi_linear", SMALL | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 'dense' or 'sparse'"),
        (
            "kimi_linear",
            SMALL | {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
            "must have each of 1 to 2 once",
        ),
        ("kimi_k2", SMALL | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("deepseek_v3", SMALL | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("deepseek_v2", SMALL | {"norm_topk_prob": True}, "norm_topk_prob of a DeepSeek V2"),
        ("deepseek_v2", SMALL | {"topk_method": "other"}, "topk_method 'other' is not supported"),
        ("deepseek_v2", SMALL | {"topk_method": "group_limited_greedy"}, "n_group and topk_group, the groups"),
        ("deepseek_v2", SMALL, "num_experts_per_tok, the number of experts of a token, is missing"),
        ("minicpm3", SMALL | {"qk_rope_head_dim": 5}, "both numbers have to be even"),
        ("glm4_moe_lite", SMALL | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 'dense' or 'sparse'"),
        (
            "glm4_moe_lite",
            SMALL | {"first_k_dense_replace": 2},
            "first_k_dense_replace 2 is not supported; supported: 1",
        ),
        ("exaone_moe", SMALL | {"mlp_layer_types": ["dense", "other"]}, "mlp_layer_types must be 'dense' or 'sparse'"),
        ("exaone_moe", SMALL | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 'dense' or 'sparse'"),
        ("axk2", SMALL | {"n_group": 4, "topk_group": 2}, "n_group of an A.X K2, experts that are chosen from groups"),
        ("axk1", SMALL | {"q_lora_rank": None}, "q_lora_rank, the channels that queries come from, is missing"),
        ("hy_v4", SMALL | {"swiglu_limit": 0.0}, "swiglu_limit 0.0 is not supported; supported: 10.0"),
        ("hy_v4", SMALL | {"first_k_dense_replace": 2}, "first_k_dense_replace 2 is not supported; supported: 1"),
        ("hy_v4", SMALL | {"indexer_types": ["shared", "full"]}, "indexer_types must be 'full' or 'shared'"),
        ("hy_v4", SMALL | {"mlp_layer_types": ["moe"] * 2}, "mlp_layer_types must be 'dense' or 'sparse'"),
        ("bitnet", SMALL | {"kv_lora_rank": 64}, r"it has latent attention \(kv_lora_rank\)"),
        ("qwen4_exp_text", {}, "layers with attention need indexer_n_heads and indexer_kv_heads and indexer_head_dim"),
        ("qwen4_exp_text", QWEN4 | {"indexer_budget": None}, "layers with attention need indexer_budget"),
        (
            "qwen4_exp_text",
            QWEN4 | {"indexer_budget": 9},
            "indexer_budget 9 is no multiple of indexer_compress_ratio 4",
        ),
        ("qwen4_exp_text", QWEN4 | {"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported; supported: 1"),
        ("qwen4_exp_text", QWEN4 | {"indexer_head_dim": 62}, "index keys of 62 channels .* cannot turn 256 of them"),
        ("qwen4_exp_text", QWEN4 | {"hc_count": 1}, "hc_count 1 is not supported"),
        ("qwen4_exp_text", QWEN4 | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen4_exp_text", QWEN4 | {"output_gate_type": "tanh"}, "output_gate_type 'tanh' is not supported"),
        ("qwen4_exp_text", QWEN4 | {"num_experts": 0}, "10 experts a token .* cannot be chosen from 0"),
        ("qwen4_exp_text", QWEN4 | {"layer_types": ["sliding_attention"] * 2}, "must be one of 'full_attention' and"),
        ("qwen4_exp_text", QWEN4 | {"ple_layer_ids": [2]}, "have to be layers with 'linear_attention', of which the"),
        ("qwen4_exp_text", QWEN4 | {"ple_layer_ids": [0]}, "ple_layer_ids .0. have to be layers with"),
        ("qwen4_exp_text", QWEN4 | {"ple_layer_ids": [1]}, "ple_layer_ids need an eos_token_id, which n-grams end at"),
        ("qwen4_exp_text", QWEN4 | {"ple_layer_ids": [1], "ple_conv_kernel_size": 1}, "has to see at least 2 tokens"),
        ("qwen4_exp_text", QWEN4 | {"ple_layer_ids": [1], "ngram_size": 1}, "over 0 heads of n-grams"),
        (
            "qwen4_exp_text",
            QWEN4 | {"ple_layer_ids": [1], "ngram_vocab_size_base": 10**18},
            "16 tables of 1000000000000000000 n-grams",
        ),
        (
            "qwen4_exp_text",
            QWEN4 | {"ple_layer_ids": [1], "ple_embed_dim": 9},
            "9 channels .* over 16 heads of n-grams",
        ),
        ("mellum", SMALL | {"layer_types": ["linear_attention"] * 2}, "layers with linear attention"),
        ("inkling_text", {}, "state spaces or convolutions"),
        ("jetmoe", ODD, "its configuration has num_attention_heads 0"),
        ("aria", {}, r"the text model within it is a aria_text model \(text_config"),
        ("voxtral", {}, r"the text model within it is a llama model .*, and has to be in a folder of its own"),
        ("blt", {}, "made of several models.*patcher"),
        ("bart", {}, "an encoder beside its decoder"),
        ("bert", SMALL, r"it is an encoder, which reads a text and does not continue it \(is_decoder"),
        ("xlm-roberta", SMALL, "it is an encoder"),
    ],
)
def test_a_refusal_names_what_cannot_be_served(tmp_path: Path, family: str, values: dict[str, Any], match: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | values))
    with pytest.raises(ModelError, match=match):
        read_decoder_config(tmp_path)


def test_unsupported_activation(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gelu"):
        read_decoder_config(edited(save_tiny_model("llama", tmp_path), hidden_act="gelu"))


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a readable"):
        read_decoder_config(tmp_path)


def test_a_file_that_python_wrote_may_have_infinite_numbers(tmp_path: Path) -> None:
    folder = save_tiny("nemotron-h", tmp_path)
    path = folder / "config.json"
    text = json.dumps(json.loads(path.read_text()) | {"time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in text
    path.write_text(text)
    assert read_decoder_config(folder).num_layers == 5


def test_a_model_without_experts_may_choose_none_of_them(tmp_path: Path) -> None:
    dense = edited(save_tiny("granitemoehybrid-dense", tmp_path / "granite"), num_experts_per_tok=0)
    assert read_decoder_config(dense).num_layers
    sparse = edited(save_tiny("granitemoehybrid", tmp_path / "experts"), num_experts_per_tok=0)
    with pytest.raises(ModelError, match="0 experts a token"):
        read_decoder_config(sparse)
    none = {"interleave_moe_layer_step": 0, "num_local_experts": 0, "num_experts_per_tok": 0, "moe_layers": []}
    llama = edited(save_tiny("llama4", tmp_path / "llama"), **none)
    parts = {type(layer.feed_forward) for layer in read_family_config(llama).recipe.layers}
    assert parts == {MlpRecipe}
    edited(llama, interleave_moe_layer_step=1, moe_layers=None)
    with pytest.raises(ModelError, match="0 experts a token"):
        read_decoder_config(llama)
