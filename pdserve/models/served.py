"""Says what is served: the one table that ``pdserve models``, the page of models and refusals print.

A row follows from the recipe that a family has with the settings that a ``config.json`` leaves out. A file may choose
other parts, such as windows, that the family knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.models.checkpoint.gguf.architectures import ARCHITECTURES
from pdserve.models.recipe import (
    DeltaNetRecipe,
    FeedForwardRecipe,
    KimiDeltaRecipe,
    LatentRecipe,
    LayerRecipe,
    LightningRecipe,
    Mamba2Recipe,
    MambaRecipe,
    MixerRecipe,
    MlpBesideExperts,
    MlpRecipe,
    ModelRecipe,
    NormKind,
    NormOrder,
    NormScope,
    SharedKvRecipe,
    ShortConvRecipe,
)
from pdserve.models.table import COMPOSITES, FAMILIES, TEXT_PARTS
from pdserve_kernels.feed_forward import Activation, Scoring

NOT_YET: dict[str, str] = {
    model_type: missing
    for missing, model_types in {
        "a text part in a folder of its own": ("minimax_m3_vl_text",),
        "states": ("recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    }.items()
    for model_type in model_types
}
"""What pdserve lacks for a family, by the ``model_type`` of its configurations."""

FORMATS_NOT_YET = ("bitsandbytes", "AQLM", "HQQ", "2, 3, 5 and 6 bits", "FP8 e5m2", "sparse compressed-tensors")
"""The number formats of weights in folders that are not served."""


@dataclass(frozen=True, slots=True)
class ServedFamily:
    """What a family is made of, in words."""

    model_type: str
    models: str
    attention: str
    feed_forward: str
    norms: str
    positions: str
    formats: tuple[str, ...]
    """The forms of weights: numbers in a folder, and the architectures of GGUF files."""

    @property
    def parts(self) -> tuple[str, str, str, str]:
        return (self.attention, self.feed_forward, self.norms, self.positions)


def served_families() -> list[ServedFamily]:
    """Returns a row for each family that has a recipe, by ``model_type``.

    Text parts of a kind that no other family is have a row under the ``model_type`` of their whole.
    """
    rows = []
    within = {whole: TEXT_PARTS[part.text] for whole, part in COMPOSITES.items() if part.text in TEXT_PARTS}
    known = {*FAMILIES.values()}
    own = {whole: family for whole, family in within.items() if "models" in vars(family) and family not in known}
    for model_type, family in sorted({**FAMILIES, **own}.items()):
        settings = family()
        recipe = settings.recipe()
        part = COMPOSITES[model_type].text if model_type in own else model_type
        gguf = [arch for arch, known in ARCHITECTURES.items() if part in known.families]
        row = ServedFamily(
            model_type,
            f"{settings.models}, its text part" if model_type in own else settings.models,
            _joined(_attention(recipe.layers, settings.attention_cap())),
            _joined(word for part in _distinct(recipe.layers) for word in _feed_forward(part)) or "none",
            _joined(_norms(recipe.layers[0])),
            _joined(_positions(recipe, settings.head_size())),
            ("fp32", "bf16", *(f"GGUF {arch}" for arch in gguf)),
        )
        rows.append(row)
    return rows


def not_yet(model_type: str) -> str:
    """Says what is missing for a family; nothing if that is not known."""
    missing = NOT_YET.get(model_type, "")
    return f"{missing} {'are' if missing.endswith('s') else 'is'} not served yet" if missing else ""


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _share(layers: Sequence[LayerRecipe], having: int) -> str:
    return "in all layers" if having == len(layers) else f"in {having} of {len(layers)} layers"


def _attention(layers: Sequence[LayerRecipe], cap: float | None) -> Iterator[str]:
    mixers = [layer.mixer for layer in layers if layer.mixer is not None]
    for kind in dict.fromkeys(type(mixer) for mixer in mixers):
        yield f"{_MIXERS[kind]} {_share(layers, sum(type(mixer) is kind for mixer in mixers))}"
    parts = [layer.attention for layer in layers if layer.attention is not None]
    if not parts:
        return
    first = parts[0]
    if mixers:
        yield f"attention {_share(layers, len(parts))}"
    if first.latent is not None:
        yield _latents(first.latent)
    if first.shared is not None:
        yield "one vector for all heads"
    choosing = sum(part.head_blocks is not None and part.head_blocks.index is not None for part in parts)
    if choosing:
        yield f"blocks that each KV head chooses {_share(layers, choosing)}"
    if first.gate is not None:
        yield "gated heads"
    windows = sum(part.window is not None for part in parts)
    if windows:
        yield f"{'chunks' if any(part.chunked for part in parts) else 'windows'} {_share(layers, windows)}"
    if any(part.sinks for part in parts):
        yield "sinks"
    yield from _entries([part.shared for part in parts if part.shared is not None], layers)
    if first.value_dim is not None:
        yield "values narrower than keys"
    if first.fused:
        yield "one tensor for queries, keys and values"
    if first.biased:
        yield "biases" if first.out in first.biased else "biases of queries, keys and values"
    if first.norms is not None:
        scope = {NormScope.HEAD: "each head", NormScope.EACH_HEAD: "each head by its own", NormScope.ALL: "all heads"}
        yield f"normalised queries and keys ({scope[first.norms.scope]})"
    if cap is not None:
        yield "bounded scores"
    if first.query_scale is not None:
        yield "queries scaled by position"
    plain = first.latent is None and not (windows or first.fused or first.biased or first.norms or first.query_scale)
    if plain and not mixers and cap is None:
        yield "as Llama"


def _latents(latent: LatentRecipe) -> str:
    if latent.index is None:
        return "latents"
    pools = "" if latent.index.pool == 1 else f", by pools of {latent.index.pool} tokens"
    return f"latents, of which an indexer chooses some{pools}"


def _entries(parts: Sequence[SharedKvRecipe], layers: Sequence[LayerRecipe]) -> Iterator[str]:
    kinds = [(part.entries.every, part.index is not None) for part in parts if part.entries is not None]
    for every, chosen in sorted(set(kinds)):
        of_some = ", of which an indexer chooses some," if chosen else ""
        yield f"entries for {every} tokens{of_some} {_share(layers, kinds.count((every, chosen)))}"


_MIXERS: dict[type[MixerRecipe], str] = {
    DeltaNetRecipe: "gated delta nets",
    KimiDeltaRecipe: "gated delta nets with a decay for each channel",
    LightningRecipe: "lightning attention",
    Mamba2Recipe: "Mamba 2",
    MambaRecipe: "Mamba",
    ShortConvRecipe: "short convolutions",
}


def _distinct(layers: Sequence[LayerRecipe]) -> list[FeedForwardRecipe]:
    return list(dict.fromkeys(part for layer in layers for part in layer.feeding))


_ACTIVATIONS = {
    Activation.SILU: "SiLU",
    Activation.GELU: "GELU",
    Activation.GELU_TANH: "GELU (tanh)",
    Activation.RELU: "ReLU",
    Activation.RELU_SQUARED: "squared ReLU",
    Activation.XIELU: "xIELU",
    Activation.CLAMPED_SILU: "clamped SiLU",
    Activation.SILU_TO_7: "SiLU up to 7",
    Activation.SILU_TO_16: "SiLU up to 16",
    Activation.LIMITED_SILU: "limited SiLU",
}


_SCORINGS = {
    Scoring.SOFTMAX: "softmax",
    Scoring.SOFTMAX_OF_CHOSEN: "softmax",
    Scoring.SIGMOID: "sigmoid",
    Scoring.SIGMOID_OF_CHOSEN: "sigmoid",
    Scoring.ROOT_SOFTPLUS: "root of softplus",
}


def _feed_forward(part: FeedForwardRecipe) -> Iterator[str]:
    if isinstance(part, MlpRecipe):
        yield f"{_ACTIVATIONS[part.activation]}{' with a gate' if part.gate or part.fused else ''}"
        return
    if isinstance(part, MlpBesideExperts):
        yield from _feed_forward(part.mlp)
        yield from _feed_forward(part.experts)
        return
    corrected = "corrected " if part.correction else ""
    if part.by_token:
        yield "experts by token"
    else:
        yield f"experts by {corrected}{_SCORINGS[part.scoring]}"
    if part.groups > 1:
        yield "groups of experts"
    if part.identities:
        yield "experts that give what they are given"
    if part.shared is not None:
        yield "a shared expert"


_ORDERS = {
    NormOrder.PRE: "before each part",
    NormOrder.POST: "behind each part",
    NormOrder.SANDWICH: "before and behind each part",
    NormOrder.PARALLEL: "once, before both parts",
    NormOrder.NORMED: "before each part, of the residual itself",
}


def _norms(layer: LayerRecipe) -> Iterator[str]:
    norm = layer.norm
    kind = "RMS" if norm.kind is NormKind.RMS else "layer norm"
    if not norm.weighted:
        kind += " without weights"
    elif norm.biased:
        kind += " with biases"
    if norm.gate_rank:
        kind += " with gates"
    yield f"{kind} {_ORDERS[layer.order]}"
    if layer.streams is not None:
        yield f"{layer.streams.count} residuals"


def _positions(recipe: ModelRecipe, head_size: int) -> Iterator[str]:
    if recipe.positions is not None:
        yield "learned"
    rotaries = [part.rotary for part in recipe.attention]
    turned = [rotary for rotary in rotaries if rotary is not None]
    if not turned:
        if recipe.positions is None:
            yield "none"
        return
    how = "rotary"
    if len(turned) < len(rotaries):
        how += f" {_share(recipe.layers, len(turned))}"
    if turned[0].interleaved:
        how += ", neighbouring channels"
    yield how
    if turned[0].width is not None and turned[0].width != head_size:
        yield f"{turned[0].width / head_size:.0%} of each head"
