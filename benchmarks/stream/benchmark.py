"""``benchmarks stream`` measures what a token costs the API process and the proxy, each optimisation on and off.

All variants' processes run from the beginning and take turns, so that all meet the same disturbances.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from benchmarks.client_process import ask_clients
from benchmarks.settings import BenchStreamConfig, StreamBenchConfig
from benchmarks.stream.figures import Condition, Regime, figures_of, medians, report_rows
from benchmarks.stream.floors import chunk_floor, crossing
from benchmarks.stream.mock_engine import Script
from benchmarks.stream.raw_answer import Wording
from benchmarks.stream.servers import SERVED_NAME, Server, running_servers, token_ids
from benchmarks.stream.stream_clients import StreamLoadOrder, StreamLoadReport
from benchmarks.stream.variants import variants
from pdserve.bench.report import Figure, Report, this_machine
from pdserve.errors import BenchError
from pdserve.process import allow_open_files
from pdserve.settings import to_environ

_WORDING = Wording(" the house is old and the river runs by it all day long while people walk to work", " end")
_PROMPT = "Say what you see from where you are, in words that a child would understand, and do not stop until I say so."
_ADMIT = 256
_WARM_UP_STREAMS = 32
_PACED_AHEAD = 32.0
"""The limit keeps an engine from flooding a node that cannot keep up: new requests would wait for minutes."""
_SATURATED_AHEAD = 0.5
"""Half of what is due may be on its way: no stream's chunks are merged while its client keeps up with the others."""
_MAX_TOKENS = 2**20
"""The length of an answer, which the mock engine always ends before."""
_EXIT_S = 10.0


@dataclass(frozen=True, slots=True)
class StreamRun:
    """One run of a variant."""

    regime: Regime
    streams: int
    step_s: float
    seconds: float
    """The time for which all streams are under way."""
    ahead: float
    """The tokens of each stream by which the engine may be ahead of its clients."""


def run(config: BenchStreamConfig, environ: Mapping[str, str]) -> Report:
    """Measures all variants and returns the report.

    Raises ConfigError for unknown variants, and BenchError if a process does not start or an answer is wrong.
    """
    found = variants(config.streaming.variants)
    allow_open_files(2 * max(config.streaming.streams))
    floor = chunk_floor()
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        script_file = Path(folder) / "script.json"
        os.mkfifo(script_file.with_suffix(".credit"))
        measured = asyncio.run(_measure(config, script_file, environ))
    return Report(
        "stream",
        this_machine(),
        to_environ(config),
        _notes(config.streaming),
        report_rows(found, measured, floor, crossing()),
    )


def _notes(streaming: StreamBenchConfig) -> tuple[str, ...]:
    return (
        f"paced: the mock engine emits {streaming.rate:,} tokens a second, all streams together, unless clients are "
        f"{_PACED_AHEAD:g} tokens behind; saturated: a step as soon as half of the clients have the chunk before, so "
        "that hardly any chunks are merged",
        "every run: all requests at once, one token a stream and step; costs and 'steady' are of the time between the "
        "last first token and the first end; CPU time is user and system time of the whole process",
        "clients, proxy, node and mock engine share the machine's cores",
    )


async def _measure(
    config: BenchStreamConfig, script_file: Path, environ: Mapping[str, str]
) -> dict[Condition, tuple[Figure, ...]]:
    streaming = config.streaming
    runs: dict[Condition, list[tuple[Figure, ...]]] = {}
    async with running_servers(
        variants(streaming.variants),
        config.model.path,
        max(streaming.streams),
        str(script_file),
        environ,
        streaming.startup_timeout_s,
    ) as servers:
        words = await _words(servers[0].url)
        warm_up = StreamRun(Regime.PACED, _WARM_UP_STREAMS, 0.01, 0.1, _PACED_AHEAD)
        for server in servers:
            await _load(streaming, server, warm_up, words, script_file)
        for plan in _plans(streaming):
            for turn in range(streaming.repeats):
                for server in servers if turn % 2 == 0 else reversed(servers):
                    condition = Condition(plan.regime, plan.streams, server.variant.name)
                    print(condition, file=sys.stderr, flush=True)
                    report = await _load(streaming, server, plan, words, script_file)
                    runs.setdefault(condition, []).append(figures_of(report))
    return {condition: medians(found) for condition, found in runs.items()}


def _plans(streaming: StreamBenchConfig) -> list[StreamRun]:
    paced = [
        StreamRun(Regime.PACED, streams, streams / streaming.rate, streaming.seconds, _PACED_AHEAD)
        for streams in streaming.streams
    ]
    saturated = [
        StreamRun(Regime.SATURATED, streams, 0.0, streaming.seconds, _SATURATED_AHEAD) for streams in streaming.streams
    ]
    return [*paced, *saturated]


async def _words(url: str) -> list[int]:
    """Returns the token ids of ``_WORDING``, with that of the last word at the end."""
    text = _WORDING.period + _WORDING.last
    found = await token_ids(url, text)
    if len(found) != text.count(" "):
        raise BenchError(f"this model's tokenizer makes {len(found)} tokens of {text.count(' ')} common words")
    return found


async def _load(
    streaming: StreamBenchConfig, server: Server, plan: StreamRun, words: Sequence[int], script_file: Path
) -> StreamLoadReport:
    *period, last = words
    credit_file = str(script_file.with_suffix(".credit"))
    script = Script(plan.streams, plan.step_s, plan.seconds, _ADMIT, tuple(period), last, credit_file, plan.ahead)
    await asyncio.to_thread(script_file.write_bytes, msgspec.json.encode(script))
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    order = StreamLoadOrder(
        address.hostname,
        address.port,
        _request(address.netloc),
        plan.streams,
        _WORDING,
        server.pids,
        streaming.run_timeout_s,
        credit_file,
    )
    report = await ask_clients("benchmarks.stream.stream_clients", order, StreamLoadReport, order.timeout_s + _EXIT_S)
    if report.failed:
        raise BenchError(f"{report.failed} of {plan.streams} streams failed: {'; '.join(report.errors)}")
    return report


def _request(host: str) -> bytes:
    body = msgspec.json.encode(
        {
            "model": SERVED_NAME,
            "prompt": _PROMPT,
            "max_tokens": _MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
