"""``pdserve plan`` says how many nodes a load needs; ``pdserve plan profile`` measures what it goes by.

``pdserve plan memory`` says what the KV cache of a model takes.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.report import check_folder, plotter, publish
from pdserve.config import CpuKernels, PlanConfig, PredictionConfig
from pdserve.config.bench import PlanMemoryConfig, PlanProfileConfig
from pdserve.errors import BenchError, ConfigError, PlanError
from pdserve.http.tls import Trust, read_authorities
from pdserve.settings import load, to_environ, with_current_names

if TYPE_CHECKING:
    from pdserve.plan.cluster import ClusterShape
    from pdserve.plan.load import ObservedLoad, PlannedRequest
    from pdserve.plan.profile import Profile
    from pdserve.plan.sizing import Prediction

PROFILE, MEMORY = "profile", "memory"
_MOST_REQUESTS = 1_000_000
_SILENT_S = 2.0
"""A search that takes no longer says nothing before its end."""
_PLOT_MODULE = "pdserve.bench.plan.forecast_plot"
_DESCRIPTION = (
    "Says how many prefill and decode nodes a load needs, or mixed ones, to keep targets of TTFT and ITL, and what to "
    "expect of the clusters around that choice. First measure what nodes take on your machine: pdserve plan profile."
)
_PROFILE_DESCRIPTION = (
    "Measures what a node takes on this machine for its steps, transfers and requests, in six minutes for a small "
    "model. Nothing else should run meanwhile."
)
_MEMORY_DESCRIPTION = (
    "Says what the KV cache takes for --max-num-seqs requests of --max-model-len tokens, by the groups that a model's "
    "cache has: whole contexts, windows and states. Without --kv-cache-mib it finds the smallest cache that holds them "
    "all at once. With --draft-model it also says what that model takes. Weights are read by nobody."
)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Predicts, or measures a profile; returns the exit status. Raises ConfigError, PlanError and BenchError."""
    environ = with_current_names(environ)
    if argv[:1] == [PROFILE]:
        return _profile(argv[1:], environ)
    if argv[:1] == [MEMORY]:
        return _memory(argv[1:], environ)
    if argv and not argv[0].startswith("-"):
        raise ConfigError(f"pdserve plan takes flags, or the word {PROFILE} or {MEMORY}; {argv[0]!r} is none of them")
    config = load(PlanConfig, argv, environ, prog="pdserve plan", description=_DESCRIPTION)
    check_folder("--json", config.report.json)
    check_folder("--plot", config.plan.plot)
    write_plot = plotter(_PLOT_MODULE) if config.plan.plot else None
    from pdserve.bench.plan.rows import forecast_rows
    from pdserve.bench.report import Report, render, this_machine, to_json
    from pdserve.plan.load import rate_of
    from pdserve.plan.profile import read_profile

    profile = read_profile(Path(config.plan.profile))
    asked = _asked_load(config, profile)
    found = _forecast(config, profile, asked.requests)
    notes = (
        f"{len(asked.requests)} requests, {rate_of(asked.requests):.3g} a second, {asked.source}",
        f"profile: {profile.model} on {profile.machine}, {profile.cores} cores, {profile.measured} UTC",
        found.verdict,
    )
    rows = forecast_rows(found.predictions, found.chosen)
    report = Report("plan", this_machine(), to_environ(config), tuple(note for note in notes if note), rows)
    publish(render(report), to_json(report), config.report.json)
    if write_plot is not None:
        write_plot(report, Path(config.plan.plot))
    return 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """The requests that a prediction is for, and where they come from."""

    requests: Sequence[PlannedRequest]
    source: str


def _asked_load(config: PlanConfig, profile: Profile) -> _Asked:
    from pdserve.plan.load import Lengths, poisson_load, read_lengths, read_trace

    plan = config.plan

    def drawn(rate: float, prompts: Lengths, outputs: Lengths) -> list[PlannedRequest]:
        long_enough = math.ceil(rate * profile.telling_s(outputs.mean))
        count = min(max(plan.requests, long_enough), _MOST_REQUESTS)
        return poisson_load(rate, count, prompts, outputs, plan.seed)

    given = [
        flag for flag, value in (("--rate", plan.rate), ("--trace", plan.trace), ("--from", plan.running)) if value
    ]
    if len(given) != 1:
        told = " and ".join(given) + " were given" if given else "none was given"
        raise ConfigError(f"which load? One of --rate, --trace and --from is needed; {told}")
    if plan.trace:
        return _Asked(read_trace(Path(plan.trace)), f"of {plan.trace}")
    if plan.running:
        seen = asyncio.run(_look(plan, config.trust.authorities))
        load = drawn(seen.rate, seen.prompts, seen.outputs)
        return _Asked(load, f"drawn from {seen.requests} that ended at {plan.running} in {plan.look_s:g} s")
    prompts, outputs = read_lengths(plan.prompts), read_lengths(plan.outputs)
    load = drawn(plan.rate, prompts, outputs)
    return _Asked(load, f"prompts of {plan.prompts} and answers of {plan.outputs} tokens")


async def _look(plan: PredictionConfig, authorities: str) -> ObservedLoad:
    """Returns the load of a running cluster. Raises PlanError."""
    import aiohttp
    import msgspec

    from pdserve.bench.cluster import known_nodes, read_metrics
    from pdserve.plan.load import observed_load

    async def look(session: aiohttp.ClientSession, url: str) -> str:
        try:
            return await read_metrics(session, url)
        except (aiohttp.ClientError, TimeoutError, OSError, BenchError) as exc:
            raise PlanError(f"--from: the node at {url} does not say what it has counted: {exc!r}") from exc

    tls = Trust(read_authorities(authorities)).context
    connector = aiohttp.TCPConnector(ssl=tls)
    timeout = aiohttp.ClientTimeout(total=10.0)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            nodes = await known_nodes(session, plan.running.rstrip("/"))
            before = [await look(session, node.url) for node in nodes]
            await asyncio.sleep(plan.look_s)
            after = [await look(session, node.url) for node in nodes]
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, OSError, BenchError) as exc:
        raise PlanError(f"--from: {plan.running} does not say what its nodes are: {exc!r}") from exc
    return observed_load(before, after, plan.look_s)


@dataclass(frozen=True, slots=True)
class _Forecast:
    predictions: Sequence[Prediction]
    verdict: str
    chosen: ClusterShape | None = None


def _forecast(config: PlanConfig, profile: Profile, requests: Sequence[PlannedRequest]) -> _Forecast:
    from pdserve.plan.cluster import ClusterShape
    from pdserve.plan.sizing import (
        PlanTargets,
        Sizing,
        check_itl,
        checked_sizing,
        least_nodes,
        predict,
        predict_if_good,
    )

    plan, targets = config.plan, config.targets
    wanted = PlanTargets(targets.target_ttft_ms / 1e3, targets.target_itl_ms / 1e3, plan.percentile)

    def of(shape: ClusterShape) -> Prediction:
        return predict(profile, shape, requests, wanted, targets, plan.disaggregation)

    aims = " and ".join(
        f"{name} p{plan.percentile:g} of {value:g} ms"
        for name, value in (("a TTFT", targets.target_ttft_ms), ("an ITL", targets.target_itl_ms))
        if value
    )
    given = ClusterShape(plan.prefill, plan.decode, plan.mixed, plan.nodes_per_machine)
    if given.nodes:
        prediction = of(given)
        if not prediction.keeps_up:
            return _Forecast([prediction], f"{given}: cannot keep up with that many requests")
        return _Forecast(
            [prediction], f"{given}: {'keeps' if prediction.meets else 'does not keep'} {aims}" if aims else ""
        )
    if not aims:
        raise ConfigError(
            "what is wanted? Give --target-ttft-ms, --target-itl-ms or both, or a cluster: --prefill, --decode, --mixed"
        )
    progress = _ProgressLine()

    def if_good(shape: ClusterShape) -> Prediction | None:
        found = predict_if_good(profile, shape, requests, wanted, targets, plan.disaggregation)
        progress.tried(shape, found is not None)
        return found

    itl = wanted.itl_s, plan.percentile
    check_itl(profile, requests, plan.nodes_per_machine, *itl)
    # A trace may come in bursts, most of whose work is done after the last request has come.
    least = 1 if plan.trace else least_nodes(profile, requests, plan.nodes_per_machine, *itl)
    apart = profile.transfer is not None
    sized = checked_sizing(Sizing(of, if_good, plan.most_nodes, plan.nodes_per_machine, least, apart=apart), aims)
    only = "" if apart else " (the profile says nothing of transfers, so only mixed nodes were looked at)"
    return _Forecast(sized.tried, f"the smallest cluster that keeps {aims}: {sized.chosen}{only}", sized.chosen)


class _ProgressLine:
    """Says on stderr what a long search has tried."""

    def __init__(self) -> None:
        self._from = time.monotonic() + _SILENT_S

    def tried(self, shape: ClusterShape, good: bool) -> None:
        if time.monotonic() >= self._from:
            print(f"plan: {shape}: {'enough' if good else 'not enough'}", file=sys.stderr, flush=True)


def _profile(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(PlanProfileConfig, argv, environ, prog="pdserve plan profile", description=_PROFILE_DESCRIPTION)
    check_folder("--out", config.profile.out)
    cores = config.cpu.cores or tuple(os.sched_getaffinity(0))
    from pdserve.bench.plan.profiling import check_layout, measure
    from pdserve.hub.finding import find_model, with_found_draft_model
    from pdserve.plan.profile import write_profile

    check_layout(config.profile.nodes, len(cores))
    config = replace(config, scheduler=with_found_draft_model(config.scheduler, config.model, environ))
    profile = asyncio.run(measure(config, find_model(config.model, environ).path, environ))
    write_profile(profile, Path(config.profile.out))
    print(f"the profile of {profile.model} is in {config.profile.out}")
    return 0


def _memory(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    config = load(PlanMemoryConfig, argv, environ, prog="pdserve plan memory", description=_MEMORY_DESCRIPTION)
    check_folder("--json", config.report.json)
    requests, asked = config.scheduler.max_num_seqs, config.model.max_model_len
    if not requests:
        raise ConfigError("how many requests at once? --max-num-seqs is needed")
    from pdserve.bench.plan.rows import draft_model_row, memory_rows
    from pdserve.bench.report import Report, render, this_machine, to_json
    from pdserve.hub.finding import find_model, with_found_draft_model
    from pdserve.models.checkpoint.config_reading import read_decoder_config
    from pdserve.models.checkpoint.weight_form import cache_item_bytes, draft_model_size
    from pdserve.models.layer_groups import Load
    from pdserve.models.sizes import CPU_MOST_TOKENS
    from pdserve.plan.memory import cache_need

    found = find_model(config.model, environ)
    decoder = read_decoder_config(found.path)
    if asked > decoder.max_positions:
        raise ConfigError(f"--max-model-len is {asked}, but the model knows only {decoder.max_positions} positions")
    context = asked or decoder.max_positions
    steps = Load(requests, config.scheduler.max_num_batched_tokens or CPU_MOST_TOKENS, context, asked)
    prompt, size = config.memory.moved_tokens or context, config.cache.block_size
    item_bytes = cache_item_bytes(config.model.dtype, config.cache.kv_cache_dtype)
    need = cache_need(decoder, item_bytes, size, steps, prompt, config.cache.kv_cache_mib)
    if config.cache.kv_cache_mib:
        verdict = f"--kv-cache-mib {need.mib} holds {need.requests:,} of them at once"
    else:
        verdict = f"the smallest cache that holds them all at once: --kv-cache-mib {need.mib}"
    notes = (
        f"{requests:,} requests of {context:,} tokens, steps of {steps.step_tokens:,}, blocks of {size}; a prompt of "
        f"{prompt:,} moves",
        verdict,
    )
    rows = memory_rows(need, requests)
    if config.scheduler.used_draft_model:
        other = Path(with_found_draft_model(config.scheduler, config.model, environ).draft_model)
        held = draft_model_size(other, read_decoder_config(other), config.model, CpuKernels.AUTO, size)
        rows += (draft_model_row(other.name, held),)
    report = Report("plan memory", this_machine(), to_environ(config), notes, rows)
    publish(render(report), to_json(report), config.report.json)
    return 0
