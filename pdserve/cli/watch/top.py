"""``pdserve top`` shows in a terminal what the status page shows: nodes, requests, rates and what went wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import aiohttp
import msgspec

from pdserve.cli.node_commands import KEY_ADVICE, error_message
from pdserve.cli.watch.top_screen import ScreenSize, render
from pdserve.config import AdmissionConfig, Switch, TopConfig, WatchConfig
from pdserve.errors import ConfigError, PdserveError
from pdserve.http.tls import Trust, read_authorities
from pdserve.settings import load
from pdserve.signals import StopSignals, stop_signals
from pdserve_proxy.credentials import read_api_keys
from pdserve_proxy.status.report import StatusAnswer

_DESCRIPTION = (
    "pdserve top shows a cluster while it works: its nodes, its requests, rates, latencies, and what went wrong. "
    "q ends it. Without a terminal it prints one report after the other."
)
_MAX_BYTES = 16 * 2**20
_ALTERNATE, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The screen that leaves what was there before, without a cursor; and back."""
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


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
