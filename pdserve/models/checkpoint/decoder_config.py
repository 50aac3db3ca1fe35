"""What is known of a decoder before its weights are read. ``config_reading`` reads it from a model's files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve.models.checkpoint.safetensors.quantisation import Quantisation
from pdserve.models.recipe import (
    AttentionRecipe,
    BlockIndexRecipe,
    ExpertsRecipe,
    HeadBlocksRecipe,
    LatentRecipe,
    LongScaling,
    MlpBesideExperts,
    ModelRecipe,
    SharedKvRecipe,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What the KV cache and the scheduler need to know of every decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    attention_scale: float
    """The factor of the attention scores."""
    attention_cap: float | None
    """Scaled scores ``x`` become ``cap * tanh(x / cap)``; None if they have no bound."""
    windows: tuple[int | None, ...]
    """The number of tokens that each layer sees, including the newest; None for a layer that sees all."""
    max_positions: int
    eos_token_ids: frozenset[int]

    @property
    def has_draft_layer(self) -> bool:
        """Whether the files have a layer that drafts tokens. Its keys and values are cached if anybody drafts or not,
        so that the blocks of all nodes are alike."""
        return False

    @property
    def cached_layers(self) -> int:
        """The layers, and the one that drafts tokens if there is one."""
        return self.num_layers + self.has_draft_layer

    def turns_for_long_contexts(self, max_model_len: int) -> bool:
        """Returns whether keys differ from those of a model that is served with shorter contexts."""
        return False


@dataclass(frozen=True, slots=True)
class FamilyConfig(DecoderConfig):
    """A model of one of ``table.FAMILIES``, with the recipe that its decoder is built from."""

    intermediate_size: int
    """The channels of a feed-forward part that is no expert."""
    recipe: ModelRecipe
    quantisation: Quantisation | None = None
    """How the weights of a folder are quantised."""

    @property
    def has_draft_layer(self) -> bool:
        return self.recipe.draft is not None

    def turns_for_long_contexts(self, max_model_len: int) -> bool:
        rotaries = (part.rotary for part in self.recipe.attention)
        scalings = (rotary and rotary.scaling for rotary in rotaries)
        return any(isinstance(each, LongScaling) and max_model_len > each.original_positions for each in scalings)

    def of_layer(self, attention: AttentionRecipe) -> FamilyConfig:
        """Returns the configuration with the heads that a layer has, which may not be those of the model."""
        own = attention.heads or self.heads, attention.kv_heads or self.kv_heads, attention.head_dim or self.head_dim
        if own == (self.heads, self.kv_heads, self.head_dim):
            return self
        heads, kv_heads, dim = own
        return replace(self, heads=heads, kv_heads=kv_heads, head_dim=dim)

    @property
    def latent(self) -> LatentRecipe | None:
        """How keys and values come from latents, if they do. All layers keep the same channels of a token."""
        return next((part.latent for part in self.recipe.attention), None)

    @property
    def shared(self) -> SharedKvRecipe | None:
        """How all heads have one vector as key and value, if they do. All layers have the same, but for entries."""
        return next((part.shared for part in self.recipe.attention), None)

    @property
    def blocks(self) -> BlockIndexRecipe | None:
        """What chooses the blocks of tokens that a token attends to, if it does. All layers have the same."""
        return next((part.blocks for part in self.recipe.attention), None)

    @property
    def head_blocks(self) -> HeadBlocksRecipe | None:
        """How KV heads choose blocks in some layers, if they do. Layers of one model differ only in ``index``."""
        found = [part.head_blocks for part in self.recipe.attention if part.head_blocks is not None]
        return next((each for each in found if each.index is not None), None)

    @property
    def experts(self) -> ExpertsRecipe | None:
        """The experts of those layers that have some."""
        for part in (part for layer in self.recipe.layers for part in layer.feeding):
            match part:
                case ExpertsRecipe() as experts:
                    return experts
                case MlpBesideExperts(experts=experts):
                    return experts
        return None


@dataclass(frozen=True, slots=True)
class FallbackConfig(DecoderConfig):
    """A fallback model: one outside ``table.FAMILIES``, which transformers computes from ``hf``."""

    hf: PretrainedConfig

    @property
    def channels(self) -> int:
        """The channels of a token's feed-forward parts as the settings name them, at least those that are usual."""
        names = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
        given = [value for name in names if isinstance(value := getattr(self.hf, name, None), int)]
        chosen = getattr(self.hf, "num_experts_per_tok", None)
        return max([4 * self.hidden_size, *given]) * (chosen if isinstance(chosen, int) and chosen > 1 else 1)
