"""Tests that what is kept free on a GPU is at least what is in memory at once, with models of usual sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.config import Dtype, SchedulerConfig
from pdserve.engine.kv_cache.cache_size import (
    LIBRARY_BYTES,
    SCORING_BYTES_PER_LOGIT,
    draft_bytes,
    logits_bytes,
    step_bytes,
    workspace_bytes,
)
from pdserve.engine.sampling import sampling_row
from pdserve.engine.sampling.logprobs import PendingScores, ScoredTokens
from pdserve.engine.sampling.pending_tokens import DeviceTokens, HostTokens
from pdserve.engine.sampling.sampling_row import SamplingRow, sampling_bytes
from pdserve.models.block_plan import BlockLoad, BlockStep, HeadBlockStep, chosen_bytes, head_block_bytes
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.checkpoint.weights import ALL, Rows
from pdserve.models.decoder import Decoder, build_decoder
from pdserve.models.families.settings import draft_layer
from pdserve.models.latent_plan import LatentStep, PoolMaking, choosing_bytes
from pdserve.models.layer_groups import layer_groups
from pdserve.models.parts.projections import Building
from pdserve.models.rank_cache import KvGroup, RunNumbers, StepCache, StepStates, cache_place, rank_layouts
from pdserve.models.recipe import (
    DeltaNetRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    GatedStreamsRecipe,
    HeadBlocksRecipe,
    IndexRecipe,
    KimiDeltaRecipe,
    LatentRecipe,
    LayerRecipe,
    LightningRecipe,
    Mamba2Recipe,
    MambaRecipe,
    MixerRecipe,
    MlpBesideExperts,
    MlpRecipe,
    Norm,
    SharedKvRecipe,
    ShortConvRecipe,
)
from pdserve.models.shared_plan import SharedLoad, SharedStep, shared_bytes
from pdserve.wire.cache_groups import Keep
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels import reference
from pdserve_kernels.contract import (
    AttentionRow,
    ExpertsForm,
    ExpertWeights,
    HeadLinear,
    Linear,
    StateRuns,
    UnreadWeight,
)
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.kv_layout import KvLayout
from tests.engine.live_bytes import LiveBytes
from tests.models import test_composites
from tests.models.tiny_families import CASES, save_tiny
from tests.nightly import nightly
from tests.tiny_models import save_tiny_model

META = torch.device("meta")
BF16 = torch.bfloat16
GIB = 2**30


class AnyCheckpoint:
    """Has every tensor that a model asks for, without memory."""

    path, device, dtype = Path("any"), META, BF16

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Rows = ALL,
        columns: slice = ALL,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype or BF16, device=META)
        if rows != ALL:
            tensor = tensor[rows if isinstance(rows, slice) else slice(len(rows))]
        return tensor if columns == ALL else tensor[:, columns]

    def take_optional(self, name: str, *part: Any, **named: Any) -> torch.Tensor | None:
        return self.take(name, *part, **named) if name.endswith("norm.weight") else None

    def take_unread(self, name: str, *part: Any, **named: Any) -> UnreadWeight:
        weight = self.take(name, *part, **named)
        return UnreadWeight(name, (weight.shape[0], weight.shape[1]), BF16, lambda: weight)

    take_transposed = take_unread

    def has(self, name: str) -> bool:
        # Tables of n-grams are one tensor each.
        return "shard_" not in name

    def unwrap(self, renamed: object, outside: tuple[str, ...], ends: tuple[str, ...]) -> None: ...

    def leave(self, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> None: ...

    def unstack(self, name: str, pattern: str, count: int) -> None: ...

    def check_all_taken(self) -> None: ...

    def check_formats(self) -> None: ...

    def unread(self) -> AnyCheckpoint:
        return self


@dataclass(frozen=True)
class Together:
    """One of several ranks, with the memory that NCCL's operations take."""

    size: int
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else torch.cat([torch.empty_like(x) for _ in range(self.size)], 1)


class GpuMemory:
    """Takes the memory that the Triton kernels take, which have no tensors in between."""

    def __init__(self, decoder: FamilyConfig, ranks: int) -> None:
        self._heads, self._latent = decoder.heads // ranks, decoder.latent

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return partial(torch.nn.functional.linear, weight=weight, bias=bias)

    def experts(self, form: ExpertsForm, weights: Iterable[ExpertWeights]) -> Any:
        for _ in weights:
            pass

        def compute(x: torch.Tensor, logits: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
            out, assigned = torch.empty_like(x), len(x) * form.routing.chosen
            # Weights and numbers of the chosen experts, their order, and their tiles.
            held = [logits.new_empty(assigned, dtype=torch.float32) for _ in range(3)]
            held.append(logits.new_empty(3 * (assigned // 16 + form.count), dtype=torch.float32))
            held += [x.new_empty(assigned, form.channels), x.new_empty(assigned, form.hidden)]
            return out

        return compute

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.empty_like(x)

    def add_rms_norm(self, x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def activated(self, inner: torch.Tensor, activation: Activation, *, gated: bool) -> torch.Tensor:
        return torch.empty_like(inner[..., : inner.shape[-1] // 2] if gated else inner)

    def from_projection(self, layer: int, qkv: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        query = torch.empty_like(qkv[:, : self._heads])
        return torch.empty_like(query)

    def causal_conv(self, x: torch.Tensor, *others: Any, silu: bool) -> torch.Tensor:
        return torch.empty_like(x)

    def gated_delta_rule(self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, *own: Any) -> torch.Tensor:
        return qkv.new_empty((*beta.shape, own[0].shape[-1]))

    def mamba2_scan(self, xbc: torch.Tensor, steps: torch.Tensor, *others: Any) -> torch.Tensor:
        return xbc.new_empty((*steps.shape, others[2].shape[3]))

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        return reference.HeadLinear(weight)

    def plan_attention(self, *planned: Any) -> Any:
        return self

    def mamba_scan(self, x: torch.Tensor, *others: torch.Tensor | StateRuns) -> torch.Tensor:
        return torch.empty_like(x)

    def __call__(self, layer: int, query: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return torch.empty_like(query) if self._latent is None else torch.empty_like(query[..., : self._latent.rank])


TOKENS, ROWS = 2048, 256


MAMBA = Mamba2Recipe(heads=8, group=16, head_dim=64, size=128, width=4, norm=Norm(1e-6))
MIXERS: dict[type[MixerRecipe], MixerRecipe] = {
    type(recipe): recipe
    for recipe in (
        DeltaNetRecipe(heads=16, group=2, key_dim=128, value_dim=128, width=4, norm=Norm(1e-6)),
        KimiDeltaRecipe(heads=32, channels=128, width=4, norm=Norm(1e-6)),
        LightningRecipe((0.1,) * 32, channels=128, norm=Norm(1e-6)),
        MAMBA,
        MambaRecipe(heads=8, channels=1024, size=16, rank=256, width=4, norm=Norm(1e-6)),
        ShortConvRecipe(heads=32, channels=64, width=3),
    )
}
"""What stands for mixers of its kind, as wide as those of large models."""


LATENT = LatentRecipe(rank=512, plain=128, turned=64, value=128, norm=Norm(1e-6), query_rank=1536)
"""What stands for the latents of a model, those of DeepSeek V3."""
INDEX = IndexRecipe(count=2048, heads=64, channels=128, interleaved=False)


def wide_latents(latent: LatentRecipe | None) -> LatentRecipe | None:
    if latent is None or latent.index is None:
        return latent and LATENT
    index = replace(INDEX, pool=1 if latent.index.pool == 1 else 16)
    if latent.head_scales is None:
        return replace(LATENT, index=index)
    index = replace(latent.index, count=INDEX.count, heads=32, channels=128)
    still = 64 if latent.still else 0
    return replace(latent, rank=512, plain=64 + still, turned=64 - still, still=still, value=128, index=index)


def save_any(case: str, folder: Path) -> Path:
    if case in test_composites.CASES.keys() - CASES.keys():
        return test_composites.save(case, folder)
    return save_tiny(case, folder) if case in CASES else save_tiny_model(case, folder)


def wide_mixer(mixer: MixerRecipe) -> MixerRecipe:
    found = MIXERS[type(mixer)]
    if isinstance(mixer, Mamba2Recipe) and mixer.parts > 1:
        return replace(MAMBA, parts=MAMBA.heads, scales=mixer.scales, gate_after_norm=mixer.gate_after_norm)
    return found


def wide(config: FamilyConfig, experts: int, shared: int) -> FamilyConfig:
    """Returns a configuration whose recipe has its sizes, and as many experts as a large model where it has experts.

    ``experts`` and ``shared`` are the channels of one expert and of the one that all tokens are sent to.
    """

    def widened(part: FeedForwardRecipe) -> FeedForwardRecipe:
        if isinstance(part, MlpRecipe):
            return replace(part, channels=config.intermediate_size)
        if isinstance(part, MlpBesideExperts):
            mlp, inner = widened(part.mlp), widened(part.experts)
            assert isinstance(mlp, MlpRecipe)
            assert isinstance(inner, ExpertsRecipe)
            return replace(part, mlp=mlp, experts=inner)
        own = None if part.shared is None else replace(part.shared, channels=shared)
        return replace(part, count=128, chosen=8, expert=replace(part.expert, channels=experts), shared=own)

    # A layer without experts may be wider than those with some.
    kind = MlpRecipe if config.experts is None else (ExpertsRecipe, MlpBesideExperts)
    of_kind = [(layer, part) for layer in config.recipe.layers if isinstance(part := layer.feed_forward, kind)]
    layers = [
        replace(
            layer,
            attention=layer.attention and replace(layer.attention, latent=wide_latents(layer.attention.latent)),
            feed_forward=widened(part),
            mixer=layer.mixer and wide_mixer(layer.mixer),
        )
        for layer, part in of_kind
    ]
    windows, inputs = config.windows[: len(layers)], config.recipe.per_layer
    inputs = None if inputs is None else replace(inputs, rows=config.vocab_size, channels=256)
    recipe = replace(config.recipe, layers=tuple(layers), per_layer=inputs)
    return replace(config, num_layers=len(layers), windows=windows, recipe=recipe)


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": ("llama", {"hidden_size": 4096, "intermediate_size": 14_336, "heads": 32, "kv_heads": 8, "head_dim": 128}),
    "gemma 12B": (
        "gemma3",
        {"hidden_size": 3840, "intermediate_size": 15_360, "heads": 16, "kv_heads": 8, "head_dim": 256},
    ),
    "moe 30B": (
        "qwen3-moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "heads": 32,
            "kv_heads": 4,
            "head_dim": 128,
        },
    ),
    "wide heads": (
        "qwen3",
        {"hidden_size": 1024, "intermediate_size": 3072, "heads": 64, "kv_heads": 8, "head_dim": 128},
    ),
    "shared expert 20k": (
        "qwen2-moe",
        {"hidden_size": 3584, "intermediate_size": 2560, "heads": 28, "kv_heads": 4, "head_dim": 128},
    ),
    "groups 110B": (
        "glm4-moe-groups",
        {"hidden_size": 4096, "intermediate_size": 10_944, "heads": 96, "kv_heads": 8, "head_dim": 128},
    ),
    "narrow experts": (
        "granitemoe-shared",
        {"hidden_size": 1536, "intermediate_size": 512, "heads": 24, "kv_heads": 8, "head_dim": 64},
    ),
    "weighed inputs": (
        "llama4",
        {"hidden_size": 5120, "intermediate_size": 8192, "heads": 40, "kv_heads": 8, "head_dim": 128},
    ),
    "inputs of layers": (
        "gemma4-shared",
        {"hidden_size": 1536, "intermediate_size": 6144, "heads": 8, "kv_heads": 2, "head_dim": 256},
    ),
    "one of several residuals": (
        "gemma3n",
        {"hidden_size": 2048, "intermediate_size": 16_384, "heads": 8, "kv_heads": 2, "head_dim": 256},
    ),
    "experts beside": (
        "gemma4-experts",
        {"hidden_size": 2816, "intermediate_size": 2112, "heads": 16, "kv_heads": 8, "head_dim": 256},
    ),
    "norms of all heads": (
        "olmo2",
        {"hidden_size": 5120, "intermediate_size": 5120, "heads": 40, "kv_heads": 40, "head_dim": 128},
    ),
    "norms of single heads": (
        "cohere-normed",
        {"hidden_size": 2048, "intermediate_size": 1024, "heads": 64, "kv_heads": 64, "head_dim": 128},
    ),
    "learned activation": (
        "apertus",
        {"hidden_size": 4096, "intermediate_size": 21_504, "heads": 32, "kv_heads": 8, "head_dim": 128},
    ),
    "squares": (
        "nanochat",
        {"hidden_size": 1280, "intermediate_size": 5120, "heads": 10, "kv_heads": 10, "head_dim": 128},
    ),
    "delta nets 80B": (
        "qwen3-next",
        {"hidden_size": 2048, "intermediate_size": 5120, "heads": 16, "kv_heads": 2, "head_dim": 256},
    ),
    "delta nets": (
        "qwen3-next-dense",
        {"hidden_size": 2048, "intermediate_size": 5120, "heads": 16, "kv_heads": 2, "head_dim": 256},
    ),
    "delta nets of channels": (
        "kimi-linear-dense",
        {"hidden_size": 2304, "intermediate_size": 4096, "heads": 32, "kv_heads": 1, "head_dim": 576},
    ),
    "states": (
        "granitemoehybrid-dense",
        {"hidden_size": 4096, "intermediate_size": 5120, "heads": 32, "kv_heads": 8, "head_dim": 128},
    ),
    "a state beside attention": (
        "falcon-h1",
        {"hidden_size": 2048, "intermediate_size": 2048, "heads": 16, "kv_heads": 2, "head_dim": 128},
    ),
    "numbers of channels": (
        "jamba-dense",
        {"hidden_size": 4096, "intermediate_size": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128},
    ),
    "short convolutions": (
        "lfm2",
        {"hidden_size": 2048, "intermediate_size": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64},
    ),
    "latents 671B": (
        "deepseek-v3",
        {"hidden_size": 7168, "intermediate_size": 18_432, "heads": 128, "kv_heads": 1, "head_dim": 576},
    ),
    "latents that are chosen": (
        "deepseek-v32",
        {"hidden_size": 7168, "intermediate_size": 18_432, "heads": 128, "kv_heads": 1, "head_dim": 704},
    ),
    "latents that others have": (
        "mistral-large4",
        {"hidden_size": 6144, "intermediate_size": 24_576, "heads": 64, "kv_heads": 1, "head_dim": 704},
    ),
    "gated latents": (
        "hy4",
        {"hidden_size": 2816, "intermediate_size": 6912, "heads": 32, "kv_heads": 1, "head_dim": 704},
    ),
    "pools of latents": (
        "glm5-next",
        {"hidden_size": 4096, "intermediate_size": 12_288, "heads": 64, "kv_heads": 1, "head_dim": 832},
    ),
    "latents": (
        "youtu",
        {"hidden_size": 2048, "intermediate_size": 6144, "heads": 16, "kv_heads": 1, "head_dim": 576},
    ),
    "parallel": (
        "falcon",
        {"hidden_size": 4544, "intermediate_size": 18_176, "heads": 71, "kv_heads": 1, "head_dim": 64},
    ),
}
EXPERTS = {
    "delta nets 80B": (512, 512),
    "shared expert 20k": (2560, 20_480),
    "groups 110B": (1408, 1408),
    "latents 671B": (2048, 2048),
    "latents that are chosen": (2048, 2048),
    "latents that others have": (6144, 6144),
    "gated latents": (768, 768),
    "pools of latents": (2048, 2048),
    "narrow experts": (512, 1024),
    "weighed inputs": (8192, 8192),
}
"""The channels of one expert and of the shared one, if they are not (768, 0)."""
AT_NIGHT = ("pools of latents", 2)
SPLIT = [
    pytest.param(size, ranks, marks=[pytest.mark.nightly] if (size, ranks) == AT_NIGHT else [])
    for size in sorted(SIZES)
    for ranks in (1, 2)
    if ranks == 1 or size != "parallel"
]
"""Sizes and ranks over which their heads can be split."""


def one_run() -> StateRuns:
    starts, source, destination = (torch.tensor(each, dtype=torch.int32) for each in ([0, TOKENS], [-1], [0]))
    return StateRuns(starts, source, destination, single=False)


@pytest.mark.parametrize(("size", "ranks"), SPLIT)
def test_a_step_takes_no_more_than_is_counted(tmp_path: Path, size: str, ranks: int) -> None:
    family, shape = SIZES[size]
    saved = save_any(family, tmp_path)
    sized = replace(read_family_config(saved), vocab_size=152_000, **shape)
    decoder = wide(sized, *EXPERTS.get(size, (768, 0)))
    together: Any = Together(ranks)
    checkpoint: Any = AnyCheckpoint()
    kernels: Any = GpuMemory(decoder, ranks)
    model = build_decoder(decoder, Building(checkpoint, kernels, together), 4096, BF16)
    with torch.inference_mode(), LiveBytes() as live:
        ids = torch.empty(TOKENS, dtype=torch.int32, device=META)
        groups = layer_groups(decoder).groups
        states = [
            StepStates([torch.empty(1, group.heads // ranks, group.numbers, device=META)] * group.layers, one_run())
            for group in groups
            if group.keep is Keep.LATEST
        ]
        attention = [kernels] * (len(groups) - len(states))
        chosen = decoder.latent is not None and decoder.latent.index is not None
        latents = [LatentStep(None, sparse=each) if chosen else LatentStep(each) for each in attention]
        model.logits(model.forward(ids, ids, StepCache(attention, states, latents))[:ROWS])
    counted = step_bytes(decoder, BF16, ranks, TOKENS, ROWS)
    assert counted / 4 < live.peak <= counted


def test_pools_take_no_more_than_is_counted() -> None:
    latent = replace(LATENT, index=replace(INDEX, pool=16))
    layout = KvLayout(1, 1, 16, latent.kept, BF16, latent.rank)
    group: Any = SimpleNamespace(layout=layout, cache=layout.allocate(TOKENS // 16, torch.device("cpu")))
    making = PoolMaking(group, [AttentionRow(TOKENS, TOKENS, range(TOKENS // 16))], latent, 16)
    key, bias = torch.zeros(1, TOKENS, 1, latent.kept, dtype=BF16), torch.zeros(16, INDEX.channels)
    with LiveBytes() as live:
        making(0, key, bias)
    counted = choosing_bytes(latent, TOKENS, TOKENS) - choosing_bytes(replace(latent, index=INDEX), TOKENS, TOKENS)
    assert counted / 2 < live.peak <= counted


V4: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 2048, "heads": 64, "kv_heads": 1, "head_dim": 512}


def of_one_vector(config: FamilyConfig) -> FamilyConfig:
    """Returns a configuration with the entries of DeepSeek V4 Flash."""

    def widened(shared: SharedKvRecipe | None) -> SharedKvRecipe | None:
        if shared is None or shared.entries is None:
            return shared
        every = 4 if shared.index is not None else 128
        index = shared.index and replace(
            shared.index, count=512, heads=64, entries=replace(shared.index.entries, every=4, channels=128)
        )
        entries = replace(shared.entries, every=every, channels=512)
        sizes: dict[str, Any] = {"query_rank": 1024, "turned": 64, "groups": 8, "group_rank": 1024}
        return replace(shared, entries=entries, index=index, **sizes)

    layers = []
    for layer in config.recipe.layers:
        part = layer.attention
        if part is not None and part.shared is not None and part.shared.entries is not None:
            part = replace(part, shared=widened(part.shared), window=128)
            layers.append(replace(layer, attention=part, streams=layer.streams and replace(layer.streams, count=4)))
    count = len(layers)
    recipe = replace(config.recipe, layers=tuple(layers))
    return replace(config, num_layers=count, windows=(128,) * count, recipe=recipe, max_positions=2**16)


@dataclass(frozen=True)
class Opened:
    """A model without memory, and a step of the most tokens: a long prompt, or one and many answers beside it."""

    kernels: Any
    together: Any
    model: Decoder
    rows: Sequence[AttentionRow]


def opened(decoder: FamilyConfig, ranks: int, spread: bool) -> Opened:
    """Returns the model for contexts of its ``max_positions``; ``spread`` is the step with answers."""
    kernels: Any = GpuMemory(decoder, ranks)
    checkpoint: Any = AnyCheckpoint()
    together: Any = Together(ranks)
    model = build_decoder(decoder, Building(checkpoint, kernels, together), decoder.max_positions, BF16)
    context, answers = decoder.max_positions, ROWS if spread else 0
    lengths = [*[1] * answers, TOKENS - answers]
    return Opened(kernels, together, model, [AttentionRow(each, context, range(context // 16)) for each in lengths])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spread", [False, nightly(True)])
def test_a_step_with_entries_takes_no_more_than_is_counted(tmp_path: Path, ranks: int, spread: bool) -> None:
    """A long prompt, or one and many answers beside each other."""
    saved = read_family_config(save_tiny("deepseek-v4", tmp_path))
    decoder = of_one_vector(wide(replace(saved, vocab_size=129_280, **V4), 2048, 2048))
    made, context = opened(decoder, ranks, spread), decoder.max_positions
    kernels, together, model, rows = made.kernels, made.together, made.model, made.rows
    groups = layer_groups(decoder).groups
    layouts, (places, _) = (
        rank_layouts(decoder, Dtype.BF16, 16, together),
        cache_place(decoder, Dtype.BF16, 16, [context // 16] * len(groups), together),
    )
    kept = [
        KvGroup(number, places[number], layout, layout.allocate(context // 16, META), 64 // ranks, group.entries)
        for number, (layout, group) in enumerate(zip(layouts, groups, strict=True))
        if isinstance(layout, KvLayout)
    ]
    starts = [*range(len(rows)), TOKENS]
    runs = RunNumbers(starts, [0] * len(rows), list(range(len(rows))), [], single=False)
    states = [
        StepStates([torch.empty(len(rows), 1, group.numbers, device=META)] * group.layers, one_run())
        for group in groups
        if group.keep is Keep.LATEST
    ]
    with torch.inference_mode(), LiveBytes() as live:
        ids = torch.empty(TOKENS, dtype=torch.int32, device=META)
        step = SharedStep(kernels, kept, [rows] * len(kept), [runs] * len(states), 0.1)
        model.logits(model.forward(ids, ids, StepCache((), states, shared=step))[:ROWS])
    load = SharedLoad(64 // ranks, 512, 128, len(rows), TOKENS, context)
    parts = [part.shared for part in decoder.recipe.attention if part.shared is not None]
    gathered = max(shared_bytes(part, 2, load) for part in parts)
    counted = step_bytes(decoder, BF16, ranks, TOKENS, ROWS) + gathered
    assert counted / 4 < live.peak <= counted
    scheduler = SchedulerConfig(max_num_seqs=len(rows), max_num_batched_tokens=TOKENS)
    steps = step_bytes(decoder, BF16, ranks, TOKENS, len(rows))
    assert workspace_bytes(decoder, scheduler, BF16, ranks, 0) > LIBRARY_BYTES + steps + gathered


QWEN4: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 2048, "heads": 16, "kv_heads": 2, "head_dim": 256}


def of_blocks(config: FamilyConfig) -> FamilyConfig:
    """Returns a configuration with blocks, residuals and n-grams as wide as those of a large model."""

    def widened(layer: LayerRecipe) -> LayerRecipe:
        part, ngrams, streams = layer.attention, layer.ngrams, layer.streams
        if part is not None and part.blocks is not None:
            part = replace(part, blocks=replace(part.blocks, count=128, every=16, heads=16, channels=128))
        if ngrams is not None:
            sizes = (2_000,) * 16
            ngrams = replace(ngrams, sizes=sizes, rows=32_000, channels=128, width=4, stream_channels=4 * 2048)
        assert isinstance(streams, GatedStreamsRecipe)
        return replace(layer, attention=part, ngrams=ngrams, streams=replace(streams, count=4, rank=320))

    recipe = replace(config.recipe, layers=tuple(widened(layer) for layer in config.recipe.layers))
    return replace(config, recipe=recipe, max_positions=2**17)


@pytest.mark.parametrize("ranks", [1, nightly(2)])
@pytest.mark.parametrize("spread", [False, nightly(True)])
@pytest.mark.parametrize("alone", [nightly("attention"), "n-grams"])
def test_a_step_with_chosen_blocks_takes_no_more_than_is_counted(
    tmp_path: Path, ranks: int, spread: bool, alone: str
) -> None:
    """A long prompt, or one and many answers beside each other; all layers of one kind."""
    saved = read_family_config(save_tiny("qwen4-exp", tmp_path))
    decoder = of_blocks(wide(replace(saved, vocab_size=16_000, **QWEN4), 512, 512))
    kind = [layer for layer in decoder.recipe.layers if (layer.attention is None) == (alone == "n-grams")]
    decoder = replace(
        decoder, recipe=replace(decoder.recipe, layers=tuple(kind)), num_layers=len(kind), windows=(None,) * len(kind)
    )
    made, context = opened(decoder, ranks, spread), decoder.max_positions
    kernels, together, model, rows = made.kernels, made.together, made.model, made.rows
    groups = layer_groups(decoder).groups
    layout = rank_layouts(decoder, Dtype.BF16, 16, together)[0]
    assert isinstance(layout, KvLayout)
    places, _ = cache_place(decoder, Dtype.BF16, 16, [context // 16] * len(groups), together)
    blocks, counted = None, step_bytes(decoder, BF16, ranks, TOKENS, ROWS)
    if decoder.blocks is not None:
        cache = layout.allocate(context // 16, META)
        group = KvGroup(0, places[0], layout, cache, 16 // ranks, beside=groups[0].beside)
        blocks = BlockStep(kernels, group, rows, 0.1, decoder.blocks)
        counted += chosen_bytes(decoder.blocks, 2, BlockLoad(16 // ranks, 2 // ranks, 256, TOKENS, context))
    states = [
        StepStates([torch.empty(1, max(1, group.heads // ranks), group.numbers, device=META)] * group.layers, one_run())
        for group in groups
        if group.keep is Keep.LATEST
    ]
    with torch.inference_mode(), LiveBytes() as live:
        ids = torch.empty(TOKENS, dtype=torch.int32, device=META)
        model.logits(model.forward(ids, ids, StepCache((), states, blocks=blocks))[:ROWS])
    scheduler = SchedulerConfig(max_num_seqs=len(rows), max_num_batched_tokens=TOKENS)
    assert workspace_bytes(decoder, scheduler, BF16, ranks, 0) > LIBRARY_BYTES + counted
    assert counted / 4 < live.peak <= counted


@pytest.mark.parametrize("size", ["delta nets 80B", "latents 671B", "8B"])
def test_drafting_takes_no_more_than_is_counted(tmp_path: Path, size: str) -> None:
    family, shape = SIZES[size]
    saved = save_tiny(family, tmp_path) if family in CASES else save_tiny_model(family, tmp_path)
    decoder = wide(replace(read_family_config(saved), vocab_size=152_000, **shape), *EXPERTS.get(size, (768, 0)))
    layer = next(each for each in decoder.recipe.layers if each.attention is not None)
    decoder = replace(decoder, recipe=replace(decoder.recipe, draft=draft_layer(layer, decoder.num_layers)))
    checkpoint: Any = AnyCheckpoint()
    kernels: Any = GpuMemory(decoder, 1)
    together: Any = Together(1)
    building = Building(checkpoint, kernels, together)
    drafter = build_decoder(decoder, building, 4096, BF16, drafts=True).drafter
    assert drafter is not None
    with torch.inference_mode(), LiveBytes() as live:
        ids = torch.empty(TOKENS, dtype=torch.int32, device=META)
        hidden = torch.empty(TOKENS, decoder.hidden_size, dtype=BF16, device=META)
        begun = drafter.begun(hidden.index_select(0, ids))
        drafted = drafter.forward(ids, begun, ids, StepCache([kernels], (), [LatentStep(kernels, None)]))
        drafter.logits(drafted.index_select(0, ids[:ROWS]))
    assert live.peak <= step_bytes(decoder, BF16, 1, TOKENS, ROWS) + draft_bytes(decoder, BF16, TOKENS)


ROW_KINDS: dict[str, dict[str, Any]] = {
    "wide top-p": {"top_p": 0.999},
    "everything": {
        "top_p": 0.999,
        "top_k": 19_000,
        "min_p": 1e-9,
        "repetition_penalty": 1.1,
        "presence_penalty": 1.0,
        "allowed_token_ids": tuple(range(20_000)),
        "logprobs": 20,
    },
    "greedy, ruled": {"temperature": 0.0, "frequency_penalty": 1.0, "logprobs": 20, "bad_words": ((4,),)},
}


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_sampling_takes_no_more_than_is_counted(monkeypatch: pytest.MonkeyPatch, kind: str, on_device: bool) -> None:
    """The flattest distribution is the one for which top-p takes most."""
    monkeypatch.setattr(sampling_row, "GPU_LOGITS_AT_ONCE", 2**18)
    monkeypatch.setattr(sampling_row, "CPU_LOGITS_AT_ONCE", 2**18)
    rows = 40
    logits = torch.zeros(rows, 20_000)
    asked = [SamplingRow(SamplingParams(max_tokens=9, seed=i, **ROW_KINDS[kind]), [1, 2, 3], 2) for i in range(rows)]
    with LiveBytes() as live:
        (DeviceTokens if on_device else HostTokens)(logits, asked, range(rows), frozenset({2})).read()
    assert live.peak <= sampling_bytes(rows, 20_000) < rows * 20_000 * 40


def test_a_prompt_with_many_answers_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children are sampled from one row of logits, of which 13 are computed at once."""
    monkeypatch.setattr(sampling_row, "CPU_LOGITS_AT_ONCE", 2**18)
    asked = [SamplingRow(SamplingParams(max_tokens=9, seed=i, top_p=0.999), [1, 2, 3], 2) for i in range(256)]
    with LiveBytes() as live:
        DeviceTokens(torch.zeros(1, 20_000), asked, [0] * len(asked), frozenset({2})).read()
    assert live.peak <= sampling_row.BYTES_PER_LOGIT * 2**18


def test_scoring_takes_no_more_than_is_counted() -> None:
    scores, logits = PendingScores([ScoredTokens(range(40), 20)]), torch.zeros(40, 20_000)
    with LiveBytes() as live:
        scores.add(logits)
    assert live.peak <= SCORING_BYTES_PER_LOGIT * logits.numel()


def test_the_workspace_is_the_sum_of_what_is_in_memory_at_once(tmp_path: Path) -> None:
    decoder = replace(read_family_config(save_tiny_model("llama", tmp_path)), vocab_size=152_000, **SIZES["8B"][1])
    small, large = (
        workspace_bytes(decoder, SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens), BF16, 1, 2**21)
        for seqs, tokens in ((8, 256), (256, 8192))
    )
    # 1.3 GiB were once seen in sampling alone, where 1 GiB was kept free for everything.
    assert LIBRARY_BYTES < small < 1.5 * GIB < 3 * GIB < large < 5 * GIB
    assert logits_bytes(1, 100, BF16, 1) < logits_bytes(1, 100, BF16, 2)


M3: dict[str, Any] = {"hidden_size": 6144, "intermediate_size": 3072, "heads": 64, "kv_heads": 4, "head_dim": 192}


def of_head_blocks(config: FamilyConfig) -> FamilyConfig:
    """Returns a configuration with the blocks of MiniMax M3."""
    layers = []
    for layer in config.recipe.layers:
        part = layer.attention
        assert part is not None and part.head_blocks is not None
        index = part.head_blocks.index and replace(part.head_blocks.index, size=128, count=16, channels=128)
        layers.append(replace(layer, attention=replace(part, head_blocks=HeadBlocksRecipe(128, 64, index))))
    return replace(config, recipe=replace(config.recipe, layers=tuple(layers)), max_positions=2**16)


@pytest.mark.parametrize(("ranks", "spread"), [nightly(ranks, spread) for ranks in (1, 2) for spread in (False, True)])
def test_a_step_whose_heads_choose_takes_no_more_than_is_counted(tmp_path: Path, ranks: int, spread: bool) -> None:
    """A long prompt, or one and many answers beside each other."""
    saved = read_family_config(save_tiny("minimax-m3", tmp_path))
    decoder = of_head_blocks(wide(replace(saved, vocab_size=200_064, **M3), 3072, 3072))
    made, context = opened(decoder, ranks, spread), decoder.max_positions
    kernels, together, model, rows = made.kernels, made.together, made.model, made.rows
    (layout,) = rank_layouts(decoder, Dtype.BF16, 16, together)
    assert isinstance(layout, KvLayout)
    places, _ = cache_place(decoder, Dtype.BF16, 16, [context // 16], together)
    group = KvGroup(0, places[0], layout, layout.allocate(context // 16, META), 64 // ranks)
    blocks = decoder.head_blocks
    assert blocks is not None
    with torch.inference_mode(), LiveBytes() as live:
        ids = torch.empty(TOKENS, dtype=torch.int32, device=META)
        step = HeadBlockStep(kernels, group, rows, 0.1, blocks)
        model.logits(model.forward(ids, ids, StepCache((), head_blocks=step))[:ROWS])
    gathered = head_block_bytes(blocks, 4 // ranks, 64 // ranks, TOKENS, len(rows), context, 2)
    counted = step_bytes(decoder, BF16, ranks, TOKENS, ROWS) + gathered
    assert counted / 4 < live.peak <= counted
    scheduler = SchedulerConfig(max_num_seqs=len(rows), max_num_batched_tokens=TOKENS)
    steps = step_bytes(decoder, BF16, ranks, TOKENS, len(rows))
    assert workspace_bytes(decoder, scheduler, BF16, ranks, 0) > LIBRARY_BYTES + steps + gathered
