"""Reads what the GGUF files of models with latent attention have otherwise: settings, and names of tensors.

llama.cpp's converter has written such files in two ways. In the older one each head has a key and a value, and one
tensor leads to both. In the newer one there is one key head, of the size of what is kept of a token, and that tensor is
two, one of which is transposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf.architectures import Architecture
from pdserve.models.checkpoint.gguf.file import GgufFile
from pdserve.models.checkpoint.gguf.states import layer_count
from pdserve.models.recipe import AttentionRecipe

SIGMOID = 2
"""The value of ``expert_gating_func``."""
CORRECTION = ".exp_probs_b.bias"
"""The end of the name of a tensor by which experts are chosen in families that take sigmoids alone."""
GROUPED_EXPERTS = frozenset({160, 256})
"""A DeepSeek V2 and a V3 have so many, in groups, which their older files do not say."""
TENSORS = {
    "attn_q_a": "query_down",
    "attn_q_a_norm": "query_norm",
    "attn_kv_a_norm": "key_norm",
    "attn_k_b": "key_up",
    "attn_v_b": "value_up",
}
"""The fields of a ``LatentRecipe``."""
OF_INDEXERS = {
    "indexer.attn_q_b": "query",
    "indexer.attn_k": "key",
    "indexer.k_norm": "key_norm",
    "indexer.proj": "weights",
}
"""The fields of an ``IndexRecipe``."""
INDEXER_TYPES = "attention.indexer.types"
"""The key says for each layer whether it has an indexer of its own."""
OF_ATTENTION = {"attn_q": "query", "attn_kv_a_mqa": "key", "attn_kv_b": "value", "attn_output": "out"}
"""The fields of an ``AttentionRecipe``."""
KEY_UP, VALUE_UP = "self_attn.k_b_proj", "self_attn.v_b_proj"
GROWTH = 0.1
"""How a Mistral 4's queries grow. The converter leaves it out, and the released configurations have this number."""
MSCALE = 0.1
"""What ``rope.scaling.yarn_log_multiplier`` is for a setting ``mscale_all_dim`` of 1."""


def latent_family(file: GgufFile, known: Architecture) -> str:
    """Returns the family of a file of an architecture with latents, by how it chooses experts."""
    if not file.own("expert_count", int, 0):
        return known.family
    kind = file.own("expert_gating_func", int, 0)
    corrected = any(name.endswith(CORRECTION) for name in file.tensors)
    return known.with_sigmoids if kind == SIGMOID or (not kind and corrected) else known.with_experts


def latent_settings(file: GgufFile, family: str) -> dict[str, Any]:
    """Returns the settings of latents, and those of experts that a file may leave out. Raises ModelError."""
    value_key, key_key = _sizes(file)
    turned, key = (file.own(name, int) for name in ("rope.dimension_count", key_key))
    if key <= turned:
        raise ModelError(f"{file.path} has heads of {key} channels, of which {turned} are turned")
    found: dict[str, Any] = {
        "q_lora_rank": file.own("attention.q_lora_rank", int, 0) or None,
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": file.own(value_key, int, _channels_of_value(file, key - turned)),
    }
    kept = file.own("attention.kv_lora_rank", int) + turned
    if _is_new(file) and file.own("attention.key_length", int) != kept:
        raise ModelError(f"{file.key('attention.key_length')} of {file.path} is not {kept}, what is kept of a token")
    experts = file.own("expert_count", int, 0)
    if not experts:
        return found
    groups = file.own("expert_group_count", int, 0)
    if groups == 0 and experts in GROUPED_EXPERTS and family != "kimi_linear":
        raise ModelError(
            f"{file.path} does not say in which groups its {experts} experts are ({file.key('expert_group_count')}); "
            "a newer file of the model does"
        )
    found |= {
        "n_group": groups or 1,
        "topk_group": file.own("expert_group_used_count", int, 0) or 1,
        # llama.cpp takes it for granted of a Kimi Linear, whose files do not say it.
        "norm_topk_prob": family == "kimi_linear" or file.own("expert_weights_norm", bool, False),
        "routed_scaling_factor": file.own("expert_weights_scale", float, 0.0) or 1.0,
    }
    if family == "glm_moe_dsa":
        found["indexer_types"] = _indexers(file)
    if family == "deepseek_v2":
        found["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return found


def _indexers(file: GgufFile) -> list[str]:
    """Returns ``indexer_types``. A file that does not say which layers have an indexer says it by its tensors."""
    known = file.metadata.get(file.key(INDEXER_TYPES))
    if not isinstance(known, list):
        known = [f"blk.{index}.indexer.attn_k.weight" in file.tensors for index in range(layer_count(file))]
    return ["full" if own else "shared" for own in known[: layer_count(file)]]


def _channels_of_value(file: GgufFile, plain: int) -> int:
    """Returns the channels of a head's value by the tensor that leads to keys and values; 0 if there is none."""
    both = file.tensors.get("blk.0.attn_kv_b.weight")
    return 0 if both is None else both.shape[0] // file.own("attention.head_count", int) - plain


def latent_scaling(file: GgufFile) -> dict[str, float]:
    """Returns the settings of yarn by which attention to longer contexts is sharper. Raises ModelError."""
    factor = round(file.own("rope.scaling.yarn_log_multiplier", float, 0.0) / MSCALE, 6)
    found = {"mscale": factor, "mscale_all_dim": factor} if factor else {}
    if file.architecture == "mistral4":
        found["llama_4_scaling_beta"] = file.own("attention.temperature_scale", float, GROWTH)
        length = file.own("rope.scaling.original_context_length", int)
        if (said := file.own("attention.temperature_length", int, length)) != length:
            key = file.key("attention.temperature_length")
            raise ModelError(f"{key} of {file.path} is {said}; only {length}, the original context, is supported")
    return found


def check_latents(file: GgufFile, heads: int) -> None:
    """Raises ModelError if the file has other key heads than its tensors mean."""
    wanted = 1 if _is_new(file) else heads
    if (found := file.own("attention.head_count_kv", int, heads)) != wanted:
        raise ModelError(f"{file.key('attention.head_count_kv')} of {file.path} is {found}, not {wanted}")


def stored_latents(file: GgufFile, block: str, attention: AttentionRecipe) -> AttentionRecipe:
    """Returns a layer's attention with what the file says by its tensors."""
    latent = attention.latent
    assert latent is not None
    if f"{block}attn_k_b.weight" in file.tensors:
        latent = replace(latent, key_up=KEY_UP, value_up=VALUE_UP)
    names = latent_tensors(replace(attention, latent=latent))
    biased = frozenset(name for key, name in names.items() if f"{block}{key}.bias" in file.tensors)
    return replace(attention, latent=latent, biased=biased)


def latent_tensors(attention: AttentionRecipe) -> dict[str, str]:
    """Returns the recipe's names of a layer's tensors, by the file's names."""
    latent = attention.latent
    assert latent is not None
    names = {key: getattr(latent, name) for key, name in TENSORS.items() if getattr(latent, name)}
    names |= {key: getattr(attention, name) for key, name in OF_ATTENTION.items()}
    if latent.query_rank:
        names["attn_q_b"] = names.pop("attn_q")
    if latent.index is not None and not latent.index.shared:
        names |= {key: getattr(latent.index, name) for key, name in OF_INDEXERS.items()}
    return names


def _is_new(file: GgufFile) -> bool:
    return file.key("attention.key_length_mla") in file.metadata


def _sizes(file: GgufFile) -> tuple[str, str]:
    """Returns the keys of a head's value and of its key."""
    end = "_mla" if _is_new(file) else ""
    return f"attention.value_length{end}", f"attention.key_length{end}"
