"""Computes the Llama family: Llama, SmolLM, Mistral, Qwen2 (biased projections), Qwen3 (normalised heads).

Qwen3-MoE is Qwen3 with another feed-forward part, which ``qwen3_moe`` has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.decoders.layers import (
    Building,
    GatedMlp,
    SelfAttention,
    VocabParallelEmbedding,
    vocab_parallel_head,
)
from pdserve.models.decoders.rotary import rotary_table
from pdserve_kernels.contract import Attention

FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""Maps ``[tokens, hidden_size]`` to the same shape."""

FeedForwardOf = Callable[[FamilyConfig, Building, str, int], FeedForward]
"""Builds a layer's feed-forward part from ``(config, building, prefix of its tensors, index of the layer)``."""


def dense(config: FamilyConfig, building: Building, prefix: str, index: int) -> FeedForward:
    """Returns a gated MLP, which is the same in every layer."""
    return GatedMlp(config, building, prefix, building.kernels.silu_and_mul)


class LlamaDecoder:
    """Satisfies ``decoder.Decoder``."""

    def __init__(
        self,
        config: FamilyConfig,
        building: Building,
        max_positions: int,
        dtype: torch.dtype,
        feed_forward: FeedForwardOf = dense,
    ) -> None:
        """Takes every tensor of the checkpoint. Raises ModelError on a missing or unknown one."""
        checkpoint = building.checkpoint
        self.capturable = feed_forward is dense
        self._kernels, self._eps = building.kernels, config.norm_eps
        self._embedding = VocabParallelEmbedding(building, "model.embed_tokens", config)
        self._layers = [LlamaLayer(config, building, i, feed_forward) for i in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,))
        self._head = vocab_parallel_head(building, self._embedding, config)
        self._cos, self._sin = rotary_table(config.rotary, config.head_dim, max_positions, dtype, checkpoint.device)
        checkpoint.check_all_taken()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        cos, sin = self._cos[positions], self._sin[positions]
        residual = self._embedding(token_ids)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            delta, residual = layer(residual, delta, cos, sin, attention)
        return residual if delta is None else residual + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._kernels.rms_norm(hidden, self._norm, self._eps))


class LlamaLayer:
    """One layer: attention and feed-forward part, each after a norm, and each added to the residual."""

    def __init__(self, config: FamilyConfig, building: Building, index: int, feed_forward: FeedForwardOf) -> None:
        checkpoint = building.checkpoint
        prefix = f"model.layers.{index}"
        self._eps, self._kernels = config.norm_eps, building.kernels
        self._attention = SelfAttention(config, building, f"{prefix}.self_attn", index)
        self._feed_forward = feed_forward(config, building, f"{prefix}.mlp", index)
        self._input_norm = checkpoint.take(f"{prefix}.input_layernorm.weight", (config.hidden_size,))
        self._mlp_norm = checkpoint.take(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,))

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(delta, residual)``. This layer's MLP output is ``delta``: the next norm adds it, in one pass."""
        kernels = self._kernels
        if delta is None:
            normed = kernels.rms_norm(residual, self._input_norm, self._eps)
        else:
            normed, residual = kernels.add_rms_norm(delta, residual, self._input_norm, self._eps)
        attended = self._attention(normed, cos, sin, attention)
        normed, residual = kernels.add_rms_norm(attended, residual, self._mlp_norm, self._eps)
        return self._feed_forward(normed), residual
