"""Reads a family's settings and its recipe from a GGUF file's header."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import msgspec

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf.architectures import (
    ARCHITECTURES,
    ATTENTION,
    COMPUTED,
    EPSILONS,
    FEED_FORWARD,
    INNER_NORMS,
    KNOWS_POSITIONS,
    KV_HEADS,
    NEUTRAL,
    OF_FAMILIES,
    PART_OF_EXPERTS,
    PART_OF_SHARED,
    READ_OTHERWISE,
    REQUIRED,
    REQUIRED_OF_EXPERTS,
    SETTINGS,
    WINDOW,
    WITHOUT_EFFECT,
    Architecture,
)
from pdserve.models.checkpoint.gguf.file import GgufFile
from pdserve.models.checkpoint.gguf.latents import (
    check_latents,
    latent_family,
    latent_scaling,
    latent_settings,
    stored_latents,
)
from pdserve.models.checkpoint.gguf.states import (
    WITHOUT_ATTENTION,
    hybrid_settings,
    layer_count,
    stored_mixer,
    with_heads_of_states,
    with_one_number,
)
from pdserve.models.families.deepseek import DENSE, SPARSE
from pdserve.models.families.settings import FULL, SLIDING, FamilySettings
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    Fusion,
    LayerRecipe,
    MlpBesideExperts,
    MlpRecipe,
    ModelRecipe,
    Rotary,
)
from pdserve.models.table import FAMILIES, TEXT_PARTS, settings_from_values
from pdserve_kernels.feed_forward import Scoring

KINDS = FAMILIES | TEXT_PARTS
ROTARY_DIVISORS = "rope_freqs.weight"
"""The tensor with the divisor of each rotary frequency: Llama 3's scaling, in numbers."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The tensors with the divisors for contexts beyond, and within, the original ones."""
WIDE_SCALES = {"gemma2": 46, "gemma3": 62}
"""The layers of the Gemmas whose scores are scaled by the hidden channels of each head; no key says so."""
GATE, UP = "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"
"""The names of what is one tensor in the checkpoints of some families, and two in files."""
SCORINGS = {
    Scoring.SOFTMAX: 1,
    Scoring.SIGMOID: 2,
    Scoring.SIGMOID_OF_CHOSEN: 2,
    Scoring.SOFTMAX_OF_CHOSEN: 3,
}
"""The values of ``expert_gating_func``."""
OF_EXPERTS = ("expert_shared_count", "leading_dense_block_count")
"""Keys that the files of dense models with latent attention have, too."""
UNNORMED_EXPERTS = 128
"""A Llama 4 with so many experts, Maverick, does not normalise queries and keys; no key says so."""


def architecture_of(file: GgufFile) -> Architecture:
    """Returns what is known of the file's architecture. Raises ModelError if that is nothing."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise ModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; as GGUF files these work: "
            f"{sorted(ARCHITECTURES)}"
        )
    return found


def gguf_settings(file: GgufFile) -> tuple[str, FamilySettings]:
    """Returns the file's family and settings.

    Raises ModelError for an architecture, or a setting of one, that is not known to be computed exactly.
    """
    family = check_keys(file)
    given, file = file, _evened(file)
    hidden, heads = file.own("embedding_length", int), file.own("attention.head_count", int)
    head_dim, latents = _head_dim(file), architecture_of(file).latents
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{file.path} has {heads} heads of {head_dim} for {hidden} hidden channels")
    _check_queries(given, file.own("attention.key_length_mla", int, head_dim))
    layers = layer_count(file)
    if layers > len(file.tensors):
        raise ModelError(f"{file.path} has {layers} layers, but only {len(file.tensors)} tensors")
    names = _names_of(family)
    narrow = latents or "v_head_dim" in names
    if not narrow and (found := file.own("attention.value_length", int, head_dim)) != head_dim:
        raise ModelError(
            f"{file.key('attention.value_length')} of {file.path} is {found}; only {head_dim} is supported"
        )
    width = file.own("rope.dimension_count", int, head_dim)
    # A family rounds down, and one that turns whole heads is checked below.
    turned = (width + 0.5) / head_dim if width != head_dim and KINDS[family].partly_turned else 1.0
    values: dict[str, Any] = dict(architecture_of(file).settings)
    values |= {
        setting: file.metadata[file.key(key)]
        for key, settings in SETTINGS.items()
        for setting in settings
        if setting in names and file.key(key) in file.metadata
    }
    values |= {
        "vocab_size": _vocabulary(file),
        "num_hidden_layers": layers,
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _end_of_sequence(file),
        "rope_scaling": _rotary(file),
        "partial_rotary_factor": turned,
        **({"rotary_pct": turned} if "rotary_pct" in names else {}),
        "original_max_position_embeddings": file.metadata.get(file.key("rope.scaling.original_context_length")),
        **_windows(file, names),
        **_by_tensors(file, family, hidden // heads),
        **(_gemma3n(given) if family == "gemma3n_text" else {}),
        **(_gemma4(given) if family == "gemma4_text" else {}),
        **(_step35(given) if family == "step3p5" else {}),
        **(_mimo(given, turned) if family == "mimo_v2_flash" else {}),
        **hybrid_settings(given, family),
        **(latent_settings(file, family) if latents else {}),
    }
    try:
        settings = settings_from_values(family, {names[name]: value for name, value in values.items()})
        settings.check()
    except ModelError as exc:
        raise ModelError(f"the settings in {file.path} do not fit together: {exc}") from exc
    _check_read(file, settings)
    return family, settings


def _evened(file: GgufFile) -> GgufFile:
    """Returns the file with one number for all layers where there is one for each layer or kind of layers.

    The number of a Gemma 4 is that of layers with a window, and ``_gemma4`` reads the others. For a Step 3.5 it is the
    other way round, and ``_step35`` does. Raises ModelError.
    """
    if file.architecture in WITHOUT_ATTENTION:
        return with_heads_of_states(file)
    if file.architecture == "gemma3n":
        return with_one_number(_with_first_channels(file), ())
    if file.architecture == "step35":
        every, windows = _query_heads(file), _pattern(file)
        one = {file.key("attention.head_count"): every[windows.index(False) if False in windows else 0]}
        return with_one_number(replace(file, metadata=file.metadata | one), ())
    if file.architecture == "mimo2":
        # The file does not count the newest token of a window.
        window = file.own(WINDOW, int)
        one = {file.key(KV_HEADS): _kv_heads_of_all(file), file.key(WINDOW): window + 1 if window > 0 else 0}
        return replace(file, metadata=file.metadata | one)
    if file.architecture != "gemma4":
        return with_one_number(file, architecture_of(file).of_layers)
    changed = dict(_with_first_channels(file).metadata)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if file.key(f"{key}_swa") in changed:
            changed[file.key(key)] = changed[file.key(f"{key}_swa")]
    heads = changed.get(file.key("attention.head_count_kv"))
    if isinstance(heads, list) and len(heads) == len(windows := _pattern(file)) > 0:
        changed[file.key("attention.head_count_kv")] = heads[windows.index(True) if True in windows else 0]
    return replace(file, metadata=changed)


def _with_first_channels(file: GgufFile) -> GgufFile:
    """Returns the file with the first layer's channels of the feed-forward part in place of those of each."""
    key = file.key("feed_forward_length")
    channels = file.metadata.get(key)
    if not isinstance(channels, list) or not channels:
        return file
    return replace(file, metadata=file.metadata | {key: channels[0]})


def _pattern(file: GgufFile) -> list[bool]:
    """Returns for each layer whether it has a window. Raises ModelError if the file does not say it of each."""
    return [bool(each) for each in _of_each(file, "attention.sliding_window_pattern")]


def _of_each(file: GgufFile, key: str) -> list[Any]:
    """Returns what a key has for each layer; it may have it for those that draft, too. Raises ModelError."""
    given, layers = file.own(key, list), layer_count(file)
    if layers < 1 or len(given) not in (layers, file.own("block_count", int)):
        raise ModelError(f"{file.key(key)} of {file.path} has {len(given)} values, for {layers} layers")
    return given[:layers]


def _kv_heads_of_all(file: GgufFile) -> int:
    """Returns the KV heads of a MiMo V2's layers that see all; others have twice as many. Raises ModelError."""
    found = {
        heads / (2 if windowed else 1) if isinstance(heads, int) else 0.0
        for heads, windowed in zip(_of_each(file, KV_HEADS), _pattern(file), strict=True)
    }
    if len(found) > 1 or (least := min(found)) < 1 or not least.is_integer():
        raise ModelError(f"{file.key(KV_HEADS)} of {file.path} is not a number, and twice that in layers with windows")
    return int(least)


def _query_heads(file: GgufFile) -> list[Any]:
    """Returns the query heads of each layer, which may be one number for all. Raises ModelError."""
    heads = file.metadata.get(file.key("attention.head_count"))
    return _of_each(file, "attention.head_count") if isinstance(heads, list) else [heads] * len(_pattern(file))


def _gemma3n(file: GgufFile) -> dict[str, Any]:
    """Returns the settings of a Gemma 3n that its layers do not share, or that its tensors say. Raises ModelError."""
    deviations = file.own("activation_sparsity_scale", list, [])
    if not all(isinstance(each, float) for each in deviations):
        raise ModelError(f"{file.key('activation_sparsity_scale')} of {file.path} has other things than numbers")
    shared = file.own("attention.shared_kv_layers", float, 0.0)
    if not shared.is_integer():
        raise ModelError(f"{file.key('attention.shared_kv_layers')} of {file.path} is {shared}")
    shapes = {
        "laurel_rank": file.tensors.get("blk.0.laurel_l.weight"),
        "vocab_size_per_layer_input": file.tensors.get("per_layer_token_embd.weight"),
    }
    return {
        "intermediate_size": file.metadata[file.key("feed_forward_length")],
        "num_kv_shared_layers": int(shared),
        # The file has the deviations above the mean of which the share follows; less than all of them is none.
        "activation_sparsity_pattern": [NormalDist().cdf(each) for each in deviations] or None,
        **{name: tensor.shape[0] for name, tensor in shapes.items() if tensor is not None},
    }


def _gemma4(file: GgufFile) -> dict[str, Any]:
    """Returns the settings of a Gemma 4 that its layers do not share. Raises ModelError."""
    windows, layers = _pattern(file), layer_count(file)
    shared = file.own("attention.shared_kv_layers", int, 0)
    heads, channels = (file.metadata.get(file.key(key)) for key in ("attention.head_count_kv", "feed_forward_length"))
    of_layer = heads if isinstance(heads, list) else [heads] * layers
    width, dim = file.own("rope.dimension_count", int), file.own("attention.key_length", int)
    of_windows = (file.own("attention.key_length_swa", int), file.own("rope.dimension_count_swa", int))
    values = (file.own("attention.value_length", int), file.own("attention.value_length_swa", int))
    if (
        dim < 2
        or width != dim
        or of_windows[0] != of_windows[1]
        or values != (dim, of_windows[0])
        or len(of_layer) != layers
    ):
        raise ModelError(f"{file.path} has heads that are not supported")
    if not 0 <= shared <= layers:
        raise ModelError(f"{file.key('attention.shared_kv_layers')} of {file.path} is {shared}, of {layers} layers")
    wide = isinstance(channels, list)
    if isinstance(channels, list) and channels != [channels[0]] * (layers - shared) + [2 * channels[0]] * shared:
        raise ModelError(f"{file.key('feed_forward_length')} of {file.path} is {channels}, which is not supported")
    full = [index for index in range(layers) if not windows[index]]
    divisors = _vector(file, ROTARY_DIVISORS)
    turned = sum(each == 1.0 for each in divisors)
    still = divisors[turned:]
    if len(divisors) != dim // 2 or any(each != 1.0 for each in divisors[:turned]) or any(x < 1e20 for x in still):
        raise ModelError(f"{ROTARY_DIVISORS} of {file.path} has numbers that are not supported")
    embedding = file.tensors.get("per_layer_token_embd.weight")
    return {
        "per_layer_config": {str(i): {"head_dim": dim, "num_key_value_heads": of_layer[i]} for i in full},
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in file.tensors,
        "use_double_wide_mlp": wide,
        "enable_moe_block": file.own("expert_count", int, 0) > 0,
        "vocab_size_per_layer_input": _vocabulary(file) if embedding is None else embedding.shape[0],
        "rope_scaling": None,
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": turned / len(divisors),
                "rope_theta": file.own("rope.freq_base", float),
            },
            SLIDING: {"rope_type": "default", "rope_theta": file.own("rope.freq_base_swa", float)},
        },
    }


def _mimo(file: GgufFile, turned: float) -> dict[str, Any]:
    """Returns the settings of a MiMo V2 that its layers do not share, or that its tensors say. Raises ModelError."""
    if file.key("attention.value_scale") not in file.metadata:
        raise ModelError(
            f"{file.path} does not say what values are multiplied by ({file.key('attention.value_scale')}); "
            "a newer file of the model does"
        )
    bases = {FULL: "rope.freq_base", SLIDING: "rope.freq_base_swa"}
    return {
        "v_head_dim": file.own("attention.value_length", int),
        "mlp_layer_types": [SPARSE if each else DENSE for each in _routed(file)],
        **_of_kinds(file, {kind: (file.own(key, float), turned) for kind, key in bases.items()}),
    }


def _routed(file: GgufFile) -> list[bool]:
    """Returns for each layer whether it has experts."""
    return [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(layer_count(file))]


def _of_kinds(file: GgufFile, frequencies: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Returns the settings of bases and parts of heads, of each kind of layer. Raises ModelError for a scaling."""
    if _rotary(file)["rope_type"] != "default":
        raise ModelError(f"{file.key('rope.scaling.type')} of {file.path} is not supported")
    of_kinds = {kind: {"rope_theta": each, "partial_rotary_factor": part} for kind, (each, part) in frequencies.items()}
    return {"rope_scaling": None, "rope_parameters": of_kinds}


def _step35(file: GgufFile) -> dict[str, Any]:
    """Returns the settings of a Step 3.5 that its layers do not share, or that its tensors say. Raises ModelError."""
    windows, dim = _pattern(file), file.own("attention.key_length", int)
    heads = _query_heads(file)
    whole = all(isinstance(each, int) for each in heads)
    of_kinds = set(zip(windows, heads, strict=True)) if whole else set()
    if len(of_kinds) != len(set(windows)):
        raise ModelError(f"{file.key('attention.head_count')} of {file.path} is not one for each kind of layer")
    if (width := file.own("rope.dimension_count", int, dim)) != dim:
        raise ModelError(f"{file.key('rope.dimension_count')} of {file.path} is {width}; only {dim} is supported")
    routed = _routed(file)
    dense = routed.index(True) if True in routed else len(routed)
    if (said := file.own("leading_dense_block_count", int, dense)) != dense:
        raise ModelError(f"{file.key('leading_dense_block_count')} of {file.path} is {said}, but tensors say {dense}")
    # llama.cpp takes it for granted that layers that see all turn half of a head.
    parts = {FULL: (file.own("rope.freq_base", float), 0.5), SLIDING: (file.own("rope.freq_base_swa", float), 1.0)}
    return {
        "num_sliding_attention_heads": dict(of_kinds).get(True),
        "mlp_layer_types": [SPARSE if each else DENSE for each in routed],
        "moe_router_scaling_factor": file.own("expert_weights_scale", float, 0.0) or 1.0,
        **_of_kinds(file, parts),
    }


def check_keys(file: GgufFile) -> str:
    """Returns the file's family. Raises ModelError for a key that is missing, or that nothing would read."""
    known, file = architecture_of(file), _evened(file)
    family, experts = known.family, file.own("expert_count", int, 0) > 0
    if known.with_experts and experts:
        family = known.with_experts
    if known.with_windows and file.own("attention.sliding_window", int, 0) > 0:
        family = known.with_windows
    if known.with_positions and file.own(KNOWS_POSITIONS, bool):
        family = known.with_positions
    if known.with_inner_norms and file.own(INNER_NORMS, bool, False):
        family = known.with_inner_norms
    if known.latents:
        family = latent_family(file, known)
    for key in (*REQUIRED, *known.required, *(REQUIRED_OF_EXPERTS if experts else ())):
        absent = file.key(key) not in file.metadata
        if absent and (key in known.unread or (known.all_experts and key == "feed_forward_length")):
            continue
        if file.own(key, int) < 1:
            raise ModelError(f"{file.key(key)} of {file.path} is {file.own(key, int)}")
    if not any(file.own(key, float, 0.0) for key in EPSILONS):
        raise ModelError(f"{file.key(EPSILONS[0])} of {file.path} is missing")
    unknown = sorted(key for key in _own_keys(file) if not _is_known(file, key, family))
    if unknown:
        words = ", ".join(f"{file.key(key)} {str(file.metadata[file.key(key)])[:40]}" for key in unknown[:5])
        raise ModelError(f"{file.path} has settings that are not supported: {words}")
    return family


def _own_keys(file: GgufFile) -> Iterator[str]:
    prefix = f"{file.architecture}."
    yield from (key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix))


def _is_known(file: GgufFile, key: str, family: str) -> bool:
    """Returns whether a key is read, or says nothing that is not computed anyway."""
    names = _names_of(family)
    if key == "attention.sliding_window" and family == "llama4_text":
        # A file that switches chunks off means other layers without positions, too.
        return False
    if key == "attention.sliding_window" and "sliding_window" not in names:
        return not 0 < file.own(key, int) < file.own("context_length", int)
    known = architecture_of(file)
    own = OF_FAMILIES.get(family, ())
    if key in own or key.startswith(known.unread):
        return True
    if known.latents and (key == "rope.scaling.yarn_log_multiplier" or (key in OF_EXPERTS and "n_group" not in names)):
        # Where there are experts without a place for them, their tensors have none either.
        return True
    if key == "rope.dimension_sections":
        return KINDS[family].three_axes
    if key == "rope.freq_base_swa" and file.metadata[file.key(key)] == file.metadata.get(file.key("rope.freq_base")):
        return True
    if key == "attention.sliding_window_pattern" and "layer_types" not in names:
        return False
    if key in known.only:
        return math.isclose(file.own(key, float), float(str(known.only[key])), rel_tol=1e-6)
    if key in READ_OTHERWISE or key in WITHOUT_EFFECT or key in _EXPERT_CHECKS or _is_neutral(file, key):
        return True
    return any(name in names for table in (SETTINGS, COMPUTED) for name in table.get(key, ()))


def _is_neutral(file: GgufFile, key: str) -> bool:
    return file.metadata.get(file.key(key)) in NEUTRAL.get(key, ())


def _head_dim(file: GgufFile) -> int:
    shared = file.own("embedding_length", int) // file.own("attention.head_count", int)
    return file.own("attention.key_length", int, shared)


def _names_of(family: str) -> dict[str, str]:
    """Returns the names of a family's settings, and what its ``config.json`` calls each."""
    return {each.name: each.encode_name for each in msgspec.structs.fields(KINDS[family])}


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'")
    return embedding.shape[0]


def _check_queries(file: GgufFile, dim: int) -> None:
    """Raises ModelError if heads are more than the tensors of queries have, before anything is made of that many."""
    ends = (".attn_q.weight", ".attn_q_b.weight", ".attn_qkv.weight")
    most = max((tensor.shape[0] for name, tensor in file.tensors.items() if name.endswith(ends)), default=None)
    given = file.metadata.get(file.key("attention.head_count"))
    every = given if isinstance(given, list) else [given]
    heads = max((each for each in every if isinstance(each, int)), default=0)
    if most is not None and heads * dim > most:
        raise ModelError(f"{file.path} has {heads} heads of {dim} channels, and its tensors have {most}")


def _end_of_sequence(file: GgufFile) -> list[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({file.get(key, int) for key in keys if key in file.metadata})


def _windows(file: GgufFile, names: Iterable[str]) -> dict[str, Any]:
    """Returns the settings of windows, for a family that has some."""
    if "sliding_window" not in names:
        return {}
    found: dict[str, Any] = {"sliding_window": file.own("attention.sliding_window", int, 0) or None}
    pattern = file.metadata.get(file.key("attention.sliding_window_pattern"))
    if isinstance(pattern, list):
        found["layer_types"] = [SLIDING if each else FULL for each in pattern[: layer_count(file)]]
    elif pattern is not None and "sliding_window_pattern" in names:
        found["sliding_window_pattern"] = pattern
    elif pattern is not None and "attention.sliding_window_pattern" not in architecture_of(file).only:
        key = file.key("attention.sliding_window_pattern")
        raise ModelError(f"{key} of {file.path} is {str(pattern)[:40]!r}; a value for each layer is needed")
    return found


def _by_tensors(file: GgufFile, family: str, channels: int) -> dict[str, Any]:
    """Returns settings that a file says by its tensors or by its size alone."""
    if family == "falcon":
        two = "blk.0.attn_norm_2.weight" in file.tensors
        grouped = two or file.own("attention.head_count_kv", int, 1) > 1
        return {"new_decoder_architecture": grouped, "num_ln_in_parallel_attn": 2 if two else 1}
    if file.architecture in WIDE_SCALES:
        wide = layer_count(file) == WIDE_SCALES[file.architecture]
        return {"query_pre_attn_scalar": channels if wide else _head_dim(file)}
    if family == "llama4_text":
        return {
            "intermediate_size": file.own("expert_feed_forward_length", int),
            "intermediate_size_mlp": file.own("feed_forward_length", int),
            "use_qk_norm": file.own("expert_count", int) != UNNORMED_EXPERTS,
        }
    if family in ("cohere", "glm4_moe"):
        return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}
    return {}


def _rotary(file: GgufFile) -> dict[str, Any]:
    """Returns the settings of frequencies, as a configuration's ``rope_scaling`` has them."""
    long, short = (_vector(file, name) for name in (LONG_FACTORS, SHORT_FACTORS))
    factor = file.own("rope.scaling.factor", float, 1.0)
    # A file that names a factor alone means this one, as llama.cpp reads it.
    usual = "longrope" if long else "none" if factor == 1.0 else "linear"
    kind = file.own("rope.scaling.type", str, usual)
    attention = file.own("rope.scaling.attn_factor", float, 1.0)
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if (found := file.own(f"rope.scaling.{key}", float, 1.0)) != 1.0:
            raise ModelError(f"{file.key(f'rope.scaling.{key}')} {found} of {file.path} is not supported")
    theta = file.own("rope.freq_base", float, 10_000.0)
    if not theta > 1:
        raise ModelError(f"{file.key('rope.freq_base')} of {file.path} is {theta}")
    parameters: dict[str, Any] = {"rope_theta": theta}
    if kind == "longrope" and long and short:
        original = file.own("rope.scaling.original_context_length", int, file.own("context_length", int))
        own = {"short_factor": list(short), "long_factor": list(long), "attention_factor": attention}
        return parameters | own | {"rope_type": kind, "original_max_position_embeddings": original}
    if attention != 1.0:
        raise ModelError(f"{file.key('rope.scaling.attn_factor')} {attention} of {file.path} is not supported")
    if kind == "none":
        if factor != 1.0:
            raise ModelError(f"{file.key('rope.scaling.factor')} of {file.path} is {factor}, but its type is 'none'")
        return parameters | {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rotary scaling {kind!r} of {file.path} is not supported")
    parameters |= {"rope_type": kind, "factor": file.own("rope.scaling.factor", float)}
    if kind == "yarn":
        original = file.own("rope.scaling.original_context_length", int)
        parameters["original_max_position_embeddings"] = original
        parameters["truncate"] = architecture_of(file).rounded_ramps
        for name in ("beta_fast", "beta_slow"):
            parameters[name] = file.metadata.get(file.key(f"rope.scaling.yarn_{name}"))
        if architecture_of(file).latents:
            parameters |= latent_scaling(file)
        if architecture_of(file).family == "ministral3":
            parameters["llama_4_scaling_beta"] = file.own("attention.temperature_scale", float, 0.0)
            if sharper := file.own("rope.scaling.yarn_log_multiplier", float, 0.0):
                parameters |= {"mscale": 1.0, "mscale_all_dim": sharper}
    return parameters


def _vector(file: GgufFile, name: str) -> tuple[float, ...]:
    """Returns a vector of fp32, or an empty tuple if the file has no such tensor."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return ()
    if tensor.kind != 0 or len(tensor.shape) != 1:
        raise ModelError(f"{name} of {file.path} is not a vector of fp32")
    try:
        with file.parts[tensor.part].open("rb") as data:
            data.seek(tensor.offset)
            return struct.unpack(f"<{tensor.shape[0]}f", data.read(4 * tensor.shape[0]))
    except (OSError, struct.error) as exc:
        raise ModelError(f"{name} of {file.path} cannot be read: {exc}") from exc


# ------------------------------------------------------------ what was read is what is computed


_EXPERT_CHECKS: dict[str, Callable[[ExpertsRecipe], object]] = {
    "expert_feed_forward_length": lambda part: part.expert.channels,
    "expert_gating_func": lambda part: SCORINGS[part.scoring],
    "expert_shared_feed_forward_length": lambda part: part.shared.channels if part.shared else 0,
    "expert_weights_norm": lambda part: part.normalised,
    "expert_weights_scale": lambda part: part.scale,
}
"""What a key of experts has to say of the recipe that follows from all of them."""
_UNSAID: dict[str, tuple[int, ...]] = {"expert_gating_func": (0,), "expert_weights_scale": (0,)}
"""Values of these keys that say nothing."""


def _check_read(file: GgufFile, settings: FamilySettings) -> None:
    """Raises ModelError if a setting of the file is not what its family computes."""
    kv_heads = file.own("attention.head_count_kv", int, settings.num_attention_heads)
    latents = architecture_of(file).latents
    if latents:
        check_latents(file, settings.num_attention_heads)
    elif settings.kv_heads() != kv_heads:
        raise ModelError(
            f"{file.key('attention.head_count_kv')} of {file.path} is {kv_heads}, not {settings.kv_heads()}"
        )
    elif settings.num_attention_heads % settings.kv_heads():
        raise ModelError(
            f"{settings.num_attention_heads} heads of {file.path} cannot share {settings.kv_heads()} KV heads"
        )
    if not latents:
        _check_turned(file, settings)
    window = file.own("attention.sliding_window", int, 0)
    if 0 < window < settings.max_position_embeddings and window not in settings.windows():
        raise ModelError(
            f"{file.path} has settings that are not supported: {file.key('attention.sliding_window')} {window}"
        )
    parts = (settings.feed_forward(index) for index in range(settings.num_hidden_layers))
    inner = (part.experts if isinstance(part, MlpBesideExperts) else part for part in parts)
    experts = next((part for part in inner if isinstance(part, ExpertsRecipe)), None)
    for key, of_recipe in _EXPERT_CHECKS.items():
        found = file.metadata.get(file.key(key))
        if experts is None or found is None or found in _UNSAID.get(key, ()):
            continue
        if found != (computed := of_recipe(experts)):
            raise ModelError(f"{file.key(key)} of {file.path} is {found}; this family computes {computed}")


def _check_turned(file: GgufFile, settings: FamilySettings) -> None:
    """Raises ModelError if the family turns another part of heads than the file says."""
    if file.architecture in ("gemma4", "step35"):
        return  # Each kind of layer has its own, and those are checked.
    head_dim = settings.head_size()
    width = file.own("rope.dimension_count", int, head_dim)
    layers = (settings.layer(index).attention for index in range(settings.num_hidden_layers))
    rotary = next((part.rotary for part in layers if part is not None and part.rotary is not None), None)
    if rotary is not None and width != (turned := rotary.width or head_dim):
        key = file.key("rope.dimension_count")
        raise ModelError(f"{key} of {file.path} is {width}; only {turned}, of {head_dim} channels, is supported")


# ------------------------------------------------------------ recipe


def gguf_recipe(file: GgufFile, settings: FamilySettings) -> ModelRecipe:
    """Returns the family's recipe with what the file says by its tensors. Raises ModelError."""
    recipe, known = settings.recipe(), architecture_of(file)
    # Those of a Gemma 4 are settings of its family.
    divisors = _vector(file, ROTARY_DIVISORS) if file.architecture != "gemma4" else ()
    of_layers = [_divisors(file, divisors, layer.attention, settings.head_size()) for layer in recipe.layers]
    each = enumerate(zip(recipe.layers, of_layers, strict=True))
    layers = tuple(_layer(file, f"blk.{index}.", layer, own) for index, (layer, own) in each)
    if known.permuted and any(layer.attention and layer.attention.fused for layer in layers):
        raise ModelError(f"{file.path} has fused queries and keys, which a {file.architecture} never has")
    return replace(recipe, layers=layers, head_biased="output.bias" in file.tensors, draft=None)


def _divisors(
    file: GgufFile, given: tuple[float, ...], attention: AttentionRecipe | None, head_dim: int
) -> tuple[float, ...]:
    """Returns the divisors of a layer's frequencies. Raises ModelError if the file has another number of them."""
    if not given or attention is None or attention.rotary is None:
        return ()
    needed = (attention.rotary.width or head_dim) // 2
    if file.architecture == "step35":
        if attention.window is not None:
            return ()
        # The converter has one for each frequency of a whole head. Of half a head, these are every second one.
        given = given[:: head_dim // 2 // needed] if len(given) == head_dim // 2 else given
    if len(given) != needed:
        raise ModelError(f"{ROTARY_DIVISORS} of {file.path} has {len(given)} numbers; {needed} are needed")
    return given


def _layer(file: GgufFile, block: str, layer: LayerRecipe, divisors: tuple[float, ...]) -> LayerRecipe:
    attention, part, mixer = layer.attention, layer.feed_forward, layer.mixer
    if attention is not None and attention.latent is not None:
        attention = stored_latents(file, block, attention)
    elif attention is not None:
        attention = _attention(file, block, attention, divisors)
    if mixer is not None:
        mixer = stored_mixer(file, block, mixer, architecture_of(file))
    if isinstance(part, MlpRecipe):
        part = _mlp(file, block, part)
    elif isinstance(part, MlpBesideExperts):
        experts = replace(part.experts, stacked=())
        if f"{block}ffn_gate_up{PART_OF_EXPERTS}.weight" not in file.tensors:
            experts = replace(experts, expert=replace(experts.expert, fused="", gate=GATE, up=UP))
        part = replace(part, mlp=_mlp(file, block, part.mlp), experts=experts)
    elif isinstance(part, ExpertsRecipe):
        expert = replace(part.expert, transposed=False)
        together = f"{block}ffn_gate_up{PART_OF_EXPERTS}.weight" in file.tensors and not expert.interleaved
        expert = replace(expert, fused="", gate=GATE, up=UP) if expert.fused and not together else expert
        expert = replace(expert, biased=_biased(file, block, expert, _names_with(PART_OF_EXPERTS)))
        shared = None if part.shared is None else _mlp(file, block, part.shared, PART_OF_SHARED)
        part = replace(part, expert=expert, shared=shared, stacked=(), apart=None)
    return replace(layer, attention=attention, feed_forward=part, mixer=mixer)


def _attention(file: GgufFile, block: str, attention: AttentionRecipe, divisors: tuple[float, ...]) -> AttentionRecipe:
    rotary: Rotary | None = attention.rotary
    if rotary is not None:
        rotary = replace(rotary, divisors=divisors)
    fused = f"{block}attn_qkv.weight" in file.tensors
    if fused and attention.value_dim is not None:
        raise ModelError(f"{file.path} has fused queries, keys and values, which is not supported with narrower values")
    attention = replace(
        attention,
        rotary=rotary,
        fused=(attention.fused or "self_attn.qkv_proj") if fused else "",
        fusion=Fusion.PARTS,
        transposed=False,
    )
    return replace(attention, biased=_biased(file, block, attention, ATTENTION))


def _mlp(file: GgufFile, block: str, part: MlpRecipe, end: str = "") -> MlpRecipe:
    if f"{block}ffn_gate{end}.weight" in file.tensors:
        part = replace(part, fused="")
    part = replace(part, transposed=False)
    return replace(part, biased=_biased(file, block, part, _names_with(end)))


def _names_with(end: str) -> dict[str, str]:
    return {key + end: name for key, name in FEED_FORWARD.items()}


def _biased(file: GgufFile, block: str, part: AttentionRecipe | MlpRecipe, names: dict[str, str]) -> frozenset[str]:
    return frozenset(getattr(part, name) for key, name in names.items() if f"{block}{key}.bias" in file.tensors)
