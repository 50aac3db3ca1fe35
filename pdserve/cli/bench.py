"""``pdserve bench <what>`` finds the benchmark, prints its table and keeps its figures."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.bench_config import (
    BenchBatchingConfig,
    BenchCompareConfig,
    BenchEngineConfig,
    BenchFailoverConfig,
    BenchGoodputConfig,
    BenchLoadConfig,
    BenchPlanConfig,
    BenchProxyConfig,
    BenchRolesConfig,
    BenchStreamConfig,
    BenchTransferConfig,
    BenchTurnsConfig,
)
from pdserve.cli.report_output import check_folder, publish
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
    plot_file: Callable[[Any], str] = lambda config: ""
    """Returns the value of ``--plot``; empty without one."""
    plot_module: str = ""
    """The module whose ``write_plot`` plots a report."""


def _measure(name: str, benchmark: Benchmark, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config, file = load_with_file(
        benchmark.config, argv, environ, prog=f"pdserve bench {name}", description=benchmark.description
    )
    plot_file = benchmark.plot_file(config)
    check_folder("--json", config.report.json)
    check_folder("--plot", plot_file)
    write_plot = plotter(benchmark.plot_module) if plot_file else None
    report = benchmark.measure(config, {**environ, "PDSERVE_CONFIG": file} if file else environ)
    from pdserve.bench.report import render, to_json

    publish(render(report), to_json(report), config.report.json)
    if write_plot is not None:
        write_plot(report, Path(plot_file))
    return 0


def plotter(module: str) -> Callable[[Report, Path], None]:
    """Returns ``write_plot`` of ``module``. It is called before the measurement, which takes minutes."""
    try:
        write_plot: Callable[[Report, Path], None] = importlib.import_module(module).write_plot
    except ImportError as exc:
        raise ConfigError(
            "--plot takes matplotlib, which pdserve's extra 'bench' brings: pip install matplotlib"
        ) from exc
    return write_plot


# The functions import their benchmarks themselves: a benchmark may import torch, which takes seconds, and which has to
# come after the choice of cores.


def _batching(config: BenchBatchingConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench import batching

    return batching.run(config, environ)


def _engine(config: BenchEngineConfig, environ: Mapping[str, str]) -> Report:
    pin_to_cores(config.cpu.cores)
    from pdserve.bench.engine import benchmark
    from pdserve.engine.runner_loading import cpu_kernels
    from pdserve.hub.finding import find_model

    cache_dir = cache_folder(environ)
    folder = find_model(config.model, environ).path
    return benchmark.run(config, folder, lambda: cpu_kernels(config.cpu.kernels, cache_dir), cache_dir)


def _load(config: BenchLoadConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.load_benchmark import run

    return run(config)


def _stream(config: BenchStreamConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.stream import benchmark

    return benchmark.run(config, environ)


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


def _proxy(config: BenchProxyConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.proxy import benchmark

    return benchmark.run(config, environ)


def _roles(config: BenchRolesConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.roles.benchmark import run

    return run(config, environ)


def _failover(config: BenchFailoverConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench import failover

    return failover.run(config, environ)


def _goodput(config: BenchGoodputConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.goodput import benchmark

    return benchmark.run(config, environ)


def _plan(config: BenchPlanConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench.plan import benchmark
    from pdserve.hub.finding import find_model

    return benchmark.run(config, find_model(config.model, environ).path, environ)


def _turns(config: BenchTurnsConfig, environ: Mapping[str, str]) -> Report:
    from pdserve.bench import turns

    return turns.run(config, environ)


BENCHMARKS = {
    "batching": Benchmark(
        "continuous against static batching, on two real nodes",
        "Continuous against static batching: the same requests to two nodes of one machine, one after the other.",
        BenchBatchingConfig,
        _batching,
        lambda config: config.batching.plot,
        "pdserve.bench.batching_plot",
    ),
    "engine": Benchmark(
        "what this machine and an engine's parts can do",
        "Times an engine's parts in this process: decode and prefill steps, their linear layers and attention, the "
        "sampler, and beside them what the machine's memory and arithmetic allow. With a GPU that the engine computes "
        "on, also a random model in the shape of an 8B one.",
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
    "stream": Benchmark(
        "node and proxy with a mock engine, each part of the text path on and off",
        "The API process of a node and a proxy, real ones, with a mock engine that emits tokens at a set rate: tokens "
        "a second, delays, CPU time of each token and peak memory, with each part of the text path on and off.",
        BenchStreamConfig,
        _stream,
        lambda config: config.streaming.plot,
        "pdserve.bench.stream.stream_plot",
    ),
    "transfer": Benchmark(
        "KV blocks from one process's cache to another's, beside ucx_perftest and NIXL",
        "Moves KV blocks between two processes through the transfer engine, on one core each (the first two of "
        "--cores), and times ucx_perftest on the same cores; then decode steps while blocks come in.",
        BenchTransferConfig,
        _transfer,
    ),
    "proxy": Benchmark(
        "the proxy before mock backends, beside another router if there is one",
        "The proxy before mock backends that answer at once: streams and plain requests a second, added latency, many "
        "streams at once, idle connections. With --peer-command the same on another router, in the same run.",
        BenchProxyConfig,
        _proxy,
    ),
    "failover": Benchmark(
        "decode nodes that die or hang under running streams",
        "A cluster on this machine, whose decode nodes are killed or stopped while they stream, one after the other: "
        "how many streams went on elsewhere, how long that took, and whether each answer is the one without a fault.",
        BenchFailoverConfig,
        _failover,
    ),
    "roles": Benchmark(
        "roles that follow a shifting load, against every static split",
        "Three nodes whose steps wait instead of computing, under phases of long prompts and of long answers: how many "
        "requests met their targets with --roles auto, and with each static split.",
        BenchRolesConfig,
        _roles,
    ),
    "goodput": Benchmark(
        "answers within latency targets: mixed, prefill and decode apart, other servers",
        "One mixed node with all cores, a prefill and a decode node that divide them, and any other server that is up, "
        "under the same closed and open loops in turns: answers a second within targets of TTFT and ITL.",
        BenchGoodputConfig,
        _goodput,
        lambda config: config.goodput.plot,
        "pdserve.bench.goodput.plots",
    ),
    "plan": Benchmark(
        "what pdserve plan predicts, beside what then happens",
        "Measures a profile, predicts what a mixed node, and a prefill and a decode node on the same cores, make of "
        "the same requests at several rates, runs them, and shows both side by side.",
        BenchPlanConfig,
        _plan,
        lambda config: config.plan.plot,
        "pdserve.bench.plan.forecast_plot",
    ),
    "turns": Benchmark(
        "conversations, with and without KV return",
        "Conversations with two clusters on this machine, one of which returns the KV blocks of answers to the prefill "
        "node: how soon the answer of each turn begins, and how much of its prompt was computed.",
        BenchTurnsConfig,
        _turns,
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
    config = load(BenchCompareConfig, compare_flags(argv), environ, prog=prog, description=description)
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
