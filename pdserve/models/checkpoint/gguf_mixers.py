"""Says how GGUF files have the tensors of layers with a state: their names, shapes, the order of rows, and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from pdserve.models.checkpoint.gguf_architectures import Architecture
from pdserve.models.checkpoint.gguf_file import GgufFile
from pdserve.models.families.qwen_next import APART
from pdserve.models.recipe import DeltaNetRecipe, Mamba2Recipe, MixerRecipe, ShortConvRecipe


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
        case ShortConvRecipe():
            return tuple(_of_short_conv(mixer))
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


def _of_short_conv(mixer: ShortConvRecipe) -> Iterator[MixerTensor]:
    conv = (mixer.heads * mixer.channels, 1, mixer.width)
    for kind, shape in (("weight", conv), ("bias", ())):
        yield MixerTensor(f"{mixer.inner}.{kind}", f"shortconv.in_proj.{kind}")
        yield MixerTensor(f"{mixer.conv}.{kind}", f"shortconv.conv.{kind}", shape)
        yield MixerTensor(f"{mixer.out}.{kind}", f"shortconv.out_proj.{kind}")
