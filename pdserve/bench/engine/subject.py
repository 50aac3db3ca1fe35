"""The subject of the measurements: a model in a runner, and the steps that it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pdserve.config import ModelConfig, Switch
from pdserve.errors import ConfigError, ModelError
from pdserve.models.backend import choose_device, open_backend
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.decoder_config import DecoderConfig, FamilyConfig
from pdserve.models.checkpoint.weights import block_formats, stays_in_blocks
from pdserve.models.layer_groups import layer_groups
from pdserve.models.runner import CudaGraphs, Graph, ModelRunner, StepRow
from pdserve.wire.cache_groups import GroupBlocks, Keep
from pdserve_kernels.contract import BlockFormat, BlockKernels, Kernels


def bounded_counts(config: DecoderConfig, num_blocks: int, requests: int) -> list[int]:
    """Returns the blocks of each group behind the first one, which has ``num_blocks``."""
    groups = layer_groups(config).groups[1:]
    return [2 * requests if group.keep is Keep.LATEST else num_blocks for group in groups]


def other_tables(bounded: Sequence[GroupBlocks], blocks: range, request: int) -> list[Sequence[int]]:
    """Returns ``StepRow.others`` of a request which has these blocks of the first group."""
    tables: list[Sequence[int]] = []
    for group in bounded:
        if group.spec.keep is Keep.LATEST:
            present = group.first + 2 * request
            tables.append((present, present + 1))
        else:
            tables.append(range(group.first + blocks.start, group.first + blocks.stop))
    return tables


@dataclass(frozen=True, slots=True)
class Subject:
    """One loaded model."""

    name: str
    config: FamilyConfig
    runner: ModelRunner
    kernels: Kernels
    """The kernel set that the runner computes with."""
    graphs: Callable[[], Graph] | None = None
    """The function that makes graphs, if the runner replays its decode steps."""
    block_kernels: BlockKernels | None = None
    """The kernels for weights that stay in the blocks of their file, if any do."""
    formats: Mapping[str, BlockFormat] = field(default_factory=dict)
    """The formats of these weights, by transformers' names."""

    @property
    def device(self) -> torch.device:
        return self.runner.kv_cache.device

    @property
    def dtype(self) -> torch.dtype:
        return self.runner.layout.dtype

    def kv_bytes(self, context: int) -> float:
        """Returns the bytes of the cache that the last token of a context reads."""
        read = 0.0
        for group in self.runner.cache.attention:
            window = group.blocks.spec.window
            seen = min(context, window) if window else context
            read += seen * group.layout.block_bytes / group.layout.block_size
        return read + sum(group.blocks.block_bytes for group in self.runner.cache.states)

    def decode_rows(self, batch: int, context: int) -> list[StepRow]:
        """Returns one new token for each of ``batch`` requests, as the last of ``context``, in blocks of their own."""
        return self.draft_rows([context - 1] * batch, 1, context)

    def prefill_rows(self, chunk: int) -> list[StepRow]:
        """Returns the rows of a complete prompt of ``chunk`` tokens."""
        return [self._row([1] * chunk, 0, range(-(-chunk // self.runner.layout.block_size)), 0)]

    def draft_rows(self, starts: Sequence[int], count: int, longest: int) -> list[StepRow]:
        """Returns ``count`` rows of one token each for a request at each of ``starts``, its next token and drafts.

        A request has blocks of its own for ``longest`` tokens, and its rows share them.
        """
        blocks = -(-longest // self.runner.layout.block_size)
        return [
            self._row([1], start + number, range(i * blocks, (i + 1) * blocks), i)
            for i, start in enumerate(starts)
            for number in range(count)
        ]

    def _row(self, token_ids: Sequence[int], start: int, blocks: range, request: int) -> StepRow:
        others = other_tables(self.runner.cache.groups[1:], blocks, request)
        return StepRow(token_ids, start, blocks, True, others=others)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that are timed."""

    batches: Sequence[int]
    contexts: Sequence[int]
    chunks: Sequence[int]
    rows: int = 0
    """The most single tokens that any other step has."""

    @property
    def longest(self) -> int:
        return max(*self.contexts, *self.chunks)

    @property
    def most_rows(self) -> int:
        """The most single tokens that a step computes."""
        return max(*self.batches, self.rows)

    def blocks(self, block_size: int) -> int:
        """Returns the number of blocks that the largest step needs."""
        return max(max(self.batches) * -(-max(self.contexts) // block_size), -(-max(self.chunks) // block_size))


def open_subject(
    name: str, folder: Path, model: ModelConfig, block_size: int, steps: Steps, cpu_kernels: Callable[[], Kernels]
) -> Subject:
    """Opens the model of ``folder`` with a KV cache for the largest of ``steps``.

    ``cpu_kernels`` makes the kernel set for a CPU. Raises ModelError (also for a fallback model, whose
    products are not known, and for one that attends to chosen tokens), and ConfigError if the model knows fewer
    positions or its device is not there.
    """
    config = read_family_config(folder)
    index = config.blocks if config.latent is None else config.latent.index
    chosen = "" if index is None else "tokens that an indexer chooses"
    chosen = chosen or ("blocks that index heads choose" if config.head_blocks is not None else "")
    if chosen or config.shared is not None:
        raise ModelError(
            f"{name} attends to {chosen or 'entries for several tokens'}, and pdserve bench engine knows what whole "
            "contexts take alone; pdserve bench load measures a node with this model"
        )
    if steps.longest > config.max_positions:
        raise ConfigError(f"{name} knows {config.max_positions} positions; {steps.longest} were asked for")
    backend = open_backend(choose_device(model.device), cpu_kernels)
    on_gpu = backend.device.type != "cpu"
    in_blocks = stays_in_blocks(folder, model, kernels=backend.block_kernels is not None, on_gpu=on_gpu)
    block_kernels = backend.block_kernels if in_blocks else None
    formats = block_formats(folder, on_gpu=on_gpu) if in_blocks else {}
    runner = ModelRunner(
        folder,
        config,
        model.dtype,
        block_size,
        steps.blocks(block_size),
        steps.longest,
        backend.kernels,
        backend.device,
        block_kernels=block_kernels,
        bounded=bounded_counts(config, steps.blocks(block_size), max(steps.batches)),
    )
    # Memory that was never written is one shared page of zeros, and reading it is faster than reading a cache in use.
    for group in runner.cache.attention:
        group.cache.fill_(0.01)
    if backend.graph_kernels is None or model.cuda_graphs is Switch.OFF:
        return Subject(name, config, runner, backend.kernels, block_kernels=block_kernels, formats=formats)
    graphs = CudaGraphs()
    runner.capture_decode(backend.graph_kernels, steps.most_rows, graphs)
    return Subject(name, config, runner, backend.kernels, graphs, block_kernels, formats)
