"""LG's EXAONE 3, a Llama with other names, EXAONE 4 with norms behind each part, and K-EXAONE with experts.

And Kolibri, with EXAONE 4's attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pdserve.models.families.deepseek import DENSE, check_kinds, routed
from pdserve.models.families.olmo import NORMS_BEHIND
from pdserve.models.families.settings import (
    FULL,
    NONE,
    SLIDING,
    Count,
    FamilySettings,
    check_experts,
    gated,
    gated_expert,
    windows_of,
)
from pdserve.models.recipe import (
    AttentionRecipe,
    ExpertsRecipe,
    FeedForwardRecipe,
    LayerRecipe,
    MlpRecipe,
    ModelRecipe,
    NormOrder,
    Rotary,
)
from pdserve_kernels.feed_forward import Scoring


class ExaoneSettings(FamilySettings, kw_only=True):
    """EXAONE 3 and 3.5. Older files have names of their own for three settings."""

    models: ClassVar[str] = "EXAONE 3, 3.5"
    default_theta: ClassVar[float] = 500_000.0
    vocab_size: Count = 102_400
    intermediate_size: Count = 14_336
    num_key_value_heads: Count | None = 8
    max_position_embeddings: Count = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 361
    num_layers: Count | None = None
    layer_norm_epsilon: float | None = None
    activation_function: str | None = None

    def __post_init__(self) -> None:
        self.num_hidden_layers = self.num_layers or self.num_hidden_layers
        self.rms_norm_eps = self.rms_norm_eps if self.layer_norm_epsilon is None else self.layer_norm_epsilon
        self.hidden_act = self.activation_function or self.hidden_act

    def attention(self, index: int) -> AttentionRecipe:
        query, key, value, out = (f"attn.attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj"))
        biased = frozenset({query, key, value, out}) if self.attention_bias else NONE
        return AttentionRecipe(self.rotary(), query=query, key=key, value=value, out=out, biased=biased)

    def mlp(self) -> MlpRecipe:
        gate, up, down = "mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj"
        biased = frozenset({gate, up, down}) if self.mlp_bias else NONE
        return MlpRecipe(self.intermediate_size, gate=gate, up=up, down=down, biased=biased)

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=("ln_1", "ln_2"))

    def recipe(self) -> ModelRecipe:
        recipe = super().recipe()
        return replace(recipe, embedding="transformer.wte", layer_prefix="transformer.h.", last_norm="transformer.ln_f")


class Exaone4Settings(FamilySettings, kw_only=True):
    """Where layers have windows, those that see everything do not know positions."""

    models: ClassVar[str] = "EXAONE 4"
    head_norms: ClassVar[bool] = True
    vocab_size: Count = 102_400
    intermediate_size: Count = 16_384
    num_key_value_heads: Count | None = 32
    rms_norm_eps: float = 1e-5
    sliding_window: Count | None = 4096
    sliding_window_pattern: int | str | None = 4
    layer_types: list[str] | None = None

    def biases(self) -> frozenset[str]:
        return NONE

    def windows(self) -> tuple[int | None, ...]:
        layers, pattern = self.num_hidden_layers, self.sliding_window_pattern
        if self.sliding_window is None:
            return (None,) * layers
        usual = [FULL] * layers
        if isinstance(pattern, int) and pattern > 0:
            usual = [SLIDING if (i + 1) % pattern and i < layers - 1 else FULL for i in range(layers)]
        elif isinstance(pattern, str):
            each = {"L": SLIDING, "G": FULL}
            usual = [each.get(pattern[i % len(pattern)], "") for i in range(layers)]
            usual[-1] = FULL
        return windows_of(self.layer_types, usual, layers, self.sliding_window)

    def rotary_of_layer(self, index: int) -> Rotary | None:
        return self.rotary() if self.sliding_window is None or self.windows()[index] is not None else None

    def layer(self, index: int) -> LayerRecipe:
        return replace(super().layer(index), norms=NORMS_BEHIND, order=NormOrder.POST)


class ExaoneMoeSettings(Exaone4Settings, kw_only=True):
    """DeepSeek V3's experts behind EXAONE 4's attention, with norms before each part."""

    models: ClassVar[str] = "K-EXAONE 236B A23B"
    eos_token_id: int | list[int] | None = 53
    moe_intermediate_size: Count = 1024
    num_experts: Count = 64
    num_experts_per_tok: Count = 8
    num_shared_experts: Count = 1
    routed_scaling_factor: float = 2.5
    n_group: Count = 1
    topk_group: Count = 1
    norm_topk_prob: bool = True
    first_k_dense_replace: int = 1
    mlp_layer_types: list[str] | None = None

    @property
    def n_routed_experts(self) -> int:
        return self.num_experts

    @property
    def n_shared_experts(self) -> int:
        return self.num_shared_experts

    def check(self) -> None:
        super().check()
        if self.mlp_layer_types is not None:  # It may have kinds of further layers: those that draft.
            check_kinds(self.mlp_layer_types[: self.num_hidden_layers], self.num_hidden_layers)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        kinds = self.mlp_layer_types
        dense = index < self.first_k_dense_replace if kinds is None else kinds[index] == DENSE
        return self.mlp() if dense else replace(routed(self), correction="mlp.e_score_correction_bias")

    def layer(self, index: int) -> LayerRecipe:
        return FamilySettings.layer(self, index)

    def recipe(self) -> ModelRecipe:
        return replace(super().recipe(), unused=("mtp.",))


class KolibriSettings(Exaone4Settings, kw_only=True):
    """Aleph Alpha's Kolibri: four norms, and experts that are chosen by corrected outputs of the router."""

    models: ClassVar[str] = "Kolibri 1"
    vocab_size: Count = 128_000
    hidden_size: Count = 2560
    num_hidden_layers: Count = 50
    num_attention_heads: Count = 48
    num_key_value_heads: Count | None = 4
    head_dim: Count | None = 128
    max_position_embeddings: Count = 262_144
    rms_norm_eps: float = 1e-6
    eos_token_id: int | list[int] | None = None
    sliding_window: Count | None = 513
    num_experts: Count = 384
    num_local_experts: Count | None = None
    """What newer files call ``num_experts``."""
    num_experts_per_tok: Count = 6
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        self.num_experts = self.num_local_experts or self.num_experts

    def check(self) -> None:
        super().check()
        check_experts(self.num_experts_per_tok, self.num_experts)

    def windows(self) -> tuple[int | None, ...]:
        usual = [SLIDING if (index + 1) % 5 else FULL for index in range(self.num_hidden_layers)]
        return windows_of(self.layer_types, usual, self.num_hidden_layers, self.sliding_window)

    def feed_forward(self, index: int) -> FeedForwardRecipe:
        return ExpertsRecipe(
            self.num_experts,
            self.num_experts_per_tok,
            gated_expert(self.moe_intermediate_size),
            scoring=Scoring.SIGMOID_OF_CHOSEN,
            normalised=self.norm_topk_prob,
            correction="moe.router.expert_bias",
            precise_router=True,
            shared=gated("mlp.shared_experts", self.shared_expert_intermediate_size),
        )

    def layer(self, index: int) -> LayerRecipe:
        norms = ("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm")
        return replace(super().layer(index), norms=norms, order=NormOrder.SANDWICH)
