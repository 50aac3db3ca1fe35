"""Llama-family decoder: Llama, SmolLM, Mistral, Qwen2 (biased projections), Qwen3 (normalised heads)."""

from __future__ import annotations

import torch

from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.layers import (
    Building,
    RowParallel,
    VocabParallelEmbedding,
    VocabParallelHead,
    column_parallel,
    vocab_parallel_head,
)
from pdserve.models.rotary_table import rotary_table
from pdserve.models.tensor_parallel import kv_share, share, spread
from pdserve_kernels.contract import Attention, HeadNorms


class LlamaDecoder:
    """Satisfies ``decoder.Decoder``."""

    def __init__(self, config: DecoderConfig, building: Building, max_positions: int, dtype: torch.dtype) -> None:
        """Takes every tensor of the checkpoint; raises ModelError on a missing or unknown one."""
        checkpoint = building.checkpoint
        self._kernels, self._eps = building.kernels, config.norm_eps
        self._embedding = VocabParallelEmbedding(building, "model.embed_tokens", config.vocab_size)
        self._layers = [LlamaLayer(config, building, i) for i in range(config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight")
        if config.tied_embeddings:
            checkpoint.drop("lm_head.weight")
            self._head = VocabParallelHead(building, self._embedding.weight)
        else:
            self._head = vocab_parallel_head(building, "lm_head", config.vocab_size)
        self._cos, self._sin = rotary_table(config, max_positions, dtype)
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
    """One block: attention and gated MLP, each behind a norm, each added to the residual."""

    def __init__(self, config: DecoderConfig, building: Building, index: int) -> None:
        checkpoint, tp = building.checkpoint, building.tp
        prefix = f"model.layers.{index}"
        self._index, self._eps, self._kernels = index, config.norm_eps, building.kernels
        heads = share(tp, config.heads, "attention heads")
        kv_heads = kv_share(tp, config.heads, config.kv_heads)
        self._head_dim = config.head_dim
        attention = f"{prefix}.self_attn"
        queries, keys = spread(heads, config.head_dim), spread(kv_heads, config.head_dim)
        self._qkv = column_parallel(
            building, [(f"{attention}.q_proj", queries), (f"{attention}.k_proj", keys), (f"{attention}.v_proj", keys)]
        )
        self._out = RowParallel(building, f"{attention}.o_proj", queries)
        inner = share(tp, config.intermediate_size, "MLP channels")
        self._gate_up = column_parallel(
            building, [(f"{prefix}.mlp.gate_proj", inner), (f"{prefix}.mlp.up_proj", inner)]
        )
        self._down = RowParallel(building, f"{prefix}.mlp.down_proj", inner)
        # Older exports carry the table that rotary_table computes.
        checkpoint.drop(f"{attention}.rotary_emb.inv_freq")
        self._input_norm = checkpoint.take(f"{prefix}.input_layernorm.weight")
        self._mlp_norm = checkpoint.take(f"{prefix}.post_attention_layernorm.weight")
        query_norm = checkpoint.take_optional(f"{attention}.q_norm.weight")
        key_norm = checkpoint.take_optional(f"{attention}.k_norm.weight")
        self._head_norms: HeadNorms | None = None
        if query_norm is not None and key_norm is not None:
            self._head_norms = HeadNorms(query_norm, key_norm, self._eps)

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(delta, residual)``: what this layer's MLP adds, not yet added, so that the next norm can fuse it."""
        kernels = self._kernels
        if delta is None:
            normed = kernels.rms_norm(residual, self._input_norm, self._eps)
        else:
            normed, residual = kernels.add_rms_norm(delta, residual, self._input_norm, self._eps)
        attended = self._attend(normed, cos, sin, attention)
        normed, residual = kernels.add_rms_norm(attended, residual, self._mlp_norm, self._eps)
        return self._down(kernels.silu_and_mul(self._gate_up(normed))), residual

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention) -> torch.Tensor:
        tokens = x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, self._head_dim)
        attended = attention.from_projection(self._index, qkv, cos, sin, self._head_norms)
        return self._out(attended.reshape(tokens, -1))
