"""``pdserve bench <what>`` finds the benchmark, prints its table and keeps its figures."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench_config import (
    BenchBatchingConfig,
    BenchCompareConfig,
    BenchEngineConfig,
    BenchLoadConfig,
    BenchProxyConfig,
    BenchStreamConfig,
    BenchTransferConfig,
)
from pdserve.config import ReportConfig
from pdserve.errors import BenchError, ConfigError
from pdserve.process import pin_to_cores
from pdserve.settings import cache_folder, load, load_with_file
from pdserve.settings.sources import suggestion

if TYPE_CHECKING:
    from pdserve.bench.report import Report

BENCHMARKS = {
    "batching": "continuous against static batching, on two real nodes",
    "engine": "what this machine and an engine's parts can do",
    "load": "load on any server that speaks OpenAI's API",
    "stream": "node and proxy with a mock engine, each part of the text path on and off",
    "transfer": "KV blocks from one process's cache to another's, beside ucx_perftest and NIXL",
    "proxy": "the proxy before mock backends, beside another router if there is one",
    "compare": "two reports of one benchmark: pdserve bench compare OLD.json NEW.json",
}

USAGE = "\n".join(
    [
        "usage: pdserve bench BENCHMARK [--flag value ...]",
        "",
        *(f"  {name:10}{summary}" for name, summary in BENCHMARKS.items()),
        "",
        "  pdserve bench BENCHMARK --help lists its settings.",
    ]
)

_BATCHING = "Continuous against static batching: the same requests to two nodes of one machine, one after the other."
_ENGINE = (
    "Times an engine's parts in this process: decode and prefill steps, their linear layers and attention, the "
    "sampler, and beside them what the machine's memory and arithmetic allow. With a GPU that the engine computes on, "
    "also a random model in the shape of an 8B one."
)
_LOAD = (
    "A closed loop of clients on any server that speaks OpenAI's API: random prompts as token ids, streamed greedy "
    "answers of a set length."
)
_STREAM = (
    "The API process of a node and a proxy, real ones, with a mock engine that emits tokens at a set rate: tokens a "
    "second, delays, CPU time of each token and peak memory, with each part of the text path on and off."
)
_TRANSFER = (
    "Moves KV blocks between two processes through the transfer engine, on one core each (the first two of --cores), "
    "and times ucx_perftest on the same cores; then decode steps while blocks come in."
)
_PROXY = (
    "The proxy before mock backends that answer at once: streams and plain requests a second, added latency, many "
    "streams at once, idle connections. With --peer-command the same on another router, in the same run."
)
_COMPARE = (
    "Compares the ratios of two reports, which hold on any machine, and leaves out times, which do not. Exit status 1 "
    "if one is worse by more than the tolerance."
)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs one benchmark; returns the exit status, 1 for a comparison that found something worse."""
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in BENCHMARKS:
        what = f"unknown benchmark {name!r}{suggestion(name, BENCHMARKS)}" if name else "which benchmark?"
        raise ConfigError(f"{what}\n\n{USAGE}")
    return _RUN[name](rest, environ)


def _batching(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config, file = load_with_file(
        BenchBatchingConfig, argv, environ, prog="pdserve bench batching", description=_BATCHING
    )
    _check_folder("--json", config.report.json)
    _check_folder("--plot", config.batching.plot)
    write_plot = _plotter("pdserve.bench.batching_plot") if config.batching.plot else None
    from pdserve.bench import batching

    report = batching.run(config, {**environ, "PDSERVE_CONFIG": file} if file else environ)
    _publish(report, config.report)
    if write_plot is not None:
        write_plot(report, Path(config.batching.plot))
    return 0


def _engine(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(BenchEngineConfig, argv, environ, prog="pdserve bench engine", description=_ENGINE)
    _check_folder("--json", config.report.json)
    pin_to_cores(config.cpu.cores)
    from pdserve.bench.engine import benchmark
    from pdserve.engine.runner_loading import cpu_kernels
    from pdserve.models.checkpoint.demo import resolve_model

    cache_dir = cache_folder(environ)
    folder = resolve_model(config.model.path, cache_dir)
    report = benchmark.run(config, folder, lambda: cpu_kernels(config.cpu.kernels, cache_dir))
    _publish(report, config.report)
    return 0


def _load(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(BenchLoadConfig, argv, environ, prog="pdserve bench load", description=_LOAD)
    _check_folder("--json", config.report.json)
    from pdserve.bench.load import run

    _publish(run(config), config.report)
    return 0


def _stream(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(BenchStreamConfig, argv, environ, prog="pdserve bench stream", description=_STREAM)
    _check_folder("--json", config.report.json)
    _check_folder("--plot", config.streaming.plot)
    write_plot = _plotter("pdserve.bench.stream.stream_plot") if config.streaming.plot else None
    from pdserve.bench.stream import benchmark as stream_benchmark

    report = stream_benchmark.run(config, environ)
    _publish(report, config.report)
    if write_plot is not None:
        write_plot(report, Path(config.streaming.plot))
    return 0


def _transfer(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(BenchTransferConfig, argv, environ, prog="pdserve bench transfer", description=_TRANSFER)
    _check_folder("--json", config.report.json)
    cores = two_cores(config.cpu.cores or tuple(sorted(os.sched_getaffinity(0))))
    pin_to_cores(cores[:1])
    from pdserve.bench.transfer import benchmark
    from pdserve.models.checkpoint.demo import resolve_model

    cache_dir = cache_folder(environ)
    folder = resolve_model(config.model.path, cache_dir)
    report = benchmark.run(config, folder, cores, environ, cache_dir)
    _publish(report, config.report)
    return 0


def two_cores(usable: Sequence[int]) -> tuple[int, int]:
    """Returns the cores of the decode and the prefill engine, which are the same one if there is no other."""
    return usable[0], usable[1 % len(usable)]


def _proxy(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(BenchProxyConfig, argv, environ, prog="pdserve bench proxy", description=_PROXY)
    _check_folder("--json", config.report.json)
    from pdserve.bench.proxy import benchmark as proxy_benchmark

    _publish(proxy_benchmark.run(config, environ), config.report)
    return 0


def _compare(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(BenchCompareConfig, compare_flags(argv), environ, prog="pdserve bench compare", description=_COMPARE)
    if not (config.compare.old and config.compare.new):
        raise ConfigError("two reports are needed: pdserve bench compare OLD.json NEW.json")
    from pdserve.bench.compare import changes
    from pdserve.bench.report import read_report

    old, new = (read_report(Path(path)) for path in (config.compare.old, config.compare.new))
    found = changes(old, new, config.compare.tolerance)
    print("\n".join(str(change) for change in found))
    return 1 if any(change.worse for change in found) else 0


def compare_flags(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with two leading file names replaced by the flags that they stand for."""
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), argv[:2]))
    given = [part for pair in zip(("--old", "--new"), names, strict=False) for part in pair]
    return [*given, *argv[len(names) :]]


def _publish(report: Report, config: ReportConfig) -> None:
    from pdserve.bench.report import render, to_json

    if config.json == "-":
        print(render(report), file=sys.stderr)
        print(to_json(report).decode(), end="")
        return
    print(render(report))
    if config.json:
        try:
            Path(config.json).write_bytes(to_json(report))
        except OSError as exc:
            raise BenchError(f"cannot write {config.json}: {exc.strerror}") from exc


def _check_folder(flag: str, file: str) -> None:
    if file and file != "-" and not Path(file).parent.is_dir():
        raise ConfigError(f"{flag}: there is no folder {str(Path(file).parent)!r}")


def _plotter(module: str) -> Callable[[Report, Path], None]:
    """Returns ``write_plot`` of ``module``. It is called before the measurement, which takes minutes."""
    try:
        write_plot: Callable[[Report, Path], None] = importlib.import_module(module).write_plot
    except ImportError as exc:
        raise ConfigError(
            "--plot takes matplotlib, which pdserve's extra 'bench' brings: pip install matplotlib"
        ) from exc
    return write_plot


_RUN: dict[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "batching": _batching,
    "engine": _engine,
    "load": _load,
    "stream": _stream,
    "transfer": _transfer,
    "proxy": _proxy,
    "compare": _compare,
}
