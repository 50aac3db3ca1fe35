"""Tests the text parts of models that take images, too: each logit is that of transformers for a text alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import StepRow
from pdserve.models.table import COMPOSITES, settings_from_values
from tests.models.greedy import small_runner
from tests.models.rank_program import Case
from tests.models.test_families import PROMPT, assert_engine_answers
from tests.models.test_tensor_parallel import computed
from tests.models.tiny_families import CASES as OF_FAMILIES
from tests.models.tiny_families import (
    DEEPSEEK_EXPERTS,
    DELTA,
    EXPERTS,
    FULL,
    GEMMA4,
    GLM5,
    GRANITE,
    GROWING,
    HEADS,
    HY4,
    LFM3,
    LLAMA4,
    MLA,
    QWEN4,
    SLIDING,
    save_tiny,
)
from tests.tiny_models import LLAMA3_ROPE, SHAPE, WINDOW, random_prompt, reference_logits

M3_SPARSE = {"layer_types": ["minimax_m3_sparse"] * 60}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION: dict[str, Any] = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 60, "patch_size": 14, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
OMNI_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
OMNI_VISION |= {"out_hidden_size": 60, "patch_size": 14}
OMNI_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 60}
GLM_VISION = QWEN_VISION | {"image_size": 28}
GLM5_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
GLM5_VISION |= {"out_hidden_size": 60, "projection_intermediate_size": 16, "image_size": 28, "patch_size": 14}
HY4_VISION = VISION | {"out_hidden_size": 60, "max_image_size": 28}
GEMMA4_VISION = VISION | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 2, 1], "rope_theta": 5000.0}
DELTA_SECTIONS = SECTIONS | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.4}
SIGLIP, CLIP = {"model_type": "siglip_vision_model"} | VISION, {"model_type": "clip_vision_model"} | VISION
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("gemma3", SHAPE | {"sliding_window": WINDOW, "query_pre_attn_scalar": 17}, VISION),
    "gemma4": ("gemma4", GEMMA4 | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 6}, GEMMA4_VISION),
    "gemma4-unified": (
        "gemma4_unified",
        GEMMA4 | {"attention_k_eq_v": True},
        {"mm_embed_dim": 16, "mm_posemb_size": 8},
    ),
    "mistral3": (
        "mistral3",
        SHAPE | {"model_type": "mistral", "sliding_window": None},
        {"model_type": "pixtral"} | VISION,
    ),
    "mistral4": (
        "mistral3",
        MLA | {"model_type": "mistral4", "n_group": 2, "topk_group": 1, "rope_parameters": GROWING},
        {"model_type": "pixtral"} | VISION,
    ),
    "kimi-k25": (
        "kimi_k25",
        MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "tie_word_embeddings": True},
        {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
    "llama4": (
        "llama4",
        LLAMA4,
        VISION
        | {"pixel_shuffle_ratio": 0.5, "projector_input_dim": 16, "projector_output_dim": 16}
        | {"vision_output_dim": 16},
    ),
    "mllama": (
        "mllama",
        SHAPE | {"num_hidden_layers": 6, "cross_attention_layers": [1, 4], "rope_parameters": LLAMA3_ROPE},
        VISION
        | {"vision_output_dim": 32, "attention_heads": 2, "num_global_layers": 1, "max_num_tiles": 1}
        | {"supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]},
    ),
    "llava": ("llava", SHAPE | {"model_type": "llama"}, CLIP),
    "llava-qwen3": ("llava", SHAPE | {"model_type": "qwen3"}, CLIP),
    "llava-next": ("llava_next", SHAPE | {"model_type": "mistral", "sliding_window": WINDOW}, CLIP),
    "llava-next-video": ("llava_next_video", SHAPE | {"model_type": "llama"}, CLIP),
    "llava-onevision": ("llava_onevision", HEADS | {"model_type": "qwen2"}, SIGLIP),
    "vipllava": ("vipllava", SHAPE | {"model_type": "llama"}, CLIP),
    "internvl": (
        "internvl",
        HEADS | {"model_type": "qwen2"},
        VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "aya-vision": ("aya_vision", HEADS | {"model_type": "cohere2", "sliding_window": WINDOW}, SIGLIP),
    "cohere2-vision": ("cohere2_vision", HEADS | {"model_type": "cohere2", "sliding_window": WINDOW}, SIGLIP),
    "smolvlm": ("smolvlm", SHAPE | {"model_type": "llama"}, VISION),
    "idefics3": ("idefics3", SHAPE | {"model_type": "llama"}, VISION),
    "qwen2-vl": ("qwen2_vl", HEADS | {"rope_parameters": SECTIONS}, QWEN_VISION),
    "qwen2-5-vl": ("qwen2_5_vl", HEADS | {"rope_parameters": SECTIONS}, QWEN_VISION),
    "qwen3-vl": ("qwen3_vl", SHAPE | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}}, QWEN_VISION),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        HEADS
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
        | {"rope_parameters": SECTIONS},
        QWEN_VISION,
    ),
    "qwen3-5": ("qwen3_5", DELTA | {"rope_parameters": DELTA_SECTIONS}, QWEN_VISION),
    "qwen3-5-moe": (
        "qwen3_5_moe",
        DELTA
        | EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "rope_parameters": DELTA_SECTIONS},
        QWEN_VISION,
    ),
    "qwen4-exp": ("qwen4_exp", QWEN4 | {"rope_parameters": DELTA_SECTIONS}, QWEN_VISION),
    "qwen2-5-omni": (
        "qwen2_5_omni_thinker",
        HEADS | {"rope_parameters": SECTIONS, "tie_word_embeddings": False},
        OMNI_VISION | {"fullatt_block_indexes": [0]},
    ),
    "qwen3-omni": (
        "qwen3_omni_moe_thinker",
        SHAPE
        | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
        | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}},
        OMNI_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "muse-glimmer": (
        "muse_glimmer",
        SHAPE | {"num_hidden_layers": 5, "sliding_window": WINDOW, "output_multiplier": 0.7, "post_norm_eps": 0.01},
        VISION,
    ),
    "lfm2-vl": ("lfm2_vl", HEADS | {"layer_types": ["conv", FULL, "conv"], "block_multiple_of": 8}, VISION),
    "lfm3-vl": ("lfm3_vl", LFM3, VISION),
    "exaone4-5": (
        "exaone4_5",
        HEADS | {"model_type": "exaone4", "sliding_window": WINDOW},
        {"hidden_size": 16, "out_hidden_size": 60, "depth": 1, "num_heads": 2, "intermediate_size": 16},
    ),
    "hyperclovax-vision": (
        "hyperclovax_vision_v2",
        SHAPE | {"model_type": "hyperclovax", "residual_multiplier": 0.7, "logits_scaling": 0.5},
        {"model_type": "qwen2_5_vl_vision"} | QWEN_VISION,
    ),
    "minicpmv4-6": ("minicpmv4_6", DELTA | {"rope_parameters": DELTA_SECTIONS}, VISION),
    "minicpmv4-7": ("minicpmv4_7", DELTA | {"rope_parameters": DELTA_SECTIONS}, VISION),
    "step3p7": (
        "step3p7",
        SHAPE
        | DEEPSEEK_EXPERTS
        | {"sliding_window": WINDOW, "num_hidden_layers": 4, "num_attention_heads": 6, "num_sliding_attention_heads": 8}
        | {"layer_types": [FULL, SLIDING] * 2, "share_expert_dim": 36, "moe_router_scaling_factor": 1.7}
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "pad_token_id": 0}
        | {"swiglu_limits": [None, 7.0, 0.0, 16.0], "swiglu_limits_shared": [7.0, 0.0, 16.0, 7.0]}
        | {"rope_theta": [50_000.0, 9000.0] * 2, "partial_rotary_factors": [0.4, 1.0] * 2},
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
    ),
    "glm46v": (
        "glm46v",
        HEADS | {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.6}},
        GLM_VISION,
    ),
    "glm4v": (
        "glm4v",
        HEADS | {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.6}},
        GLM_VISION,
    ),
    "glmga": (
        "glmga",
        HEADS | {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.6}},
        GLM_VISION,
    ),
    "hy4-vl": ("hy_v4_vl", HY4 | {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 0]}}, HY4_VISION),
    "granite4-vision": ("granite4_vision", HEADS | GRANITE, CLIP | {"hidden_size": 64, "num_attention_heads": 1}),
    "glm5-next": ("glm5_next", GLM5, GLM5_VISION),
    "glm5-next-wide": (
        "glm5_next",
        GLM5
        | {"index_topk": 96, "index_kpool": 8, "linear_lower_bound": None, "attention_bias": True, "hc_mult": 2}
        | {"layer_types": [FULL, "linear_attention"], "num_hidden_layers": 2, "indexer_types": ["full"] * 2}
        | {"mlp_layer_types": ["sparse"] * 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "hc_eps": 0.05},
        GLM5_VISION,
    ),
    "glm4v-moe": (
        "glm4v_moe",
        HEADS
        | DEEPSEEK_EXPERTS
        | {"rope_parameters": SECTIONS | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.4}},
        GLM_VISION,
    ),
}


OF_WHOLES: dict[str, dict[str, Any]] = {
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2", "spatial_target_layers": [0]},
    "qwen2_5_omni_thinker": {"audio_config": OMNI_AUDIO},
    "qwen3_omni_moe_thinker": {"audio_config": OMNI_AUDIO},
}
"""What else configurations need to be small, or at all."""


def save(case: str, folder: Path, of_text: Mapping[str, object] | None = None, **changes: object) -> Path:
    """Saves a random model, always the same one. ``of_text`` are settings of its part, and ``changes`` of the whole."""
    kind, text, vision = CASES[case]
    text = {**text, **(of_text or {})}
    torch.manual_seed(sum(case.encode()))
    auto: Any = AutoModelForImageTextToText
    of_kind: Any = CONFIG_MAPPING[kind]
    # transformers writes into what it is given, and cases share parts.
    config = of_kind(text_config=deepcopy(text), vision_config=deepcopy(vision), **OF_WHOLES.get(kind, {}), **changes)
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "correction" in name:
            torch.nn.init.uniform_(tensor.data, -1.5, 1.5)
        elif tensor.is_floating_point() and ("norm" in name or name.endswith("bias")):
            torch.nn.init.uniform_(tensor.data, 0.5, 1.5)
        elif tensor.is_floating_point() and any(part in name for part in ("language_model", "text_model", "lm_head")):
            torch.nn.init.normal_(tensor.data, 0, 0.4)
    model.tie_weights()
    model.save_pretrained(folder)
    if kind == "kimi_k25":
        # transformers reads the names of real files, and writes layers under another one.
        file = folder / "model.safetensors"
        tensors = {name.replace("model.blocks.", "model.layers."): each for name, each in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


@torch.inference_mode()
def reference(folder: Path, prompt: Sequence[int] = PROMPT) -> torch.Tensor:
    """Returns the logits of transformers after each token of the prompt."""
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([prompt])
    if "omni" in model.config.model_type:
        # transformers' code looks for these tokens, which its configurations of this part do not name.
        model.config.vision_start_token_id, model.config.vision_end_token_id = -1, -1
        model.config.audio_end_token_id = -1
    # transformers' code for the whole of this one fails if there are no images.
    model = model.language_model if model.config.model_type == "llama4" else model
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    return logits


def assert_logits(folder: Path, wanted: torch.Tensor) -> None:
    runner, pieces = small_runner(folder), list[torch.Tensor]()
    for start, end in ((0, 17), (17, 20), (20, len(PROMPT))):
        runner.run([StepRow(PROMPT[start:end], start, range(16), True, range(end - start))], score=pieces.append)
    assert wanted.std() > 0.05
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_logit_of_the_text_part_is_that_of_transformers(tmp_path: Path, case: str) -> None:
    folder = save(case, tmp_path)
    wanted = reference(folder)
    if "cohere2" in str(CASES[case][1].get("model_type")):
        # transformers' code for the whole leaves this out. That for the part alone has it, as the model was trained.
        wanted = wanted * 0.0625
    assert_logits(folder, wanted)


ALONE_HERE = ("glm5-next", "glm5-next-wide", "hy4-vl", "mllama")
"""Text parts of kinds that no family is."""


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize("case", ALONE_HERE)
def test_an_engine_gives_the_tokens_of_transformers(tmp_path: Path, case: str) -> None:
    assert_engine_answers(save(case, tmp_path))


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.parametrize("case", ALONE_HERE)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, case: str) -> None:
    folder = save(case, tmp_path)
    alone, split = computed([Case(str(folder), size, [PROMPT[:6], PROMPT], 8) for size in (1, 2)])
    assert not alone.error
    assert split == alone


@pytest.mark.nightly
@pytest.mark.parametrize("case", ALONE_HERE)
def test_no_logit_depends_on_chunks(tmp_path: Path, case: str) -> None:
    """Pools and blocks begin and end within chunks, tokens see more than they attend to, and long rows are expanded."""
    prompt = random_prompt(120, seed=3)
    folder = save(case, tmp_path)
    wanted = reference(folder, prompt)
    for sizes in ([120], [1, 64, 55], [10, 11, 12, 13, 74], [40, *[1] * 80]):
        runner, pieces, start = small_runner(folder), list[torch.Tensor](), 0
        for size in sizes:
            row = StepRow(prompt[start : start + size], start, range(30), True, range(size))
            other = StepRow(prompt[5:6], 0, range(30, 32), False)
            runner.run([other, row], score=pieces.append)
            start += size
        torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@pytest.mark.nightly
@pytest.mark.parametrize("chained", [False, True])
def test_tokens_that_are_taken_back_leave_nothing_in_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chained: bool
) -> None:
    """As drafts are that prove wrong: in one row, or in rows of a token each that go on with each other."""
    kinds = {"num_hidden_layers": 3, "layer_types": [FULL] * 3, "indexer_types": ["full", "full", "shared"]}
    alone = GLM5 | kinds | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    monkeypatch.setitem(CASES, "alone", ("glm5_next", alone, GLM5_VISION))
    folder, choose, prompt = save("alone", tmp_path), random.Random(3), random_prompt(70, seed=4)
    wanted, runner, pieces, start = reference(folder, prompt), small_runner(folder), list[torch.Tensor](), 0
    while start < len(prompt):
        right, wrong = choose.randint(1, 4), choose.randint(0, 6)
        tokens = [*prompt[start : start + right], *choose.choices(range(3, 500), k=wrong)]
        right = min(right, len(prompt) - start)
        if chained:
            rows = [StepRow([token], start + at, range(32), True) for at, token in enumerate(tokens)]
            found = runner.run(rows)
        else:
            scored = list[torch.Tensor]()
            runner.run([StepRow(tokens, start, range(32), True, range(len(tokens)))], score=scored.append)
            found = torch.cat(scored)
        pieces.append(found[:right].clone())
        start += right
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


def test_settings_of_text_may_lie_beside_those_of_the_whole(tmp_path: Path) -> None:
    found = []
    for values in ({"text_config": GLM5}, GLM5, {}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm5_next"} | values))
        found.append(read_decoder_config(tmp_path))
    assert found[0] == found[1] != found[2]


def test_the_delta_nets_of_a_glm5_may_have_settings_of_their_own() -> None:
    own: dict[str, object] = {"head_dim": 20, "num_heads": 2, "short_conv_kernel_size": 3, "gate_lower_bound": None}
    usual: dict[str, object] = {"linear_head_dim": 20, "linear_num_heads": 2, "linear_conv_kernel_dim": 3}
    for safe, bound in ((False, None), (True, -5.0)):
        named = settings_from_values("glm5_next_text", {"linear_attn_config": own | {"safe_gate": safe}})
        assert named.recipe() == settings_from_values("glm5_next_text", usual | {"linear_lower_bound": bound}).recipe()


TEXT_PREFIXES = {
    "mistral3": ("language_model.model.", "model.language_model."),
    "gemma3": ("language_model.model.", "model.language_model."),
    "qwen2-5-vl": ("model.", "model.language_model.", "thinker.model."),
    "glm4v": ("model.language_model.",),
}
HEADS_OF = {"language_model.model.": "language_model.lm_head.", "thinker.model.": "thinker.lm_head."}


@pytest.mark.parametrize("case", sorted(TEXT_PREFIXES))
def test_the_part_is_found_by_each_name_that_files_have(tmp_path: Path, case: str) -> None:
    folder = save(case, tmp_path, tie_word_embeddings=False)
    wanted = reference(folder)
    tensors = {plain(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    for prefix in TEXT_PREFIXES[case]:
        head = HEADS_OF.get(prefix, "lm_head.")
        renamed = {
            name if beside(name) else re.sub("^lm_head.", head, re.sub("^model.", prefix, name)): tensor
            for name, tensor in tensors.items()
        }
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        assert_logits(folder, wanted)
    twice = renamed | {
        "model.language_model.norm.weight": torch.ones(60),
        "language_model.model.norm.weight": torch.ones(60),
    }
    save_file(twice, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"has tensor 'model\.norm\.weight' twice"):
        small_runner(folder)


def test_the_part_may_be_whole_within_the_whole(tmp_path: Path) -> None:
    folder = save("hyperclovax-vision", tmp_path, tie_word_embeddings=False)
    wanted = reference(folder)
    assert_logits(folder, wanted)
    file = folder / "model.safetensors"
    layers = r"^model\.language_model\.(layers|norm|embed_tokens)\."
    renamed = {re.sub(layers, r"model.language_model.model.\1.", name): each for name, each in load_file(file).items()}
    assert "model.language_model.model.norm.weight" in renamed
    assert "model.language_model.lm_head.weight" in renamed
    save_file(renamed, file, metadata={"format": "pt"})
    assert_logits(folder, wanted)


BY_HAND = {"gemma3n", "nemotron_h_omni", "qwen2_5_omni", "qwen3_omni_moe"}
"""Models whose text part a test puts into a whole itself."""


def put_into_whole(folder: Path, beginning: str, prefix: str, others: Sequence[str]) -> dict[str, Any]:
    """Saves a model's tensors as those of a part of a whole, beside ``others``. Returns the settings of the part.

    Names have ``prefix`` in place of their ``beginning``.
    """
    file = folder / "model.safetensors"
    own = {re.sub(f"^{beginning}", prefix, name): each for name, each in load_file(file).items()}
    save_file(own | {f"{name}.weight": torch.ones(2) for name in others}, file, metadata={"format": "pt"})
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


def test_the_text_part_of_a_gemma3n_is_that_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny("gemma3n", tmp_path)
    wanted = reference_logits(folder, PROMPT)
    others = [
        *("model.vision_tower.blocks.0.conv", "model.audio_tower.conformer.0.norm"),
        *("model.embed_vision.embedding", "model.embed_audio.soft"),
        # Files have keys of layers that read those of others, and nothing uses them.
        "model.language_model.layers.5.self_attn.k_proj",
    ]
    text = put_into_whole(folder, "model.", "model.language_model.", others)
    parts = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": text} | parts))
    assert_logits(folder, wanted)


def test_the_text_part_of_a_nemotron_omni_is_that_of_transformers(tmp_path: Path) -> None:
    """Its released files call its settings otherwise, and have other parts under names of their own."""
    folder = save_tiny("nemotron-h", tmp_path)
    wanted = reference_logits(folder, PROMPT)
    others = ("mlp1.0", "vision_model.blocks.0", "sound_encoder.encoder.layers.0", "sound_projection.norm")
    text = put_into_whole(folder, "", "language_model.", others)
    (folder / "config.json").write_text(json.dumps({"model_type": "nemotron_h_omni", "llm_config": text}))
    assert_logits(folder, wanted)


@pytest.mark.parametrize("case", ["qwen2-5-omni", "qwen3-omni"])
def test_the_part_that_writes_text_may_lie_beside_one_that_speaks(tmp_path: Path, case: str) -> None:
    folder = save(case, tmp_path)
    wanted = reference(folder)
    others = ("talker.model.norm", "token2wav.code2wav_dit_model.norm", "code2wav.decoder.conv")
    thinker = put_into_whole(folder, "", "thinker.", others)
    path, kind = folder / "config.json", CASES[case][0].removesuffix("_thinker")
    whole = {"model_type": kind, "thinker_config": thinker, "tie_word_embeddings": True}
    path.write_text(json.dumps(whole))
    assert_logits(folder, wanted)
    for broken in (3, {"text_config": 3}, {"text_config": {"hidden_size": "wide"}}):
        path.write_text(json.dumps(whole | {"thinker_config": broken}))
        with pytest.raises(ModelError):
            read_decoder_config(folder)


def plain(name: str) -> str:
    """Returns the name that a tensor of the text part has in a model of text."""
    return re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name).removeprefix("language_model.")


def beside(name: str) -> bool:
    """Returns whether a tensor belongs to another part."""
    return any(part in name for part in ("visual", "vision", "projector"))


def test_settings_of_older_files_lie_beside_those_of_the_whole(tmp_path: Path) -> None:
    folder = save("qwen2-5-vl", tmp_path)
    wanted = reference(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 2, 1]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(text | config))
    assert_logits(folder, wanted)


@pytest.mark.parametrize("of_part", [None, True])
def test_a_head_is_tied_if_the_whole_or_the_part_says_so(tmp_path: Path, of_part: bool | None) -> None:
    folder = save("llava", tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["tie_word_embeddings"] = of_part is None
    config["text_config"]["tie_word_embeddings"] = bool(of_part)
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "lm_head" not in name}, folder / "model.safetensors")
    assert_logits(folder, reference(folder))
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has no tensor 'lm_head\.weight'"):
        small_runner(folder)


def test_eos_tokens_of_the_whole_go_before_those_of_the_part(tmp_path: Path) -> None:
    folder = save("qwen3-vl", tmp_path, eos_token_id=[7, 9])
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_decoder_config(folder).eos_token_ids == {7, 9}


@pytest.mark.nightly
def test_ngrams_end_at_the_tokens_of_the_part(tmp_path: Path) -> None:
    folder = save("qwen4-exp", tmp_path, eos_token_id=PROMPT[20])
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["eos_token_id"] = [PROMPT[7], 2]
    path.write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_decoder_config(folder).eos_token_ids == {PROMPT[20]}
    assert_logits(folder, reference(folder))


@pytest.mark.parametrize(
    ("kind", "part", "words"),
    [
        ("llava", {"model_type": "zamba"}, r"its text part is a zamba model \(text_config\), which has no recipe"),
        ("glm4v_moe", {"num_attention_heads": 32, "use_qk_norm": True}, "use_qk_norm"),
        ("glm4v", {"model_type": "glm4v_text", "head_dim": 64}, "head_dim 64"),
        ("step3p7", {"swiglu_limits": [5.0] * 45}, "swiglu_limits must be one of 0, 7, 16 for each of 45 layers"),
        ("step3p7", {"attention_other_setting": {"head_dim": 64}}, "attention_other_setting is only supported with"),
        ("step3p7", {"per_layer_config": {"00": {"num_attention_heads": 8}}}, "per_layer_config is only supported"),
        ("glm5_next", {"qk_rope_head_dim": 2}, "qk_rope_head_dim 2 is not supported; supported: 0"),
        ("glm5_next", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False"),
        ("glm5_next", {"swiglu_limit": 7.0}, "swiglu_limit 7.0 is not supported; supported: 10.0"),
        ("glm5_next", {"index_kpool": 1}, "pools of 1 tokens"),
        ("glm5_next", {"index_kpool": 3}, "index_topk, 2048, a multiple of it"),
        ("glm5_next", {"first_k_dense_replace": 1}, "first_k_dense_replace 1 is not supported; supported: 3"),
        ("glm5_next", {"layer_types": [FULL] * 44}, "layer_types must be one of 'indexed_attention' and 'linear_att"),
        ("glm5_next", {"indexer_types": ["full", *["shared"] * 44]}, "layer 3 is 'shared' in indexer_types"),
        ("llava", {"model_type": "llama", "rope_scaling": {"type": "mrope"}}, "rotary scaling 'mrope'"),
        ("llava", {"model_type": "olmo", "clip_qkv": 8.0}, "settings that no recipe has"),
        ("llava", {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantised.*gptq"),
        ("mistral3", {"model_type": "mistral", "hidden_size": "60"}, "hidden_size"),
        ("mistral_large4", {"no_rope_layers": [1] * 71}, "no_rope_layers has to say 0 or 1 of each of 72"),
        ("mistral_large4", {"kv_source_layers": [0] * 71}, "kv_source_layers has to name a layer for each of 72"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 3, *range(3, 72)]}, "2 cannot have the latents of layer 3"),
        ("mistral_large4", {"kv_source_layers": [0, 0, 1, *range(3, 72)]}, "2 cannot have the latents of layer 1"),
        # Layer 3 knows no positions. The others know them, and transformers gives layer 5 those of layer 1.
        ("mistral_large4", {"kv_source_layers": [0, 1, 2, 2, *range(4, 72)]}, "3 is not computed with the latents"),
        ("mistral_large4", {"kv_source_layers": [0, 1, 1, 3, 4, 0, *range(6, 72)]}, "5 is not computed with the lat"),
        ("minimax_m3_vl", {"layer_types": [FULL] * 59}, "layer_types must be one of .* for each of 60 layers"),
        ("minimax_m3_vl", {"mlp_layer_types": ["moe"] * 60}, "mlp_layer_types must be 'dense' or 'sparse'"),
        ("minimax_m3_vl", {"swiglu_limit": 8.0}, "swiglu_alpha 1.702 and swiglu_limit 8.0 are not supported"),
        ("minimax_m3_vl", {"rotary_dim": 64}, "rotary_dim 64 is not the 128 channels of partial_rotary_factor"),
        ("minimax_m3_vl", M3_SPARSE | {"index_n_heads": 8}, "index_n_heads 8 has to be the number of KV heads, 4"),
        ("minimax_m3_vl", M3_SPARSE | {"index_local_blocks": 0}, "index_local_blocks 0 has to be 1 or more"),
        ("minimax_m3_vl", M3_SPARSE | {"index_head_dim": 96}, "index heads of 96 channels are not supported, of which"),
        ("mistral_large4", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ("mistral_large4", {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, kind: str, part: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": part}))
    with pytest.raises(ModelError, match=words):
        read_decoder_config(tmp_path)


def test_every_composite_has_a_case() -> None:
    in_families = {family for family, _ in OF_FAMILIES.values()} & set(COMPOSITES)
    assert {kind for kind, _, _ in CASES.values()} | in_families | BY_HAND == set(COMPOSITES)
