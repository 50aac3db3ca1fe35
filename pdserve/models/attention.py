"""The attention of one step: where its keys and values go, and what each of its tokens looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.models.step_batch import StepRow
from pdserve_kernels.cpu.kv_write import KvWrite
from pdserve_kernels.cpu.paged_attention import DecodeAttention, PrefillAttention, PrefillSpan
from pdserve_kernels.layout import KvLayout


class StepAttention:
    """Planned once a step for rows that are ordered single tokens first; called once a layer."""

    def __init__(self, layout: KvLayout, cache: torch.Tensor, rows: Sequence[StepRow], heads: int) -> None:
        singles = [row for row in rows if len(row.token_ids) == 1]
        spans = rows[len(singles) :]
        if any(len(row.token_ids) == 1 for row in spans):
            raise ValueError("rows with one token must come before rows with several")
        self._singles = len(singles)
        self._write = KvWrite(layout, cache, _slots(rows, layout.block_size).to(cache.device))
        self._decode = (
            DecodeAttention(
                layout, cache, [row.block_table for row in singles], [row.context_len for row in singles], heads
            )
            if singles
            else None
        )
        self._prefills = [
            (
                len(row.token_ids),
                PrefillAttention(
                    layout, cache, PrefillSpan(len(row.token_ids), row.context_len, row.block_table), heads
                ),
            )
            for row in spans
        ]

    def __call__(self, layer: int, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        """``query`` ``[tokens, heads, head_dim]``, ``key_value`` ``[2, tokens, kv_heads, head_dim]``."""
        self._write(layer, key_value)
        if self._decode is not None and not self._prefills:
            return self._decode(layer, query)
        out = torch.empty_like(query)
        if self._decode is not None:
            out[: self._singles] = self._decode(layer, query[: self._singles])
        first = self._singles
        for length, attend in self._prefills:
            out[first : first + length] = attend(layer, query[first : first + length])
            first += length
        return out


def _slots(rows: Sequence[StepRow], block_size: int) -> torch.Tensor:
    slots: list[int] = []
    for row in rows:
        table = row.block_table
        slots.extend(
            table[position // block_size] * block_size + position % block_size
            for position in range(row.start, row.context_len)
        )
    return torch.tensor(slots, dtype=torch.int64)
