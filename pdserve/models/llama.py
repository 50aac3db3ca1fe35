"""Llama-family decoder: Llama, SmolLM, Mistral, Qwen2 (biased projections), Qwen3 (normalised heads)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pdserve.models.attention import StepAttention
from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.rotary_table import rotary_table
from pdserve.models.weights import Checkpoint
from pdserve_kernels.cpu.linear import Linear
from pdserve_kernels.reference import add_rms_norm, rms_norm, rotary, silu_and_mul


class Decoder:
    """Token ids and positions in, hidden states out; ``logits`` for the rows that need them."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, max_positions: int, dtype: torch.dtype) -> None:
        """Takes every tensor of ``checkpoint``; raises ModelError on a missing or unknown one."""
        self._eps = config.norm_eps
        self._embedding = checkpoint.take("model.embed_tokens.weight")
        self._layers = [Layer(config, checkpoint, i) for i in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight")
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
            self._head = Linear(self._embedding)
        else:
            self._head = Linear(checkpoint.take("lm_head.weight"))
        self._cos, self._sin = rotary_table(config, max_positions, dtype)
        checkpoint.check_all_taken()

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """``[tokens]`` ids and positions to ``[tokens, hidden_size]``, before the final norm."""
        cos, sin = self._cos[positions], self._sin[positions]
        residual = F.embedding(token_ids, self._embedding)
        delta: torch.Tensor | None = None
        for layer in self._layers:
            delta, residual = layer(residual, delta, cos, sin, attention)
        return residual if delta is None else residual + delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden_size]`` to fp32 ``[rows, vocab_size]``."""
        return self._head(rms_norm(hidden, self._norm, self._eps)).float()


class Layer:
    """One block: attention and gated MLP, each behind a norm, each added to the residual."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, index: int) -> None:
        prefix = f"model.layers.{index}"
        self._index = index
        self._eps = config.norm_eps
        self._heads, self._kv_heads, self._head_dim = config.heads, config.kv_heads, config.head_dim
        attention = f"{prefix}.self_attn"
        self._qkv = _fused(checkpoint, [f"{attention}.{name}_proj" for name in "qkv"])
        self._out = _fused(checkpoint, [f"{attention}.o_proj"])
        self._gate_up = _fused(checkpoint, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"])
        self._down = _fused(checkpoint, [f"{prefix}.mlp.down_proj"])
        # Older exports carry the table that rotary_table computes.
        checkpoint.drop(f"{attention}.rotary_emb.inv_freq")
        self._input_norm = checkpoint.take(f"{prefix}.input_layernorm.weight")
        self._mlp_norm = checkpoint.take(f"{prefix}.post_attention_layernorm.weight")
        self._query_norm = checkpoint.take_optional(f"{attention}.q_norm.weight")
        self._key_norm = checkpoint.take_optional(f"{attention}.k_norm.weight")

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StepAttention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(delta, residual)``: what this layer's MLP adds, not yet added, so that the next norm can fuse it."""
        if delta is None:
            normed = rms_norm(residual, self._input_norm, self._eps)
        else:
            normed, residual = add_rms_norm(delta, residual, self._input_norm, self._eps)
        attended = self._attend(normed, cos, sin, attention)
        normed, residual = add_rms_norm(attended, residual, self._mlp_norm, self._eps)
        return self._down(silu_and_mul(self._gate_up(normed))), residual

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, self._heads + 2 * self._kv_heads, self._head_dim)
        query_key, value = torch.split(qkv, [self._heads + self._kv_heads, self._kv_heads], 1)
        if self._query_norm is not None and self._key_norm is not None:
            query, key = torch.split(query_key, [self._heads, self._kv_heads], 1)
            query_key = torch.cat(
                (rms_norm(query, self._query_norm, self._eps), rms_norm(key, self._key_norm, self._eps)), 1
            )
        query, key = torch.split(rotary(query_key, cos, sin), [self._heads, self._kv_heads], 1)
        return self._out(attention(self._index, query, torch.stack((key, value))).reshape(tokens, -1))


def _fused(checkpoint: Checkpoint, names: list[str]) -> Linear:
    weight = torch.cat([checkpoint.take(f"{name}.weight") for name in names])
    biases = [bias for name in names if (bias := checkpoint.take_optional(f"{name}.bias")) is not None]
    return Linear(weight, torch.cat(biases) if biases else None)
