"""Reads from a GGUF file's header which layers of a model have a state, and of how many numbers these are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf_architectures import CHANNELS, KV_HEADS
from pdserve.models.checkpoint.gguf_file import GgufFile
from pdserve.models.families.lfm import CONV
from pdserve.models.families.mamba import LINEAR, MLP, MOE
from pdserve.models.families.settings import FULL

RMS, PLAIN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def layer_count(file: GgufFile) -> int:
    """Returns the number of layers, without those behind the last that draft tokens."""
    return file.own("block_count", int) - file.own("nextn_predict_layers", int, 0)


def with_one_number(file: GgufFile, of_layers: tuple[str, ...]) -> GgufFile:
    """Returns the file with one number in place of a number for each layer.

    A key that is among ``of_layers`` may have 0 for some. Raises ModelError if there are several other numbers, or not
    one for each layer.
    """
    changed = dict(file.metadata)
    for key in (KV_HEADS, CHANNELS):
        if isinstance(changed.get(file.key(key)), list):
            sizes = {size for size in _of_layers(file, key) if size or key not in of_layers}
            if len(sizes) > 1:
                raise ModelError(f"{file.key(key)} of {file.path} has {sorted(sizes)}; only one size is supported")
            changed[file.key(key)] = next(iter(sizes), 0)
    return replace(file, metadata=changed)


def hybrid_settings(file: GgufFile, family: str) -> dict[str, Any]:
    """Returns the settings of a family with states that no key sets alone; none for other families.

    ``file`` is as it was read. Raises ModelError if its keys do not fit together.
    """
    of_family = _SETTINGS.get(family)
    return {} if of_family is None else of_family(file)


def _of_layers(file: GgufFile, key: str) -> list[int]:
    """Returns what a key has for each layer. Raises ModelError if these are not whole numbers."""
    given, layers = file.own(key, list), file.own("block_count", int)
    if len(given) != layers or not all(isinstance(each, int) and each >= 0 for each in given):
        raise ModelError(f"{file.key(key)} of {file.path} is {str(given)[:80]}; a number for each layer is needed")
    return given[: layer_count(file)]


def _sees_all(file: GgufFile) -> list[bool]:
    """Returns for each layer whether it has attention."""
    return [heads > 0 for heads in _of_layers(file, KV_HEADS)]


def _each_head(file: GgufFile) -> int:
    """Returns the channels of a head of a layer with a state."""
    inner, heads = file.own("ssm.inner_size", int), file.own("ssm.time_step_rank", int)
    if inner % heads:
        raise ModelError(f"{file.key('ssm.inner_size')} {inner} of {file.path} cannot be spread over {heads} heads")
    return inner // heads


def _check_convolved(file: GgufFile, channels: int) -> None:
    """Raises ModelError if keys and tensors do not agree, before rows are counted by what the keys say."""
    found = next((each for name, each in file.tensors.items() if name.endswith(".ssm_conv1d.weight")), None)
    if found is None or found.shape[0] != channels:
        other = "none" if found is None else found.shape[0]
        raise ModelError(f"{file.path} has settings of {channels} convolved channels, and its tensors have {other}")


def _epsilon(file: GgufFile) -> float:
    """Returns the number that the norms of all layers add. Raises ModelError if the file has two."""
    found = file.own(RMS, float)
    if not math.isclose(found, other := file.own(PLAIN, float, found), rel_tol=1e-6):
        raise ModelError(f"{file.key(RMS)} of {file.path} is {found}, but {file.key(PLAIN)} is {other}")
    return found


def _delta_net(file: GgufFile) -> dict[str, Any]:
    keys = file.own("ssm.state_size", int) * file.own("ssm.group_count", int)
    _check_convolved(file, 2 * keys + file.own("ssm.inner_size", int))
    found: dict[str, Any] = {"linear_value_head_dim": _each_head(file)}
    if file.key("attention.recurrent_layers") in file.metadata:
        given = file.own("attention.recurrent_layers", list)
        if len(given) < layer_count(file):
            raise ModelError(f"{file.key('attention.recurrent_layers')} of {file.path} is not of all layers")
        found["layer_types"] = [LINEAR if each else FULL for each in given[: layer_count(file)]]
    return found


def _lfm(file: GgufFile) -> dict[str, Any]:
    return {"layer_types": [FULL if each else CONV for each in _sees_all(file)], "norm_eps": _epsilon(file)}


def _mamba(file: GgufFile) -> dict[str, Any]:
    """Returns the settings that a Granite and a Bamba have for the channels of a Mamba."""
    hidden, inner = file.own("embedding_length", int), file.own("ssm.inner_size", int)
    if inner % hidden:
        raise ModelError(f"{file.key('ssm.inner_size')} of {file.path} is {inner}, not a multiple of {hidden}")
    return {"mamba_d_head": _each_head(file), "mamba_expand": inner // hidden}


def _falcon(file: GgufFile) -> dict[str, Any]:
    if "output.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor 'output.weight', and its embedding has a factor that no head has")
    return {
        "mamba_d_ssm": file.own("ssm.inner_size", int),
        "mamba_d_head": _each_head(file),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


def _granite(file: GgufFile) -> dict[str, Any]:
    kinds = [FULL if each else LINEAR for each in _sees_all(file)]
    shared = file.own("expert_shared_feed_forward_length", int, 0) or file.own("feed_forward_length", int)
    experts = file.own("expert_count", int, 0)
    return _mamba(file) | {
        "layer_types": kinds,
        "num_local_experts": experts,
        "shared_intermediate_size": shared,
    }


def _bamba(file: GgufFile) -> dict[str, Any]:
    return _mamba(file) | {"attn_layer_indices": [index for index, each in enumerate(_sees_all(file)) if each]}


def _nemotron(file: GgufFile) -> dict[str, Any]:
    return {
        "layers_block_type": _kinds_of_one_part(file),
        "mamba_head_dim": _each_head(file),
        "layer_norm_epsilon": _epsilon(file),
    }


def _kinds_of_one_part(file: GgufFile) -> list[str]:
    channels = _of_layers(file, CHANNELS)
    kinds: list[str] = []
    for index, full in enumerate(_sees_all(file)):
        routed = f"blk.{index}.ffn_gate_inp.weight" in file.tensors
        if full and channels[index]:
            raise ModelError(f"layer {index} of {file.path} has attention and a feed-forward part, not one of them")
        kinds.append(FULL if full else LINEAR if not channels[index] else MOE if routed else MLP)
    return kinds


_SETTINGS: dict[str, Callable[[GgufFile], dict[str, Any]]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon,
    "granitemoehybrid": _granite,
    "lfm2": _lfm,
    "lfm2_moe": _lfm,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_next": _delta_net,
}
