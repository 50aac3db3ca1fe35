"""Runs one scheduled step on one rank: rows in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pdserve.config import Dtype
from pdserve.models.backend import CPU
from pdserve.models.decode_graphs import DecodeGraphs, DecodeInputs, Graph
from pdserve.models.decoder import build_decoder
from pdserve.models.decoder_config import DecoderConfig
from pdserve.models.layers import Building
from pdserve.models.step_batch import StepRow
from pdserve.models.tensor_parallel import ALONE, TpGroup, kv_share, share
from pdserve.models.weights import Checkpoint
from pdserve_kernels.contract import AttentionRow, GraphKernels, Kernels
from pdserve_kernels.layout import KvLayout
from pdserve_kernels.staging import stage

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
        device: torch.device = CPU,
        tp: TpGroup = ALONE,
        kv_memory: memoryview | None = None,
    ) -> None:
        """Loads this rank's part of the model. Raises ModelError if the folder does not hold it.

        ``kv_memory``, zeroed and of ``num_blocks`` blocks, is where to keep the KV cache; wherever ``device`` has it if
        not given.
        """
        torch_dtype = TORCH_DTYPES[dtype]
        self.layout = kv_layout(config, dtype, block_size, tp)
        self.kv_cache = self.layout.allocate(num_blocks, device) if kv_memory is None else self.layout.over(kv_memory)
        heads = share(tp, config.heads, "attention heads")
        self._heads = heads.stop - heads.start
        self._scale = config.attention_scale
        self._max_model_len = max_model_len
        self._kernels = kernels
        self._tp = tp
        self._graphs: DecodeGraphs | None = None
        building = Building(Checkpoint(folder, torch_dtype, device), self._kernels, tp)
        self._decoder = build_decoder(config, building, max_model_len, torch_dtype)

    @torch.inference_mode()
    def run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Compute every row's tokens into the KV cache; single-token rows come first.

        ``tokens``, ``[number of rows]`` on the device of the cache, take the place of the rows' own where all have one.

        Returns fp32 logits ``[number of rows with wants_logits, vocab_size]``, in the order of the rows, on the device
        of the cache and valid until the next call; on ranks other than 0 ``[that number, 0]``. Does not wait for a GPU
        to have computed them. Raises RankLost if another rank does not compute the same.
        """
        self._tp.begin_step()
        if self._graphs is not None:
            logits = self._graphs.run(rows, tokens)
            if logits is not None:
                wanting = [i for i, row in enumerate(rows) if row.wants_logits]
                return logits if len(wanting) == len(rows) else logits[wanting]
        return self._run(rows, tokens)

    def _run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None) -> torch.Tensor:
        """Any step, each kernel launched from here."""
        last, end = [], 0
        for row in rows:
            end += len(row.token_ids)
            if row.wants_logits:
                last.append(end - 1)
        token_ids, positions, wanted = stage(
            [
                [token for row in rows for token in row.token_ids],
                [position for row in rows for position in range(row.start, row.context_len)],
                last,
            ],
            self.kv_cache.device,
        )
        if tokens is not None:
            token_ids.copy_(tokens)
        spans = [AttentionRow(len(row.token_ids), row.context_len, row.block_table) for row in rows]
        attention = self._kernels.plan_attention(self.layout, self.kv_cache, spans, self._heads, self._scale)
        hidden = self._decoder.forward(token_ids, positions, attention)
        return self._decoder.logits(hidden[wanted])

    @torch.inference_mode()
    def capture_decode(self, kernels: GraphKernels, max_rows: int, make_graph: Callable[[], Graph]) -> None:
        """From now on, replay steps of up to ``max_rows`` single tokens. Stores nothing in the cache.

        Does nothing if the model's steps differ with what they hold.
        """
        if not self._decoder.capturable:
            return

        def compute(inputs: DecodeInputs) -> torch.Tensor:
            attention = kernels.plan_decode(
                self.layout,
                self.kv_cache,
                inputs.slots,
                inputs.tables,
                self._heads,
                self._scale,
                self._max_model_len,
            )
            return self._decoder.logits(self._decoder.forward(inputs.token_ids, inputs.positions, attention))

        self._graphs = DecodeGraphs(
            compute, make_graph, max_rows, self._max_model_len, self.layout.block_size, self.kv_cache.device
        )

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks. All sources are read before any destination is written."""
        self.kv_cache[list(destinations)] = self.kv_cache[list(sources)]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks: what is not finite must not stay in memory that another request will own."""
        self.kv_cache[list(blocks)] = 0


def kv_layout(config: DecoderConfig, dtype: Dtype, block_size: int, tp: TpGroup = ALONE) -> KvLayout:
    """The layout of one rank's KV cache for a model. Raises ModelError if its heads cannot be split so."""
    kv_heads = kv_share(tp, config.heads, config.kv_heads)
    num_kv_heads = kv_heads.stop - kv_heads.start
    return KvLayout(num_kv_heads, config.num_layers, block_size, config.head_dim, TORCH_DTYPES[dtype])
