"""What the process that fetches a model says, a line of JSON for each message, and how its user sees it.

On a terminal a download is one bar, and elsewhere a line every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

import msgspec

LINE_S = 5.0
"""Seconds between two lines where stderr is no terminal."""


class DownloadProgress(msgspec.Struct, frozen=True, tag=True):
    """How much of the download is there. ``done`` begins with what an earlier download has left."""

    done: int
    total: int
    """Bytes of all files that are served, except those that were there."""


class Note(msgspec.Struct, frozen=True, tag=True):
    """A sentence for the user."""

    text: str


class DownloadEnded(msgspec.Struct, frozen=True, tag=True):
    """The model is complete. This is the last message."""

    path: str
    """The folder or GGUF file."""
    commit: str
    fetched: int
    """How many bytes came over the network."""


class DownloadFailed(msgspec.Struct, frozen=True, tag=True):
    """Why there is no model. This is the last message."""

    message: str
    passing: bool
    """Whether the same may work later, without a change of settings."""


Message: TypeAlias = DownloadProgress | Note | DownloadEnded | DownloadFailed


class DownloadOrder(msgspec.Struct, frozen=True):
    """What the process is to fetch."""

    model: str
    """A name of the hub."""
    cache: str
    """The folder of cached models."""
    newest: bool = False
    """Whether the hub is asked even if the model is complete in the cache."""


@contextmanager
def shown_progress(name: str, out: TextIO) -> Iterator[Callable[[Message], None]]:
    """Yields what takes the messages of a download of ``name``, and shows them on ``out``."""
    try:
        with _shown(name, out) as take:
            yield take
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=out, flush=True)
        raise


@contextmanager
def _shown(name: str, out: TextIO) -> Iterator[Callable[[Message], None]]:
    if not out.isatty():
        yield ProgressLines(name, lambda text: print(text, file=out, flush=True)).take
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("fetching {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=Console(file=out)) as bar:
        task = bar.add_task(name, start=False, total=None)

        def take(message: Message) -> None:
            match message:
                case DownloadProgress(done, total):
                    bar.start_task(task)
                    bar.update(task, completed=done, total=total)
                case Note(text):
                    bar.console.print(text, markup=False, highlight=False)

        yield take


class ProgressLines:
    """Says in lines how far a download is."""

    def __init__(self, name: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._say = say
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._said_s = float("-inf")

    def take(self, message: Message) -> None:
        match message:
            case Note(text):
                self._say(text)
            case DownloadProgress():
                now = self._clock()
                if self._first is None:
                    self._first = (now, message.done)
                if self._first[1] >= message.total:
                    return  # nothing is to fetch
                if message.done >= message.total or now - self._said_s >= LINE_S:
                    self._said_s = now
                    self._say(self._line(message, now))

    def _line(self, progress: DownloadProgress, now: float) -> str:
        assert self._first is not None
        began_s, before = self._first
        text = f"fetching {self._name}: {percent(progress)} %, {in_gb(progress.done)} of {in_gb(progress.total)}"
        rate = (progress.done - before) / (now - began_s) if now > began_s else 0.0
        if rate <= 0 or progress.done >= progress.total:
            return text
        return f"{text}, {in_gb(rate)}/s, {_duration((progress.total - progress.done) / rate)} left"


def percent(progress: DownloadProgress) -> int:
    """Returns how much of a download is there, from 0 to 100; 100 only if all of it is."""
    return int(100 * progress.done / progress.total) if progress.total else 100


def in_gb(nbytes: float) -> str:
    """Returns a size in words: ``4.1 GB``, ``231 MB`` or ``3.2 kB``."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
