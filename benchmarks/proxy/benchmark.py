"""``benchmarks proxy`` measures what a proxy costs before backends that cost next to nothing, beside a peer."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.client_process import ask_clients
from benchmarks.proxy.proxy_clients import ClientLoad, ProxyLoadOrder, ProxyLoadReport
from benchmarks.proxy.systems import (
    DIRECT,
    PDSERVE,
    PEER,
    System,
    plain_body,
    request,
    running_systems,
    stream_body,
)
from benchmarks.settings import BenchProxyConfig, ProxyBenchConfig
from pdserve.bench.report import Better, Figure, Report, Row, Unit, measured, this_machine
from pdserve.errors import BenchError
from pdserve.settings import to_environ

STREAMS, PLAIN, LATENCY, MANY, IDLE = (
    "streams, closed loop",
    "plain requests, closed loop",
    "plain requests at a set rate",
    "streams at once",
    "plain requests beside idle connections",
)
ALONE = "pdserve against the backend itself"
CPU = "CPU of each"
_MARGIN_S = 60.0
_WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of load."""

    what: str
    at: dict[str, int | str]
    systems: tuple[str, ...]
    repeats: int
    order: Callable[[System], ProxyLoadOrder]
    sent_chunks: int
    """The number of chunks in all streams of a run that sends a set number of them, else 0."""


def run(config: BenchProxyConfig, environ: Mapping[str, str]) -> Report:
    """Compares the systems and returns the report.

    Raises BenchError if a system does not come up or answers nothing, ConfigError if the peer cannot be started.
    """
    rows = asyncio.run(_measure(config.proxying, environ))
    notes = [
        "medians of the repeats, which take turns; one worker; mock backends answer at once and register by the "
        "discovery protocol",
        "for each client's request pdserve sends one, to a decode node, and a router in P/D mode two, to a prefill and "
        "to a decode server; clients and backends share the cores with what is measured",
        "added latency is the median over that of the backend itself, at the same set rate; no request is logged",
    ]
    if not config.proxying.peer_command:
        notes.append("no --peer-command was given: pdserve's rows only")
    return Report("proxy", this_machine(), to_environ(config), tuple(notes), tuple(rows))


async def _measure(config: ProxyBenchConfig, environ: Mapping[str, str]) -> list[Row]:
    async with running_systems(config.peer_command, environ, config.startup_timeout_s) as systems:
        rows: list[Row] = []
        for case in _cases(config):
            taking_part = [system for system in systems if system.name in case.systems]
            rows += await _rows(case, taking_part, config.run_timeout_s)
        return [*rows, *_ratios(rows)]


def _cases(config: ProxyBenchConfig) -> list[Case]:
    at = config.connections

    def load(request: bytes, *, chunks: int = 0, rate: float = 0.0, once: bool = False, seconds: float) -> ClientLoad:
        return ClientLoad(request, chunks, seconds, rate, once, seconds + _MARGIN_S)

    def streams(system: System) -> ProxyLoadOrder:
        sent = request(system, stream_body(config.chunks, 0))
        return _order(system, at, load(sent, chunks=config.chunks, seconds=config.seconds))

    def plain(system: System) -> ProxyLoadOrder:
        return _order(system, at, load(request(system, plain_body()), seconds=config.seconds))

    def paced(system: System, idle: int = 0) -> ProxyLoadOrder:
        sent = request(system, plain_body())
        return _order(system, at, load(sent, rate=config.rate, seconds=config.seconds), idle)

    def many(system: System) -> ProxyLoadOrder:
        sent = request(system, stream_body(config.chunks, config.gap_ms))
        seconds = config.chunks * config.gap_ms / 1000
        order = _order(system, config.streams, load(sent, chunks=config.chunks, once=True, seconds=seconds))
        return msgspec.structs.replace(order, warm_up=None)

    everyone, proxies = (DIRECT, PDSERVE, PEER), (PDSERVE, PEER)
    loop = {"connections": at}
    return [
        Case(STREAMS, {**loop, "chunks": config.chunks}, everyone, config.repeats, streams, 0),
        Case(PLAIN, {**loop}, everyone, config.repeats, plain, 0),
        Case(LATENCY, {**loop, "rate": config.rate}, everyone, config.repeats, paced, 0),
        Case(
            IDLE,
            {**loop, "rate": config.rate, "idle": config.idle},
            proxies,
            1,
            lambda system: paced(system, config.idle),
            0,
        ),
        Case(
            MANY,
            {"streams": config.streams, "chunks": config.chunks, "gap, ms": config.gap_ms},
            proxies,
            1,
            many,
            config.streams * config.chunks,
        ),
    ]


def _order(system: System, connections: int, load: ClientLoad, idle: int = 0) -> ProxyLoadOrder:
    warm_up = msgspec.structs.replace(load, seconds=_WARM_UP_S)
    return ProxyLoadOrder(system.host, system.port, connections, load, system.pids, idle, warm_up)


async def _rows(case: Case, systems: Sequence[System], timeout_s: float) -> list[Row]:
    found: dict[str, list[ProxyLoadReport]] = defaultdict(list)
    for _ in range(case.repeats):
        for system in systems:
            report = await ask_clients("benchmarks.proxy.proxy_clients", case.order(system), ProxyLoadReport, timeout_s)
            if not report.answered:
                raise BenchError(f"{system.name} answered nothing ({case.what}): {'; '.join(report.errors)}")
            for error in report.errors:
                print(f"{case.what}, {system.name}: {error}", file=sys.stderr)
            found[system.name].append(report)
    return [
        Row(case.what, {**case.at, "system": name}, _medians([_figures(case, name, report) for report in reports]))
        for name, reports in found.items()
    ]


def _figures(case: Case, name: str, report: ProxyLoadReport) -> tuple[Figure, ...]:
    used_us = report.cpu_s.get(name, float("nan")) * 1e6
    per_answer = Figure(CPU, used_us / report.answered, Unit.US, Better.LOWER)
    failed = Figure("failed", report.failed, Unit.COUNT, Better.LOWER)
    if case.sent_chunks:
        return measured(
            failed,
            Figure("lost chunks", case.sent_chunks - report.chunks, Unit.COUNT, Better.LOWER),
            Figure("first chunk p99", report.first_s.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("gap p50", report.gaps_s.p50 * 1e3, Unit.MS, Better.NEITHER),
            Figure("gap p99", report.gaps_s.p99 * 1e3, Unit.MS, Better.LOWER),
            Figure("CPU of a chunk", used_us / report.chunks, Unit.US, Better.LOWER),
        )
    memory = (
        report.memory_mib.get(name, float("nan")) * 1024 / int(case.at.get("idle", 1))
        if case.what == IDLE
        else float("nan")
    )
    return measured(
        Figure("answered", report.answered / report.seconds, Unit.REQUESTS_PER_S, Better.HIGHER),
        Figure("latency p50", report.latency_s.p50 * 1e3, Unit.MS, Better.LOWER),
        Figure("latency p99", report.latency_s.p99 * 1e3, Unit.MS, Better.LOWER),
        Figure("first chunk p50", report.first_s.p50 * 1e3, Unit.MS, Better.LOWER),
        per_answer,
        Figure("memory of an idle connection", memory, Unit.KIB, Better.LOWER),
        failed,
    )


def _medians(runs: Sequence[tuple[Figure, ...]]) -> tuple[Figure, ...]:
    """Returns the median of each figure over all runs."""
    return tuple(
        msgspec.structs.replace(figures[0], value=statistics.median(figure.value for figure in figures))
        for figures in zip(*runs, strict=True)
    )


def _ratios(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of ratios, which can be compared with a run on another machine."""

    def value(what: str, system: str, figure: str) -> float:
        for row in rows:
            if row.what == what and row.at["system"] == system:
                return row.figure(figure).value
        return float("nan")

    def ratio(what: str, over: str, figure: str, better: Better, name: str) -> Figure:
        return Figure(name, _over(value(what, PDSERVE, figure), value(what, over, figure)), Unit.RATIO, better)

    def added_ms(system: str) -> float:
        return value(LATENCY, system, "latency p50") - value(LATENCY, DIRECT, "latency p50")

    alone = measured(
        ratio(STREAMS, DIRECT, "answered", Better.HIGHER, "streams"),
        ratio(PLAIN, DIRECT, "answered", Better.HIGHER, "plain requests"),
        ratio(STREAMS, DIRECT, CPU, Better.LOWER, "CPU of a stream"),
        ratio(PLAIN, DIRECT, CPU, Better.LOWER, "CPU of a plain request"),
        Figure(
            "latency beside idle connections",
            _over(value(IDLE, PDSERVE, "latency p50"), value(LATENCY, PDSERVE, "latency p50")),
            Unit.RATIO,
            Better.LOWER,
        ),
    )
    against = measured(
        ratio(STREAMS, PEER, "answered", Better.HIGHER, "streams"),
        ratio(PLAIN, PEER, "answered", Better.HIGHER, "plain requests"),
        Figure("added latency p50", _over(added_ms(PDSERVE), added_ms(PEER)), Unit.RATIO, Better.LOWER),
        ratio(PLAIN, PEER, "latency p50", Better.LOWER, "latency p50, closed loop"),
        ratio(STREAMS, PEER, "latency p50", Better.LOWER, "a stream's time p50"),
        ratio(MANY, PEER, "gap p99", Better.LOWER, "gap p99"),
    )
    compared = [(ALONE, alone), ("pdserve against the peer", against)]
    return [Row(what, {}, figures) for what, figures in compared if figures]


def _over(value: float, other: float) -> float:
    """Returns the ratio; NaN if ``other`` is 0, as for a peer that hands out a stream in one piece."""
    return value / other if other > 0 else float("nan")
