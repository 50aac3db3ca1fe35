"""Reads layers with a state from GGUF files: which ones they are and of how many numbers, by the header, and how their
tensors are stored: names, shapes, the order of rows, and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from pdserve.errors import ModelError
from pdserve.models.checkpoint.gguf.architectures import CHANNELS, KV_HEADS, Architecture
from pdserve.models.checkpoint.gguf.file import GgufFile
from pdserve.models.families.lfm import CONV
from pdserve.models.families.mamba import LINEAR, MLP, MOE
from pdserve.models.families.qwen import APART
from pdserve.models.families.settings import FULL
from pdserve.models.recipe import (
    DeltaNetRecipe,
    KimiDeltaRecipe,
    Mamba2Recipe,
    MambaRecipe,
    MixerRecipe,
    ShortConvRecipe,
)

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


WITHOUT_ATTENTION = ("mamba", "mamba2")
"""The architectures of files without attention."""


def with_heads_of_states(file: GgufFile) -> GgufFile:
    """Returns a file without attention as one whose heads are those of its states, or one. Raises ModelError."""
    changed = {key: value for key, value in file.metadata.items() if key != file.key(CHANNELS)}
    changed[file.key("attention.head_count")] = 1
    if file.architecture == "mamba2":
        changed[file.key("attention.head_count")] = file.own("ssm.time_step_rank", int)
        changed[file.key("attention.key_length")] = _each_head(file)
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
    if heads < 1 or inner % heads:
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


def _kimi(file: GgufFile) -> dict[str, Any]:
    heads = file.own("attention.head_count", int)
    wanted = heads * file.own("kda.head_dim", int) * file.own("ssm.conv_kernel", int)
    found = next((each for name, each in file.tensors.items() if name.endswith(".ssm_conv1d_q.weight")), None)
    if found is not None and math.prod(found.shape) != wanted:
        raise ModelError(
            f"{file.path} has settings of {wanted} convolved numbers, and its tensors have {math.prod(found.shape)}"
        )
    return {"layer_types": [FULL if each else LINEAR for each in _sees_all(file)], "linear_num_heads": heads}


def _lfm(file: GgufFile) -> dict[str, Any]:
    return {"layer_types": [FULL if each else CONV for each in _sees_all(file)], "norm_eps": _epsilon(file)}


def _jamba(file: GgufFile) -> dict[str, Any]:
    routed = [f"blk.{index}.ffn_gate_inp.weight" in file.tensors for index in range(layer_count(file))]
    period, first = _repeated(file, "attention", _sees_all(file))
    expert_period, first_routed = _repeated(file, "experts", routed)
    return {
        "attn_layer_period": period,
        "attn_layer_offset": first,
        "expert_layer_period": expert_period,
        "expert_layer_offset": first_routed,
        "num_experts": max(1, file.own("expert_count", int, 0)),
        "mamba_expand": _times_hidden(file),
        "mamba_dt_rank": file.own("ssm.time_step_rank", int),
    }


def _repeated(file: GgufFile, what: str, layers: list[bool]) -> tuple[int, int]:
    """Returns one in how many layers is true, and the first. Raises ModelError if they do not come so regularly."""
    true = [index for index, each in enumerate(layers) if each]
    if not true:
        return len(layers), len(layers)
    first, period = true[0], true[1] - true[0] if len(true) > 1 else len(layers)
    if first >= period or true != list(range(first, len(layers), period)):
        raise ModelError(f"{file.path} has {what} in layers {true[:20]}; one in so many layers is needed")
    return period, first


def _times_hidden(file: GgufFile) -> int:
    """Returns how many times as many channels a Mamba has as the model."""
    hidden, inner = file.own("embedding_length", int), file.own("ssm.inner_size", int)
    if inner % hidden:
        raise ModelError(f"{file.key('ssm.inner_size')} of {file.path} is {inner}, not a multiple of {hidden}")
    return inner // hidden


def _mamba(file: GgufFile) -> dict[str, Any]:
    """Returns the settings that a Granite and a Bamba have for the channels of a Mamba."""
    return {"mamba_d_head": _each_head(file), "mamba_expand": _times_hidden(file)}


def _mamba_alone(file: GgufFile) -> dict[str, Any]:
    return {"expand": _times_hidden(file), "layer_norm_epsilon": file.own(RMS, float)}


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
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm2": _lfm,
    "lfm2_moe": _lfm,
    "falcon_mamba": _mamba_alone,
    "mamba": _mamba_alone,
    "mamba2": _mamba_alone,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_next": _delta_net,
}


@dataclass(frozen=True, slots=True)
class MixerTensor:
    """A tensor of a mixer, by the recipe's name for it within a layer."""

    name: str
    stored: str
    """The file's name of it within a layer. Several tensors may be parts of one."""
    shape: tuple[int, ...] = ()
    """Its shape, if the file leaves out or adds dimensions of 1, or has a row for each group."""
    rows: tuple[int, ...] = ()
    """The stored row of each row, if these are not all in the same order."""
    rate: bool = False
    """Whether ``-exp(x)`` is stored, and not ``x``."""


def stored_mixer(file: GgufFile, block: str, mixer: MixerRecipe, known: Architecture) -> MixerRecipe:
    """Returns a layer's mixer with what the file has otherwise; its tensors there begin with ``block``."""
    match mixer:
        case DeltaNetRecipe():
            # Whatever is fused in the file: its rows are known.
            return replace(mixer, inner=APART, tiled=known.tiled)
        case Mamba2Recipe():
            names = ("ssm_in", "ssm_out", "ssm_conv1d")
            biased, out_biased, conv_biased = (f"{block}{name}.bias" in file.tensors for name in names)
            return replace(mixer, biased=biased, out_biased=out_biased, conv_biased=conv_biased)
        case MambaRecipe():
            biased, conv_biased = (f"{block}{name}.bias" in file.tensors for name in ("ssm_in", "ssm_conv1d"))
            return replace(mixer, biased=biased, conv_biased=conv_biased)
        case ShortConvRecipe():
            return replace(mixer, biased=f"{block}shortconv.conv.bias" in file.tensors)
        case _:
            return mixer


def mixer_tensors(file: GgufFile, block: str, mixer: MixerRecipe) -> tuple[MixerTensor, ...]:
    """Returns the tensors that a layer's mixer takes, or may take."""
    match mixer:
        case DeltaNetRecipe():
            together, scalars = (f"{block}{name}.weight" in file.tensors for name in ("ssm_in", "ssm_ba"))
            return _of_delta_net(mixer, together=together, scalars=scalars)
        case Mamba2Recipe():
            return tuple(_of_mamba(mixer))
        case MambaRecipe():
            return tuple(_of_channels(mixer))
        case ShortConvRecipe():
            return tuple(_of_short_conv(mixer))
        case KimiDeltaRecipe():
            return tuple(_of_kimi(mixer))
        case _:
            return ()


def gated_norm(mixer: MixerRecipe) -> str:
    """Returns the name of the norm that is stored as it is where others are shifted; an empty one if there is none."""
    return mixer.gated_norm if isinstance(mixer, DeltaNetRecipe | Mamba2Recipe) else ""


@lru_cache(maxsize=4)
def _of_delta_net(mixer: DeltaNetRecipe, *, together: bool, scalars: bool) -> tuple[MixerTensor, ...]:
    """Returns the tensors of a file that has all projections ``together``, or the two to ``scalars``.

    Such rows are by key head, as in the checkpoint. All layers have the same, and so the same tuples of rows.
    """
    keys, group, values = mixer.key_dim, mixer.group, mixer.group * mixer.value_dim
    qkv, gate, beta, step = (f"{name}.weight" for name in mixer.inner)
    before = 2 * mixer.heads * keys
    order = _value_heads(mixer)
    channels = tuple(_ranges((head * mixer.value_dim, (head + 1) * mixer.value_dim) for head in order))
    mixed = (*range(before), *(before + channel for channel in channels)) if order else ()
    found = [
        MixerTensor(
            f"{mixer.conv}.weight", "ssm_conv1d.weight", (mixer.heads * mixer.conv_channels, 1, mixer.width), mixed
        ),
        MixerTensor(mixer.step_bias, "ssm_dt.bias", rows=order),
        MixerTensor(mixer.log_rate, "ssm_a", rows=order, rate=True),
        MixerTensor(f"{mixer.gated_norm}.weight", "ssm_norm.weight"),
        MixerTensor(f"{mixer.out}.weight", "ssm_out.weight"),
    ]
    if together:
        # Files of the first versions of llama.cpp with this architecture.
        query, key, value, gates = _by_key_head(mixer.heads, keys, keys, values, values)
        found += [
            MixerTensor(qkv, "ssm_in.weight", rows=(*query, *key, *value)),
            MixerTensor(gate, "ssm_in.weight", rows=gates),
        ]
    else:
        found += [MixerTensor(qkv, "attn_qkv.weight", rows=mixed), MixerTensor(gate, "attn_gate.weight", rows=channels)]
    if scalars:
        betas, steps = _by_key_head(mixer.heads, group, group)
        found += [MixerTensor(beta, "ssm_ba.weight", rows=betas), MixerTensor(step, "ssm_ba.weight", rows=steps)]
    else:
        found += [MixerTensor(beta, "ssm_beta.weight", rows=order), MixerTensor(step, "ssm_alpha.weight", rows=order)]
    return tuple(found)


def _value_heads(mixer: DeltaNetRecipe) -> tuple[int, ...]:
    """Returns the stored place of each value head, by key head; none if they are stored so."""
    if not mixer.tiled or mixer.group == 1:
        return ()
    return tuple(number * mixer.heads + head for head in range(mixer.heads) for number in range(mixer.group))


def _by_key_head(heads: int, *sizes: int) -> Iterator[tuple[int, ...]]:
    """Returns the rows of each part, where those of all parts of a key head stand together."""
    first = 0
    for size in sizes:
        starts = range(first, heads * sum(sizes), sum(sizes))
        yield tuple(_ranges((start, start + size) for start in starts))
        first += size


def _ranges(bounds: Iterable[tuple[int, int]]) -> Iterator[int]:
    return chain.from_iterable(range(first, end) for first, end in bounds)


def _of_mamba(mixer: Mamba2Recipe) -> Iterator[MixerTensor]:
    heads = mixer.heads * mixer.group
    conv = (mixer.all_conv_channels, 1, mixer.width)
    yield MixerTensor(f"{mixer.inner}.weight", "ssm_in.weight")
    yield MixerTensor(f"{mixer.inner}.bias", "ssm_in.bias")
    yield MixerTensor(f"{mixer.conv}.weight", "ssm_conv1d.weight", conv)
    yield MixerTensor(f"{mixer.conv}.bias", "ssm_conv1d.bias")
    yield MixerTensor(mixer.step_bias, "ssm_dt.bias")
    yield MixerTensor(mixer.log_rate, "ssm_a", (heads,), rate=True)
    yield MixerTensor(mixer.skip, "ssm_d", (heads,))
    yield MixerTensor(f"{mixer.gated_norm}.weight", "ssm_norm.weight", (heads * mixer.head_dim,))
    yield MixerTensor(f"{mixer.out}.weight", "ssm_out.weight")
    yield MixerTensor(f"{mixer.out}.bias", "ssm_out.bias")


def _of_channels(mixer: MambaRecipe) -> Iterator[MixerTensor]:
    for kind, conv in (("weight", (mixer.heads * mixer.channels, 1, mixer.width)), ("bias", ())):
        yield MixerTensor(f"{mixer.inner}.{kind}", f"ssm_in.{kind}")
        yield MixerTensor(f"{mixer.conv}.{kind}", f"ssm_conv1d.{kind}", conv)
        yield MixerTensor(f"{mixer.steps}.{kind}", f"ssm_dt.{kind}")
        yield MixerTensor(f"{mixer.out}.{kind}", f"ssm_out.{kind}")
    yield MixerTensor(f"{mixer.selecting}.weight", "ssm_x.weight")
    yield MixerTensor(mixer.log_rate, "ssm_a", rate=True)
    yield MixerTensor(mixer.skip, "ssm_d")
    if mixer.norm is not None and mixer.norm.weighted:
        for name, stored in zip(mixer.norms, ("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"), strict=True):
            yield MixerTensor(f"{name}.weight", f"{stored}.weight")


def _of_short_conv(mixer: ShortConvRecipe) -> Iterator[MixerTensor]:
    conv = (mixer.heads * mixer.channels, 1, mixer.width)
    for kind, shape in (("weight", conv), ("bias", ())):
        yield MixerTensor(f"{mixer.inner}.{kind}", f"shortconv.in_proj.{kind}")
        yield MixerTensor(f"{mixer.conv}.{kind}", f"shortconv.conv.{kind}", shape)
        yield MixerTensor(f"{mixer.out}.{kind}", f"shortconv.out_proj.{kind}")


def _of_kimi(mixer: KimiDeltaRecipe) -> Iterator[MixerTensor]:
    for name, part in zip(mixer.convs, "qkv", strict=True):
        yield MixerTensor(f"{name}.weight", f"ssm_conv1d_{part}.weight", (mixer.all_channels, 1, mixer.width))
    names = {
        "attn_q": mixer.query,
        "attn_k": mixer.key,
        "attn_v": mixer.value,
        "attn_output": mixer.out,
        "ssm_beta": mixer.beta,
        "ssm_f_a": mixer.step_down,
        "ssm_f_b": mixer.step_up,
        "ssm_g_a": mixer.gate_down,
        "ssm_g_b": mixer.gate_up,
        "ssm_norm": mixer.gated_norm,
    }
    yield from (MixerTensor(f"{name}.weight", f"{stored}.weight") for stored, name in names.items())
    yield MixerTensor(mixer.step_bias, "ssm_dt.bias")
    yield MixerTensor(mixer.log_rate, "ssm_a", (1, 1, mixer.heads, 1), rate=True)
