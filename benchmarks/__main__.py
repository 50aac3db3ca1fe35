"""``benchmarks NAME`` runs a study, prints its table, and writes its figures and plot to files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.programs import for_servers
from benchmarks.settings import (
    BenchBatchingConfig,
    BenchFailoverConfig,
    BenchFamiliesConfig,
    BenchGgufServersConfig,
    BenchGoodputConfig,
    BenchGpuShapesConfig,
    BenchHostConfig,
    BenchLentCoresConfig,
    BenchPlanConfig,
    BenchProxyConfig,
    BenchRolesConfig,
    BenchSpeculationConfig,
    BenchStreamConfig,
    BenchTurnsConfig,
    check,
)
from pdserve.bench.report import check_folder, plotter, publish
from pdserve.cli.main import status_of
from pdserve.config import NodeConfig, ProxyConfig
from pdserve.errors import ConfigError
from pdserve.process import die_with_parent
from pdserve.settings import ROOTS, cache_folder, load_with_file, with_current_names
from pdserve.settings.setting import settings_of, to_text
from pdserve.settings.sources import CONFIG_ENV, from_file, suggestion

if TYPE_CHECKING:
    from pdserve.bench.report import Report


@dataclass(frozen=True, slots=True)
class Study:
    """A study that makes a report."""

    summary: str
    """Its line in the usage."""
    description: str
    """The beginning of its own help."""
    config: type[Any]
    """The class of its settings, one section of which is ``report``."""
    measure: Callable[[Any, Mapping[str, str]], Report]
    """Takes the settings, and the environment for the programs that the study starts."""
    plot_file: Callable[[Any], str] = lambda config: ""
    """Returns the value of ``--plot``; empty without one."""
    plot_module: str = ""
    """The module whose ``write_plot`` plots a report."""


# The functions import their studies themselves: a study may import torch, which takes seconds.


def _batching(config: BenchBatchingConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks import batching

    return batching.run(config, environ)


def _stream(config: BenchStreamConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.stream import benchmark

    return benchmark.run(config, environ)


def _proxy(config: BenchProxyConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.proxy import benchmark

    return benchmark.run(config, environ)


def _roles(config: BenchRolesConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.roles import benchmark

    return benchmark.run(config, environ)


def _failover(config: BenchFailoverConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks import failover

    return failover.run(config, environ)


def _goodput(config: BenchGoodputConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.goodput import benchmark

    return benchmark.run(config, environ)


def _plan(config: BenchPlanConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.plan import benchmark
    from pdserve.hub.finding import find_model

    return benchmark.run(config, find_model(config.model, environ).path, environ)


def _families(config: BenchFamiliesConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks import families

    return families.run(config, environ)


def _gpu_shapes(config: BenchGpuShapesConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.gpu_shapes import benchmark

    return benchmark.run(config)


def _host(config: BenchHostConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks import host

    return host.run(config)


def _lent_cores(config: BenchLentCoresConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.lent_cores import benchmark
    from pdserve.hub.finding import find_model

    return benchmark.run(config, find_model(config.model, environ).path, cache_folder(environ))


def _gguf_servers(config: BenchGgufServersConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks import gguf_servers

    return gguf_servers.run(config, environ)


def _turns(config: BenchTurnsConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks import turns

    return turns.run(config, environ)


def _speculation(config: BenchSpeculationConfig, environ: Mapping[str, str]) -> Report:
    from benchmarks.speculation import benchmark

    return benchmark.run(config, environ)


STUDIES = {
    "batching": Study(
        "continuous against static batching, on two real nodes",
        "Continuous against static batching: the same requests to two nodes of one machine, one after the other.",
        BenchBatchingConfig,
        _batching,
        lambda config: config.batching.plot,
        "benchmarks.batching_plot",
    ),
    "stream": Study(
        "node and proxy with a mock engine, each part of the text path on and off",
        "The API process of a node and a proxy, real ones, with a mock engine that emits tokens at a set rate: tokens "
        "a second, delays, CPU time of each token and peak memory, with each part of the text path on and off.",
        BenchStreamConfig,
        _stream,
        lambda config: config.streaming.plot,
        "benchmarks.stream.stream_plot",
    ),
    "proxy": Study(
        "the proxy before mock backends, beside another router if there is one",
        "The proxy before mock backends that answer at once: streams and plain requests a second, added latency, many "
        "streams at once, idle connections. With --peer-command the same on another router, in the same run.",
        BenchProxyConfig,
        _proxy,
    ),
    "failover": Study(
        "decode nodes that die or hang under running streams",
        "A cluster on this machine, whose decode nodes are killed or stopped while they stream, one after the other: "
        "how many streams went on elsewhere, how long that took, and whether each answer is the one without a fault.",
        BenchFailoverConfig,
        _failover,
    ),
    "roles": Study(
        "roles that follow a shifting load, against every static split",
        "Three nodes whose steps wait instead of computing, under phases of long prompts and of long answers: how many "
        "requests met their targets with --roles auto, and with each static split.",
        BenchRolesConfig,
        _roles,
    ),
    "goodput": Study(
        "answers within latency targets: mixed, prefill and decode apart, other servers",
        "One mixed node with all cores, a prefill and a decode node that divide them, and any other server that is up, "
        "under the same closed and open loops in turns: answers a second within targets of TTFT and ITL.",
        BenchGoodputConfig,
        _goodput,
        lambda config: config.goodput.plot,
        "benchmarks.goodput.plots",
    ),
    "plan": Study(
        "what pdserve plan predicts, beside what then happens",
        "Measures a profile, predicts what a mixed node, and a prefill and a decode node on the same cores, make of "
        "the same requests at several rates, runs them, and shows both side by side.",
        BenchPlanConfig,
        _plan,
        lambda config: config.plan.plot,
        "benchmarks.plan.plot",
    ),
    "families": Study(
        "families with a recipe, beside the same models in transformers' code",
        "Decode and prefill steps of models with random weights, computed by their family's recipe and, in turns, by "
        "transformers' code with pdserve's attention and products.",
        BenchFamiliesConfig,
        _families,
    ),
    "gpu-shapes": Study(
        "a GPU's steps of random models: an 8B one, weights in 4 bits and FP8, experts",
        "What pdserve bench engine measures, of random models in the shape of an 8B one, with plain and quantised "
        "weights, and of DeepSeek-V3's experts; and steps with drafts, of which as many are right as is said.",
        BenchGpuShapesConfig,
        _gpu_shapes,
    ),
    "host": Study(
        "what a step takes of the step loop's thread, without a model",
        "The step loop's own work: scheduler, blocks, sampler and messages are real, and the runner computes nothing. "
        "The CPU time of a decode step, and the bytes that it tells other ranks, beside what is wanted.",
        BenchHostConfig,
        _host,
    ),
    "lent-cores": Study(
        "steps with borrowed cores, and how soon their owner has them back",
        "A decode step and prefill steps on half of the cores, with the other half borrowed from an engine that "
        "sleeps, and on all as own ones; and how long that engine's wake-up takes.",
        BenchLentCoresConfig,
        _lent_cores,
    ),
    "gguf-servers": Study(
        "a node beside llama-server, from the same random GGUF files",
        "A mixed node and another server, which read the same file of random weights, get the same requests in turns: "
        "output, time to the first token, and CPU time of a token.",
        BenchGgufServersConfig,
        _gguf_servers,
    ),
    "turns": Study(
        "conversations, with and without KV return",
        "Conversations with two clusters on this machine, one of which returns the KV blocks of answers to the prefill "
        "node: how soon the answer of each turn begins, and how much of its prompt was computed.",
        BenchTurnsConfig,
        _turns,
    ),
    "speculation": Study(
        "answers that repeat much, and others, with speculation and without",
        "Two clusters on this machine, one of which speculates, are asked the same in turns: the time of a token, the "
        "tokens a second, how many drafts were accepted, and that no answer is another one.",
        BenchSpeculationConfig,
        _speculation,
        lambda config: config.speculation.plot,
        "benchmarks.speculation.plot",
    ),
}

USAGE = "\n".join(
    [
        "usage: python -m benchmarks STUDY [--flag value ...]",
        "",
        *(f"  {name:13}{study.summary}" for name, study in STUDIES.items()),
        "",
        "  python -m benchmarks STUDY --help lists its settings. pdserve bench compare compares two reports.",
    ]
)


def main(argv: Sequence[str] | None = None, environ: MutableMapping[str, str] = os.environ) -> int:
    """Runs one study and returns the exit status: 2 for a wrong setting or model, 130 after Ctrl-C."""
    die_with_parent(environ)
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    return status_of(f"benchmarks {name}".rstrip(), lambda: run(name, rest, environ))


def run(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Measures and shows a study's report; returns the exit status 0. Raises PdserveError."""
    if name not in STUDIES:
        raise ConfigError(
            f"{f'unknown study {name!r}{suggestion(name, STUDIES)}' if name else 'which study?'}\n\n{USAGE}"
        )
    study = STUDIES[name]
    # The studies pass it on to programs together with settings of today's names.
    environ = with_current_names(environ)
    config, file = load_with_file(
        study.config,
        argv,
        environ,
        prog=f"python -m benchmarks {name}",
        description=study.description,
        roots=_EVERY_ROOT,
    )
    check(config)
    plot_file = study.plot_file(config)
    check_folder("--json", config.report.json)
    check_folder("--plot", plot_file)
    write_plot = plotter(study.plot_module) if plot_file else None
    report = study.measure(config, for_servers(_with_values_of(file, environ) if file else environ))
    from pdserve.bench.report import render, to_json

    publish(render(report), to_json(report), config.report.json)
    if write_plot is not None:
        write_plot(report, Path(plot_file))
    return 0


_EVERY_ROOT = (*ROOTS, *(study.config for study in STUDIES.values()))


def _with_values_of(file: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``environ`` with what a TOML file says about nodes and proxies, which refuse studies' settings."""
    every = [setting for root in _EVERY_ROOT for setting in settings_of(root)]
    given: dict[str, str] = {}
    for root in (NodeConfig, ProxyConfig):
        settings = {setting.flag: setting for setting in settings_of(root)}
        values = from_file(list(settings.values()), Path(file), every)
        given |= {settings[flag].env: to_text(value) for flag, value in values.items()}
    return {name: value for name, value in {**given, **environ}.items() if name != CONFIG_ENV}


if __name__ == "__main__":
    sys.exit(main())
