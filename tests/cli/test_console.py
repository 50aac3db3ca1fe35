"""Tests what ``pdserve up`` prints about itself and its processes."""

from __future__ import annotations

import io

import pytest

from pdserve.cli.console import Console
from pdserve.config import LogLevel


def test_lines_are_marked_with_their_process() -> None:
    out = io.StringIO()
    console = Console(out, colour=False)
    console.relay("proxy", "hello")
    console.say("ready")
    first, second = out.getvalue().splitlines()
    assert first == "proxy     | hello"
    assert second.endswith("s] ready")


def test_colour_is_only_for_terminals() -> None:
    plain, coloured = io.StringIO(), io.StringIO()
    Console(plain, colour=False).relay("proxy", "hello")
    Console(coloured, colour=True).relay("proxy", "hello")
    assert "\x1b" not in plain.getvalue()
    assert "\x1b" in coloured.getvalue()


@pytest.mark.parametrize(("level", "shown"), [(LogLevel.DEBUG, 4), (LogLevel.INFO, 3), (LogLevel.ERROR, 1)])
def test_log_lines_below_the_level_are_hidden(level: LogLevel, shown: int) -> None:
    out = io.StringIO()
    console = Console(out, colour=False, level=level)
    for name in ("DEBUG", "INFO", "WARNING", "ERROR"):
        console.relay("proxy", f"2026-11-21 04:00:00,000 {name} pdserve: text")
    console.relay("proxy", "a traceback, say")
    assert len(out.getvalue().splitlines()) == shown + 1


def test_lines_wait_while_something_else_writes() -> None:
    out = io.StringIO()
    console = Console(out, colour=False)
    with console.held():
        console.relay("proxy", "one")
        console.relay("proxy", "two")
        out.write("the answer\n")
    assert [line.rpartition(" ")[2] for line in out.getvalue().splitlines()] == ["answer", "one", "two"]


def test_a_terminal_that_is_gone_stops_nothing() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Console(Gone(), colour=False).say("stopping")


def test_every_line_is_kept_whether_it_is_printed_or_not() -> None:
    out, kept = io.StringIO(), list[tuple[str, str]]()
    console = Console(out, colour=False, level=LogLevel.WARNING, keep=lambda name, line: kept.append((name, line)))
    lines = [
        "2026-11-21 04:00:00,000 INFO pdserve: text",
        "2026-11-21 04:00:00,000 WARNING pdserve: text",
        "a traceback",
    ]
    for line in lines:
        console.relay("proxy", line)
    assert kept == [("proxy", line) for line in lines]
    assert [line.partition("| ")[2] for line in out.getvalue().splitlines()] == lines[1:]


def screen(written: str) -> list[str]:
    """Returns the lines that a terminal shows."""
    return [line.rpartition("\r\x1b[2K")[2] for line in written.split("\n")]


def test_progress_moves_on_a_terminals_last_line_and_makes_way_for_lines() -> None:
    out = io.StringIO()
    console = Console(out, colour=False, terminal=True)
    console.progress(0.25, "loading weights")
    console.progress(0.5, "warming up")
    assert [line.partition("] ")[2] for line in screen(out.getvalue())] == ["█" * 10 + "░" * 10 + " warming up"]
    console.say("ready")
    assert [line.partition("] ")[2] for line in screen(out.getvalue())] == ["ready", ""]
    console.progress(1.0, "late")
    with console.held():
        console.progress(1.0, "hidden")
        out.write("the answer\n")
    assert screen(out.getvalue())[1:] == ["the answer", ""]


def test_progress_is_for_terminals_only() -> None:
    out = io.StringIO()
    Console(out, colour=False).progress(0.5, "loading weights")
    assert not out.getvalue()


def test_progress_fits_the_terminals_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    Console(out, colour=False, terminal=True).progress(0.5, "loading weights " * 10)
    assert len(screen(out.getvalue())[0]) == 39
