"""Qwen 2, with biased projections, and Qwen 3, with normalised heads, dense and with experts.

Qwen 3 Next and Qwen 3.5 have gated delta nets in most layers, and gated attention in the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import ClassVar

from pdserve.errors import ModelError
from pdserve.models.families.settings import (
    FULL,
    HEAD_NORMS,
    LINEAR,
    NONE,
    QKV,
    QKVO,
    SLIDING,
    Count,
    FamilySettings,
    check_experts,
    check_layer_types,
    gated,
    gated_expert,
    in_one_tensor,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    BlockIndexRecipe,
    DeltaNetRecipe,
    DraftRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    GatedStreamsRecipe,
    GateRecipe,
    HeadNorm,
    LayerRecipe,
    ModelRecipe,
    NgramRecipe,
    Norm,
    Rotary,
)
from pdserve_kernels.feed_forward import Activation, Scoring


class Qwen2Settings(FamilySettings, kw_only=True):
    """The last layers see a window, or those that ``layer_types`` names, if ``use_sliding_window`` allows it."""

    models: ClassVar[str] = "Qwen 2, Qwen 2.5, QwQ, DeepSeek R1's distilled Qwens"
    vocab_size: Count = 151_936
    intermediate_size: Count = 22_016
    num_key_value_heads: Count | None = 32
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def biases(self) -> frozenset[str]:
        return QKV

    def windows(self) -> tuple[int | None, ...]:
        window = self.sliding_window if self.use_sliding_window else None
        first = self.num_hidden_layers if window is None else self.max_window_layers
        usual = [SLIDING if i >= first else FULL for i in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, window)


class Qwen3Settings(Qwen2Settings, kw_only=True):
    """Qwen 3 has heads of 128 channels where a file does not say otherwise."""

    models: ClassVar[str] = "Qwen 3"
    head_norms: ClassVar[bool] = True
    head_dim: Count | None = 128

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE


class Qwen3MoeSettings(FamilySettings, kw_only=True):
    """Most layers have experts, and every layer sees a window if ``use_sliding_window`` allows it."""

    models: ClassVar[str] = "Qwen 3 30B A3B, 235B A22B"
    head_norms: ClassVar[bool] = True
    vocab_size: Count = 151_936
    hidden_size: Count = 2048
    intermediate_size: Count = 6144
    num_hidden_layers: Count = 24
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: Count | None = 4096
    num_experts: int = 128
    num_local_experts: int | None = None
    """What newer files call ``num_experts``."""
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        count = self.num_experts if self.num_local_experts is None else self.num_local_experts
        sparse = (index + 1) % self.decoder_sparse_step == 0 and index not in (self.mlp_only_layers or [])
        if count <= 0 or not sparse:
            return self.mlp()
        expert = gated_expert(self.moe_intermediate_size)
        return ExpertsRecipe(count, self.num_experts_per_tok, expert, normalised=self.norm_topk_prob)


class FlintSettings(Qwen3MoeSettings, kw_only=True):
    """RecursiveSI's Flint: windows, within which alone heads know positions, sinks, and experts chosen by sigmoid."""

    models: ClassVar[str] = "Flint"
    vocab_size: Count = 150_144
    num_hidden_layers: Count = 49
    head_dim: Count | None = 128
    max_position_embeddings: Count = 262_144
    sliding_window: Count | None = 513
    layer_types: list[str] | None = None
    num_experts: int = 256
    num_experts_per_tok: Count = 6
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 1024
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        self.mlp_only_layers = [0, 1] if self.mlp_only_layers is None else self.mlp_only_layers

    def windows(self) -> tuple[int | None, ...]:
        last = self.num_hidden_layers - 1
        usual = [FULL if index in (0, last) or index % 4 == 1 else SLIDING for index in range(last + 1)]
        return windows_of(self.layer_types, usual, last + 1, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None if self.windows()[index] is None else self.rotary()

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), sinks="self_attn.softmax_offset")

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        if not isinstance(part, ExpertsRecipe):
            return part
        shared = gated("mlp.shared_expert", self.shared_expert_intermediate_size)
        return replace(part, scoring=Scoring.SIGMOID, precise_router=True, shared=shared)


class Qwen2MoeSettings(Qwen3MoeSettings, kw_only=True):
    """Qwen 1.5 and 2 with experts: one more expert sees every token, weighed by a gate of its own."""

    models: ClassVar[str] = "Qwen 1.5 MoE A2.7B, Qwen 2 57B A14B"
    head_norms: ClassVar[bool] = False
    intermediate_size: Count = 5632
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 16
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    sliding_window: int | None = 4096
    num_experts: int = 60
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1408
    shared_expert_intermediate_size: Count = 5632
    qkv_bias: bool = True

    def biases(self) -> frozenset[str]:
        return QKV if self.qkv_bias else NONE

    def windows(self) -> tuple[int | None, ...]:
        window = (self.sliding_window or None) if self.use_sliding_window else None
        first = self.num_hidden_layers if window is None else self.max_window_layers
        usual = [SLIDING if i >= first else FULL for i in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, window)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        if not isinstance(part, ExpertsRecipe):
            return part
        shared = gated("mlp.shared_expert", self.shared_expert_intermediate_size)
        return replace(part, shared=shared, shared_gate="mlp.shared_expert_gate")


class Qwen2VlTextSettings(Qwen2Settings, kw_only=True):
    """The text part of a Qwen 2 or 2.5 VL."""

    three_axes: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Count = 152_064
    hidden_size: Count = 8192
    intermediate_size: Count = 29_568
    num_hidden_layers: Count = 80
    num_attention_heads: Count = 64
    num_key_value_heads: Count | None = 8
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 151_645
    max_window_layers: int = 80


class Qwen25OmniTextSettings(Qwen2VlTextSettings, kw_only=True):
    """The text part of a Qwen 2.5 Omni."""

    hidden_size: Count = 3584
    intermediate_size: Count = 18_944
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 28
    num_key_value_heads: Count | None = 4
    max_position_embeddings: Count = 32_768
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = None
    sliding_window: Count | None = 32_768
    max_window_layers: int = 28


class Qwen3VlTextSettings(FamilySettings, kw_only=True):
    """The text part of a Qwen 3 VL. Every layer sees all tokens."""

    three_axes: ClassVar[bool] = True
    head_norms: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Count = 151_936
    intermediate_size: Count = 22_016
    num_key_value_heads: Count | None = 32
    head_dim: Count | None = 128
    max_position_embeddings: Count = 128_000
    eos_token_id: int | list[int] | None = None

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE


class Qwen3VlMoeTextSettings(Qwen3MoeSettings, kw_only=True):
    """The text part of a Qwen 3 VL with experts, of which one tensor ``[experts, in, out]`` holds all of a layer."""

    three_axes: ClassVar[bool] = True
    default_theta: ClassVar[float] = 500_000.0
    intermediate_size: Count = 5632
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 16
    max_position_embeddings: Count = 128_000
    num_experts: int = 60
    num_experts_per_tok: Count = 4
    moe_intermediate_size: Count = 1408

    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.num_hidden_layers

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        if not isinstance(part, ExpertsRecipe):
            return part
        part = in_one_tensor(part)
        return replace(part, expert=replace(part.expert, transposed=True), normalised=True, turned_by_shape=True)


class Qwen3OmniMoeTextSettings(Qwen3MoeSettings, kw_only=True):
    """The text part of a Qwen 3 Omni. Every layer sees all tokens."""

    three_axes: ClassVar[bool] = True
    default_theta: ClassVar[float] = 1_000_000.0
    vocab_size: Count = 3584
    intermediate_size: Count = 18_944
    num_hidden_layers: Count = 28
    num_attention_heads: Count = 28
    norm_topk_prob: bool = True

    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.num_hidden_layers


APART = tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
"""The projections of a delta net in Qwen 3.5."""


class DeltaNetSettings(FamilySettings, kw_only=True):
    """What these families share."""

    partly_turned: ClassVar[bool] = True
    turned_part: ClassVar[float] = 0.25
    inner: ClassVar[tuple[str, ...]] = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
    layer_kinds: ClassVar[tuple[str, ...]] = (FULL, LINEAR)
    head_dim: Count | None = 256
    max_position_embeddings: Count = 32_768
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32

    def check(self) -> None:
        super().check()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ModelError(
                f"{self.linear_num_value_heads} value heads (linear_num_value_heads) cannot be spread evenly over "
                f"{self.linear_num_key_heads} key heads"
            )
        check_layer_types(self.kinds(), self.num_hidden_layers, *self.layer_kinds)

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        every = self.full_attention_interval
        usual = [LINEAR if (index + 1) % every else FULL for index in range(self.num_hidden_layers)]
        return usual if self.layer_types is None else self.layer_types

    def norm(self) -> Norm:
        return Norm(self.rms_norm_eps, offset=1.0)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), norms=HeadNorm(self.norm(), *HEAD_NORMS), gate=GateRecipe())

    def delta_net(self) -> DeltaNetRecipe:
        return DeltaNetRecipe(
            heads=self.linear_num_key_heads,
            group=self.linear_num_value_heads // self.linear_num_key_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            width=self.linear_conv_kernel_dim,
            norm=Norm(self.rms_norm_eps),
            inner=self.inner,
        )

    def recipe(self) -> ModelRecipe:
        # The text part of a larger model, saved alone, may keep its names.
        renamed = (("model.language_model.", "model."),)
        last = LayerRecipe(self.attention(0), self.feed_forward(self.num_hidden_layers - 1), self.norm())
        draft = DraftRecipe(
            last,
            tensors="mtp.",
            prefix="mtp.layers.0.",
            projection="mtp.fc",
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            last_norm="mtp.norm",
        )
        return replace(super().recipe(), renamed=renamed, draft=draft)

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        return replace(layer, attention=None, mixer=self.delta_net()) if self.kinds()[index] == LINEAR else layer


class Qwen35Settings(DeltaNetSettings, kw_only=True):
    """Queries, gates, betas and steps have projections of their own."""

    models: ClassVar[str] = "Qwen 3.5"
    inner: ClassVar[tuple[str, ...]] = APART
    three_axes: ClassVar[bool] = True
    vocab_size: Count = 248_320
    intermediate_size: Count = 12_288
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 4


class Qwen3NextSettings(DeltaNetSettings, kw_only=True):
    """Most layers have experts, and one more expert sees every token, weighed by a gate of its own."""

    models: ClassVar[str] = "Qwen 3 Next 80B A3B"
    vocab_size: Count = 151_936
    hidden_size: Count = 2048
    intermediate_size: Count = 5632
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 16
    num_key_value_heads: Count | None = 2
    num_experts: int = 512
    num_experts_per_tok: Count = 10
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        sparse = (index + 1) % self.decoder_sparse_step == 0 and index not in (self.mlp_only_layers or [])
        return self.experts() if self.num_experts > 0 and sparse else self.mlp()

    def experts(self) -> ExpertsRecipe:
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            gated_expert(self.moe_intermediate_size),
            normalised=self.norm_topk_prob,
            shared=gated("mlp.shared_expert", self.shared_expert_intermediate_size),
            shared_gate="mlp.shared_expert_gate",
        )


class Qwen35MoeSettings(Qwen3NextSettings, kw_only=True):
    """All layers have experts, of which one tensor holds all of a layer."""

    models: ClassVar[str] = "Qwen 3.5 35B A3B, 122B A10B, 397B A17B"
    inner: ClassVar[tuple[str, ...]] = APART
    three_axes: ClassVar[bool] = True
    vocab_size: Count = 248_320
    num_hidden_layers: Count = 40
    num_experts: int = 256
    num_experts_per_tok: Count = 8

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        usual = self.experts()
        return replace(in_one_tensor(usual), apart=usual.expert, normalised=True)


OUTPUT_GATES = {"silu": Activation.SILU, "sigmoid": Activation.SIGMOID}
"""The values of ``output_gate_type``."""
INDEXED = "indexed_attention"
MOST_HASHED = 2**63 - 1
"""The largest product of an id and its multiplier."""


MOST_TABLES, MOST_ROWS = 4096, 2**32
"""The most tables of n-grams, and rows of one: a file that names more would keep a search for primes busy."""


class Qwen4ExpSettings(Qwen35MoeSettings, kw_only=True):
    """Several residuals; attention to chosen blocks of tokens; and vectors of hashed n-grams before some layers."""

    models: ClassVar[str] = "Qwen 4 Exp"
    turned_part: ClassVar[float] = 1.0
    layer_kinds: ClassVar[tuple[str, ...]] = (FULL, INDEXED, LINEAR)
    num_experts: int = 512
    num_experts_per_tok: Count = 10
    hc_count: int = 4
    hc_lowrank: Count = 320
    ple_layer_ids: list[int] | None = None
    """The layers before which n-grams are added, from 1 on."""
    ple_embed_dim: Count | None = None
    ple_conv_kernel_size: Count = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: Count = 128
    seed: int = 1234
    indexer_n_heads: Count | None = None
    indexer_kv_heads: Count | None = None
    indexer_head_dim: Count | None = None
    indexer_budget: Count | None = None
    indexer_compress_ratio: Count | None = None
    output_gate_type: str | None = None

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok, self.num_experts)
        if self.gate_of_nets() not in OUTPUT_GATES:
            known = ", ".join(repr(each) for each in OUTPUT_GATES)
            raise ModelError(f"output_gate_type {self.gate_of_nets()!r} is not supported; supported: {known}")
        if self.hc_count < 2:
            raise ModelError(f"hc_count {self.hc_count} is not supported; there have to be at least 2 residuals")
        if set(self.kinds()) != {LINEAR}:
            self._check_index()
        if self.ple_layer_ids:
            self._check_ngrams(self.ple_layer_ids)

    def _check_index(self) -> None:
        names = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
        lacking = [name for name in names if getattr(self, name) is None]
        if lacking:
            raise ModelError(f"layers with attention need {' and '.join(lacking)}")
        if self.indexer_kv_heads != 1:
            raise ModelError(f"indexer_kv_heads {self.indexer_kv_heads} is not supported; supported: 1")
        budget, every, channels = self.indexer_budget or 1, self.indexer_compress_ratio or 1, self.indexer_head_dim or 1
        if budget % every:
            raise ModelError(f"indexer_budget {budget} is no multiple of indexer_compress_ratio {every}")
        turned = self.turned_channels() or self.head_size()
        if turned > channels:
            raise ModelError(f"index keys of {channels} channels (indexer_head_dim) cannot turn {turned} of them")

    def _check_ngrams(self, layers: list[int]) -> None:
        kinds = self.kinds()
        if not all(1 <= layer <= len(kinds) and kinds[layer - 1] == LINEAR for layer in layers):
            raise ModelError(f"ple_layer_ids {layers} have to be layers with {LINEAR!r}, of which the first is 1")
        heads, channels = self.ngram_heads(), self.ngram_channels()
        if heads <= 0 or channels % heads:
            raise ModelError(
                f"{channels} channels (ple_embed_dim) cannot be spread evenly over {heads} heads of n-grams"
            )
        if heads * len(layers) > MOST_TABLES or self.ngram_vocab_size_base > MOST_ROWS:
            raise ModelError(
                f"{heads * len(layers)} tables of {self.ngram_vocab_size_base} n-grams (heads_per_ngram, "
                f"ngram_vocab_size_base) are not supported; supported: {MOST_TABLES} of {MOST_ROWS}"
            )
        if self.ple_conv_kernel_size < 2:
            raise ModelError("ple_conv_kernel_size 1 is not supported; the convolution has to see at least 2 tokens")
        if not self.end_tokens():
            raise ModelError("ple_layer_ids need an eos_token_id, which n-grams end at")

    def ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    def ngram_channels(self) -> int:
        """Returns the channels of a token's vectors of all heads."""
        return self.ple_embed_dim or self.hidden_size

    def end_tokens(self) -> list[int]:
        ids = self.eos_token_id
        return ids if isinstance(ids, list) else [] if ids is None else [ids]

    def gate_of_nets(self) -> str:
        return self.output_gate_type or self.hidden_act

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), blocks=self.blocks())

    def blocks(self) -> BlockIndexRecipe | None:
        heads, channels = self.indexer_n_heads, self.indexer_head_dim
        budget, every = self.indexer_budget, self.indexer_compress_ratio
        if heads is None or channels is None or budget is None or every is None:
            return None
        return BlockIndexRecipe(budget // every, every, heads, channels, self.norm())

    def delta_net(self) -> DeltaNetRecipe:
        return replace(super().delta_net(), gate=OUTPUT_GATES[self.gate_of_nets()])

    def experts(self) -> ExpertsRecipe:
        return replace(super().experts(), normalised=self.norm_topk_prob)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        usual = self.experts()
        return replace(in_one_tensor(usual), apart=usual.expert)

    def layer(self, index: int) -> LayerRecipe:
        streams = GatedStreamsRecipe(self.hc_count, self.hc_lowrank, self.norm())
        return replace(super().layer(index), norms=(), streams=streams, ngrams=self.ngrams(index))

    def ngrams(self, index: int) -> NgramRecipe | None:
        """Returns what is added before a layer; None if that is nothing."""
        layers = sorted(set(self.ple_layer_ids or ()))
        if index + 1 not in layers:
            return None
        place, heads, divisor = layers.index(index + 1), self.ngram_heads(), self.make_ngram_vocab_size_divisible_by
        sizes = tuple(islice(primes_from(self.ngram_vocab_size_base), place * heads, (place + 1) * heads))
        return NgramRecipe(
            hash_multipliers(self.vocab_size, self.ngram_size, place, self.seed),
            sizes,
            -(-sum(sizes) // divisor) * divisor,
            self.ngram_channels() // heads,
            self.end_tokens()[0],
            self.ple_conv_kernel_size,
            self.hc_count * self.hidden_size,
            self.norm(),
        )

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), draft=None, unused=("mtp.", "model.visual."), last_norm="")


def primes_from(first: int) -> Iterator[int]:
    """Yields the primes that are not less than ``first``, which the tables of n-grams have as many rows as."""
    for number in count(max(first, 2)):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number


def hash_multipliers(vocab_size: int, ngram_size: int, layer: int, seed: int) -> tuple[int, ...]:
    """Returns ``NgramRecipe.multipliers`` of the layer with number ``layer`` of those with n-grams.

    They are odd numbers of SplitMix64 (Steele et al., 2014).
    """
    bound, first = max(1, MOST_HASHED // vocab_size // 2), seed + 10007 * layer
    return tuple(2 * (_splitmix(first + SPLITMIX_STEP * (number + 1)) % bound) + 1 for number in range(ngram_size))


SPLITMIX_STEP = 0x9E3779B97F4A7C15
_64_BITS = 2**64 - 1


def _splitmix(value: int) -> int:
    value = (value + SPLITMIX_STEP) & _64_BITS
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> shift)) * factor & _64_BITS
    return value ^ (value >> 31)


class LaraMiniSettings(Qwen3NextSettings, kw_only=True):
    """Translated's Lara: windows in some layers, beside layers that see all and know no positions; no gated heads."""

    models: ClassVar[str] = "Lara 4 Mini"
    head_norms: ClassVar[bool] = True
    partly_turned: ClassVar[bool] = False
    turned_part: ClassVar[float] = 1.0
    inner: ClassVar[tuple[str, ...]] = ("linear_attn.in_proj",)
    layer_kinds: ClassVar[tuple[str, ...]] = (FULL, SLIDING, LINEAR)
    hidden_size: Count = 1024
    num_hidden_layers: Count = 34
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 128
    max_position_embeddings: Count = 131_072
    eos_token_id: int | list[int] | None = 151_643
    tie_word_embeddings: bool = True
    sliding_window: Count | None = 512
    linear_num_key_heads: Count = 8
    linear_num_value_heads: Count = 16
    num_experts: int = 128
    num_experts_per_tok: Count = 4

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok, self.num_experts)

    def biases(self) -> frozenset[str]:
        return QKVO if self.attention_bias else NONE

    def kinds(self) -> list[str]:
        pattern = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
        usual = [pattern[index % len(pattern)] for index in range(self.num_hidden_layers)]
        return usual if self.layer_types is None else self.layer_types

    def windows(self) -> tuple[int | None, ...]:
        kinds = [SLIDING if kind == SLIDING else FULL for kind in self.kinds()]
        return windows_of(kinds, kinds, self.num_hidden_layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self.kinds()[index] == SLIDING else None

    def norm(self) -> Norm:
        return FamilySettings.norm(self)

    def attention(self, index: int) -> AttentionRecipe:
        return FamilySettings.attention(self, index)

    def delta_net(self) -> DeltaNetRecipe:
        return replace(super().delta_net(), gated_norm="linear_attn.out_norm")

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return replace(in_one_tensor(self.experts()), shared_gate="", precise_router=True)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), draft=None)
