"""Decode steps captured once for each size and then replayed, so that no kernel is launched one by one.

A step of a small model on a fast GPU takes less time than launching its some hundred kernels from Python. The inputs
of a captured step are fixed tensors; what changes from step to step is their contents. Where only single-token rows
are computed, their number is padded to the next bucket; rows of padding store nothing and read nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from pdserve.models.decode_buckets import bucket_for, decode_buckets
from pdserve.models.step_batch import StepRow
from pdserve_kernels.contract import DecodeTables
from pdserve_kernels.staging import pack, packed_starts

PADDING_SLOT = -1


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One decode step on the device; int32, a value a row."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: DecodeTables


class Graph(Protocol):
    """A computation that is recorded once."""

    def capture(self, compute: Callable[[], None]) -> None:
        """Record ``compute``, which reads and writes tensors that stay."""

    def replay(self) -> None:
        """Run what was recorded, on whatever its inputs hold now."""


class CudaGraphs:
    """Makes graphs that share one pool of memory: only one of them is used at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self) -> CudaGraph:
        return CudaGraph(self._pool)


class CudaGraph:
    """Satisfies ``Graph``."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, compute: Callable[[], None]) -> None:
        # Kernels are compiled and libraries allocate on first use, which cannot be recorded.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()

    def replay(self) -> None:
        self._graph.replay()


class DecodeGraphs:
    """The captured decode steps of one model, and the tensors they read."""

    def __init__(
        self,
        compute: Callable[[DecodeInputs], torch.Tensor],
        make_graph: Callable[[], Graph],
        max_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Capture ``compute``, which gives one row of logits for each of its inputs, for every bucket."""
        self._compute = compute
        self._buckets = decode_buckets(max_rows)
        self._block_size = block_size
        self._starts = packed_starts([max_rows] * 5 + [max_rows * -(-max_model_len // block_size)])
        self._buffer = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        self._fill([], max_rows)
        # One for all graphs: their own results would take max_rows * vocab_size numbers for every bucket.
        self._logits = torch.empty_like(compute(self._inputs(max_rows)))
        # Largest first: the others then fit into the memory that it took.
        self._graphs = {bucket: make_graph() for bucket in reversed(self._buckets)}
        for bucket, graph in self._graphs.items():
            self._fill([], bucket)
            graph.capture(partial(self._run, bucket))

    def run(self, rows: Sequence[StepRow], tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """Logits of each row, valid until the next call; None if there is no graph for such a step.

        ``tokens``, ``[rows]`` on the device, take the place of the rows' own.
        """
        bucket = bucket_for(len(rows), self._buckets)
        if bucket is None or any(len(row.token_ids) != 1 for row in rows):
            return None
        self._fill(rows, bucket)
        if tokens is not None:
            self._buffer[: len(rows)].copy_(tokens)
        self._graphs[bucket].replay()
        return self._logits[: len(rows)]

    def _run(self, bucket: int) -> None:
        self._logits[:bucket].copy_(self._compute(self._inputs(bucket)))

    def _inputs(self, bucket: int) -> DecodeInputs:
        parts = [self._buffer[start : start + bucket] for start in self._starts[:5]]
        token_ids, positions, slots, context_lens, block_starts = parts
        blocks = self._buffer[self._starts[5] :]
        return DecodeInputs(token_ids, positions, slots, DecodeTables(context_lens, block_starts, blocks))

    def _fill(self, rows: Sequence[StepRow], bucket: int) -> None:
        host = pack(padded_parts(rows, bucket, self._block_size), self._starts, self._buffer.device)
        self._buffer[: len(host)].copy_(host, non_blocking=True)


def padded_parts(rows: Sequence[StepRow], bucket: int, block_size: int) -> list[list[int]]:
    """Token ids, positions, slots, context lengths, starts of block tables, and the tables, one after another."""
    padding = [0] * (bucket - len(rows))
    slots: list[int] = []
    starts: list[int] = []
    blocks: list[int] = []
    for row in rows:
        slots.append(row.block_table[row.start // block_size] * block_size + row.start % block_size)
        starts.append(len(blocks))
        blocks.extend(row.block_table[: -(-row.context_len // block_size)])
    return [
        [row.token_ids[0] for row in rows] + padding,
        [row.start for row in rows] + padding,
        slots + [PADDING_SLOT] * len(padding),
        [row.context_len for row in rows] + padding,
        starts + padding,
        blocks,
    ]
