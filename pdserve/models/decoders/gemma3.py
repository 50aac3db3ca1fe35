"""Computes the text model of Gemma 3 (Gemma Team, 2025).

Most layers see a sliding window, and one in every few sees everything. Every layer has four norms,
whose weights are stored as the difference from one, and normalised query and key heads. Keys and values that have left
a window stay in the cache: the layers that see everything need their blocks anyway. For a model that takes images,
too, this module computes only the part that reads and writes text.
"""

from __future__ import annotations

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

NORM_OFFSET = 1.0


class Gemma3Decoder:
    """Satisfies ``decoder.Decoder``."""

    capturable = True

    def __init__(self, config: FamilyConfig, building: Building, max_positions: int, dtype: torch.dtype) -> None:
        """Takes every tensor of the checkpoint. Raises ModelError on a missing or unknown one."""
        checkpoint = building.checkpoint
        checkpoint.unwrap("language_model.", others=("vision_tower.", "multi_modal_projector."))
        self._kernels, self._eps = building.kernels, config.norm_eps
        self._embedding = VocabParallelEmbedding(building, "model.embed_tokens", config)
        # The factor is rounded like the weights, because the model was trained with the rounded one.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
        self._layers = [Gemma3Layer(config, building, i) for i in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight", (config.hidden_size,)) + NORM_OFFSET
        self._head = vocab_parallel_head(building, self._embedding, config)
        self._windows = config.windows
        self._table, self._window_table = (
            rotary_table(rotary, config.head_dim, max_positions, dtype, checkpoint.device)
            for rotary in (config.rotary, config.window_rotary)
        )
        checkpoint.check_all_taken()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        angles, window_angles = ((cos[positions], sin[positions]) for cos, sin in (self._table, self._window_table))
        residual = self._embedding(token_ids) * self._embedding_scale
        delta: torch.Tensor | None = None
        for window, layer in zip(self._windows, self._layers, strict=True):
            cos, sin = angles if window is None else window_angles
            delta, residual = layer(residual, delta, cos, sin, attention)
        return residual if delta is None else residual + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._kernels.rms_norm(hidden, self._norm, self._eps))


class Gemma3Layer:
    """One layer: attention and gated MLP, each between two norms, and each added to the residual."""

    def __init__(self, config: FamilyConfig, building: Building, index: int) -> None:
        prefix = f"model.layers.{index}"
        self._eps, self._kernels = config.norm_eps, building.kernels
        self._attention = SelfAttention(config, building, f"{prefix}.self_attn", index, NORM_OFFSET)
        self._mlp = GatedMlp(config, building, f"{prefix}.mlp", building.kernels.gelu_and_mul)
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = (
            building.checkpoint.take(f"{prefix}.{name}.weight", (config.hidden_size,)) + NORM_OFFSET for name in names
        )

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(delta, residual)``. This layer's MLP output is ``delta``: the next norm adds it, in one pass."""
        kernels, eps = self._kernels, self._eps
        if delta is None:
            normed = kernels.rms_norm(residual, self._before_attention, eps)
        else:
            normed, residual = kernels.add_rms_norm(delta, residual, self._before_attention, eps)
        attended = kernels.rms_norm(self._attention(normed, cos, sin, attention), self._after_attention, eps)
        normed, residual = kernels.add_rms_norm(attended, residual, self._before_mlp, eps)
        return kernels.rms_norm(self._mlp(normed), self._after_mlp, eps), residual
