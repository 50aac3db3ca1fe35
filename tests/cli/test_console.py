"""Tests what ``pdserve up`` prints about itself and its processes."""

from __future__ import annotations

import io
import re

import pytest

from pdserve.cli.up.output import Console
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


def console_on(out: io.StringIO, columns: int, monkeypatch: pytest.MonkeyPatch) -> Console:
    """Returns a console on a terminal that is so wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    return Console(out, colour=False, terminal=True)


def screen(written: str) -> list[str]:
    """Returns the lines that a terminal shows, of those that go up, clear a line, and write."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r|\n)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part and not part.startswith(("\x1b", "\r")):
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_progress_stays_below_the_lines_and_goes_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = console_on(out, 80, monkeypatch)
    console.progress(0.25, "2 s", [("decode-0", "loading weights"), ("prefill-0", "loading weights")])
    console.progress(0.5, "3 s", [("decode-0", "warming up")])
    console.relay("decode-0", "a warning")
    shown = [line for line in screen(out.getvalue()) if line]
    assert shown[0] == "decode-0  | a warning"
    assert shown[1].endswith(" 3 s")
    assert shown[2:] == ["  decode-0  warming up"]
    console.end_progress()
    console.say("ready")
    assert [line.partition("] ")[2] or line for line in screen(out.getvalue()) if line] == [shown[0], "ready"]


def test_progress_makes_way_for_what_else_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = console_on(out, 80, monkeypatch)
    console.progress(0.5, "late", [])
    with console.held():
        console.progress(1.0, "hidden", [])
        out.write("the answer\n")
    assert [line for line in screen(out.getvalue()) if line] == ["the answer"]


def test_progress_is_for_terminals_only() -> None:
    out = io.StringIO()
    Console(out, colour=False).progress(0.5, "2 s", [("decode-0", "loading weights")])
    assert not out.getvalue()


def test_on_a_narrow_terminal_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    stage = "loading weights from a folder with a rather long name"
    console_on(out, 40, monkeypatch).progress(0.5, "2 s", [("decode-0", stage)])
    shown = screen(out.getvalue())
    assert max(map(len, shown)) <= 40
    assert " ".join(" ".join(shown).split()).endswith(stage)


def test_long_lines_are_not_broken() -> None:
    out = io.StringIO()
    Console(out, colour=False).say("word " * 60)
    assert len(out.getvalue().splitlines()) == 1
