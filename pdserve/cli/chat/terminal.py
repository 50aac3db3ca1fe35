"""Shows answers in a terminal while they come, as they are written or with their Markdown rendered.

What a model writes is shown, and never obeyed: control characters, with which a text could move the cursor or change
the terminal, are left out.
"""

from __future__ import annotations

import asyncio
import time
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from pdserve.cli.chat.server import Piece
from pdserve.printable import printable

DRAW_S = 0.08
"""Rendered text is drawn again after this time at the earliest."""
_DRAW_SHARE = 5
"""A text that takes long to render is drawn again after this many times as long."""
_ROWS_LEFT = 3


class Screen:
    """The terminal of a chat. One answer is shown at a time: ``add`` takes its pieces, and ``end`` ends it."""

    def __init__(self, out: TextIO, *, colour: bool, markdown: bool) -> None:
        self.markdown = markdown
        self._colour = colour
        self._console = Console(file=out, highlight=False, no_color=not colour, force_terminal=True)
        self._is_reasoning = False
        self._is_line_open = False
        self._rendered: _RenderedAnswer | None = None

    def add(self, piece: Piece) -> None:
        """Shows a part of the answer. Called within an event loop."""
        text = printable(piece.text)
        if piece.is_reasoning:
            self._is_reasoning = True
            self._write(f"\x1b[2m{text}\x1b[0m" if self._colour else text)
            self._is_line_open = not text.endswith("\n")
            return
        if self._is_reasoning:
            if not text.strip():
                return
            self._is_reasoning = False
            self._close_line()
            self._console.print()
        if not self.markdown:
            self._write(text)
            self._is_line_open = not text.endswith("\n")
            return
        if self._rendered is None:
            self._rendered = _RenderedAnswer(self._console)
        self._rendered.add(text)

    def end(self) -> None:
        """Ends the answer, however much of it there is. The cursor is at the beginning of a line afterwards."""
        rendered, self._rendered = self._rendered, None
        self._is_reasoning = False
        if rendered is not None:
            rendered.end()
        self._close_line()

    def note(self, text: str) -> None:
        """Prints a line about the chat."""
        self._console.print(Text(printable(text), style="dim"), soft_wrap=True)

    def problem(self, text: str) -> None:
        """Prints a line about what went wrong."""
        self._console.print(Text(printable(text), style="red"), soft_wrap=True)

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _close_line(self) -> None:
        if self._is_line_open:
            self._console.print()
            self._is_line_open = False


class _RenderedAnswer:
    """Draws the block of Markdown that is being written, and prints it for good when the next one has begun."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tail = ""
        self._has_printed = False
        self._timer: asyncio.TimerHandle | None = None
        self._pause_s = DRAW_S
        # Drawn by this thread alone. At the end it takes away what it has drawn.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def add(self, text: str) -> None:
        self._tail += text
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._draw)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._live.stop()
        self._print(self._tail)

    def _draw(self) -> None:
        self._timer = None
        began_s = time.monotonic()
        whole, self._tail = finished_blocks(self._tail)
        self._print(whole)
        # What is drawn has to fit: what has left the terminal at its top cannot be taken away.
        self._live.update(_Rows(self._tail, max(1, self._console.size.height - _ROWS_LEFT)), refresh=True)
        self._pause_s = max(DRAW_S, _DRAW_SHARE * (time.monotonic() - began_s))

    def _print(self, text: str) -> None:
        if text.strip():
            if self._has_printed:
                self._console.print()
            self._has_printed = True
            self._console.print(_Rows(text))


def finished_blocks(text: str) -> tuple[str, str]:
    """Returns the blocks of Markdown that nothing can change that comes after ``text``, and the rest.

    The last block may go on, and the last line may be half a line.
    """
    lines = text[: text.rfind("\n") + 1].splitlines(keepends=True)
    starts = [token.map[0] for token in Markdown("".join(lines)).parsed if token.level == 0 and token.map is not None]
    if len(starts) < 2:
        return "", text
    whole = "".join(lines[: starts[-1]])
    return whole, text[len(whole) :]


class _Rows:
    """The rows of a rendered text without the empty ones around it; at most the last ``most`` of them."""

    def __init__(self, text: str, most: int = 0) -> None:
        self._text = text
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = console.render_lines(Markdown(self._text), options, pad=False)
        written = [number for number, row in enumerate(rows) if any(segment.text for segment in row)]
        rows = rows[written[0] : written[-1] + 1] if written else []
        for row in rows[-self._most :]:
            # A link's address is shown decoded: control characters of its percent codes are only here.
            yield from (Segment(printable(segment.text), segment.style) for segment in row)
            yield Segment.line()
