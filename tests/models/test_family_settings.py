"""Compares what is read of a ``config.json`` with what transformers reads, and rotary frequencies with its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config, read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.parts.rotary import frequencies
from pdserve.models.recipe import ExpertsRecipe, Rotary
from pdserve.models.table import FAMILIES as SETTINGS
from pdserve.models.table import TEXT_PARTS, settings_from_values
from tests.models.tiny_families import config_of
from tests.tiny_models import FAMILIES, OTHERS

SMALL: dict[str, Any] = {"num_hidden_layers": 7, "hidden_size": 64, "num_attention_heads": 4}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_1 = LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 8192}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
FULL, SLIDING = "full_attention", "sliding_attention"

ANY_FAMILY: list[dict[str, Any]] = [
    {},
    SMALL,
    SMALL | {"head_dim": 32, "tie_word_embeddings": True},
    SMALL | {"num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-5},
    SMALL | {"vocab_size": 1000, "intermediate_size": 96, "max_position_embeddings": 77},
    SMALL | {"eos_token_id": 7},
    SMALL | {"eos_token_id": [7, 8]},
    SMALL | {"eos_token_id": None},
    SMALL | {"sliding_window": 16},
    SMALL | {"sliding_window": 16, "use_sliding_window": True},
    SMALL | {"sliding_window": 16, "use_sliding_window": False},
    SMALL | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
    SMALL | {"layer_types": [FULL] * 7},
    SMALL | {"sliding_window": 16, "use_sliding_window": True, "layer_types": [FULL, SLIDING] * 3 + [FULL]},
    SMALL | {"attention_bias": True, "torch_dtype": "bfloat16", "use_cache": False, "transformers_version": "4.40.0"},
    SMALL | {"auto_map": {"AutoModel": "modeling_other.Other"}, "quantization_config": None, "unknown": [1, {"a": 2}]},
    SMALL | {"rope_theta": 500_000.0},
    SMALL | {"rope_theta": 1_000_000},
    SMALL | {"rope_theta": 500_000.0, "rope_scaling": None},
    SMALL | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    SMALL | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}},
    SMALL | {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8}},
]
ONE_ROTARY: list[dict[str, Any]] = [
    SMALL | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    SMALL | {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
    SMALL | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3_1},
    SMALL | {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}, "max_position_embeddings": 131_072},
    SMALL | {"rope_scaling": LLAMA3_1, "original_max_position_embeddings": 4096},
    SMALL | {"rope_parameters": LLAMA3_1 | {"rope_theta": 300_000.0}},
    SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    SMALL | {"rope_parameters": {"rope_theta": 5000.0}, "rope_theta": 6000.0},
    SMALL | {"rope_parameters": {"rope_theta": 5000.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    SMALL | {"rope_parameters": YARN, "head_dim": 64},
    SMALL | {"rope_parameters": YARN | {"truncate": False}, "head_dim": 64},
    SMALL | {"rope_parameters": YARN | {"attention_factor": 1.5}, "head_dim": 64},
    SMALL | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "head_dim": 128},
    SMALL | {"rope_parameters": YARN | {"beta_fast": 20, "beta_slow": 2.0, "rope_theta": 1e6}, "head_dim": 128},
    SMALL | {"rope_scaling": {"type": "yarn", "factor": 2.0}, "max_position_embeddings": 2048, "head_dim": 64},
    SMALL | {"rope_scaling": YARN | {"factor": 1.0}, "head_dim": 64},
]
ONLY: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [
        SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        SMALL | {"num_local_experts": 5},
        SMALL | {"num_experts": 0},
        SMALL | {"mlp_only_layers": [0, 3]},
        SMALL | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ],
    "gemma3_text": [
        SMALL | {"query_pre_attn_scalar": 168},
        SMALL | {"sliding_window_pattern": 3},
        SMALL | {"rope_local_base_freq": 5000.0, "rope_theta": 70_000.0},
        SMALL | {"rope_scaling": {"type": "linear", "factor": 8.0}},
        SMALL | {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}},
        SMALL | {"rope_parameters": {FULL: {"rope_theta": 5.0}, SLIDING: {"rope_type": "linear", "factor": 2.0}}},
        SMALL | {"rope_parameters": {FULL: YARN, SLIDING: {"rope_theta": 77.0}}},
        SMALL | {"rope_parameters": {FULL: YARN | {"truncate": True}}, "rope_scaling": {"factor": 2.0}},
        SMALL | {"attn_logit_softcapping": None, "final_logit_softcapping": 0.0},
    ],
}


OLDER = sorted({config.model_type for config in FAMILIES.values()})
"""The families of which each setting is compared. Of the others, ``test_families`` compares all logits."""


def configurations(family: str) -> list[dict[str, Any]]:
    return ANY_FAMILY + (ONE_ROTARY if family != "gemma3_text" else []) + ONLY.get(family, [])


def written(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def windows_of_transformers(hf: PretrainedConfig) -> tuple[int | None, ...]:
    window: int | None = getattr(hf, "sliding_window", None)
    layers: int = hf.num_hidden_layers
    if hf.model_type == "llama":
        return (None,) * layers
    if hf.model_type in ("mistral", "qwen3_moe"):
        return (window,) * layers
    return tuple(window if kind == SLIDING else None for kind in hf.layer_types)


Sparse = tuple[int, int, int, bool]


def experts_of_transformers(hf: PretrainedConfig) -> list[Sparse | None]:
    """Returns for each layer the numbers of experts, chosen ones and channels, and whether weights are normalised."""
    layers = range(hf.num_hidden_layers)
    if hf.model_type != "qwen3_moe" or hf.num_experts == 0:
        return [None for _ in layers]
    sparse = {i for i in layers if i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0}
    found = (hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, hf.norm_topk_prob)
    return [found if i in sparse else None for i in layers]


def experts_of(config: FamilyConfig) -> list[Sparse | None]:
    parts = [layer.feed_forward for layer in config.recipe.layers]
    return [
        (part.count, part.chosen, part.expert.channels, part.normalised) if isinstance(part, ExpertsRecipe) else None
        for part in parts
    ]


def assert_frequencies(rotary: Rotary, head_dim: int, hf: PretrainedConfig, kind: str | None) -> None:
    parameters = hf.rope_parameters if kind is None else hf.rope_parameters[kind]
    if parameters["rope_type"] == "default":
        steps = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        wanted, factor = 1.0 / (parameters["rope_theta"] ** steps), 1.0
    else:
        hf.head_dim = head_dim
        wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](hf, torch.device("cpu"), layer_type=kind)
    found, found_factor = frequencies(rotary, head_dim)
    assert torch.equal(found, wanted)
    assert found_factor == factor


def assert_like_transformers(found: FamilyConfig, hf: PretrainedConfig) -> None:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    ids = hf.eos_token_id if isinstance(hf.eos_token_id, list) else [hf.eos_token_id]
    assert found.family == hf.model_type
    assert found.vocab_size == hf.vocab_size
    assert found.hidden_size == hf.hidden_size
    assert found.intermediate_size == hf.intermediate_size
    assert found.num_layers == hf.num_hidden_layers
    assert found.heads == hf.num_attention_heads
    assert found.kv_heads == hf.num_key_value_heads
    assert found.head_dim == head_dim
    assert found.attention_scale == (hf.query_pre_attn_scalar if "gemma3" in hf.model_type else head_dim) ** -0.5
    assert {norm.eps for norm in (found.recipe.norm, *(layer.norm for layer in found.recipe.layers))} == {
        hf.rms_norm_eps
    }
    assert found.recipe.tied == hf.tie_word_embeddings
    assert found.windows == windows_of_transformers(hf)
    assert found.max_positions == hf.max_position_embeddings
    assert found.eos_token_ids == {token_id for token_id in ids if token_id is not None}
    assert experts_of(found) == experts_of_transformers(hf)
    for window, part in zip(found.windows, found.recipe.attention, strict=True):
        assert part.window == window
        assert part.rotary is not None
        kind = (FULL if window is None else SLIDING) if hf.model_type == "gemma3_text" else None
        assert_frequencies(part.rotary, head_dim, hf, kind)


@pytest.mark.parametrize("family", OLDER)
def test_settings_are_read_as_transformers_reads_them(tmp_path: Path, family: str) -> None:
    for values in configurations(family):
        folder = written(tmp_path, {"model_type": family} | values)
        hf = AutoConfig.from_pretrained(folder)
        if hf.model_type != family:
            # A mistral file with kinds of layers is a Ministral's, for both.
            assert read_family_config(folder).family == hf.model_type, values
            continue
        assert_like_transformers(read_family_config(folder), hf)


SHARED: list[dict[str, Any]] = [
    {},
    SMALL,
    SMALL | {"tie_word_embeddings": True, "eos_token_id": [7, 8]},
    SMALL | {"tie_word_embeddings": False, "eos_token_id": 7, "max_position_embeddings": 77},
]
NO_OWN_DEFAULT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"o_groups": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "glm4_moe": {"head_dim": 128},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gptj": {"rotary_dim": 8},
    "laguna": {"num_key_value_heads": 2},
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
    | {"indexer_budget": 64, "indexer_compress_ratio": 4},
}
"""What files of these families cannot leave out, or not in small shapes."""


@pytest.mark.parametrize("family", sorted(set(SETTINGS) - set(OLDER)))
def test_what_a_file_leaves_out_has_the_value_of_transformers(tmp_path: Path, family: str) -> None:
    for values in SHARED:
        names = CONFIG_MAPPING[family].attribute_map
        named = {names.get(name, name): value for name, value in values.items()}
        folder = written(tmp_path, {"model_type": family} | NO_OWN_DEFAULT.get(family, {}) | named)
        hf, found = AutoConfig.from_pretrained(folder), read_family_config(folder)
        hf.allow_global_per_layer_attribute_access = True
        heads = hf.num_heads if family == "mamba2" else getattr(hf, "num_attention_heads", found.heads)
        ids = hf.eos_token_id if isinstance(hf.eos_token_id, list) else [hf.eos_token_id]
        assert (found.vocab_size, found.hidden_size, found.num_layers) == (
            *(hf.vocab_size, hf.hidden_size, hf.num_hidden_layers),
        )
        assert found.heads == heads
        assert found.max_positions == getattr(hf, "max_position_embeddings", found.max_positions)
        latents = [part.latent for part in found.recipe.attention if part.latent is not None]
        if latents:
            assert (latents[0].rank, latents[0].plain) == (hf.kv_lora_rank, hf.qk_nope_head_dim)
            assert (latents[0].turned, latents[0].value) == (hf.qk_rope_head_dim, hf.v_head_dim)
            assert found.head_dim == hf.kv_lora_rank + hf.qk_rope_head_dim + getattr(hf, "index_head_dim", 0)
        else:
            assert found.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // heads)
        assert found.eos_token_ids == {token_id for token_id in ids if token_id is not None}
        assert found.recipe.tied == bool(hf.tie_word_embeddings)
        parameters = getattr(hf, "rope_parameters", None) or {}
        turned = {part.rotary.theta for part in found.recipe.attention if part.rotary}
        if "rope_theta" in parameters and found.recipe.attention:
            assert turned == {parameters["rope_theta"]}


@pytest.mark.parametrize("name", sorted(FAMILIES | OTHERS))
def test_saved_configurations_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    (FAMILIES | OTHERS)[name].save_pretrained(tmp_path)
    hf = AutoConfig.from_pretrained(tmp_path)
    assert_like_transformers(read_family_config(tmp_path), getattr(hf, "text_config", hf))


def test_each_of_ten_layers_and_more_has_its_own_heads(tmp_path: Path) -> None:
    """transformers writes the numbers of so many layers with two digits."""
    config_of("gemma4", num_hidden_layers=12, layer_types=None).save_pretrained(tmp_path)
    assert list(json.loads((tmp_path / "config.json").read_text())["per_layer_config"]) == ["05", "11"]
    parts = read_family_config(tmp_path).recipe.attention
    assert [(part.head_dim, part.kv_heads) for part in (parts[4], parts[5], parts[11])] == [(10, 2), (16, 1), (16, 1)]


@pytest.mark.parametrize("own", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])
def test_a_gemma3_with_images_is_tied_by_its_outer_setting(
    tmp_path: Path, own: dict[str, Any], outer: dict[str, Any]
) -> None:
    folder = written(tmp_path, {"model_type": "gemma3", "text_config": SMALL | own} | outer)
    assert read_family_config(folder).recipe.tied == AutoConfig.from_pretrained(folder).tie_word_embeddings


def test_a_gemma3_with_images_has_its_outer_ends(tmp_path: Path) -> None:
    folder = written(tmp_path, {"model_type": "gemma3", "text_config": SMALL, "eos_token_id": [1, 106]})
    assert read_decoder_config(folder).eos_token_ids == {1, 106}
    folder = written(tmp_path, {"model_type": "gemma3", "text_config": SMALL | {"eos_token_id": 7}})
    assert read_decoder_config(folder).eos_token_ids == {7}


@pytest.mark.parametrize(
    "values", [{"tie_word_embeddings": "yes"}, {"eos_token_id": "x"}, {"text_config": []}, {"text_config": 3}]
)
def test_a_gemma3_with_images_is_refused_for_outer_settings(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        read_decoder_config(written(tmp_path, {"model_type": "gemma3", "text_config": SMALL} | values))


def test_a_sarvam_with_latents_has_another_name_for_yarn() -> None:
    scaling = {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    found, wanted = (
        settings_from_values("sarvam_mla", {"rope_scaling": scaling | {"type": kind}}).recipe()
        for kind in ("deepseek_yarn", "yarn")
    )
    assert found == wanted != settings_from_values("sarvam_mla", {}).recipe()


def test_a_mimo_may_have_the_names_of_its_own_code() -> None:
    names: dict[str, object] = {
        "sliding_window": 128,
        "sliding_window_size": 128,
        "routed_scaling_factor": None,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "layernorm_epsilon": 1e-5,
    }
    named, ours = (settings_from_values("mimo_v2_flash", {"num_hidden_layers": 7} | own) for own in (names, {}))
    named.check()
    assert named.recipe() == ours.recipe()
    assert named.windows() == (None, 129, 129, 129, 129, None, 129)


def test_a_kimi_linear_may_have_the_names_of_its_own_code() -> None:
    """The released ``config.json``, with other sizes."""
    released: dict[str, object] = {
        "first_k_dense_replace": 2,
        "head_dim": 72,
        "linear_attn_config": {
            "full_attn_layers": [4, 7],
            "head_dim": 64,
            "kda_layers": [1, 2, 3, 5, 6],
            "num_heads": 16,
            "short_conv_kernel_size": 3,
        },
        "mla_use_nope": True,
        "model_max_length": 77,
        "moe_layer_freq": 1,
        "moe_renormalize": False,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 4,
        "num_experts": 16,
        "num_experts_per_token": 3,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
    }
    usual: dict[str, object] = {
        "layer_types": ["linear_attention"] * 3 + [FULL] + ["linear_attention"] * 2 + [FULL],
        "linear_conv_kernel_dim": 3,
        "linear_head_dim": 64,
        "linear_num_heads": 16,
        "max_position_embeddings": 77,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5,
        "n_group": 4,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 3,
        "num_local_experts": 16,
        "topk_group": 2,
    }
    named, ours, other = (
        settings_from_values("kimi_linear", {"num_hidden_layers": 7} | own) for own in (released, usual, {})
    )
    named.check()
    assert named.recipe() == ours.recipe() != other.recipe()
    assert named.max_position_embeddings == ours.max_position_embeddings == 77


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": LLAMA3_1}])
def test_a_step_may_have_the_names_of_its_own_code(scaling: dict[str, object]) -> None:
    """Lists for each layer go on with three that draft tokens."""
    released: dict[str, Any] = scaling | {
        "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 2,
        "moe_layers_enum": "2,4",
        "moe_num_experts": 16,
        "moe_top_k": 3,
        "num_attention_groups": 8,
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 2,
        "rope_theta": [5_000_000.0, 10_000.0, 10_000.0, 10_000.0] * 2,
        "share_expert_dims": 64,
        "sliding_window": 16,
        "swiglu_limits": [0.0] * 4 + [7.0] * 4,
        "swiglu_limits_shared": [0.0] * 4 + [16.0] * 4,
    }
    usual = json.loads(json.dumps(CONFIG_MAPPING["step3p5"](**released).to_dict()))
    named, ours, other = (
        settings_from_values("step3p5", values) for values in (released, usual, released | {"moe_top_k": 2})
    )
    for each in (named, ours):
        each.check()
    assert named.recipe() == ours.recipe() != other.recipe()
    assert named.recipe().attention[0].rotary != named.recipe().attention[1].rotary


def test_a_minimax_m3_may_have_the_names_of_its_own_code() -> None:
    sparse = {"sparse_num_index_heads": 2, "sparse_index_dim": 64, "sparse_block_size": 32, "sparse_topk_blocks": 8}
    sparse |= {"sparse_local_block": 2}
    released: dict[str, Any] = {
        "hidden_act": "swigluoai",
        "moe_layer_freq": [0, 1, 1],
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 64,
        "sparse_attention_config": sparse | {"sparse_attention_freq": [0, 0, 1]},
    }
    usual = json.loads(json.dumps(CONFIG_MAPPING["minimax_m3_vl_text"](**released).to_dict()))
    named, ours, other = (
        settings_from_values("minimax_m3_vl_text", values) for values in (released, usual, released | {"head_dim": 64})
    )
    for each in (named, ours):
        each.check()
    assert named.recipe() == ours.recipe() != other.recipe()
    assert [part.head_blocks and part.head_blocks.index for part in named.recipe().attention][:2] == [None, None]
    assert named.head_size() == ours.head_size() == 160


def test_a_sarvam_has_other_names_for_three_settings() -> None:
    usual: dict[str, object] = {"n_routed_experts": 8, "n_shared_experts": 2, "attention_bias": True}
    others: dict[str, object] = {"num_experts": 8, "num_shared_experts": 2, "use_qkv_bias": True}
    found, wanted = (settings_from_values("sarvam_moe", values).recipe() for values in (others, usual))
    assert found == wanted != settings_from_values("sarvam_moe", {}).recipe()


WITHOUT_EFFECT = {
    *("attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef"),  # for training
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "hidden_dropout", "embedding_dropout", "layerdrop"),
    *("residual_dropout", "classifier_dropout", "router_jitter_noise", "init_std", "embedding_initializer_range"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),  # softmax is always taken in fp32
    *("num_mtp_layers", "is_decoder", "eod_token_id", "sep_token_id"),  # nothing of these is in a plain answer
    *("rescale_prenorm_residual", "z_loss_coefficient", "time_step_max", "time_step_floor"),  # for training
    *("time_step_scale", "time_step_init_scheme", "mtp_loss_scaling_factor"),  # for training
    *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype"),  # how transformers computes
    *("use_mambapy", "use_associative_scan"),  # as well
    *("num_nextn_predict_layers", "mtp_layers_block_type"),  # layers that guess further tokens
    *("mtp_layer_types", "mtp_mlp_layer_types"),  # as well
    *("expand", "n_shared_experts", "moe_shared_expert_overlap"),  # read by nothing
    "learnable_sink_init",  # what sinks are before training
    *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),  # for training
    "residual_in_fp32",  # the residual has the numbers of the weights
    "num_logits_to_keep",  # for transformers' own loop
    *("bos_token_id", "pad_token_id", "use_cache"),  # for transformers' own loop and tokenizer
    *(
        "z_loss_coefficient",
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_min",
        "time_step_max",
    ),  # as well
    *("mamba_chunk_size", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype"),  # how states are computed
    *("num_nextn_predict_layers", "mtp_layers_block_type", "num_logits_to_keep", "moe_shared_expert_overlap"),
    *("expand", "n_shared_experts"),  # Nemotron-H's code reads none of them
    "altup_coef_clip",  # for training
    "pretraining_tp",  # how Llama was trained; transformers reads it no more
}
WITHOUT_EFFECT_IN = {
    "nemotron_h": {"sliding_window", "time_step_min"},
    "mamba2": {"time_step_rank"},
    "qwen4_exp_text": {"split_ngram_parts"},
}
"""What one family does not read. For a Nemotron-H, transformers takes ``time_step_min`` for the least length of a
step, but the files' ``time_step_limit`` begins at 0. Of a Qwen 4, the files say into how many parts a table is cut."""


@pytest.mark.parametrize("family", sorted(SETTINGS | TEXT_PARTS))
def test_every_setting_of_a_family_is_read_or_has_no_effect(family: str) -> None:
    """A new version of transformers may give a family a setting that changes its answers."""
    own, shared = ({field.name for field in fields(kind)} for kind in (CONFIG_MAPPING[family], PretrainedConfig))
    read = {field.encode_name for field in msgspec.structs.fields((SETTINGS | TEXT_PARTS)[family])}
    names, without = CONFIG_MAPPING[family].attribute_map, WITHOUT_EFFECT | WITHOUT_EFFECT_IN.get(family, set())
    assert {name for name in own - shared - read if names.get(name, name) not in read} <= without


WRONG: list[dict[str, Any]] = [
    {"hidden_size": None},
    {"hidden_size": "64"},
    {"num_hidden_layers": 0},
    {"num_attention_heads": 5},
    {"head_dim": 7},
    {"tie_word_embeddings": "yes"},
    {"rms_norm_eps": "small"},
    {"hidden_act": "gelu", "hidden_activation": "silu"},
    {"rope_scaling": {"rope_type": "dynamic"}},
    {"rope_scaling": {"rope_type": "linear"}},
    {"rope_scaling": {"rope_type": "unheard-of"}},
    {"rope_scaling": []},
    {"per_layer_config": {"2": {"head_dim": 32}}},
    {"partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"is_causal": False},
    {"is_causal": None},
]
ALSO_WRONG: dict[str, list[dict[str, Any]]] = {
    "qwen3": [
        {"layer_types": [FULL]},
        {"layer_types": [SLIDING] * 7},
        {"layer_types": ["chunked_attention"] * 7},
        {"layer_types": [FULL] * 7, "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 7.0}}},
    ],
    "gemma3_text": [
        {"sliding_window": None},
        {"attn_logit_softcapping": 30.0},
        {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True},
        {"rope_parameters": {FULL: YARN | {"truncate": False}}},
        {"rope_parameters": {FULL: YARN, "truncate": False}},
        {"rope_parameters": {FULL: YARN}, "rope_scaling": {"truncate": False}},
        {"sliding_window_pattern": 0},
    ],
}


@pytest.mark.parametrize("family", OLDER)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, family: str) -> None:
    for values in WRONG + ALSO_WRONG.get(family, []):
        # Only without a size of its own does a head take its share of the hidden channels.
        folder = written(tmp_path, {"model_type": family, "head_dim": None} | SMALL | values)
        with pytest.raises(ModelError):
            read_decoder_config(folder)


START = """
import sys
import pdserve.engine.assembly
import pdserve.engine.process
from pathlib import Path
from pdserve.models.checkpoint.config_reading import read_decoder_config
read_decoder_config(Path(sys.argv[1]))
print(sorted({"transformers", "torch._dynamo", "sympy"} & sys.modules.keys()))
"""


@pytest.mark.integration
def test_an_engine_starts_without_transformers(tmp_path: Path) -> None:
    folder = written(tmp_path, {"model_type": "llama"})
    command = [sys.executable, "-c", START, str(folder)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        (
            "llama4_text",
            {"layer_types": [SLIDING] * 7},
            "layer_types must be one of .* 'chunked_attention' for each of 7",
        ),
        ("llama4_text", {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 7}, "no attention_chunk"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers has to say of each of 7 layers"),
        ("gemma3n_text", {"num_kv_shared_layers": 3}, "layer 4 reads .* of an earlier layer of its kind"),
        ("gemma3n_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ("gemma3n_text", {"intermediate_size": [96] * 6}, "intermediate_size has 6 values for 7 layers"),
        ("gemma3n_text", {"intermediate_size": [0] * 7}, "intermediate_size"),
        ("gemma3n_text", {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 values for 7"),
        ("gemma3n_text", {"activation_sparsity_pattern": [1.0] * 7}, "activation_sparsity_pattern"),
        ("gemma3n_text", {"altup_num_inputs": 1}, "altup_num_inputs"),
        ("gemma3n_text", {"altup_active_idx": 4}, "altup_active_idx 4 is none of 4 residuals"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4}, "needs num_experts, top_k_experts and moe_inter"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "layer 6 reads .* of an earlier layer of its kind"),
        ("gemma4_text", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ("gemma4_text", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100, less than vocab_size"),
        ("gemma4_text", {"per_layer_config": {"6": {"head_dim": 7}}}, "layer 6 has heads that cannot be computed"),
        ("gemma4_text", {"per_layer_config": {"6": {"hidden_size": 8}}}, "hidden_size"),
        ("gemma4_text", {"per_layer_config": {"x": {}}}, "per_layer_config has 'x', which is no number of 7 layers"),
        ("gemma4_text", {"per_layer_config": {"7": {}}}, "per_layer_config has '7', which is no number of 7 layers"),
        (
            "gemma4_text",
            {"rope_parameters": {FULL: {"rope_theta": 5.0}}},
            "rope_parameters has nothing for 'sliding_att",
        ),
    ],
)
def test_what_is_not_computed_is_named(tmp_path: Path, family: str, values: dict[str, Any], words: str) -> None:
    small = SMALL | {"layer_types": [SLIDING] * 6 + [FULL]} if family == "gemma4_text" else SMALL
    with pytest.raises(ModelError, match=words):
        read_decoder_config(written(tmp_path, {"model_type": family} | small | values))
