"""Times fetches of one block size, with and without checksums in turns."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pdserve.bench.transfer.bench_engines import Assignment, CacheShape, FetchingEngine, PrefillProcess, TransferSetup
from pdserve.config import Switch

_WARM_UP = 2
_IN_A_ROW = 4
_AHEAD = 2
"""The fetches that are under way at once, as on a node with several requests, so that none waits for its order."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The times of fetches of ``blocks`` blocks each."""

    block_bytes: int
    blocks: int
    seconds: tuple[float, ...]
    """The mean time of a fetch, for each row of several."""
    receive_cpu_s: float
    """The CPU seconds of the receiving transfer thread for a block."""
    send_cpu_s: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def bytes_per_s(self) -> float:
        return self.block_bytes * self.blocks / self.median_s


def moves(
    prefill: PrefillProcess, shape: CacheShape, blocks: int, setup: TransferSetup, repeats: int
) -> Mapping[Switch, Moves]:
    """Times ``repeats`` rows of fetches of ``blocks`` blocks, without checksums and, if there can be any, with them.

    Raises BenchError, TransferError.
    """
    ways = [way for way in Switch if setup.device == "cpu" or way is Switch.OFF]
    target = prefill.assign(Assignment(shape.block_bytes, shape.blocks, setup))
    engines: dict[Switch, FetchingEngine] = {}
    try:
        for checksums in ways:
            own = dataclasses.replace(setup.config, checksums=checksums)
            engines[checksums] = FetchingEngine(target, shape, msgspec.structs.replace(setup, config=own))
            for _ in range(_WARM_UP):
                engines[checksums].fetch(blocks)
        taken = [{way: _timed(prefill, engine, blocks) for way, engine in engines.items()} for _ in range(repeats)]
    finally:
        for engine in engines.values():
            engine.close()
    return {way: _summary(shape, blocks, [turn[way] for turn in taken]) for way in ways}


@dataclass(frozen=True, slots=True)
class _TimedFetch:
    seconds: float
    receive_cpu_s: float
    send_cpu_s: float


def _timed(prefill: PrefillProcess, engine: FetchingEngine, blocks: int) -> _TimedFetch:
    received, sent = engine.cpu_s(), prefill.cpu_s()
    seconds = engine.fetch_in_a_row(blocks, _IN_A_ROW, _AHEAD)
    times = (seconds, engine.cpu_s() - received, prefill.cpu_s() - sent)
    return _TimedFetch(*(time / _IN_A_ROW for time in times))


def _summary(shape: CacheShape, blocks: int, fetches: list[_TimedFetch]) -> Moves:
    return Moves(
        shape.block_bytes,
        blocks,
        tuple(fetch.seconds for fetch in fetches),
        statistics.median(fetch.receive_cpu_s for fetch in fetches) / blocks,
        statistics.median(fetch.send_cpu_s for fetch in fetches) / blocks,
    )
