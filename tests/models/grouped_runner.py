"""A runner that keeps the tables of all groups of the cache but the first for the requests of a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdserve.config import Dtype
from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.layer_groups import layer_groups
from pdserve.models.runner import ModelRunner, Score, StepRow
from pdserve.wire.cache_groups import GroupBlocks, Keep
from pdserve_kernels.contract import Kernels

SPARE_BLOCKS = 16


class GroupedRunner(ModelRunner):
    """Rows need only the table of the first group, whose first block names the request.

    What a request does not need is given back before a step, and is not a number then: who reads it shows.
    """

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        dtype: Dtype,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        kernels: Kernels,
        **others: Any,
    ) -> None:
        """Takes what ``ModelRunner`` takes, but for ``bounded``."""
        bounded = [num_blocks + SPARE_BLOCKS] * (len(layer_groups(config).groups) - 1)
        shape = (dtype, block_size, num_blocks, max_model_len)
        super().__init__(folder, config, *shape, kernels, bounded=bounded, **others)
        self._block_size = block_size
        self._bounded = self.cache.groups[1:]
        # The first block of a group is never taken: holes may stand for it.
        self._free = [list(group.ids)[:0:-1] for group in self._bounded]
        self._tables: dict[int, list[list[int]]] = {}
        for group in self._bounded:
            self._spoil(group, group.ids)

    def run(
        self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None, score: Score | None = None
    ) -> torch.Tensor:
        if not self._bounded:
            return super().run(rows, tokens, score)
        seen: dict[int, int] = {}
        for row in rows:
            seen[row.block_table[0]] = row.context_len
        begun: set[int] = set()
        placed, left = [], list[tuple[int, int]]()
        for row in rows:
            request = row.block_table[0]
            others: list[Sequence[int]] = []
            for number, group in enumerate(self._bounded):
                if request not in begun and row.start == 0:
                    self._give_back(request, number)
                if group.spec.keep is Keep.LATEST:
                    others.append(self._state(request, number, left, follows=request in begun))
                else:
                    others.append(self._window(request, number, row.start, seen[request], follows=request in begun))
            begun.add(request)
            placed.append(msgspec.structs.replace(row, others=others))
        logits = super().run(placed, tokens, score)
        for number, block in left:
            self._release(number, block)
        return logits

    def _state(self, request: int, number: int, left: list[tuple[int, int]], *, follows: bool) -> tuple[int, int]:
        table = self._table(request, number)
        if follows:
            return table[0], table[0]
        source = table[0] if table else -1
        if source >= 0:
            left.append((number, source))
        table[:] = [self._free[number].pop()]
        return source, table[0]

    def _window(self, request: int, number: int, start: int, end: int, *, follows: bool) -> list[int]:
        table = self._table(request, number)
        if not follows:
            needed = self._bounded[number].spec.needed(start, self._block_size)
            for place, block in enumerate(table[: needed.start]):
                if block >= 0:
                    self._release(number, block)
                    table[place] = -1
            table += [self._free[number].pop() for _ in range(-(-end // self._block_size) - len(table))]
            self.clear([block for block in table[start // self._block_size + 1 :] if block >= 0])
            if start % self._block_size == 0:
                self.clear(table[start // self._block_size : start // self._block_size + 1])
        return list(table)

    def _table(self, request: int, number: int) -> list[int]:
        return self._tables.setdefault(request, [[] for _ in self._bounded])[number]

    def _give_back(self, request: int, number: int) -> None:
        table = self._table(request, number)
        for block in table:
            if block >= 0:
                self._release(number, block)
        table.clear()

    def _release(self, number: int, block: int) -> None:
        self._spoil(self._bounded[number], [block])
        self._free[number].append(block)

    def _spoil(self, group: GroupBlocks, blocks: Sequence[int]) -> None:
        for block in blocks:
            start = group.place(block)
            self.cache.memory[start : start + group.block_bytes].fill_(0xFF)
