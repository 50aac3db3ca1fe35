"""Tests that a GGUF file of each architecture gives the logits and tokens of the checkpoint that it was made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import ExpertGatingFuncType, RopeScalingType

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.gguf.architectures import ARCHITECTURES
from pdserve.models.checkpoint.gguf.file import read_gguf
from pdserve.models.recipe import YarnScaling
from pdserve.models.runner import StepRow
from pdserve.models.table import FAMILIES, TEXT_PARTS
from pdserve.settings import cache_folder
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from tests.models.converted_gguf import CONVERTED, GROWING_LATENTS, HALVES, KDA_HEADS, Converted, save_converted
from tests.models.greedy import greedy_tokens, small_runner
from tests.models.grouped_runner import GroupedRunner
from tests.models.rank_program import Case
from tests.models.test_composites import CASES as COMPOSITES
from tests.models.test_composites import save as save_whole
from tests.models.test_tensor_parallel import computed
from tests.models.tiny_families import CASES, FULL, save_tiny
from tests.tiny_models import FAMILIES as OLDER
from tests.tiny_models import Reference, save_tiny_model

PROMPT = [(7 * i * i + 11 * i) % 509 + 3 for i in range(41)]
SIGMOID, SOFTMAX = ExpertGatingFuncType.SIGMOID, ExpertGatingFuncType.SOFTMAX
SINGLE = [(arch, converted) for arch, cases in sorted(CONVERTED.items()) for converted in cases]


def save(converted: Converted, folder: Path) -> Path:
    if converted.case in CASES:
        return save_tiny(converted.case, folder, **converted.changes)
    if converted.case in COMPOSITES:
        return save_whole(converted.case, folder, converted.changes)
    return save_tiny_model(converted.case, folder, **converted.changes)


@pytest.mark.parametrize(("arch", "converted"), SINGLE, ids=[f"{arch}-{each.case}" for arch, each in SINGLE])
def test_logits_and_tokens_are_those_of_the_checkpoint(tmp_path: Path, arch: str, converted: Converted) -> None:
    folder = save(converted, tmp_path / "folder")
    runner = small_runner(save_converted(folder, tmp_path / "tiny.gguf", arch))
    reference = Reference(folder, 8)
    wanted = reference.logits(PROMPT)
    pieces: list[torch.Tensor] = []
    runner.run([StepRow(PROMPT, 0, range(16), True, range(len(PROMPT)))], score=pieces.append)
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))
    assert greedy_tokens(runner, PROMPT, 8) == reference.answer(PROMPT)


REFUSED: list[tuple[str, str, Callable[[GGUFWriter], object], str]] = [
    ("afmoe", "trinity", lambda file: file.add_sliding_window(0), r"afmoe\.attention\.sliding_window .* is 0"),
    ("afmoe", "trinity", lambda file: file.add_sliding_window_pattern(3), r"afmoe\..*\.sliding_window_pattern 3"),
    ("afmoe", "trinity", lambda file: file.add_expert_weights_norm(value=False), r"expert_weights_norm .* is False"),
    ("olmo2", "olmo3", lambda file: file.add_sliding_window_pattern(3), "is .3.; a value for each layer is needed"),
    ("apertus", "apertus", lambda file: file.add_xielu_beta([0.5, 0.5]), r"xielu\.beta .* has no number for each of 3"),
    ("deepseek2", "deepseek-v3", lambda file: file.add_key_length(30), "is not 24, what is kept of a token"),
    ("deepseek2", "deepseek-v3", lambda file: file.add_head_count_kv(6), "attention.head_count_kv of .* is 6, not 1"),
    ("deepseek2", "deepseek-v3", lambda file: file.add_key_length_mla(4), "heads of 4 channels, of which 4 are turned"),
    ("deepseek2", "deepseek-v3", lambda file: file.add_attn_temperature_scale(0.1), "attention.temperature_scale"),
    ("glm4moe", "glm4-moe", lambda file: file.add_expert_gating_func(SOFTMAX), r"glm4moe\.expert_gating_func .* is 1"),
    ("llama", "mixtral", lambda file: file.add_expert_weights_scale(2.5), r"llama\.expert_weights_scale .* is 2\.5"),
    ("dots1", "dots1", lambda file: file.add_sliding_window(5), r"dots1\.attention\.sliding_window 5"),
    ("olmoe", "olmoe", lambda file: file.add_sliding_window(5), r"olmoe\.attention\.sliding_window 5"),
    ("olmo", "olmo", lambda file: file.add_clamp_kqv(8.0), r"olmo\.attention\.clamp_kqv 8\.0"),
    ("stablelm", "stablelm", lambda file: file.add_max_alibi_bias(8.0), r"stablelm\.attention\.max_alibi_bias 8\.0"),
    ("seed_oss", "seed-oss", lambda file: file.add_logit_scale(0.5), r"seed_oss\.logit_scale 0\.5"),
    (
        "arcee",
        "arcee",
        lambda file: file.add_rope_scaling_yarn_ext_factor(0.5),
        r"arcee\.rope\.scaling\.yarn_ext_factor",
    ),
    ("falcon", "falcon", lambda file: file.add_rope_dimension_count(4), r"falcon\.rope\.dimension_count .* is 4"),
    (
        "starcoder",
        "gpt-bigcode",
        lambda file: file.add_head_count_kv(6),
        r"starcoder\..*head_count_kv .* is 6",
    ),
    ("hunyuan-moe", "hunyuan-moe", lambda file: file.add_expert_shared_count(2), r"hunyuan-moe\.expert_shared_count 2"),
    (
        "granite",
        "granite",
        lambda file: file.add_rope_scaling_finetuned(value=False),
        r"granite\.rope\.scaling\.finetuned False",
    ),
    ("granite", "granite", lambda file: file.add_uint32("granite.new_part", 7), r"granite\.new_part 7"),
    ("phi3", "phi3", lambda file: file.add_value_length(20), r"phi3\.attention\.value_length .* is 20; only 10"),
    ("arcee", "arcee", lambda file: file.add_head_count_kv([2, 0, 2]), r"arcee\..*head_count_kv .* has \[0, 2\]"),
    ("granitehybrid", "bamba", lambda file: file.add_rope_dimension_count(20), r"dimension_count .* is 20; only 4"),
    ("granitehybrid", "bamba", lambda file: file.add_residual_scale(0.5), r"granitehybrid\.residual_scale 0\.5"),
    (
        "granitehybrid",
        "granitemoehybrid",
        lambda file: file.add_head_count_kv(2),
        r"granitehybrid\..*head_count_kv .* is '2'; list is needed",
    ),
    (
        "granitehybrid",
        "granitemoehybrid",
        lambda file: file.kv_data[0].pop("granitehybrid.rope.scaling.finetuned"),
        r"granitehybrid\.rope\.scaling\.finetuned .* is missing",
    ),
    ("lfm2", "lfm2", lambda file: file.add_rope_dimension_sections([2, 2, 1, 0]), r"lfm2\.rope\.dimension_sections"),
    (
        "nemotron_h_moe",
        "nemotron-h",
        lambda file: file.add_layer_norm_eps(1e-3),
        r"rms_epsilon .* is 9.*e-06, but nemotron_h_moe\.attention\.layer_norm_epsilon is 0\.001",
    ),
    ("nemotron_h_moe", "nemotron-h", lambda file: file.add_moe_latent_size(8), r"nemotron_h_moe\.moe_latent_size 8"),
    ("kimi-linear", "kimi-linear", lambda file: file.add_kda_head_dim(0), r"kimi-linear\.kda\.head_dim .* is 0"),
    ("kimi-linear", "kimi-linear", lambda file: file.add_head_count_kv([0, 6, 0]), "head_count_kv .* is 6, not 1"),
    ("kimi-linear", "kimi-linear", lambda file: file.add_head_count_kv(1), "head_count_kv .* is '1'; list is needed"),
    ("kimi-linear", "kimi-linear", lambda file: file.add_expert_weights_norm(value=False), "weights_norm .* is False"),
    ("kimi-linear", "kimi-linear", lambda file: file.add_moe_latent_size(8), r"kimi-linear\.moe_latent_size 8"),
    ("step35", "step3p7", lambda file: file.add_head_count([6, 8, 8, 8, 8]), "head_count .* not one for each kind of"),
    ("step35", "step3p7", lambda file: file.add_head_count([6, 8]), r"head_count .* has 2 values, for 4 layers"),
    (
        "step35",
        "step3p7",
        lambda file: file.add_array("step35.attention.head_count", ["6"] * 5),
        "head_count .* is '6'",
    ),
    (
        "step35",
        "step3p7",
        lambda file: file.add_head_count_kv([2, 4, 2, 4, 2]),
        r"head_count_kv .* has \[2, 4\]; only one",
    ),
    ("step35", "step3p7", lambda file: file.add_rope_dimension_count(6), r"step35\.rope\.dimension_count .* is 6"),
    ("step35", "step3p7", lambda file: file.add_rope_scaling_factor(4.0), r"step35\.rope\.scaling\.type of .* is not"),
    ("step35", "step3p7", lambda file: file.kv_data[0].pop("step35.rope.freq_base_swa"), "freq_base_swa .* is missing"),
    ("step35", "step3p7", lambda file: file.add_leading_dense_block_count(2), "block_count .* is 2, but tensors say 1"),
    ("step35", "step3p7", lambda file: file.add_moe_every_n_layers(2), r"step35\.moe_every_n_layers 2"),
    ("step35", "step3p7", lambda file: file.add_swiglu_clamp_exp([5.0] * 5), "swiglu_limits must be one of 0, 7, 16"),
    ("step35", "step3p7", lambda file: file.add_swiglu_clamp_shexp([7.0]), "swiglu_limits must be one of 0, 7, 16"),
    (
        "step35",
        "step3p7",
        lambda file: file.add_tensor("rope_freqs.weight", np.ones(4, np.float32)),
        r"rope_freqs\.weight of .* has 4 numbers; 3 are needed",
    ),
    (
        "mimo2",
        "mimo",
        lambda file: file.add_head_count_kv([2] * 6),
        "head_count_kv .* twice that in layers with windows",
    ),
    (
        "mimo2",
        "mimo",
        lambda file: file.add_head_count_kv([3] * 6),
        "head_count_kv .* twice that in layers with windows",
    ),
    ("mimo2", "mimo", lambda file: file.add_head_count_kv([4, 2]), r"head_count_kv .* has 2 values, for 3 layers"),
    (
        "mimo2",
        "mimo",
        lambda file: file.add_sliding_window_pattern([True]),
        r"window_pattern .* has 1 values, for 3 layers",
    ),
    ("mimo2", "mimo", lambda file: file.add_sliding_window(0), r"mimo2\.attention\.sliding_window .* is 0"),
    ("mimo2", "mimo", lambda file: file.add_value_length(13), "v_head_dim 13 is above head_dim, 12"),
    ("mimo2", "mimo", lambda file: file.add_rope_scaling_factor(4.0), r"mimo2\.rope\.scaling\.type of .* is not"),
    ("mimo2", "mimo", lambda file: file.add_expert_weights_norm(value=False), r"mimo2\.expert_weights_norm False"),
    ("mimo2", "mimo", lambda file: file.kv_data[0].pop("mimo2.attention.value_scale"), "what values are multiplied by"),
    (
        "mimo2",
        "mimo",
        lambda file: file.add_tensor("blk.0.attn_qkv.weight", np.ones((176, 60), np.float32)),
        "fused queries, keys and values, which is not supported with narrower",
    ),
    ("mistral4", "mistral4", lambda file: file.add_attn_temperature_length(9), "temperature_length .* is 9; only 16"),
    ("mistral4", "mistral4", lambda file: file.add_expert_gating_func(SIGMOID), "expert_gating_func .* is 2"),
    ("mistral4", "mistral4", lambda file: file.add_rope_scaling_type(RopeScalingType.LINEAR), "llama_4_scaling_beta"),
    ("kimi-linear", "kimi-linear", lambda file: file.add_kda_head_dim(2**30), "convolved numbers, .* tensors have 216"),
    (
        "kimi-linear",
        "kimi-linear",
        lambda file: file.add_key_length_mla(2**30),
        "heads of 1073741824 channels, .* have 72",
    ),
    (
        "afmoe",
        "trinity",
        lambda file: file.add_head_count(2**30),
        "1073741824 heads of 10 channels, .* tensors have 60",
    ),
    ("afmoe", "trinity", lambda file: file.add_head_count_kv(7), "6 heads of .* cannot share 7 KV heads"),
    ("mistral4", "mistral4", lambda file: file.add_rope_freq_base(1.0), r"mistral4\.rope\.freq_base of .* is 1\.0"),
    ("jamba", "jamba", lambda file: file.add_head_count_kv([2, 2, 0]), r"attention in layers \[0, 1\]; one in so many"),
    ("qwen3next", "qwen3-next", lambda file: file.add_ssm_inner_size(71), r"103 convolved channels, .* have 104"),
    ("qwen35", "qwen3-5", lambda file: file.add_ssm_time_step_rank(5), r"inner_size 72 .* over 5 heads"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that saves the model of a case, once for all tests that have it refused."""
    changes = {"step3p7": HALVES, "kimi-linear": KDA_HEADS, "mistral4": {"rope_parameters": GROWING_LATENTS}}
    return cache(lambda case: save(Converted(case, changes.get(case, {})), tmp_path_factory.mktemp(case)))


@pytest.mark.parametrize(("arch", "case", "extra", "message"), REFUSED, ids=[each[3] for each in REFUSED])
def test_a_setting_that_is_not_computed_is_refused(
    saved: Callable[[str], Path],
    tmp_path: Path,
    arch: str,
    case: str,
    extra: Callable[[GGUFWriter], object],
    message: str,
) -> None:
    with pytest.raises(ModelError, match=message):
        small_runner(save_converted(saved(case), tmp_path / "tiny.gguf", arch, extra))


def test_settings_that_say_what_is_computed_anyway(tmp_path: Path) -> None:
    folder = save_tiny("qwen2-moe", tmp_path / "folder", mlp_only_layers=[])

    def extra(file: GGUFWriter) -> None:
        file.add_sliding_window(0)
        file.add_expert_gating_func(SOFTMAX)
        file.add_expert_weights_scale(1.0)
        file.add_causal_attention(value=True)
        file.add_rope_scaling_finetuned(value=True)

    said = read_family_config(save_converted(folder, tmp_path / "said.gguf", "qwen2moe", extra))
    assert said == read_family_config(save_converted(folder, tmp_path / "plain.gguf", "qwen2moe"))


def test_the_settings_of_yarn_are_read(tmp_path: Path) -> None:
    folder = save_tiny("arcee", tmp_path / "folder")

    def extra(file: GGUFWriter) -> None:
        file.add_rope_scaling_type(RopeScalingType.YARN)
        file.add_rope_scaling_factor(20.0)
        file.add_rope_scaling_orig_ctx_len(64)
        file.add_rope_scaling_yarn_beta_fast(16.0)
        file.add_rope_scaling_yarn_beta_slow(2.0)

    rotary = read_family_config(save_converted(folder, tmp_path / "tiny.gguf", "arcee", extra)).recipe
    scaling = rotary.attention[0].rotary
    assert scaling is not None
    assert scaling.scaling == YarnScaling(20.0, 64, 16.0, 2.0, True, None, None, None)


def test_tokens_that_a_file_rules_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny("gemma4-unified", tmp_path / "folder", num_experts=None)

    def suppress(file: GGUFWriter) -> None:
        file.add_array("tokenizer.ggml.suppress_tokens", [7, 9])

    read_family_config(save_converted(folder, tmp_path / "plain.gguf", "gemma4"))
    assert "which no answer follows" not in caplog.text
    read_family_config(save_converted(folder, tmp_path / "tiny.gguf", "gemma4", suppress))
    assert "tokenizer.ggml.suppress_tokens [7, 9], which no answer follows" in caplog.text


def test_layers_that_draft_tokens_are_left_alone(tmp_path: Path) -> None:
    folder = save_tiny("glm4-moe", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    wanted = read_family_config(folder)

    def extra(file: GGUFWriter) -> None:
        file.add_block_count(config["num_hidden_layers"] + 1)
        file.add_nextn_predict_layers(1)
        file.add_tensor(f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight", np.ones((60, 120), np.float32))

    path = save_converted(folder, tmp_path / "tiny.gguf", "glm4moe", extra)
    assert read_family_config(path).num_layers == wanted.num_layers
    small_runner(path)


def test_lists_of_layers_have_those_that_draft_tokens_too(tmp_path: Path) -> None:
    kinds = ["linear_attention", "moe", FULL]
    folder = save_tiny("nemotron-h", tmp_path / "folder", layers_block_type=kinds)

    def extra(file: GGUFWriter) -> None:
        file.add_block_count(len(kinds) + 1)
        file.add_nextn_predict_layers(1)
        file.add_head_count_kv([0, 0, 2, 2])
        file.add_feed_forward_length([0, 24, 0, 24])
        file.add_tensor("blk.3.nextn.eh_proj.weight", np.ones((60, 120), np.float32))

    path = save_converted(folder, tmp_path / "tiny.gguf", "nemotron_h_moe", extra)
    assert greedy_tokens(small_runner(path), PROMPT, 4) == Reference(folder, 4).answer(PROMPT)


BLOCK_SHAPE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BLOCK_SHAPE |= {"intermediate_size": 96}


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_0])
def test_experts_stay_in_blocks(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    shape: dict[str, Any] = BLOCK_SHAPE | {"moe_intermediate_size": 32, "mlp_only_layers": []}
    folder = save_tiny_model("qwen3-moe", tmp_path / "folder", **shape)
    path = save_converted(folder, tmp_path / "tiny.gguf", "qwen3moe", quantized=kind)
    kernels, config = CompiledKernels(cache_folder(os.environ)), read_family_config(path)
    original = CompiledKernels.unread_linear
    with patch.object(CompiledKernels, "unread_linear", autospec=True, side_effect=original) as dequantised:
        in_blocks = GroupedRunner(path, config, Dtype.BF16, 4, 32, 128, kernels, block_kernels=kernels)
    routers = {(8, 64)}
    assert {call.args[1].shape for call in dequantised.call_args_list} == routers
    widened = GroupedRunner(path, config, Dtype.BF16, 4, 32, 128, kernels)
    kept, plain = (each.run([StepRow(PROMPT, 0, range(16), True)]).clone() for each in (in_blocks, widened))
    assert not torch.equal(kept, plain)
    # Inputs are rounded to bytes, as in ``test_block_weights``.
    assert (kept - plain).norm() / plain.norm() < 0.2


HYBRIDS: dict[str, tuple[str, dict[str, Any], set[tuple[int, int]]]] = {
    "qwen35moe": (
        "qwen3-5-moe",
        {"linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {(8, 64), (1, 64)},
    ),
    "granitehybrid": (
        "granitemoehybrid",
        {"mamba_n_heads": 4, "mamba_d_head": 32, "shared_intermediate_size": 64},
        {(4, 64)},
    ),
    "nemotron_h_moe": (
        "nemotron-h",
        {"mamba_head_dim": 32, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
        | {"layers_block_type": ["linear_attention", "moe", FULL]},
        {(8, 64)},
    ),
    "lfm2": ("lfm2", {"block_multiple_of": 32}, set()),
    "kimi-linear": (
        "kimi-linear",
        {"linear_num_heads": 4, "linear_head_dim": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
        {(8, 64), (32, 32)},
    ),
}
"""The case of each kind of state, its shape, and the shapes of its routers, which have no blocks.

Nor have products of latents that each head has of its own.
"""
OTHERS: dict[str, tuple[str, dict[str, Any], set[tuple[int, int]]]] = {
    "afmoe": (
        "trinity",
        {"moe_intermediate_size": 32, "global_attn_every_n_layers": 4, "layer_types": None},
        {(8, 64)},
    ),
    "mimo2": (
        "mimo",
        {"head_dim": 24, "v_head_dim": 16, "moe_intermediate_size": 32, "routed_scaling_factor": None}
        | {"initializer_range": 0.15},
        {(8, 64)},
    ),
    "mistral4": (
        "mistral4",
        {"moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
        | {"rope_parameters": GROWING_LATENTS},
        {(8, 64), (32, 32)},
    ),
    "step35": (
        "step3p7",
        HALVES | {"head_dim": 16, "moe_intermediate_size": 32, "share_expert_dim": 32},
        {(8, 64)},
    ),
}
"""The same of architectures with gates of heads, values narrower than keys, experts in one tensor, and unlike heads."""


@pytest.mark.parametrize("arch", HYBRIDS | OTHERS)
def test_layers_of_all_kinds_stay_in_blocks(tmp_path: Path, arch: str) -> None:
    case, shape, routers = (HYBRIDS | OTHERS)[arch]
    folder = save(Converted(case, BLOCK_SHAPE | shape), tmp_path / "folder")
    path = save_converted(folder, tmp_path / "tiny.gguf", arch, quantized=GGMLQuantizationType.Q8_0)
    kernels, config = CompiledKernels(cache_folder(os.environ)), read_family_config(path)
    original = CompiledKernels.unread_linear
    with patch.object(CompiledKernels, "unread_linear", autospec=True, side_effect=original) as dequantised:
        in_blocks = GroupedRunner(path, config, Dtype.BF16, 4, 32, 128, kernels, block_kernels=kernels)
    assert {call.args[1].shape for call in dequantised.call_args_list} == routers
    widened = GroupedRunner(path, config, Dtype.BF16, 4, 32, 128, kernels)
    kept, plain = (each.run([StepRow(PROMPT, 0, range(16), True)]).clone() for each in (in_blocks, widened))
    assert not torch.equal(kept, plain)
    # Inputs are rounded to bytes, as in ``test_block_weights``.
    assert (kept - plain).norm() / plain.norm() < 0.2


def test_projections_that_are_together_are_taken_apart(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-next", tmp_path / "folder")
    path = save_converted(folder, tmp_path / "tiny.gguf", "qwen3next", together=True)
    assert "blk.0.ssm_in.weight" in read_gguf(path).tensors
    assert greedy_tokens(small_runner(path), PROMPT, 8) == Reference(folder, 8).answer(PROMPT)


def test_layers_that_keep_a_state_may_be_named_one_by_one(tmp_path: Path) -> None:
    folder = save_tiny("qwen3-5", tmp_path / "folder")

    def extra(file: GGUFWriter) -> None:
        file.add_array("qwen35.attention.recurrent_layers", [True, False, True])
        file.add_full_attention_interval(3)

    path = save_converted(folder, tmp_path / "tiny.gguf", "qwen35", extra)
    assert greedy_tokens(small_runner(path), PROMPT, 8) == Reference(folder, 8).answer(PROMPT)


def test_a_falcon_h1_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("falcon-h1", tmp_path / "folder", tie_word_embeddings=True)
    with pytest.raises(ModelError, match="its embedding has a factor that no head has"):
        read_family_config(save_converted(folder, tmp_path / "tiny.gguf", "falcon-h1"))


def older(writer: GGUFWriter) -> None:
    """Gives each head a key and a value, as files did at first. These also say nothing of groups and sigmoids."""
    writer.add_head_count_kv(6)
    writer.add_key_length(10)
    writer.add_value_length(10)
    for key in ("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"):
        del writer.kv_data[0][f"deepseek2.{key}"]


def test_files_of_latents_that_give_each_head_a_key(tmp_path: Path) -> None:
    folder = save_tiny("deepseek-v3", tmp_path / "folder")
    path = save_converted(folder, tmp_path / "tiny.gguf", "deepseek2", older, together=True)
    assert "blk.0.attn_kv_b.weight" in read_gguf(path).tensors
    assert greedy_tokens(small_runner(path), PROMPT, 8) == Reference(folder, 8).answer(PROMPT)


@pytest.mark.parametrize("own", [None, [True, True, False], [True, False, False]])
def test_a_file_says_which_layers_have_an_indexer(tmp_path: Path, own: list[bool] | None) -> None:
    """By its key, or else by its tensors."""

    def types(writer: GGUFWriter) -> None:
        if own is not None:
            writer.add_array("glm-dsa.attention.indexer.types", own)

    folder = save_tiny("glm-moe-dsa", tmp_path / "folder", attention_bias=False)
    config = read_family_config(save_converted(folder, tmp_path / "tiny.gguf", "glm-dsa", types))
    latents = [layer.attention.latent for layer in config.recipe.layers if layer.attention]
    found = [latent.index is not None and not latent.index.shared for latent in latents if latent is not None]
    assert found == (own or [True, True, False])


def test_a_file_may_say_how_queries_grow(tmp_path: Path) -> None:
    folder = save_tiny("mistral4", tmp_path / "folder", rope_parameters=GROWING_LATENTS | {"llama_4_scaling_beta": 0.7})

    def grow(writer: GGUFWriter) -> None:
        writer.add_attn_temperature_scale(0.7)
        writer.add_attn_temperature_length(16)

    path = save_converted(folder, tmp_path / "tiny.gguf", "mistral4", grow)
    assert greedy_tokens(small_runner(path), PROMPT, 8) == Reference(folder, 8).answer(PROMPT)


def test_older_files_without_groups_have_none_unless_their_model_does(tmp_path: Path) -> None:
    def without_groups(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["deepseek2.expert_group_count"], writer.kv_data[0]["deepseek2.expert_group_used_count"]

    folder = save_tiny("deepseek-v3", tmp_path / "folder", n_group=1, topk_group=1)
    path = save_converted(folder, tmp_path / "tiny.gguf", "deepseek2", without_groups)
    assert greedy_tokens(small_runner(path), PROMPT, 8) == Reference(folder, 8).answer(PROMPT)

    for count in (160, 256):

        def of_deepseek(writer: GGUFWriter, count: int = count) -> None:
            without_groups(writer)
            writer.add_expert_count(count)

        path = save_converted(folder, tmp_path / f"{count}.gguf", "deepseek2", of_deepseek)
        with pytest.raises(ModelError, match=f"does not say in which groups its {count} experts are"):
            read_family_config(path)


@pytest.mark.integration
def test_ranks_take_the_value_heads_of_their_key_heads(tmp_path: Path) -> None:
    """A rank's inputs of the projection behind a delta net are several parts of a row."""
    path = save_converted(save_tiny("qwen3-5", tmp_path / "folder"), tmp_path / "tiny.gguf", "qwen35")
    alone, split = computed([Case(str(path), size, [PROMPT[:6], PROMPT[3:20]], 5) for size in (1, 2)])
    assert not alone.error
    assert split == alone


@pytest.mark.parametrize("arch", CONVERTED)
def test_the_table_has_the_family_of_each_case(arch: str) -> None:
    known = {case: family for case, (family, *_) in CASES.items()} | {"step3p7": "step3p5"}
    known |= {case: config.model_type for case, config in OLDER.items()}
    kinds = {known[each.case] for each in CONVERTED[arch]}
    assert kinds <= ARCHITECTURES[arch].families
    assert ARCHITECTURES[arch].families <= FAMILIES.keys() | TEXT_PARTS.keys()


def test_every_architecture_has_a_case() -> None:
    assert set(ARCHITECTURES) - set(CONVERTED) == {"gemma3", "qwen2", "qwen3"}
