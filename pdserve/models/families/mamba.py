"""Models with a Mamba in most layers: Granite 4, Bamba, Nemotron-H, Falcon-H1, Jamba; and in all: Mamba, Mamba 2."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import msgspec

from pdserve.errors import ModelError
from pdserve.models.families.llama import GraniteMoeSettings
from pdserve.models.families.settings import FULL, Count, FamilySettings, check_experts, check_layer_types, gated
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    LayerRecipe,
    Mamba2Recipe,
    MambaRecipe,
    MixerRecipe,
    MlpRecipe,
    ModelRecipe,
    Norm,
    PartScales,
    Rotary,
)
from pdserve_kernels.feed_forward import Activation, Scoring

LINEAR, MOE, MLP = "linear_attention", "moe", "mlp"
OLDER = {"mamba": LINEAR, "attention": FULL}
"""What older files call the kinds of layers."""


def check_steps(limit: list[object] | None) -> None:
    """Raises ModelError if the lengths of steps have bounds."""
    if limit is not None and limit not in ([0.0, None], [0.0, {"__float__": "Infinity"}]):
        raise ModelError(f"time_step_limit {limit} is not supported; steps have no bounds")


def kinds_of(given: list[str], layers: int, known: frozenset[str]) -> list[str]:
    """Returns the kind of each layer. Raises ModelError if one is unknown, or there are not as many as ``layers``."""
    kinds = [OLDER.get(kind, kind) for kind in given]
    check_layer_types(kinds, layers, *sorted(known))
    return kinds


class GraniteHybridSettings(GraniteMoeSettings, kw_only=True):
    """Layers that see everything know positions only if the file says so."""

    models: ClassVar[str] = "Granite 4"
    num_local_experts: int | None = 8  # type: ignore[assignment]  # none in the dense ones
    num_experts_per_tok: int = 2
    shared_intermediate_size: Count = 1024
    position_embedding_type: str | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: int | str | None = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[object] | None = None

    def check(self) -> None:
        super().check()
        check_steps(self.time_step_limit)
        if self.num_local_experts:
            check_experts(self.num_experts_per_tok, self.num_local_experts)
        if self.position_embedding_type not in (None, "nope", "rope"):
            raise ModelError(f"position_embedding_type {self.position_embedding_type!r} is not supported")
        self.kinds()

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        given = self.layer_types or self.layers_block_type or [LINEAR] * self.num_hidden_layers
        return kinds_of(given, self.num_hidden_layers, frozenset({LINEAR, FULL}))

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self.position_embedding_type == "rope" else None

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        shared = MlpRecipe(
            self.shared_intermediate_size, fused="shared_mlp.input_linear", down="shared_mlp.output_linear"
        )
        if not self.num_local_experts:
            return shared
        part = super().feed_forward(index)
        assert isinstance(part, ExpertsRecipe)
        return replace(part, shared=shared)

    def mamba(self) -> Mamba2Recipe:
        return mamba_of(self, self.mamba_expand * self.hidden_size)

    def layer(self, index: int) -> LayerRecipe:
        layer = super().layer(index)
        return layer if self.kinds()[index] == FULL else replace(layer, attention=None, mixer=self.mamba())


class BesideMambaSettings(FamilySettings, kw_only=True):
    """What a Bamba and a Falcon-H1 share: the settings of a Mamba 2, and the name of the last norm."""

    vocab_size: Count = 128_000
    intermediate_size: Count = 14_336
    num_key_value_heads: Count | None = 8
    rms_norm_eps: float = 1e-5
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: int | str | None = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[object] | None = None

    def check(self) -> None:
        super().check()
        check_steps(self.time_step_limit)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), last_norm="model.final_layernorm")


class BambaSettings(BesideMambaSettings, kw_only=True):
    models: ClassVar[str] = "Bamba 9B"
    partly_turned: ClassVar[bool] = True
    max_position_embeddings: Count = 262_144
    attn_layer_indices: list[int] | None = None

    def turned_channels(self) -> int | None:
        # Whatever the file says.
        return self.head_size() // 2

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return gated("feed_forward", self.intermediate_size, biased=self.mlp_bias)

    def layer(self, index: int) -> LayerRecipe:
        layer = replace(super().layer(index), norms=("input_layernorm", "pre_ff_layernorm"))
        if index in (self.attn_layer_indices or ()):
            return layer
        return replace(layer, attention=None, mixer=mamba_of(self, self.mamba_expand * self.hidden_size))


class FalconH1Settings(BesideMambaSettings, kw_only=True):
    """Each layer has attention and a Mamba 2 beside each other. The file has factors of what most products give."""

    models: ClassVar[str] = "Falcon-H1 0.5B, 1.5B, 3B, 7B, 34B"
    max_position_embeddings: Count = 8192
    mamba_d_ssm: Count | None = 1024
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    projectors_bias: bool = False
    lm_head_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    mlp_multipliers: list[float] | None = None
    key_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    ssm_multipliers: list[float] | None = None
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0

    def check(self) -> None:
        super().check()
        for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            given = getattr(self, name)
            if given is not None and len(given) != count:
                raise ModelError(f"{name} has {len(given)} numbers; a Falcon-H1 has {count}")

    def attention_scale(self) -> float:
        # The cache has keys as they are before they are multiplied.
        return super().attention_scale() * self.key_multiplier

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        gate, _ = self.mlp_multipliers or (1.0, 1.0)
        return replace(gated("feed_forward", self.intermediate_size, biased=self.mlp_bias), gate_scale=gate)

    def mamba(self) -> Mamba2Recipe:
        part = mamba_of(self, self.mamba_d_ssm or self.mamba_expand * self.hidden_size)
        scales = None
        if self.ssm_multipliers is not None:
            gates, inputs, write, read, steps = self.ssm_multipliers
            scales = (gates, inputs, write, read, steps)
        return replace(
            part,
            norm=self.norm() if self.mamba_rms_norm else None,
            gate_after_norm=self.mamba_norm_before_gate,
            scales=scales,
            out_biased=self.projectors_bias,
        )

    def layer(self, index: int) -> LayerRecipe:
        _, down = self.mlp_multipliers or (1.0, 1.0)
        return replace(
            super().layer(index),
            norms=("input_layernorm", "pre_ff_layernorm"),
            mixer=self.mamba(),
            scales=PartScales(
                attention_in=self.attention_in_multiplier,
                attention_out=self.attention_out_multiplier,
                mixer_in=self.ssm_in_multiplier,
                mixer_out=self.ssm_out_multiplier,
                feed_forward_out=down,
            ),
        )

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            embedding_scale=self.embedding_multiplier,
            logits_scale=self.lm_head_multiplier,
        )


MOST_PARTS = 8
"""Groups are cut into no more parts than this on all, because each part has some of the state of its group."""


def parts_of(groups: int, heads: int) -> int:
    """Returns into how many parts a group of so many heads is cut, so that as many ranks can share all groups."""
    parts = 1
    while heads % (2 * parts) == 0 and 2 * parts * groups <= MOST_PARTS:
        parts *= 2
    return parts


def mamba_of(settings: GraniteHybridSettings | BesideMambaSettings, channels: int) -> Mamba2Recipe:
    """Returns a Mamba 2 of so many channels. Raises ModelError if the settings do not fit together."""
    heads, groups, given = settings.mamba_n_heads, settings.mamba_n_groups, settings.mamba_d_head
    head_dim = given if isinstance(given, int) else channels // heads
    if heads * head_dim != channels or heads % groups:
        raise ModelError(
            f"{heads} heads (mamba_n_heads) of {head_dim} channels in {groups} groups do not make "
            f"the {channels} channels of a Mamba"
        )
    parts = parts_of(groups, heads // groups)
    return Mamba2Recipe(
        heads=groups * parts,
        group=heads // groups // parts,
        head_dim=head_dim,
        size=settings.mamba_d_state,
        width=settings.mamba_d_conv,
        norm=settings.norm(),
        parts=parts,
        biased=settings.mamba_proj_bias,
        out_biased=settings.mamba_proj_bias,
        conv_biased=settings.mamba_conv_bias,
    )


def named_mixer(part: Mamba2Recipe) -> Mamba2Recipe:
    """Returns the part with the names that it has in layers which have one part each."""
    inner, conv, step_bias, log_rate, skip, norm, out = (
        f"mixer.{name}" for name in ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
    )
    return replace(
        part, inner=inner, conv=conv, step_bias=step_bias, log_rate=log_rate, skip=skip, gated_norm=norm, out=out
    )


PATTERN = {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP}
"""The letters of ``hybrid_override_pattern``."""


class NemotronHSettings(FamilySettings, kw_only=True):
    """Each layer has one part: a Mamba 2, attention that knows no positions, a feed-forward part or experts."""

    models: ClassVar[str] = "Nemotron-H 8B, 47B, 56B, Nemotron Nano 2, Nemotron 3 Nano"
    activations: ClassVar[tuple[str, ...]] = ("relu2",)
    vocab_size: Count = 131_072
    intermediate_size: Count = 21_504
    num_hidden_layers: Count = 4
    num_key_value_heads: Count | None = 8
    head_dim: Count | None = 128
    max_position_embeddings: Count = 4096
    layer_norm_epsilon: float = 1e-5
    sliding_window: int | None = None
    layers_block_type: list[str] | None = None
    layer_types: list[str] | None = None
    hybrid_override_pattern: str | None = None
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    ssm_state_size: Count = 128
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    n_groups: Count = 8
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    mamba_proj_bias: bool = False
    time_step_limit: list[object] | None = None
    n_routed_experts: Count = 8
    num_experts_per_tok: Count = 2
    moe_intermediate_size: Count = 7688
    moe_shared_expert_intermediate_size: Count = 7688
    moe_latent_size: int | None = None
    routed_scaling_factor: float = 1.0
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        self.rms_norm_eps = self.layer_norm_epsilon
        self.num_hidden_layers = len(self._given())

    def check(self) -> None:
        self._check_shared()
        self._check_activation("mlp_hidden_act")
        check_steps(self.time_step_limit)
        if self.mamba_hidden_act != "silu":
            raise ModelError(f"mamba_hidden_act {self.mamba_hidden_act!r} is not supported; supported: 'silu'")
        if self.sliding_window is not None:
            raise ModelError("sliding_window is not supported in a Nemotron-H")
        if self.moe_latent_size is not None:
            raise ModelError("moe_latent_size, experts of fewer channels than the model, is not supported")
        if self.mamba_num_heads % self.n_groups:
            raise ModelError(f"{self.mamba_num_heads} heads of a Mamba cannot be spread evenly over {self.n_groups}")
        self.kinds()

    def _given(self) -> list[str]:
        if given := self.layers_block_type or self.layer_types:
            return given
        if self.hybrid_override_pattern is not None:
            return [PATTERN.get(letter, letter) for letter in self.hybrid_override_pattern]
        return [LINEAR, MOE, FULL, MLP]

    def kinds(self) -> list[str]:
        """Returns the kind of each layer."""
        return kinds_of(self._given(), self.num_hidden_layers, frozenset(PATTERN.values()))

    def attention(self, index: int) -> AttentionRecipe:
        query, key, value, out = (f"mixer.{name}_proj" for name in "qkvo")
        return AttentionRecipe(rotary=None, query=query, key=key, value=value, out=out)

    def mamba(self) -> Mamba2Recipe:
        parts = parts_of(self.n_groups, self.mamba_num_heads // self.n_groups)
        return named_mixer(
            Mamba2Recipe(
                heads=self.n_groups * parts,
                group=self.mamba_num_heads // self.n_groups // parts,
                head_dim=self.mamba_head_dim,
                size=self.ssm_state_size,
                width=self.conv_kernel,
                norm=self.norm(),
                parts=parts,
                biased=self.use_bias,
                out_biased=self.use_bias,
                conv_biased=self.use_conv_bias,
            )
        )

    def feed(self, channels: int, prefix: str) -> MlpRecipe:
        """Returns a part whose tensors' names begin with ``prefix``."""
        up, down = f"{prefix}.up_proj", f"{prefix}.down_proj"
        biased = frozenset({up, down}) if self.mlp_bias else frozenset[str]()
        return MlpRecipe(channels, Activation.RELU_SQUARED, gate="", up=up, down=down, biased=biased)

    def experts(self) -> ExpertsRecipe:
        return ExpertsRecipe(
            self.n_routed_experts,
            self.num_experts_per_tok,
            replace(self.feed(self.moe_intermediate_size, "mixer.experts.{}"), biased=frozenset()),
            router="mixer.gate",
            scoring=Scoring.SIGMOID,
            normalised=self.norm_topk_prob,
            correction="mixer.gate.e_score_correction_bias",
            precise_router=True,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            scale=self.routed_scaling_factor,
            smallest_sum=1e-20,
            shared=self.feed(self.moe_shared_expert_intermediate_size, "mixer.shared_experts"),
        )

    def layer(self, index: int) -> LayerRecipe:
        alone = LayerRecipe(None, None, self.norm(), ("norm",))
        match self.kinds()[index]:
            case "linear_attention":
                return replace(alone, mixer=self.mamba())
            case "full_attention":
                return replace(alone, attention=self.attention(index))
            case "moe":
                return replace(alone, feed_forward=self.experts())
            case _:
                return replace(alone, feed_forward=self.feed(self.intermediate_size, "mixer"))

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            renamed=(
                ("backbone.embeddings", "model.embed_tokens"),
                ("backbone.norm_f", "model.norm"),
                ("backbone.", "model."),
            ),
            unused=("mtp.",),
        )


class OnlyMambaSettings(FamilySettings, kw_only=True):
    """Each layer is a Mamba. There is no attention, and no bound of contexts; files do not have one, either."""

    num_hidden_layers: Count = 64
    max_position_embeddings: Count = 262_144
    layer_norm_epsilon: float = 1e-5
    state_size: Count = 128
    expand: Count = 2
    conv_kernel: Count = 4
    use_bias: bool = False
    use_conv_bias: bool = True

    def __post_init__(self) -> None:
        self.rms_norm_eps = self.layer_norm_epsilon

    def mixer(self) -> MixerRecipe:
        """Returns the part that every layer is."""
        raise NotImplementedError

    def layer(self, index: int) -> LayerRecipe:
        return LayerRecipe(None, None, self.norm(), ("norm",), mixer=self.mixer())

    def recipe(self) -> ModelRecipe:
        return replace(
            super().recipe(),
            renamed=(
                ("backbone.embeddings.", "model.embed_tokens."),
                ("backbone.embedding.", "model.embed_tokens."),
                ("backbone.norm_f", "model.norm"),
                ("backbone.", "model."),
            ),
        )


def mamba_of_channels(settings: FamilySettings, times: int, size: int, rank: int | str, width: int) -> MambaRecipe:
    """Returns a Mamba of ``times`` as many channels as the model has, without norms of its own."""
    channels = times * settings.hidden_size
    parts = parts_of(1, channels)
    steps = rank if isinstance(rank, int) else -(-settings.hidden_size // 16)
    return MambaRecipe(heads=parts, channels=channels // parts, size=size, rank=steps, width=width, norm=None)


class MambaSettings(OnlyMambaSettings, kw_only=True):
    models: ClassVar[str] = "Mamba 130M to 2.8B"
    vocab_size: Count = 50_280
    hidden_size: Count = 768
    num_hidden_layers: Count = 32
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 0
    state_size: Count = 16
    time_step_rank: int | str = "auto"

    def check(self) -> None:
        self._check_activation("hidden_act")

    def inner_norm(self) -> Norm | None:
        """Returns the norm of what steps are made of, and of what channels are written and read with."""
        return None

    def mixer(self) -> MambaRecipe:
        part = mamba_of_channels(self, self.expand, self.state_size, self.time_step_rank, self.conv_kernel)
        return replace(
            part,
            norm=self.inner_norm(),
            biased=self.use_bias,
            conv_biased=self.use_conv_bias,
            inner="mixer.in_proj",
            conv="mixer.conv1d",
            selecting="mixer.x_proj",
            steps="mixer.dt_proj",
            log_rate="mixer.A_log",
            skip="mixer.D",
            out="mixer.out_proj",
        )


class FalconMambaSettings(MambaSettings, kw_only=True):
    models: ClassVar[str] = "Falcon Mamba 7B"
    mixer_rms_eps: float = 1e-6

    def inner_norm(self) -> Norm:
        return Norm(self.mixer_rms_eps, weighted=False)


class Mamba2Settings(OnlyMambaSettings, kw_only=True):
    models: ClassVar[str] = "Mamba 2 130M to 2.7B, Codestral Mamba 7B"
    vocab_size: Count = 32_768
    num_attention_heads: Count = msgspec.field(name="num_heads", default=128)
    head_dim: Count | None = 64
    n_groups: Count = 8
    time_step_limit: list[object] | None = None

    def check(self) -> None:
        self._check_activation("hidden_act")
        check_steps(self.time_step_limit)
        heads, channels = self.num_attention_heads, self.expand * self.hidden_size
        if heads * self.head_size() != channels or heads % self.n_groups:
            raise ModelError(
                f"{heads} heads (num_heads) of {self.head_size()} channels in {self.n_groups} groups do not make "
                f"the {channels} channels of a Mamba"
            )

    def mixer(self) -> Mamba2Recipe:
        heads = self.num_attention_heads // self.n_groups
        parts = parts_of(self.n_groups, heads)
        return named_mixer(
            Mamba2Recipe(
                heads=self.n_groups * parts,
                group=heads // parts,
                head_dim=self.head_size(),
                size=self.state_size,
                width=self.conv_kernel,
                norm=self.norm(),
                parts=parts,
                biased=self.use_bias,
                out_biased=self.use_bias,
                conv_biased=self.use_conv_bias,
            )
        )


class JambaSettings(FamilySettings, kw_only=True):
    """One layer in several has attention, which knows no positions, the others a Mamba. Some layers have experts."""

    models: ClassVar[str] = "Jamba 1.5, 1.6, 1.7, Jamba Reasoning 3B"
    vocab_size: Count = 65_536
    intermediate_size: Count = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 262_144
    num_experts: Count = 16
    num_experts_per_tok: Count = 2
    expert_layer_period: Count = 2
    expert_layer_offset: int = 1
    attn_layer_period: Count = 8
    attn_layer_offset: int = 4
    mamba_d_state: Count = 16
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok if self.num_experts > 1 else 1, self.num_experts)

    def biases(self) -> frozenset[str]:
        return frozenset()

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return None

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        if self.num_experts == 1 or index % self.expert_layer_period != self.expert_layer_offset:
            return gated("feed_forward", self.intermediate_size)
        expert = gated("feed_forward.experts.{}", self.intermediate_size)
        return ExpertsRecipe(self.num_experts, self.num_experts_per_tok, expert, router="feed_forward.router")

    def mamba(self) -> MambaRecipe:
        part = mamba_of_channels(self, self.mamba_expand, self.mamba_d_state, self.mamba_dt_rank, self.mamba_d_conv)
        return replace(part, norm=self.norm(), biased=self.mamba_proj_bias, conv_biased=self.mamba_conv_bias)

    def layer(self, index: int) -> LayerRecipe:
        layer = replace(super().layer(index), norms=("input_layernorm", "pre_ff_layernorm"))
        if index % self.attn_layer_period == self.attn_layer_offset:
            return layer
        return replace(layer, attention=None, mixer=self.mamba())

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), last_norm="model.final_layernorm")
