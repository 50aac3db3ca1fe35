"""Runs all measurements of ``pdserve bench transfer``."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from pdserve.bench.engine.subject import Steps, Subject, open_subject
from pdserve.bench.machine import chip_name, this_machine
from pdserve.bench.report import Report, Row
from pdserve.bench.transfer.bench_engines import BLOCK_TOKENS, CacheShape
from pdserve.bench.transfer.decode_steps import while_receiving
from pdserve.bench.transfer.messages import TransferSetup
from pdserve.bench.transfer.moves import moves
from pdserve.bench.transfer.prefill_process import PrefillProcess, prefill_process
from pdserve.bench.transfer.returning_steps import while_returning
from pdserve.bench.transfer.rows import (
    Yardsticks,
    checksum_row,
    copy_row,
    decode_row,
    overhead_row,
    return_row,
    transfer_rows,
)
from pdserve.bench.transfer.yardsticks import copy_bytes_per_s, nixl_rates, perftest_bytes_per_s
from pdserve.bench_config import BenchTransferConfig, CacheMemory
from pdserve.engine.runner_loading import cpu_kernels
from pdserve.models.checkpoint.demo import served_model_name
from pdserve.settings import to_environ

_MIB = 2**20
_LEAST_BLOCKS = 8
_MOST_BLOCKS = 4096
_TINY_BYTES = 64
_TINY_BLOCKS = 2048
_COPY_MIB = 64

NOTES = (
    "fetches in a row, two under way at a time, each from the order to the landing of its last block: request, push, "
    "accept on arrival, checksums on both sides; each engine a process on a core of its own",
    "on one host the decode engine's thread copies blocks out of the prefill engine's memory; with --kv-shared-cache "
    "off both copy, in and out of UCX's: CPU time of a block is mostly copying, and its own cost is what a "
    "block of 64 bytes takes",
    "ucx_perftest moves one message's memory over and over, which stays in caches; a fetch moves all of it",
)


def run(
    config: BenchTransferConfig,
    folder: Path,
    cores: tuple[int, int],
    environ: Mapping[str, str],
    cache_dir: Path,
) -> Report:
    """This process is the decode engine, pinned by the caller to ``cores[0]``; the prefill engine runs on ``cores[1]``.

    Raises BenchError, TransferError or ModelError.
    """
    bench = config.bench
    on_gpu = bench.memory is CacheMemory.CUDA
    device = "cuda" if on_gpu else "cpu"
    setup = TransferSetup(config.transfer, secrets.token_bytes(32), str(cache_dir), device)
    copied = copy_bytes_per_s(_COPY_MIB)
    nixl = nixl_rates(bench.nixl_command, environ) if bench.nixl_command else {}
    rows: list[Row] = []
    with prefill_process(cores[1], environ) as prefill:
        for kib in bench.block_kib:
            _say(f"blocks of {kib} KiB")
            size = kib * 1024
            blocks = min(max(bench.fetch_mib * _MIB // size, _LEAST_BLOCKS), _MOST_BLOCKS)
            moved = moves(prefill, CacheShape(size, blocks), blocks, setup, bench.repeats)
            yardsticks = Yardsticks(
                perftest_bytes_per_s(config.transfer, environ, size, cores, survivable=True, memory=bench.memory),
                perftest_bytes_per_s(config.transfer, environ, size, cores, survivable=False, memory=bench.memory),
                nixl.get(size),
                copied,
            )
            rows += transfer_rows(moved, yardsticks)
            if not on_gpu:
                rows.append(checksum_row(moved, BLOCK_TOKENS / bench.prefill_tokens_per_s))
        if on_gpu:
            return _report(config, rows)
        _say("blocks of 64 bytes")
        tiny = CacheShape(_TINY_BYTES, _TINY_BLOCKS)
        rows.append(overhead_row(moves(prefill, tiny, _TINY_BLOCKS, setup, bench.repeats)))
        if bench.decode_s:
            subject = _subject(config, folder, cache_dir)
            rows += _decode_rows(config, subject, prefill, setup)
    rows.append(copy_row(copied))
    return _report(config, rows)


def _report(config: BenchTransferConfig, rows: Sequence[Row]) -> Report:
    missing = () if config.bench.nixl_command else ("no --nixl-command was given: NIXL was not measured",)
    return Report("transfer", this_machine(chip_name()), to_environ(config), (*NOTES, *missing), tuple(rows))


def _subject(config: BenchTransferConfig, folder: Path, cache_dir: Path) -> Subject:
    bench = config.bench
    steps = Steps((bench.decode_batch,), (bench.decode_context,), (1,))
    name = config.model.served_model_name or served_model_name(config.model.path, folder)
    return open_subject(
        name, folder, config.model, BLOCK_TOKENS, steps, partial(cpu_kernels, config.cpu.kernels, cache_dir)
    )


def _decode_rows(
    config: BenchTransferConfig, subject: Subject, prefill: PrefillProcess, setup: TransferSetup
) -> list[Row]:
    bench = config.bench
    size = subject.runner.layout.block_bytes
    shape = CacheShape(size, max(bench.fetch_mib * _MIB // size, _LEAST_BLOCKS))
    step_rows = subject.decode_rows(bench.decode_batch, bench.decode_context)
    found = []
    for tokens_per_s in (bench.prefill_tokens_per_s, None):
        _say("decode steps, " + (f"{tokens_per_s:g} tok/s coming in" if tokens_per_s else "all that can come in"))
        times = while_receiving(
            lambda: subject.runner.run(step_rows),
            prefill,
            shape,
            setup,
            bench.decode_s,
            tokens_per_s,
        )
        found.append(decode_row(subject.name, bench.decode_batch, tokens_per_s, times))
    _say("decode steps, blocks returning")
    returns = while_returning(lambda: subject.runner.run(step_rows), prefill, shape, setup, bench.decode_s)
    found.append(return_row(subject.name, bench.decode_batch, returns))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
