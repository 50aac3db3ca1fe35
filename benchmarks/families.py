"""``benchmarks families`` times steps of families with a recipe beside the same models in transformers' code.

The models have random weights in bf16 and the shape of one of about half a billion. Both runners take turns, so that
what else the machine does meanwhile hits both alike.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_checkpoint import write_checkpoint
from benchmarks.settings import BenchFamiliesConfig, FamiliesBenchConfig
from pdserve.bench.engine.subject import bounded_counts, other_tables
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, this_machine
from pdserve.config import Dtype
from pdserve.errors import ConfigError
from pdserve.models.checkpoint.config_reading import read_family_config
from pdserve.models.checkpoint.fallback_config import read_fallback_config
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.settings import cache_folder, to_environ
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels

BLOCK_SIZE = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 32_064,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 704,
    "shared_expert_intermediate_size": 2816,
}
SHAPES: dict[str, dict[str, Any]] = {
    "phi3": SHAPE | {"original_max_position_embeddings": 4096},
    "olmo2": SHAPE,
    "qwen2_moe": SHAPE | EXPERTS,
}
_NOTES = (
    "least times of all rounds; one before them warms up",
    "times better: the time in transformers' code over the recipe's",
)


def run(config: BenchFamiliesConfig, environ: Mapping[str, str]) -> Report:
    """Measures each family. Raises ConfigError for one without a shape, BuildError and ModelError."""
    if unknown := sorted(set(config.families.families) - SHAPES.keys()):
        raise ConfigError(f"--families {unknown[0]} has no shape here; {', '.join(SHAPES)} have one")
    torch.set_num_threads(config.families.threads)
    kernels = CompiledKernels(cache_folder(environ))
    rows = [row for family in config.families.families for row in _rows(config.families, family, kernels)]
    return Report("families", this_machine(chip_name()), to_environ(config), _NOTES, tuple(rows))


def _rows(config: FamiliesBenchConfig, family: str, kernels: CompiledKernels) -> Iterator[Row]:
    chunk = range(-(-config.chunk // BLOCK_SIZE))
    steps = {f"decode of {batch}": _decode(batch, config.context) for batch in config.batches}
    steps[f"prefill of {config.chunk}"] = [Lone([1] * config.chunk, 0, chunk, 0)]
    longest = max(config.context, config.chunk)
    blocks = max(config.batches) * -(-longest // BLOCK_SIZE)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as made:
        folder = Path(made)
        print(f"families: {family}", file=sys.stderr, flush=True)
        _write(family, config.layers, folder)
        decoders = (read_family_config(folder), read_fallback_config(folder))
        native, other = (
            ModelRunner(
                *(folder, decoder, Dtype.BF16, BLOCK_SIZE, blocks, longest, kernels),
                bounded=bounded_counts(decoder, blocks, max(config.batches)),
            )
            for decoder in decoders
        )
    least: dict[tuple[str, ModelRunner], float] = {}
    for turn in range(config.rounds + 1):
        for name, step in steps.items():
            for runner in (native, other):
                took = _seconds(runner, step)
                if turn:
                    least[name, runner] = min(took, least.get((name, runner), took))
    for name in steps:
        yield Row(
            family,
            {"step": name},
            (
                Figure("recipe", least[name, native] * 1e3, Unit.MS, Better.LOWER),
                Figure("transformers", least[name, other] * 1e3, Unit.MS),
                Figure("times better", least[name, other] / least[name, native], Unit.RATIO, Better.HIGHER),
            ),
        )


@dataclass(frozen=True, slots=True)
class Lone:
    """A row of a request with blocks of its own."""

    token_ids: list[int]
    start: int
    blocks: range
    request: int


def _decode(batch: int, context: int) -> list[Lone]:
    each = -(-context // BLOCK_SIZE)
    return [Lone([1], context - 1, range(i * each, (i + 1) * each), i) for i in range(batch)]


def _seconds(runner: ModelRunner, step: list[Lone]) -> float:
    bounded = runner.cache.groups[1:]
    rows = [
        StepRow(row.token_ids, row.start, row.blocks, True, others=other_tables(bounded, row.blocks, row.request))
        for row in step
    ]
    start = time.perf_counter()
    runner.run(rows)
    return time.perf_counter() - start


def _write(family: str, layers: int, folder: Path) -> None:
    """Writes a random model of a family. Without ``layers``, it has those of its shape."""
    write_checkpoint(family, SHAPES[family] | ({"num_hidden_layers": layers} if layers else {}), folder)
