"""``pdserve bench <what>`` finds the benchmark, prints its table and keeps its figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.bench.report import check_folder, publish
from pdserve.config.bench import BenchCompareConfig, BenchEngineConfig, BenchLoadConfig, BenchTransferConfig
from pdserve.errors import ConfigError
from pdserve.process import pin_to_cores
from pdserve.settings import cache_folder, load, load_with_file, with_current_names
from pdserve.settings.sources import suggestion

if TYPE_CHECKING:
    from pdserve.bench.report import Report


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs one benchmark; returns the exit status, 1 for a comparison that found something worse."""
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    # The benchmarks pass it on to programs together with settings of today's names.
    environ = with_current_names(environ)
    if name == COMPARE:
        return _compare(rest, environ)
    if name not in BENCHMARKS:
        what = f"unknown benchmark {name!r}{suggestion(name, [*BENCHMARKS, COMPARE])}" if name else "which benchmark?"
        raise ConfigError(f"{what}\n\n{USAGE}")
    return _measure(name, BENCHMARKS[name], rest, environ)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that makes a report."""

    summary: str
    """Its line in the usage of ``pdserve bench``."""
    description: str
    """The beginning of its own help."""
    config: type[Any]
    """The class of its settings, one section of which is ``report``."""
    measure: Callable[[Any, Mapping[str, str]], Report]
    """Takes the settings, and the environment for the programs that the benchmark starts."""


def _measure(name: str, benchmark: Benchmark, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config, file = load_with_file(
        benchmark.config, argv, environ, prog=f"pdserve bench {name}", description=benchmark.description
    )
    check_folder("--json", config.report.json)
    report = benchmark.measure(config, {**environ, "PDSERVE_CONFIG": file} if file else environ)
    from pdserve.bench.report import render, to_json

    publish(render(report), to_json(report), config.report.json)
    return 0


# The functions import their benchmarks themselves: a benchmark may import torch, which takes seconds, and which has to
# come after the choice of cores.


def _engine(config: BenchEngineConfig, environ: Mapping[str, str]) -> Report:
    pin_to_cores(config.cpu.cores)
    from pdserve.bench.engine import benchmark
    from pdserve.engine.runner_loading import cpu_kernels
    from pdserve.hub.finding import find_model

    cache_dir = cache_folder(environ)
    folder = find_model(config.model, environ).path
    return benchmark.run(config, folder, lambda: cpu_kernels(config.cpu.kernels, cache_dir))


def _load(config: BenchLoadConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.load_benchmark import run

    return run(config)


def _transfer(config: BenchTransferConfig, environ: Mapping[str, str]) -> Report:
    cores = two_cores(config.cpu.cores or tuple(sorted(os.sched_getaffinity(0))))
    pin_to_cores(cores[:1])
    from pdserve.bench.transfer import benchmark
    from pdserve.hub.finding import find_model

    cache_dir = cache_folder(environ)
    folder = find_model(config.model, environ).path
    return benchmark.run(config, folder, cores, environ, cache_dir)


def two_cores(usable: Sequence[int]) -> tuple[int, int]:
    """Returns the cores of the decode and the prefill engine, which are the same one if there is no other."""
    return usable[0], usable[1 % len(usable)]


BENCHMARKS = {
    "engine": Benchmark(
        "what this machine and an engine's parts can do",
        "Times an engine's parts in this process: decode and prefill steps, their linear layers and attention, the "
        "sampler, and beside them what the machine's memory and arithmetic allow.",
        BenchEngineConfig,
        _engine,
    ),
    "load": Benchmark(
        "load on any server that speaks OpenAI's API",
        "A number of clients, a rate, or the times of a trace, on any server that speaks OpenAI's API. Requests are "
        "random prompts with greedy answers of a set length, or those of a --dataset. Answers are streamed.",
        BenchLoadConfig,
        _load,
    ),
    "transfer": Benchmark(
        "KV blocks from one process's cache to another's, beside ucx_perftest and NIXL",
        "Moves KV blocks between two processes through the transfer engine, on one core each (the first two of "
        "--cores), and times ucx_perftest on the same cores; then decode steps while blocks come in.",
        BenchTransferConfig,
        _transfer,
    ),
}

COMPARE = "compare"

USAGE = "\n".join(
    [
        "usage: pdserve bench BENCHMARK [--flag value ...]",
        "",
        *(f"  {name:10}{benchmark.summary}" for name, benchmark in BENCHMARKS.items()),
        f"  {COMPARE:10}two reports of one benchmark: pdserve bench compare OLD.json NEW.json",
        "",
        "  pdserve bench BENCHMARK --help lists its settings.",
    ]
)


def _compare(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    description = (
        "Compares the ratios of two reports, which hold on any machine, and leaves out times, which do not. Exit "
        "status 1 if one is worse by more than the tolerance."
    )
    prog = "pdserve bench compare"
    config = load(BenchCompareConfig, argv, environ, prog=prog, description=description)
    if not (config.compare.old and config.compare.new):
        raise ConfigError("two reports are needed: pdserve bench compare OLD.json NEW.json")
    from pdserve.bench.report import changes, read_report

    old, new = (read_report(Path(path)) for path in (config.compare.old, config.compare.new))
    found = changes(old, new, config.compare.tolerance)
    print("\n".join(str(change) for change in found))
    return 1 if any(change.worse for change in found) else 0
