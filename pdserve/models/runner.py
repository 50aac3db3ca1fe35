"""Runs one scheduled step on one rank: rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.config import Dtype
from pdserve.models.decoder import build_decoder
from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.layers import Building
from pdserve.models.step_batch import StepRow
from pdserve.models.tensor_parallel import Alone
from pdserve.models.weights import Checkpoint
from pdserve_kernels.contract import AttentionRow, Kernels
from pdserve_kernels.layout import KvLayout

TORCH_DTYPES = {Dtype.BF16: torch.bfloat16, Dtype.FP32: torch.float32}


class ModelRunner:
    """Owns the weights and the KV cache of one rank."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        dtype: Dtype,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        kernels: Kernels,
    ) -> None:
        """Loads the model. Raises ModelError if the folder does not hold it."""
        torch_dtype = TORCH_DTYPES[dtype]
        self.layout = kv_layout(config, dtype, block_size)
        self.kv_cache = self.layout.allocate(num_blocks, torch.device("cpu"))
        self._heads = config.heads
        self._scale = config.attention_scale
        self._kernels = kernels
        building = Building(Checkpoint(folder, torch_dtype), self._kernels, Alone())
        self._decoder = build_decoder(config, building, max_model_len, torch_dtype)

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow]) -> torch.Tensor:
        """Compute every row's tokens into the KV cache; single-token rows come first.

        Returns fp32 logits ``[number of rows with wants_logits, vocab_size]``, in the order of the rows.
        """
        token_ids = [token for row in rows for token in row.token_ids]
        positions = [position for row in rows for position in range(row.start, row.context_len)]
        spans = [AttentionRow(len(row.token_ids), row.context_len, row.block_table) for row in rows]
        attention = self._kernels.plan_attention(self.layout, self.kv_cache, spans, self._heads, self._scale)
        hidden = self._decoder.forward(torch.tensor(token_ids), torch.tensor(positions), attention)
        last, end = [], 0
        for row in rows:
            end += len(row.token_ids)
            if row.wants_logits:
                last.append(end - 1)
        return self._decoder.logits(hidden[last])

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks. All sources are read before any destination is written."""
        self.kv_cache[list(destinations)] = self.kv_cache[list(sources)]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks: what is not finite must not stay in memory that another request will own."""
        self.kv_cache[list(blocks)] = 0


def kv_layout(config: DecoderConfig, dtype: Dtype, block_size: int) -> KvLayout:
    """The layout of one rank's KV cache for a model."""
    return KvLayout(config.kv_heads, config.num_layers, block_size, config.head_dim, TORCH_DTYPES[dtype])
