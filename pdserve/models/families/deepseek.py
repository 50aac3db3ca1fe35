"""DeepSeek V2 and V3, and families with their attention: keys and values of all heads come from one latent a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.settings import (
    FULL,
    LINEAR,
    NONE,
    SLIDING,
    Count,
    FamilySettings,
    RotarySettings,
    check_layer_types,
    draft_layer,
    gated,
    gated_expert,
    growing,
    in_one_tensor,
    renamed_in_layers,
    rotary_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    EntriesRecipe,
    EntryIndexRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    GateRecipe,
    HeadScales,
    IndexRecipe,
    KimiDeltaRecipe,
    LatentRecipe,
    LayerRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
    NormKind,
    NormOrder,
    Rotary,
    SharedKvRecipe,
    StreamsRecipe,
)
from pdserve_kernels.feed_forward import LIMITED_AT, Activation, GroupScore, Scoring

LATENT_EPS = 1e-6
"""That of the norms of latents, whatever that of the other norms is."""
KEY, VALUE, OUT = "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj"
DENSE, SPARSE = "dense", "sparse"
INDEXED = "indexed_attention"
OWN, SHARED = "full", "shared"
SPARSE_ENTRIES, FEW_ENTRIES = "compressed_sparse_attention", "heavily_compressed_attention"
KIND_OF_RATIO = {0: SLIDING, 4: SPARSE_ENTRIES, 128: FEW_ENTRIES}
"""The kinds of a DeepSeek V4's layers, by the tokens of an entry, as its own files have them."""
BY_TOKEN, ROUTED = "hash_moe", "moe"
KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "num_local_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
"""What files of a Kimi Linear call these settings."""
KIMI_CONSTANTS = {
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
}
"""The only values of these settings of a Kimi Linear that are computed."""
LARGE4_PARTS = ("vision_encoder.", "patch_merger.", "pre_mm_projector_norm.", "vision_language_adapter.", "mtp_dspark.")
"""What names begin with of tensors of a Mistral Large 4's other parts."""
HY4_NAMES = (
    *(
        (stored, own)
        for part, own in (("hc_attn_layer", "hc_attn_"), ("hc_mlp_layer", "hc_ffn_"))
        for stored in (f"hc_pre.{part}.hc_", f"{part}.hc_pre.hc_", f"{part}.hc_")
    ),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("self_attn.learnable_sink_param", "self_attn.sinks"),
    *((f"{part}.linear_gate.", f"{part}.gate_proj.") for part in ("self_attn", "mlp", "mlp.shared_experts")),
)
"""What tensors of a Hy 4's layer are called in its files, as transformers reads them, and in its recipe."""
METHODS = ("greedy", "group_limited_greedy")
"""How a DeepSeek V2 chooses experts: from all, or from some groups of them."""


class RoutedSettings(Protocol):
    """The settings of DeepSeek V3's experts, as many families have them."""

    @property
    def n_routed_experts(self) -> int: ...
    @property
    def n_shared_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def routed_scaling_factor(self) -> float | None: ...
    @property
    def n_group(self) -> int: ...
    @property
    def topk_group(self) -> int: ...
    @property
    def norm_topk_prob(self) -> bool: ...


def routed(settings: RoutedSettings) -> ExpertsRecipe:
    """Returns DeepSeek V3's experts: chosen by corrected scores, in groups, beside a shared one if there is one."""
    channels, scale = settings.moe_intermediate_size, settings.routed_scaling_factor
    shared = channels * settings.n_shared_experts
    return ExpertsRecipe(
        settings.n_routed_experts,
        settings.num_experts_per_tok,
        gated_expert(channels),
        scoring=Scoring.SIGMOID,
        normalised=settings.norm_topk_prob,
        correction="mlp.gate.e_score_correction_bias",
        precise_router=True,
        groups=settings.n_group,
        chosen_groups=settings.topk_group,
        scale=1.0 if scale is None else scale,
        smallest_sum=1e-20,
        shared=gated("mlp.shared_experts", shared) if shared else None,
    )


def with_experts(layer: LayerRecipe, experts: ExpertsRecipe) -> LayerRecipe:
    """Returns a layer that has ``experts`` if it has none."""
    return layer if isinstance(layer.feed_forward, ExpertsRecipe) else replace(layer, feed_forward=experts)


class LatentSettings(FamilySettings, kw_only=True):
    """A family with latent attention."""

    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    rope_interleave: bool = True

    def head_size(self) -> int:
        """Returns the channels that the cache has of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def kv_heads(self) -> int:
        # Each head has keys and values of its own, whatever the setting says, and all of them come from one latent.
        return 1

    def turned_channels(self) -> int | None:
        return None

    def rotary(self) -> Rotary:
        return replace(super().rotary(), interleaved=self.rope_interleave)

    def attention_scale(self) -> float:
        scale: float = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        given = self.scaling()
        if (given.rope_type or given.type or "default") == "default" or not given.mscale_all_dim:
            return scale
        if given.factor is None or given.factor <= 1:
            return scale
        magnitude = 0.1 * given.mscale_all_dim * math.log(given.factor) + 1.0
        return scale * magnitude * magnitude

    def attention(self, index: int) -> AttentionRecipe:
        rank = self.q_lora_rank or 0
        latent = LatentRecipe(
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
            Norm(LATENT_EPS),
            rank,
        )
        biased = frozenset({latent.query_down, KEY, OUT}) if self.attention_bias else NONE
        query = "self_attn.q_b_proj" if rank else "self_attn.q_proj"
        return AttentionRecipe(
            self.rotary_of_layer(index), query=query, key=KEY, value=VALUE, out=OUT, biased=biased, latent=latent
        )

    def _check_heads(self) -> None:
        if self.qk_rope_head_dim % 2 or self.head_size() % 2:
            raise ModelError(
                f"a latent of {self.kv_lora_rank} channels and {self.qk_rope_head_dim} turned ones is not supported; "
                "both numbers have to be even"
            )


class YoutuSettings(LatentSettings, kw_only=True):
    models: ClassVar[str] = "Youtu LLM 2B"
    vocab_size: Count = 128_256
    hidden_size: Count = 2048
    intermediate_size: Count = 6144
    num_attention_heads: Count = 16
    max_position_embeddings: Count = 131_072
    eos_token_id: int | list[int] | None = 128_001
    tie_word_embeddings: bool = True


class MiniCpm3Settings(LatentSettings, kw_only=True):
    """Embedding, residuals and logits have factors. Halves of the turned channels are turned against each other."""

    models: ClassVar[str] = "MiniCPM 3 4B"
    vocab_size: Count = 73_448
    hidden_size: Count = 2560
    intermediate_size: Count = 6400
    num_hidden_layers: Count = 62
    num_attention_heads: Count = 40
    max_position_embeddings: Count = 32_768
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    kv_lora_rank: Count = 256
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 64
    qk_rope_head_dim: Count = 32
    v_head_dim: Count | None = None  # type: ignore[assignment]  # a share of the hidden channels unless a file says it
    scale_emb: float = 12.0
    scale_depth: float | None = 1.4
    dim_model_base: Count | None = 256

    def __post_init__(self) -> None:
        self.v_head_dim = self.v_head_dim or self.hidden_size // self.num_attention_heads

    def rotary(self) -> Rotary:
        return replace(super().rotary(), interleaved=False)

    def layer(self, index: int) -> LayerRecipe:
        depth = self.num_hidden_layers**0.5
        return replace(super().layer(index), residual_scale=(self.scale_depth or depth) / depth)

    def recipe(self) -> ModelRecipe:
        factor = 1.0 if self.dim_model_base is None else self.dim_model_base / self.hidden_size
        return replace(super().recipe(), embedding_scale=self.scale_emb, logits_scale=factor)


class DeepseekV2Settings(LatentSettings, kw_only=True):
    """Experts are chosen by softmax, V2's from groups, beside shared ones."""

    models: ClassVar[str] = "DeepSeek V2, V2 Lite, V2.5, Coder V2"
    vocab_size: Count = 102_400
    num_hidden_layers: Count = 32
    max_position_embeddings: Count = 2048
    moe_intermediate_size: Count = 1407
    n_routed_experts: Count = 64
    n_shared_experts: Count = 2
    num_experts_per_tok: Count | None = None
    routed_scaling_factor: float = 1.0
    n_group: Count | None = None
    topk_group: Count | None = None
    topk_method: str | None = "greedy"
    norm_topk_prob: bool | None = False
    scoring_func: str = "softmax"
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 0

    def check(self) -> None:
        super().check()
        _check_routing(self.scoring_func, "softmax", self.moe_layer_freq)
        if self.norm_topk_prob:
            raise ModelError("norm_topk_prob of a DeepSeek V2, weights of experts with a sum of one, is not supported")
        if self.topk_method not in METHODS:
            raise ModelError(f"topk_method {self.topk_method!r} is not supported; supported: {', '.join(METHODS)}")
        if self.topk_method == METHODS[1] and (self.n_group is None or self.topk_group is None):
            raise ModelError("n_group and topk_group, the groups of experts and how many are chosen, are missing")
        if self.num_experts_per_tok is None and self.first_k_dense_replace < self.num_hidden_layers:
            raise ModelError("num_experts_per_tok, the number of experts of a token, is missing")

    def rotary(self) -> Rotary:
        # No file says otherwise, and transformers would not read it.
        return replace(super().rotary(), interleaved=True)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if index < self.first_k_dense_replace:
            return self.mlp()
        channels = self.moe_intermediate_size
        grouped = self.topk_method == METHODS[1]
        return ExpertsRecipe(
            self.n_routed_experts,
            self.num_experts_per_tok or 1,
            gated_expert(channels),
            precise_router=True,
            groups=(self.n_group or 1) if grouped else 1,
            chosen_groups=(self.topk_group or 1) if grouped else 1,
            group_score=GroupScore.BEST,
            scale=self.routed_scaling_factor,
            shared=gated("mlp.shared_experts", channels * self.n_shared_experts, biased=self.mlp_bias),
        )


class DeepseekV3Settings(LatentSettings, kw_only=True):
    """Experts are chosen by corrected scores, from groups, beside a shared one. The first layers have none."""

    models: ClassVar[str] = "DeepSeek V3, R1, V3.1, Kimi K2"
    scored_by: ClassVar[str] = "sigmoid"
    """The only value of ``scoring_func`` that is computed."""
    vocab_size: Count = 129_280
    hidden_size: Count = 7168
    intermediate_size: Count = 18_432
    num_hidden_layers: Count = 61
    num_attention_heads: Count = 128
    max_position_embeddings: Count = 4096
    eos_token_id: int | list[int] | None = 1
    moe_intermediate_size: Count = 2048
    n_routed_experts: Count = 256
    n_shared_experts: Count = 1
    num_experts_per_tok: Count = 8
    routed_scaling_factor: float = 2.5
    n_group: Count = 8
    topk_group: Count = 4
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"
    moe_layer_freq: int = 1
    first_k_dense_replace: int = 3

    def check(self) -> None:
        super().check()
        _check_routing(self.scoring_func, self.scored_by, self.moe_layer_freq)

    def kinds(self) -> list[str]:
        """Returns for each layer whether its feed-forward part is one, or of experts."""
        return first_dense(self.first_k_dense_replace, self.num_hidden_layers)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return self.mlp() if self.kinds()[index] == DENSE else routed(self)

    def recipe(self) -> ModelRecipe:
        whole, count = super().recipe(), self.num_hidden_layers
        return replace(whole, draft=draft_layer(with_experts(whole.layers[-1], routed(self)), count))


class SarvamMlaSettings(DeepseekV3Settings, kw_only=True):
    models: ClassVar[str] = "Sarvam 105B"
    vocab_size: Count = 262_144
    hidden_size: Count = 4096
    intermediate_size: Count = 16_384
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 64
    n_routed_experts: Count = 128
    q_lora_rank: Count | None = None
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: int = 1
    num_experts: Count | None = None
    num_shared_experts: Count | None = None

    def __post_init__(self) -> None:
        self.n_routed_experts = self.num_experts or self.n_routed_experts
        self.n_shared_experts = self.num_shared_experts or self.n_shared_experts
        given = self.rope_scaling
        if given is not None and "deepseek_yarn" in (given.rope_type, given.type):
            self.rope_scaling = msgspec.structs.replace(given, rope_type="yarn", type=None)


class Glm4MoeLiteSettings(DeepseekV3Settings, kw_only=True):
    models: ClassVar[str] = "GLM 4.7 Flash"
    dense_first: ClassVar[bool] = False
    """Whether ``first_k_dense_replace`` may be another number than 1."""
    vocab_size: Count = 154_880
    hidden_size: Count = 2048
    intermediate_size: Count = 10_240
    num_hidden_layers: Count = 47
    num_attention_heads: Count = 20
    max_position_embeddings: Count = 202_752
    rms_norm_eps: float = 1e-5
    moe_intermediate_size: Count = 1536
    n_routed_experts: Count = 64
    num_experts_per_tok: Count = 4
    routed_scaling_factor: float = 1.8
    q_lora_rank: Count | None = 768
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: int = 1
    mlp_layer_types: list[str] | None = None

    def check(self) -> None:
        super().check()
        if self.first_k_dense_replace != 1 and not self.dense_first:
            raise ModelError(f"first_k_dense_replace {self.first_k_dense_replace} is not supported; supported: 1")
        check_kinds(self.kinds(), self.num_hidden_layers)

    def kinds(self) -> list[str]:
        return super().kinds() if self.mlp_layer_types is None else self.mlp_layer_types


class DeepseekV32Settings(DeepseekV3Settings, kw_only=True):
    """DeepSeek V3, with an indexer in each layer, which chooses the tokens that are attended to."""

    models: ClassVar[str] = "DeepSeek V3.2"
    query_vector: ClassVar[bool] = True
    """Whether queries come from a shorter vector, and those of the indexer from that, too."""
    index_interleaved: ClassVar[bool] = False
    """Whether the indexer turns neighbouring channels against each other, and not the halves."""
    max_position_embeddings: Count = 163_840
    mlp_layer_types: list[str] | None = None
    layer_types: list[str] | None = None
    index_topk: Count = 2048
    index_head_dim: Count = 128
    index_n_heads: Count = 64

    def check(self) -> None:
        super().check()
        check_kinds(self.kinds(), self.num_hidden_layers)
        if self.query_vector and self.q_lora_rank is None:
            raise ModelError("q_lora_rank, the channels that the queries of an indexer come from, is missing")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ModelError(
                f"an indexer with heads of {self.index_head_dim} channels cannot turn {self.qk_rope_head_dim} of them"
            )
        self._check_layers()

    def _check_layers(self) -> None:
        """Raises ModelError unless the kinds of layers are known."""
        if self.layer_types is not None and set(self.layer_types) != {INDEXED}:
            raise ModelError(f"layer_types must be {INDEXED!r} for each of the layers")

    def kinds(self) -> list[str]:
        return super().kinds() if self.mlp_layer_types is None else self.mlp_layer_types

    def head_size(self) -> int:
        return super().head_size() + self.index_head_dim

    def rotary(self) -> Rotary:
        return replace(super().rotary(), interleaved=True)

    def index(self, index: int) -> IndexRecipe:
        """Returns the indexer of a layer."""
        return IndexRecipe(self.index_topk, self.index_n_heads, self.index_head_dim, self.index_interleaved)

    def attention(self, index: int) -> AttentionRecipe:
        part = super().attention(index)
        assert part.latent is not None
        return replace(part, latent=replace(part.latent, index=self.index(index)))


class GlmMoeDsaSettings(DeepseekV32Settings, kw_only=True):
    """DeepSeek V3.2's attention, of which some layers may take what a layer before them has chosen."""

    models: ClassVar[str] = "GLM 5"
    index_interleaved: ClassVar[bool] = True
    vocab_size: Count = 154_880
    hidden_size: Count = 6144
    intermediate_size: Count = 12_288
    num_hidden_layers: Count = 78
    num_attention_heads: Count = 64
    max_position_embeddings: Count = 202_752
    rms_norm_eps: float = 1e-5
    q_lora_rank: Count | None = 2048
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256
    n_group: Count = 1
    topk_group: Count = 1
    index_n_heads: Count = 32
    indexer_types: list[str] | None = None
    index_topk_pattern: str | list[str] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2

    def check(self) -> None:
        super().check()
        check_sources(self.sources(), self.num_hidden_layers)

    def sources(self) -> list[str]:
        """Returns for each layer whether it chooses tokens itself, or takes those of the layer before it."""
        if self.indexer_types is not None:
            return self.indexer_types
        if self.index_topk_pattern is not None:
            return [{"F": OWN, "S": SHARED}.get(kind, kind) for kind in self.index_topk_pattern]
        every, offset = max(self.index_topk_freq, 1), self.index_skip_topk_offset
        return [OWN if max(i - offset + 1, 0) % every == 0 else SHARED for i in range(self.num_hidden_layers)]

    def index(self, index: int) -> IndexRecipe:
        return replace(super().index(index), shared=self.sources()[index] == SHARED)

    def recipe(self) -> ModelRecipe:
        whole = super().recipe()
        assert whole.draft is not None
        # The first layer has an indexer of its own, as the one that drafts has.
        attention = whole.layers[0].attention
        return replace(whole, draft=replace(whole.draft, layer=replace(whole.draft.layer, attention=attention)))


class Hy4Settings(DeepseekV32Settings, kw_only=True):
    """Tencent's Hy 4: DeepSeek V3.2's attention with gated heads and sinks, and several residuals, which are not mixed.

    A layer may take what a layer before it has chosen. Halves of turned channels are turned against each other, and the
    indexer's are the last of a head.
    """

    models: ClassVar[str] = "Hy 4 Preview"
    vocab_size: Count = 120_832
    hidden_size: Count = 2816
    intermediate_size: Count = 6912
    num_hidden_layers: Count = 34
    num_attention_heads: Count = 32
    max_position_embeddings: Count = 262_144
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 120_025
    moe_intermediate_size: Count = 768
    routed_scaling_factor: float = 2.827
    qk_nope_head_dim: Count = 192
    v_head_dim: Count = 256
    n_group: Count = 1
    topk_group: Count = 1
    first_k_dense_replace: int = 1
    index_n_heads: Count = 16
    indexer_types: list[str] | None = None
    hc_mult: Count = 4
    hc_magnitude: float = 2.0
    hc_eps: float = 1e-6
    swiglu_limit: float = LIMITED_AT

    def check(self) -> None:
        super().check()
        check_sources(self.sources(), self.num_hidden_layers)
        if self.swiglu_limit != LIMITED_AT:
            raise ModelError(f"swiglu_limit {self.swiglu_limit!r} is not supported; supported: {LIMITED_AT!r}")
        if self.first_k_dense_replace != 1 and self.mlp_layer_types is None:
            raise ModelError(f"first_k_dense_replace {self.first_k_dense_replace} is not supported; supported: 1")

    def rotary(self) -> Rotary:
        return replace(super().rotary(), interleaved=False)

    def sources(self) -> list[str]:
        """Returns for each layer whether it chooses tokens itself, or takes those of the layer before it."""
        usual = [OWN if index == 0 or index % 4 == 1 else SHARED for index in range(self.num_hidden_layers)]
        return usual if self.indexer_types is None else self.indexer_types

    def index(self, index: int) -> IndexRecipe:
        norm = Norm(self.rms_norm_eps, NormKind.LAYER, biased=True)
        return replace(super().index(index), turns_last=True, norm=norm, shared=self.sources()[index] == SHARED)

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), gate=GateRecipe("self_attn.gate_proj"), sinks="self_attn.sinks")

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        if not isinstance(part, ExpertsRecipe):
            return part
        part = in_one_tensor(part)
        return replace(part, expert=replace(part.expert, activation=Activation.LIMITED_SILU))

    def layer(self, index: int) -> LayerRecipe:
        streams = StreamsRecipe(
            self.hc_mult, 0, self.hc_eps, self.norm(), magnitude=self.hc_magnitude, output_eps=self.hc_eps
        )
        return replace(super().layer(index), streams=streams)

    def recipe(self) -> ModelRecipe:
        heads = ("hc_pre.hc_head.hc_head_", "hc_head.hc_pre.hc_head_", "hc_head.hc_head_")
        renamed = [(f"model.{name}", "model.hc_head.hc_") for name in heads]
        renamed += [
            (f"model.layers.{index}.{stored}", f"model.layers.{index}.{own}")
            for index in range(self.num_hidden_layers)
            for stored, own in HY4_NAMES
        ]
        whole = replace(super().recipe(), precise_head=True, draft=None)
        return replace(whole, renamed=tuple(renamed), unused=("model.mtp_layers.",))


class Hy4VlTextSettings(Hy4Settings, kw_only=True):
    """The text part of Hy 4, which turns neighbouring channels against each other."""

    models: ClassVar[str] = "Hy 4"
    three_axes: ClassVar[bool] = True
    index_interleaved: ClassVar[bool] = True
    hidden_size: Count = 6144
    intermediate_size: Count = 18_432
    num_hidden_layers: Count = 78
    num_attention_heads: Count = 64
    moe_intermediate_size: Count = 2048
    q_lora_rank: Count | None = 2048
    index_n_heads: Count = 32

    def rotary(self) -> Rotary:
        return replace(super().rotary(), interleaved=True)

    def attention(self, index: int) -> AttentionRecipe:
        part = super().attention(index)
        assert part.latent is not None
        return replace(part, latent=replace(part.latent, norm=self.norm()))


class AxK1Settings(Glm4MoeLiteSettings, kw_only=True):
    """The outputs of experts are normalised."""

    dense_first: ClassVar[bool] = True

    models: ClassVar[str] = "A.X K1"
    vocab_size: Count = 163_840
    hidden_size: Count = 7168
    intermediate_size: Count = 18_432
    num_hidden_layers: Count = 61
    num_attention_heads: Count = 64
    max_position_embeddings: Count = 32_768
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = 163_691
    moe_intermediate_size: Count = 2048
    n_routed_experts: Count = 192
    num_experts_per_tok: Count = 8
    routed_scaling_factor: float = 2.5
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Count = 128
    v_head_dim: Count = 128
    n_group: Count = 8
    topk_group: Count = 4
    moe_layer_freq: int = 1

    def check(self) -> None:
        super().check()
        if self.q_lora_rank is None:
            raise ModelError("q_lora_rank, the channels that queries come from, is missing")

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if self.kinds()[index] == DENSE:
            return layer
        before, feed = layer.norms
        return replace(layer, norms=(before, "", feed, "post_mlp_layernorm"), order=NormOrder.SANDWICH)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        part = super().feed_forward(index)
        # The released files have no correction.
        return replace(part, correction_optional=True) if isinstance(part, ExpertsRecipe) else part

    def recipe(self) -> ModelRecipe:
        whole = super().recipe()
        # Nor do they use this norm of layers without experts, which they have.
        norms = (f"model.layers.{i}.post_mlp_layernorm." for i, kind in enumerate(self.kinds()) if kind == DENSE)
        return replace(whole, unused=(*whole.unused, *norms))


class AxK2Settings(DeepseekV32Settings, kw_only=True):
    """DeepSeek V3.2 with gated heads and gated norms. Queries come from their vector before its norm, too."""

    models: ClassVar[str] = "A.X K2 Light"
    vocab_size: Count = 163_840
    hidden_size: Count = 2048
    intermediate_size: Count = 5120
    num_hidden_layers: Count = 48
    num_attention_heads: Count = 32
    max_position_embeddings: Count = 131_072
    eos_token_id: int | list[int] | None = 163_691
    moe_intermediate_size: Count = 512
    n_routed_experts: Count = 128
    kv_lora_rank: Count = 128
    q_lora_rank: Count | None = 384
    qk_nope_head_dim: Count = 64
    qk_rope_head_dim: Count = 32
    v_head_dim: Count = 64
    n_group: Count | None = None  # type: ignore[assignment]  # experts are in no groups
    topk_group: Count | None = None  # type: ignore[assignment]  # as well
    first_k_dense_replace: int = 1
    index_n_heads: Count = 16
    gated_norm_rank: Count = 16

    def __post_init__(self) -> None:
        self.n_group, self.topk_group = self.n_group or 1, self.topk_group or 1

    def check(self) -> None:
        super().check()
        if (self.n_group or 1) > 1:
            # Experts of other groups have the score 0, by which they are better than some of the chosen groups'.
            raise ModelError("n_group of an A.X K2, experts that are chosen from groups, is not supported")

    def attention(self, index: int) -> AttentionRecipe:
        part = super().attention(index)
        assert part.latent is not None
        return replace(part, latent=replace(part.latent, query_pair=True), gate=GateRecipe())

    def layer(self, index: int) -> LayerRecipe:
        layer, gated_norm = super().layer(index), replace(self.norm(), gate_rank=self.gated_norm_rank)
        return replace(layer, norm=gated_norm, other_norm=self.norm() if self.kinds()[index] == DENSE else None)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), draft=None)


class Mistral4Settings(LatentSettings, kw_only=True):
    """Mistral 4: experts are chosen by softmax, and queries grow with their positions."""

    models: ClassVar[str] = "Mistral Small 4"
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 131_072
    hidden_size: Count = 4096
    intermediate_size: Count = 12_288
    num_hidden_layers: Count = 36
    max_position_embeddings: Count = 1_048_576
    kv_lora_rank: Count = 256
    q_lora_rank: Count | None = 1024
    qk_nope_head_dim: Count = 64
    moe_intermediate_size: Count = 2048
    n_routed_experts: Count = 128
    n_shared_experts: Count = 1
    num_experts_per_tok: Count = 4
    routed_scaling_factor: float = 1.0
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 0
    rope_parameters: RotarySettings | None = msgspec.field(
        default_factory=lambda: RotarySettings(
            rope_type="yarn",
            rope_theta=10_000.0,
            factor=128.0,
            original_max_position_embeddings=8192,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        )
    )

    def attention(self, index: int) -> AttentionRecipe:
        return replace(super().attention(index), query_scale=growing(self.scaling()))

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if index < self.first_k_dense_replace:
            return self.mlp()
        channels = self.moe_intermediate_size
        experts = ExpertsRecipe(
            self.n_routed_experts,
            self.num_experts_per_tok,
            gated_expert(channels),
            normalised=self.norm_topk_prob,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            scale=self.routed_scaling_factor,
            smallest_sum=1e-20,
            shared=gated("mlp.shared_experts", channels * self.n_shared_experts),
        )
        return in_one_tensor(experts)


class MistralLarge4Settings(GlmMoeDsaSettings, kw_only=True):
    """GLM 5's attention with queries that grow, learned frequencies, and layers with the latents of earlier ones.

    Some layers know no positions: heads then have as many channels more that are not turned.
    """

    models: ClassVar[str] = "Mistral Large 4"
    scored_by: ClassVar[str] = "softmax"
    query_vector: ClassVar[bool] = False
    vocab_size: Count = 204_800
    intermediate_size: Count = 24_576
    num_hidden_layers: Count = 72
    max_position_embeddings: Count = 1_048_576
    eos_token_id: int | list[int] | None = 2
    moe_intermediate_size: Count = 6144
    n_routed_experts: Count = 128
    num_experts: Count | None = None
    num_experts_per_tok: Count = 4
    routed_scaling_factor: float = 1.0
    q_lora_rank: Count | None = None
    qk_nope_head_dim: Count = 64
    v_head_dim: Count = 128
    scoring_func: str = "softmax"
    first_k_dense_replace: int = 1
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    kv_source_layers: list[int] | None = None
    final_logit_softcapping: float = 30.0
    rope_parameters: RotarySettings | None = msgspec.field(
        default_factory=lambda: RotarySettings(
            rope_type="yarn",
            rope_theta=10_000.0,
            factor=2048.0,
            original_max_position_embeddings=512,
            beta_fast=32.0,
            beta_slow=1.0,
            attention_factor=1.0,
        )
    )

    def __post_init__(self) -> None:
        self.q_lora_rank = None  # transformers does not have it, whatever a file says.
        self.n_routed_experts = self.num_experts or self.n_routed_experts

    def check(self) -> None:
        super().check()
        if not self.norm_topk_prob:
            raise ModelError("norm_topk_prob of a Mistral Large 4 has to be true: weights of experts have a sum of one")
        count, turning, sources = self.num_hidden_layers, self.turning(), self.latent_sources()
        if len(turning) < count or not set(turning) <= {0, 1}:
            raise ModelError(f"no_rope_layers has to say 0 or 1 of each of {count} layers")
        if len(sources) != count:
            raise ModelError(f"kv_source_layers has to name a layer for each of {count} layers")
        shared = dict[int, int]()
        for index, source in enumerate(sources):
            if not 0 <= source <= index or sources[source] != source:
                raise ModelError(f"kv_source_layers: layer {index} cannot have the latents of layer {source}")
            # transformers gives a layer those of the last layer that knows positions, or does not, as it does itself.
            if source != index and shared.get(turning[index]) != source:
                raise ModelError(f"kv_source_layers: layer {index} is not computed with the latents of layer {source}")
            if source == index and index in sources[index + 1 :]:
                shared[turning[index]] = index

    def turning(self) -> list[int]:
        """Returns for each layer 1 if it knows positions, and 0 if it does not."""
        every = self.no_rope_layer_interval
        usual = [int((index + 1) % every != 0) for index in range(self.num_hidden_layers)]
        return usual if self.no_rope_layers is None else self.no_rope_layers

    def latent_sources(self) -> list[int]:
        """Returns for each layer the one whose latents it has, which may be itself."""
        return list(range(self.num_hidden_layers)) if self.kv_source_layers is None else self.kv_source_layers

    def rotary(self) -> Rotary:
        return replace(super().rotary(), learned="lerope.alpha")

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self.turning()[index] else None

    def attention(self, index: int) -> AttentionRecipe:
        part, source = super().attention(index), self.latent_sources()[index]
        assert part.latent is not None and part.latent.index is not None
        still = 0 if self.turning()[index] else self.qk_rope_head_dim
        chosen = replace(
            part.latent.index,
            query="attention.indexer.wq_b",
            key="attention.indexer.wk",
            key_norm="attention.indexer.k_norm",
            weights="attention.indexer.weights_proj",
            query_norm="attention.indexer.q_input_norm",
            head_scales=_scales("attention.indexer"),
        )
        latent = replace(
            part.latent,
            plain=part.latent.plain + still,
            turned=part.latent.turned - still,
            still=still,
            norm=self.norm(),
            key_norm="attention.kv_a_norm",
            head_scales=_scales("attention"),
            key_from=None if source == index else source,
            index=chosen,
        )
        key, out = "attention.wkv_a_with_mqa", "attention.wo"
        biased = frozenset({key, out}) if self.attention_bias else NONE
        return replace(
            part, query="attention.wq", key=key, value="attention.wkv_b", out=out, biased=biased, latent=latent
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        def mlp(prefix: str, channels: int) -> MlpRecipe:
            gate, down, up = (f"{prefix}.w{number}" for number in (1, 2, 3))
            return MlpRecipe(channels, gate=gate, up=up, down=down)

        channels = self.moe_intermediate_size
        if self.kinds()[index] == DENSE:
            return mlp("feed_forward", self.intermediate_size)
        return ExpertsRecipe(
            self.n_routed_experts,
            self.num_experts_per_tok,
            mlp("experts.{}", channels),
            router="gate",
            normalised=True,
            precise_router=True,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            scale=self.routed_scaling_factor,
            smallest_sum=1e-20,
            shared=mlp("shared_experts", channels * self.n_shared_experts),
        )

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("attention_norm", "ffn_norm"))

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            embedding="tok_embeddings",
            layer_prefix="layers.",
            last_norm="norm",
            head="output",
            logits_cap=self.final_logit_softcapping,
            unused=LARGE4_PARTS,
            draft=None,
        )


def _scales(part: str) -> HeadScales:
    return HeadScales(f"{part}.ssmax_scaling.s", f"{part}.ssmax_scaling.b")


class DeltaSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The object ``linear_attn_config`` of a Kimi Linear. Layers count from 1."""

    head_dim: Count | None = None
    num_heads: Count | None = None
    short_conv_kernel_size: Count | None = None
    kda_layers: list[int] | None = None
    full_attn_layers: list[int] | None = None


class KimiLinearSettings(LatentSettings, kw_only=True):
    """Most layers have a gated delta net, and the others latents that do not know positions; experts are V3's.

    What its own code has a name for and transformers takes for granted (``mla_use_nope`` and others) has to say the
    same, and settings of later models of this type are refused.
    """

    models: ClassVar[str] = "Kimi Linear 48B A3B"
    vocab_size: Count = 163_840
    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_hidden_layers: Count = 27
    max_position_embeddings: Count = 1_048_576
    model_max_length: Count | None = None
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 163_586
    q_lora_rank: Count | None = None
    moe_intermediate_size: Count = 1024
    num_local_experts: Count = 256
    num_experts: Count | None = None
    n_shared_experts: Count = 1
    num_shared_experts: Count | None = None
    num_experts_per_tok: Count = 8
    num_experts_per_token: Count | None = None
    routed_scaling_factor: float = 2.446
    n_group: Count = 1
    num_expert_group: Count | None = None
    topk_group: Count = 1
    norm_topk_prob: bool = True
    moe_renormalize: bool | None = None
    mlp_layer_types: list[str] | None = None
    first_k_dense_replace: int = 1
    layer_types: list[str] | None = None
    linear_head_dim: Count = 128
    linear_num_heads: Count = 32
    linear_conv_kernel_dim: Count = 4
    linear_attn_config: DeltaSettings | None = None
    moe_router_activation_func: str = "sigmoid"
    moe_layer_freq: int = 1
    use_grouped_topk: bool = True
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    routed_expert_hidden_size: int | None = None
    attn_res_block_size: int | None = None

    def __post_init__(self) -> None:
        for name, named in KIMI_NAMES.items():
            given = getattr(self, named)
            setattr(self, name, getattr(self, name) if given is None else given)
        own = self.linear_attn_config or DeltaSettings()
        self.linear_head_dim = own.head_dim or self.linear_head_dim
        self.linear_num_heads = own.num_heads or self.linear_num_heads
        self.linear_conv_kernel_dim = own.short_conv_kernel_size or self.linear_conv_kernel_dim

    @property
    def n_routed_experts(self) -> int:
        return self.num_local_experts

    def check(self) -> None:
        super().check()
        check_kinds(self.kinds(), self.num_hidden_layers)
        check_layer_types(self.layers(), self.num_hidden_layers, FULL, LINEAR)
        for name, known in KIMI_CONSTANTS.items():
            given = getattr(self, name)
            if given != known:
                raise ModelError(f"{name} {given!r} is not supported; supported: {known!r}")
        if not self.use_grouped_topk and self.n_group > 1:
            raise ModelError(f"use_grouped_topk False is not supported with {self.n_group} groups (num_expert_group)")

    def scaling(self) -> RotarySettings:
        return RotarySettings()  # Nothing is turned, whatever a file says of frequencies.

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None

    def kinds(self) -> list[str]:
        """Returns for each layer whether its feed-forward part is one, or of experts."""
        usual = first_dense(self.first_k_dense_replace, self.num_hidden_layers)
        return usual if self.mlp_layer_types is None else self.mlp_layer_types

    def layers(self) -> list[str]:
        """Returns for each layer whether it has latents or a delta net. Raises ModelError if that is not said once."""
        own, count = self.linear_attn_config, self.num_hidden_layers
        if self.layer_types is not None:
            return self.layer_types
        if own is None or own.kda_layers is None or own.full_attn_layers is None:
            return [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
        if sorted(own.kda_layers + own.full_attn_layers) != list(range(1, count + 1)):
            raise ModelError(
                f"kda_layers and full_attn_layers of linear_attn_config must have each of 1 to {count} once"
            )
        return [FULL if index in own.full_attn_layers else LINEAR for index in range(1, count + 1)]

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if self.layers()[index] == FULL:
            return layer
        delta = KimiDeltaRecipe(
            self.linear_num_heads, self.linear_head_dim, self.linear_conv_kernel_dim, Norm(self.rms_norm_eps)
        )
        return replace(layer, attention=None, mixer=delta)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if self.kinds()[index] == DENSE:
            return self.mlp()
        gate, down, up = (f"mlp.experts.{{}}.w{number}" for number in (1, 2, 3))
        return replace(routed(self), expert=MlpRecipe(self.moe_intermediate_size, gate=gate, up=up, down=down))

    def recipe(self) -> ModelRecipe:
        # The released files have this name for layers with experts, and those that transformers writes for all.
        return replace(super().recipe(), renamed=renamed_in_layers(len(self.layers()), "block_sparse_moe", "mlp"))


class BailingHybridSettings(KimiLinearSettings, kw_only=True):
    """Ant's Ling 3: a Kimi Linear whose latents know positions, whose heads are gated, and whose decays are bounded."""

    models: ClassVar[str] = "Ling 3.0 Flash"
    default_theta: ClassVar[float] = 6_000_000.0
    vocab_size: Count = 157_184
    hidden_size: Count = 2560
    intermediate_size: Count = 6144
    num_hidden_layers: Count = 42
    max_position_embeddings: Count = 262_144
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = 156_895
    head_dim: Count | None = 128
    moe_intermediate_size: Count = 768
    num_local_experts: Count = 512
    routed_scaling_factor: float = 2.5
    n_group: Count = 8
    topk_group: Count = 4
    first_k_dense_replace: int = 2
    short_conv_kernel_size: Count = 4
    linear_head_dim: Count | None = None  # type: ignore[assignment]  # a head's channels unless a file says it
    linear_num_heads: Count | None = None  # type: ignore[assignment]  # as many heads as latents have
    linear_conv_kernel_dim: Count | None = None  # type: ignore[assignment]  # short_conv_kernel_size
    layer_group_size: Count = 6
    kda_safe_gate: bool = True
    kda_lower_bound: float = -5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.linear_head_dim = self.linear_head_dim or self.head_dim or 128
        self.linear_num_heads = self.linear_num_heads or self.num_attention_heads
        self.linear_conv_kernel_dim = self.linear_conv_kernel_dim or self.short_conv_kernel_size

    def scaling(self) -> RotarySettings:
        return LatentSettings.scaling(self)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary()

    def layers(self) -> list[str]:
        size = self.layer_group_size
        usual = [LINEAR if (index + 1) % size else FULL for index in range(self.num_hidden_layers)]
        return usual if self.layer_types is None else self.layer_types

    def attention(self, index: int) -> AttentionRecipe:
        part = super().attention(index)
        biased = frozenset("self_attn.dense" if name == part.out else name for name in part.biased)
        return replace(part, out="self_attn.dense", biased=biased, gate=GateRecipe("self_attn.g_proj", one=True))

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        if not isinstance(layer.mixer, KimiDeltaRecipe):
            return layer
        delta = replace(
            layer.mixer,
            gate_down="",
            gate_up="self_attn.g_proj",
            step_down="",
            step_up="self_attn.f_proj",
            flat_rates=True,
            least_decay=self.kda_lower_bound if self.kda_safe_gate else None,
            out="self_attn.dense",
        )
        return replace(layer, mixer=delta)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if self.kinds()[index] == DENSE:
            return self.mlp()
        return replace(routed(self), correction="mlp.gate.expert_bias")

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            renamed=(
                ("model.word_embeddings.", "model.embed_tokens."),
                *renamed_in_layers(self.num_hidden_layers, "attention", "self_attn"),
            ),
            unused=(f"model.layers.{self.num_hidden_layers}.",),
        )


class LongcatFlashSettings(LatentSettings, kw_only=True):
    """Meituan's LongCat: two layers have one number, and experts, of which some give what they are given.

    The experts are given what the first one's feed-forward part is, and are added at the end of the second one.
    """

    models: ClassVar[str] = "LongCat Flash"
    default_theta: ClassVar[float] = 10_000_000.0
    vocab_size: Count = 131_072
    hidden_size: Count = 6144
    num_hidden_layers: Count | None = None  # type: ignore[assignment]  # two for each of num_layers
    num_layers: Count = 28
    num_attention_heads: Count = 64
    max_position_embeddings: Count = 131_072
    rms_norm_eps: float = 1e-5
    ffn_hidden_size: Count = 12_288
    expert_ffn_hidden_size: Count = 2048
    moe_topk: Count = 12
    n_routed_experts: Count = 512
    zero_expert_num: int | None = 256
    zero_expert_type: str | None = None
    router_bias: bool = False
    routed_scaling_factor: float = 6.0
    qk_head_dim: int | None = None
    mla_scale_q_lora: bool = True
    mla_scale_kv_lora: bool = True

    def __post_init__(self) -> None:
        self.num_layers = self.num_layers if self.num_hidden_layers is None else self.num_hidden_layers // 2
        self.num_hidden_layers = 2 * self.num_layers
        self.intermediate_size = self.ffn_hidden_size

    def check(self) -> None:
        super().check()
        if self.zero_expert_type not in (None, "identity"):
            raise ModelError(f"zero_expert_type {self.zero_expert_type!r} is not supported; supported: 'identity'")
        if self.qk_head_dim not in (None, self.qk_nope_head_dim + self.qk_rope_head_dim):
            raise ModelError(f"qk_head_dim {self.qk_head_dim} is not the sum of qk_nope_head_dim and qk_rope_head_dim")
        for name, known in (("router_bias", False), ("mla_scale_q_lora", True), ("mla_scale_kv_lora", True)):
            if getattr(self, name) is not known:
                raise ModelError(f"{name} of a LongCat has to be {str(known).lower()}")
        if self.q_lora_rank is None:
            raise ModelError("q_lora_rank, the channels that queries come from, is missing")

    def attention(self, index: int) -> AttentionRecipe:
        part = super().attention(index)
        assert part.latent is not None

        def own(name: str) -> str:
            return name.replace("self_attn.", f"self_attn.{index % 2}.")

        latent = replace(
            part.latent,
            query_down=own(part.latent.query_down),
            query_norm=own(part.latent.query_norm),
            key_norm=own(part.latent.key_norm),
            query_scale=(self.hidden_size / part.latent.query_rank) ** 0.5,
            scale=(self.hidden_size / part.latent.rank) ** 0.5,
        )
        query, key, value, out = map(own, (part.query, part.key, part.value, part.out))
        biased = frozenset(map(own, part.biased))
        return replace(part, query=query, key=key, value=value, out=out, biased=biased, latent=latent)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return gated(f"mlps.{index % 2}", self.intermediate_size)

    def experts(self) -> ExpertsRecipe:
        identities = self.zero_expert_num or 0
        return ExpertsRecipe(
            self.n_routed_experts + identities,
            self.moe_topk,
            gated_expert(self.expert_ffn_hidden_size),
            router="mlp.router.classifier",
            correction="mlp.router.e_score_correction_bias",
            precise_router=True,
            scale=self.routed_scaling_factor,
            identities=identities,
        )

    def layer(self, index: int) -> LayerRecipe:
        layer, number = super().layer(index), index % 2
        norms = tuple(f"{name}.{number}" for name in layer.norms)
        return replace(layer, norms=norms, shortcut=None if number else self.experts())

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), layers_a_number=2, unused=("model.mtp.",))


class CompressRates(msgspec.Struct):
    """The object ``compress_rates`` of a DeepSeek V4."""

    compressed_sparse_attention: Count = 4
    heavily_compressed_attention: Count = 128


class MainAndCompressed(RotarySettings, kw_only=True):
    """The object ``rope_parameters`` of a DeepSeek V4: of layers without entries, and of those with some."""

    main: RotarySettings | None = None
    compress: RotarySettings | None = None


class DeepseekV4Settings(FamilySettings, kw_only=True):
    """One vector of a token for all heads, windows, and entries that stand for several tokens; several residuals."""

    models: ClassVar[str] = "DeepSeek V4 Flash, V4 Pro"
    partly_turned: ClassVar[bool] = True
    vocab_size: Count = 129_280
    hidden_size: Count = 4096
    num_hidden_layers: Count = 43
    num_attention_heads: Count = 64
    head_dim: Count | None = 512
    max_position_embeddings: Count = 1_048_576
    eos_token_id: int | list[int] | None = 1
    rope_parameters: MainAndCompressed | None = None
    moe_intermediate_size: Count = 2048
    q_lora_rank: Count = 1024
    num_experts_per_tok: Count = 6
    n_routed_experts: Count = 256
    n_shared_experts: Count = 1
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    layer_types: list[str] | None = None
    compress_ratios: list[int] | None = None
    compress_rates: CompressRates | None = None
    compress_rate_csa: Count | None = None
    compress_rate_hca: Count | None = None
    compress_rope_theta: float = 160_000.0
    hc_mult: Count = 4
    hc_sinkhorn_iters: Count = 20
    hc_eps: float = 1e-6
    mlp_layer_types: list[str] | None = None
    num_hash_layers: int = 3
    swiglu_limit: float = LIMITED_AT
    sliding_window: Count = 128
    o_groups: Count = 8
    o_lora_rank: Count = 1024
    index_n_heads: Count = 64
    index_head_dim: Count = 128
    index_topk: Count = 512
    qk_rope_head_dim: Count | None = None

    def check(self) -> None:
        super().check()
        count = self.num_hidden_layers
        check_layer_types(self.layers(), count, SLIDING, SPARSE_ENTRIES, FEW_ENTRIES)
        check_kinds(self.kinds(), count, BY_TOKEN, ROUTED)
        known = {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "swiglu_limit": LIMITED_AT}
        for name, value in known.items():
            if (given := getattr(self, name)) != value:
                raise ModelError(f"{name} {given!r} is not supported; supported: {value!r}")
        if self.num_attention_heads % self.o_groups:
            raise ModelError(f"{self.num_attention_heads} heads are not {self.o_groups} equal groups (o_groups)")
        given, turned = self.scaling(), self.turned_channels()
        kinds = (given.main, given.compress) if isinstance(given, MainAndCompressed) else ()
        for kind in kinds:
            # Without the setting, transformers turns whole heads.
            if kind is not None and int(self.head_size() * (kind.partial_rotary_factor or 1.0)) != turned:
                raise ModelError(
                    f"partial_rotary_factor {kind.partial_rotary_factor} of rope_parameters turns other channels than "
                    f"{turned}"
                )
        if self.index_head_dim < (turned or 0):
            raise ModelError(f"an indexer with heads of {self.index_head_dim} channels cannot turn {turned} of them")

    def kv_heads(self) -> int:
        return 1

    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers

    def turned_channels(self) -> int | None:
        if self.partial_rotary_factor is not None:
            return int(self.head_size() * self.partial_rotary_factor)
        return self.head_size() // 8 if self.qk_rope_head_dim is None else self.qk_rope_head_dim

    def layers(self) -> list[str]:
        """Returns the kind of each layer's attention."""
        count = self.num_hidden_layers
        if self.layer_types is not None:
            return self.layer_types[:count]
        if self.compress_ratios is not None:
            return [KIND_OF_RATIO.get(ratio, str(ratio)) for ratio in self.compress_ratios[:count]]
        return [SPARSE_ENTRIES if index >= 2 and index % 2 else FEW_ENTRIES for index in range(count)]

    def kinds(self) -> list[str]:
        """Returns for each layer how its experts are chosen."""
        count = self.num_hidden_layers
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[:count]
        return [BY_TOKEN if index < self.num_hash_layers else ROUTED for index in range(count)]

    def rotary_of_layer(self, index: int) -> Rotary | None:
        given, theta = self.scaling(), self.default_theta if self.rope_theta is None else self.rope_theta
        main, compressed = RotarySettings(), msgspec.structs.replace(given, rope_theta=self.compress_rope_theta)
        if isinstance(given, MainAndCompressed) and given.main is not None and given.compress is not None:
            main, compressed = given.main, given.compress
        if (compressed.rope_type or compressed.type) == "yarn" and compressed.attention_factor is None:
            compressed = msgspec.structs.replace(compressed, attention_factor=1.0)
        own = main if self.layers()[index] == SLIDING else compressed
        return rotary_of(own, theta, self.max_position_embeddings, interleaved=True)

    def attention(self, index: int) -> AttentionRecipe:
        kind, rates = self.layers()[index], self.compress_rates or CompressRates()
        channels, entries, chosen = self.head_size(), None, None
        if kind == FEW_ENTRIES:
            entries = EntriesRecipe(self.compress_rate_hca or rates.heavily_compressed_attention, channels)
        if kind == SPARSE_ENTRIES:
            every = self.compress_rate_csa or rates.compressed_sparse_attention
            entries = EntriesRecipe(every, channels, overlapping=True)
            names = (f"attn.indexer.compressor.{name}" for name in ("wkv", "wgate", "ape", "norm"))
            of_index = EntriesRecipe(every, self.index_head_dim, True, *names)
            chosen = EntryIndexRecipe(self.index_topk, self.index_n_heads, of_index)
        shared = SharedKvRecipe(
            self.q_lora_rank,
            self.turned_channels() or 0,
            self.o_groups,
            self.o_lora_rank,
            self.norm(),
            entries,
            chosen,
        )
        return AttentionRecipe(
            self.rotary_of_layer(index),
            window=self.sliding_window,
            query="attn.wq_b",
            key="attn.wkv",
            value="",
            out="attn.wo_b",
            sinks="attn.attn_sink",
            shared=shared,
        )

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        channels, by_token = self.moe_intermediate_size, self.kinds()[index] == BY_TOKEN

        def expert(prefix: str) -> MlpRecipe:
            gate, down, up = (f"{prefix}.w{number}" for number in (1, 2, 3))
            return MlpRecipe(channels, Activation.LIMITED_SILU, gate=gate, up=up, down=down)

        return ExpertsRecipe(
            self.n_routed_experts,
            self.num_experts_per_tok,
            expert("ffn.experts.{}"),
            router="ffn.gate",
            scoring=Scoring.ROOT_SOFTPLUS,
            normalised=True,
            correction="" if by_token else "ffn.gate.bias",
            precise_router=True,
            by_token="ffn.gate.tid2eid" if by_token else "",
            scale=self.routed_scaling_factor,
            smallest_sum=1e-20,
            shared=expert("ffn.shared_experts"),
        )

    def layer(self, index: int) -> LayerRecipe:
        streams = StreamsRecipe(self.hc_mult, self.hc_sinkhorn_iters, self.hc_eps, self.norm())
        return replace(super().layer(index), norms=("attn_norm", "ffn_norm"), streams=streams)

    def recipe(self) -> ModelRecipe:
        renamed = (
            ("embed.", "model.embed_tokens."),
            ("layers.", "model.layers."),
            ("norm.", "model.norm."),
            ("hc_head_", "model.hc_head.hc_"),
            ("lm_head.", "head."),
        )
        return replace(super().recipe(), head="head", renamed=renamed, unused=("mtp.", "model.mtp."))


def _check_routing(given: str, known: str, every: int) -> None:
    """Raises ModelError if experts are chosen in another way, or in other layers, than the family's."""
    if given != known:
        raise ModelError(f"scoring_func {given!r} is not supported; supported: {known!r}")
    if every != 1:
        raise ModelError(
            f"moe_layer_freq {every} is not supported; supported: 1, experts in every layer after the first"
        )


def first_dense(dense: int, layers: int) -> list[str]:
    """Returns the kinds of so many layers, of which the first ``dense`` have no experts."""
    return [DENSE if index < dense else SPARSE for index in range(layers)]


def check_sources(sources: Sequence[str], layers: int) -> None:
    """Raises ModelError unless each layer has an indexer of its own, or that of a layer before it."""
    if len(sources) != layers or not set(sources) <= {OWN, SHARED} or sources[0] != OWN:
        raise ModelError(
            f"indexer_types must be {OWN!r} or {SHARED!r} for each of the layers, and {OWN!r} for the first one"
        )


def check_kinds(kinds: Sequence[str], layers: int, one: str = DENSE, other: str = SPARSE) -> None:
    """Raises ModelError unless each layer's feed-forward part is of the ``one`` kind or the ``other``."""
    if len(kinds) != layers or not set(kinds) <= {one, other}:
        raise ModelError(f"mlp_layer_types must be {one!r} or {other!r} for each of the layers")
