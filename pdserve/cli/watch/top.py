"""``pdserve top`` shows in a terminal what the status page shows: nodes, requests, rates and what went wrong.

What nodes and clients have named is shown without characters that a terminal would obey.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve.cli.node_commands import KEY_ADVICE, error_message
from pdserve.config import AdmissionConfig, Switch, TopConfig, WatchConfig
from pdserve.errors import ConfigError, PdserveError
from pdserve.http.tls import Trust, read_authorities
from pdserve.log_format import printable_line
from pdserve.settings import load
from pdserve.signals import StopSignals, stop_signals
from pdserve.wire.cache_groups import Keep
from pdserve.wire.status import Incident, IncidentKind, RequestView
from pdserve_proxy.credentials import read_api_keys
from pdserve_proxy.status.report import GroupStatus, NodeStatus, StatusAnswer, StatusReport
from pdserve_proxy.status.throughput import Percentiles

MIB = 2**20
BAR_CHARS = 10
PLAIN_INCIDENTS = 10
"""The number of incidents where the height does not say how many lines there are."""
PLAIN_REQUESTS = 16
LEAST_INCIDENTS = 3
"""So many are shown, however many nodes there are."""
MIN_WIDTH = 20
_BOLD, _QUIET, _RED, _YELLOW, _END = "1", "2", "31", "33", "0"
_GRAVE = frozenset({IncidentKind.REQUEST_FAILED, IncidentKind.ATTEMPT_FAILED, IncidentKind.NODE_LOST})
_NOTED = frozenset({IncidentKind.RESUMED, IncidentKind.NODE_DRAINS})

_DESCRIPTION = (
    "pdserve top shows a cluster while it works: its nodes, its requests, rates, latencies, and what went wrong. "
    "q ends it. Without a terminal it prints one report after the other."
)
_MAX_BYTES = 16 * 2**20
_ALTERNATE, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The screen that leaves what was there before, without a cursor; and back."""
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, slots=True)
class ScreenSize:
    width: int
    height: int | None
    """The number of lines; None if there may be any number."""
    colour: bool


def render(report: StatusReport, screen: ScreenSize, url: str, note: str = "") -> list[str]:
    """Returns the lines of a screen, at least one. ``note`` says what is wrong with the report itself."""
    lines = [_head(report, url), *([(_RED, printable_line(note))] if note else []), (_QUIET, "")]
    lines += [*_rates(report), (_QUIET, ""), *_latencies(report), (_QUIET, "")]
    happened = min(len(report.incidents), LEAST_INCIDENTS)
    spared = 2 + happened if happened else 0
    lines += _nodes(report, None if screen.height is None else screen.height - len(lines) - spared)
    lines += _groups(report, None if screen.height is None else screen.height - len(lines) - spared)
    lines_left = None if screen.height is None else max(0, screen.height - len(lines))
    lines += _requests(report, PLAIN_REQUESTS if lines_left is None else lines_left // 2 - 2)
    lines_left = None if screen.height is None else max(0, screen.height - len(lines))
    lines += _incidents(report, PLAIN_INCIDENTS if lines_left is None else lines_left - 2)
    shown = lines if screen.height is None else lines[: max(screen.height, 1)]
    return [_cut(style, text, screen) for style, text in shown]


_Line = tuple[str, str]
"""A style and a text."""


def _head(report: StatusReport, url: str) -> _Line:
    at = time.strftime("%H:%M:%S", time.localtime(report.unix_s))
    workers = f" · {report.workers} workers" if report.workers > 1 else ""
    return _BOLD, f"pdserve {printable_line(report.version)} · up {duration(report.uptime_s)}{workers} · {url} · {at}"


def _rates(report: StatusReport) -> list[_Line]:
    rates = report.rates
    stages = ", ".join(f"{number} {stage.value}" for stage, number in report.stages.items()) or "none"
    return [
        (
            "",
            f"requests {amount(rates.requests_per_s)}/s   failures {amount(rates.failures_per_s)}/s   "
            f"tokens {amount(rates.generated_tokens_per_s)}/s   prompt tokens {amount(rates.prompt_tokens_per_s)}/s",
        ),
        ("", f"under way: {stages}"),
    ]


def _latencies(report: StatusReport) -> list[_Line]:
    found = report.latencies
    rows = [("", "p50", "p95", "p99")]
    for name, one in (("time to first token", found.ttft), ("between tokens", found.itl), ("whole request", found.e2e)):
        rows.append((name, *_three(one)))
    return _table(rows, "lrrr")


def _three(found: Percentiles) -> tuple[str, str, str]:
    return duration(found.p50), duration(found.p95), duration(found.p99)


def _nodes(report: StatusReport, lines_left: int | None) -> list[_Line]:
    """Returns ``lines_left`` lines at most, or one node's if the height is less."""
    if not report.nodes:
        return [(_YELLOW, "no node is registered")]
    nodes, left_out = report.nodes, report.nodes_left_out
    if lines_left is not None and 1 + len(nodes) + bool(left_out) > lines_left:
        nodes = nodes[: max(1, lines_left - 2)]
        left_out += len(report.nodes) - len(nodes)
    head = ("NODE", "ROLE", "STATE", "RUNNING", "WAITING", "KV CACHE", "TOK/S", "DRAFTS", "PROMPT/S", "STEP")
    lines = _table([(*head, "LINKS", "VERSION"), *map(_node, nodes)], "lllrrlrrrrll")
    if left_out:
        lines.append((_QUIET, f"{left_out} more"))
    return lines


def _node(node: NodeStatus) -> tuple[str, ...]:
    links = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in node.links.items())
    return (
        printable_line(node.name),
        printable_line(node.role),
        printable_line(node.state),
        f"{node.running}/{node.max_running}",
        str(node.waiting),
        _bar(node.kv_used),
        amount(node.generated_tokens_per_s),
        _drafts(node),
        amount(node.prompt_tokens_per_s),
        duration(node.step_s or None),
        printable_line(links) or "–",
        printable_line(node.version) or f"protocol {node.protocol}",
    )


def _drafts(node: NodeStatus) -> str:
    """Returns which share of the node's tokens is accepted drafts."""
    if not node.accepted_drafts_per_s or not node.generated_tokens_per_s:
        return "–"
    return f"{node.accepted_drafts_per_s / node.generated_tokens_per_s:.0%}"


def _groups(report: StatusReport, lines_left: int | None) -> list[_Line]:
    """Returns ``lines_left`` lines at most, about the nodes whose caches have several groups."""
    rows = [_group(node, group) for node in report.nodes for group in node.cache_groups]
    shown = rows if lines_left is None else rows[: max(0, lines_left - 3)]
    if not shown:
        return []
    head = ("NODE", "CACHE GROUP", "KEEPS", "USED", "BLOCKS", "MIB")
    lines = [("", ""), *_table([head, *shown], "lllrrr")]
    return [*lines, (_QUIET, f"{len(rows) - len(shown)} more")] if len(shown) < len(rows) else lines


def _group(node: NodeStatus, group: GroupStatus) -> tuple[str, ...]:
    match group.keep:
        case Keep.ALL:
            keeps = "every block"
        case Keep.WINDOW:
            keeps = f"last {group.window:,} tokens"
        case Keep.LATEST:
            keeps = "latest state"
    return (
        printable_line(node.name),
        printable_line(group.name),
        keeps,
        _bar(group.used_blocks / group.num_blocks if group.num_blocks else None),
        f"{group.used_blocks:,}/{group.num_blocks:,}",
        f"{group.used_blocks * group.block_bytes / MIB:,.1f}/{group.num_blocks * group.block_bytes / MIB:,.1f}",
    )


def _bar(share: float | None) -> str:
    if share is None:
        return "–"
    filled = round(min(share, 1.0) * BAR_CHARS)
    return f"{'█' * filled}{'░' * (BAR_CHARS - filled)} {share:4.0%}"


def _requests(report: StatusReport, lines_left: int) -> list[_Line]:
    if not report.under_way or lines_left < 1:
        return []
    rows = [("REQUEST", "STAGE", "NODES", "SINCE")]
    rows += [_request(one, report.now_s) for one in report.under_way[:lines_left]]
    lines = [("", ""), *_table(rows, "lllr")]
    hidden = sum(report.stages.values()) - len(rows) + 1
    return [*lines, (_QUIET, f"{hidden} more")] if hidden > 0 else lines


def _request(one: RequestView, now_s: float) -> tuple[str, str, str, str]:
    nodes = " → ".join(printable_line(name) for name in (one.prefill, one.decode) if name)
    return printable_line(one.request_id)[:36], one.stage.value, nodes or "–", duration(now_s - one.arrived_s)


def _incidents(report: StatusReport, lines_left: int) -> list[_Line]:
    if not report.incidents or lines_left < 1:
        return []
    return [
        ("", ""),
        (_QUIET, "WHAT HAPPENED"),
        *(_incident(one, report) for one in report.incidents[: -lines_left - 1 : -1]),
    ]


def _incident(one: Incident, report: StatusReport) -> _Line:
    at = time.strftime("%H:%M:%S", time.localtime(report.unix_s - report.now_s + one.at_s))
    times = f" × {one.count}" if one.count > 1 else ""
    request = f" · {printable_line(one.request)}" if one.request else ""
    style = _RED if one.kind in _GRAVE else _YELLOW if one.kind in _NOTED else ""
    kind = one.kind.value.replace("_", " ")
    return style, f"{at}  {kind:14}  {printable_line(one.node)} {printable_line(one.text)}{times}{request}"


def _table(rows: Sequence[Sequence[str]], sides: str) -> list[_Line]:
    """Returns the rows in columns; the first one is their head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Iterable[str]) -> str:
        cells = zip(row, widths, sides, strict=True)
        return "  ".join(cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in cells)

    head, *rest = rows
    return [(_QUIET, line(head)), *(("", line(row)) for row in rest)]


def _cut(style: str, text: str, screen: ScreenSize) -> str:
    """Returns a line that fits."""
    width = max(screen.width, MIN_WIDTH)
    text = (text if len(text) <= width else f"{text[: width - 1]}…").rstrip()
    return f"\x1b[{style}m{text}\x1b[{_END}m" if style and text and screen.colour else text


def amount(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.0995 else f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    for unit, size in (("min", 60), ("h", 3600)):
        if seconds < size * (120 if unit == "min" else 48):
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


class StatusUnknown(PdserveError):
    """The proxy does not answer, or does not tell its status."""


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Shows the cluster until q, SIGINT or SIGTERM; returns the exit status.

    Raises ConfigError, and StatusUnknown if the proxy does not tell its status at first.
    """
    config = load(TopConfig, argv, environ, prog="pdserve top", description=_DESCRIPTION)
    trust = Trust(read_authorities(config.trust.authorities))
    colour = "NO_COLOR" not in environ
    try:
        asyncio.run(_watch(config.watch, trust, colour=colour))
    except OSError as exc:
        if exc.errno not in (errno.EPIPE, errno.EIO):
            raise
        # Whoever read has enough, or the terminal is gone. What Python still holds back for them goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _watch(config: WatchConfig, trust: Trust, *, colour: bool) -> None:
    interactive = sys.stdout.isatty() and sys.stdin.isatty() and config.once is Switch.OFF and config.json is Switch.OFF
    with stop_signals(signal.SIGHUP, signal.SIGQUIT) as signals:
        async with _Source(config, trust) as source:
            first = await _unless_stopped(source.ask(), signals)
            if first is None:
                return
            if interactive:
                await _draw(config, source, first, signals, colour=colour)
            else:
                await _print(config, source, first, signals)


async def _print(config: WatchConfig, source: _Source, answer: StatusAnswer, signals: StopSignals) -> None:
    """Prints reports as text or JSON, or one that knows rates too, which take two looks."""
    while True:
        if config.once is Switch.OFF:
            _print_one(config, answer)
        if await _stops_within(config.interval_s, signals):
            return
        answer = await source.ask()
        if config.once is Switch.ON:
            _print_one(config, answer)
            return


def _print_one(config: WatchConfig, answer: StatusAnswer) -> None:
    if config.json is Switch.ON:
        print(msgspec.json.encode(answer.report).decode(), flush=True)
        return
    width = shutil.get_terminal_size((120, 0)).columns
    print("\n".join(render(answer.report, ScreenSize(width, None, colour=False), config.proxy_url)), flush=True)


async def _draw(
    config: WatchConfig, source: _Source, answer: StatusAnswer, signals: StopSignals, *, colour: bool
) -> None:
    """Draws on the terminal until somebody ends it."""
    loop = asyncio.get_running_loop()
    wake = asyncio.Event()
    note = ""
    with _terminal(loop, signals.drain.set, wake.set):
        while not signals.drain.is_set():
            size = shutil.get_terminal_size((80, 24))
            lines = render(answer.report, ScreenSize(size.columns, size.lines, colour=colour), config.proxy_url, note)
            _write(_HOME + "".join(f"{line}{_CLEAR_LINE}\r\n" for line in lines[:-1]) + lines[-1] + _CLEAR_BELOW)
            wake.clear()
            if await _stops_within(config.interval_s, signals, wake):
                return
            try:
                answer = await _unless_stopped(source.ask(), signals) or answer
                note = ""
            except StatusUnknown as exc:
                note = f"{time.strftime('%H:%M:%S')} {exc}"


async def _stops_within(seconds: float, signals: StopSignals, wake: asyncio.Event | None = None) -> bool:
    """Waits for so long, or until ``wake`` is set, and returns whether it is time to end."""
    waits = [asyncio.create_task(event.wait()) for event in (signals.drain, wake) if event is not None]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return signals.drain.is_set()


async def _unless_stopped(asking: asyncio.Task[StatusAnswer], signals: StopSignals) -> StatusAnswer | None:
    stop = asyncio.create_task(signals.drain.wait())
    stop.add_done_callback(lambda _: asking.cancel())
    try:
        await asyncio.wait([asking])
        return None if asking.cancelled() else asking.result()
    finally:
        stop.cancel()


class _Source:
    """Asks one proxy for its status. Used as an async context manager."""

    def __init__(self, config: WatchConfig, trust: Trust) -> None:
        """Raises ConfigError if there is no usable key in the file that should have one."""
        self._url = config.proxy_url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"--proxy-url: {config.proxy_url!r} was given; it takes one like http://127.0.0.1:8000")
        keys = read_api_keys(AdmissionConfig(api_keys=config.api_keys, api_key_file=config.api_key_file))
        self._headers = {"authorization": f"Bearer {keys[0].key}"} if keys else {}
        self._tls = trust.context if self._url.startswith("https:") else True
        self._timeout = aiohttp.ClientTimeout(total=config.timeout_s)

    async def __aenter__(self) -> _Source:
        connector = aiohttp.TCPConnector(ssl=self._tls)
        self._http = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    def ask(self) -> asyncio.Task[StatusAnswer]:
        """Returns the report as it is now. The task raises StatusUnknown."""
        return asyncio.create_task(self._ask())

    async def _ask(self) -> StatusAnswer:
        try:
            async with self._http.get(f"{self._url}/status", headers=self._headers) as response:
                body = await response.content.read(_MAX_BYTES)
                while not response.content.at_eof() and len(body) < _MAX_BYTES:
                    body += await response.content.read(_MAX_BYTES)
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise StatusUnknown(f"no answer from {self._url}: {exc or 'it took too long'}") from exc
        if response.status != 200:
            advice = f"; {KEY_ADVICE}" if response.status == 401 else ""
            words = error_message(body) or f"it answers {response.status}"
            raise StatusUnknown(f"{self._url} does not tell its status: {words}{advice}")
        try:
            return msgspec.json.decode(body, type=StatusAnswer)
        except msgspec.MsgspecError as exc:
            raise StatusUnknown(f"{self._url} is no proxy of this version: {exc}") from exc


@contextmanager
def _terminal(loop: asyncio.AbstractEventLoop, end: Callable[[], None], redraw: Callable[[], None]) -> Iterator[None]:
    """Takes the terminal's screen and keys, and gives them back however the block ends.

    Calls ``end`` for q, and where nobody is at the terminal any more; and ``redraw`` when its size has changed.
    """
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    raw = termios.tcgetattr(keys)
    raw[3] &= ~(termios.ICANON | termios.ECHO)

    def take() -> None:
        termios.tcsetattr(keys, termios.TCSADRAIN, raw)
        _write(_ALTERNATE)

    def give_back() -> None:
        with suppress(OSError):  # the terminal may be gone
            _write(_BACK)
        with suppress(termios.error):
            termios.tcsetattr(keys, termios.TCSADRAIN, before)

    def read() -> None:
        try:
            typed = os.read(keys, 64)
        except OSError:
            typed = b""
        if not typed or b"q" in typed.lower():
            end()

    def suspend() -> None:
        give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        take()
        redraw()

    try:
        take()
        loop.add_reader(keys, read)
        loop.add_signal_handler(signal.SIGTSTP, suspend)
        loop.add_signal_handler(signal.SIGWINCH, redraw)
        yield
    finally:
        loop.remove_reader(keys)
        loop.remove_signal_handler(signal.SIGTSTP)
        loop.remove_signal_handler(signal.SIGWINCH)
        give_back()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
