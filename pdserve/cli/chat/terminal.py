"""A chat in a terminal: reads messages and commands, shows answers while they come, and says how long they took.

Answers are shown as they are written or with their Markdown rendered. What a model writes is shown, and never obeyed:
control characters, with which a text could move the cursor or change the terminal, are left out.
"""

from __future__ import annotations

import asyncio
import os
import re
import readline
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from pdserve.cli.chat.server import (
    Answer,
    AskFailed,
    ChatRefused,
    Conversation,
    Message,
    Piece,
    Sampling,
    Server,
    latency_line,
    read_timeline,
    stream_answer,
)
from pdserve.log_format import printable
from pdserve.settings.sources import suggestion
from pdserve.wire.timeline import Timeline

DRAW_S = 0.08
"""Rendered text is drawn again after this time at the earliest."""
_DRAW_SHARE = 5
"""A text that takes long to render is drawn again after this many times as long."""
_ROWS_LEFT = 3
PROMPT, MORE = ">>> ", "... "
COMMAND = re.compile(r"(/[a-z?]+)(?:\s+(.*))?")
"""A message that is a command: its name and what follows. It has one line."""
BLOCK = '"""'
"""A line that begins with it begins a message of several lines, which ends with it."""
_MOST_LINES = 1000
_PASTE_S = 0.02
"""Nobody types so soon after the end of a line: what comes within it was pasted, and is of the same message."""
COMMANDS = {
    "/help": "shows this",
    "/read FILE": "puts a text file into the next message",
    "/regen": "asks the last question again",
    "/reset": "forgets the conversation, and keeps the system prompt",
    "/system TEXT": "sets the system prompt, or shows it; - takes it away",
    "/markdown on|off": "renders the Markdown of answers, or not",
    "/quit": "ends the chat, as Ctrl-D does",
}
_QUIT = ("/quit", "/exit", "/bye")


class ChatScreen:
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


class LineReader:
    """The prompt. ``history`` is the file that keeps the lines from one chat to the next."""

    def __init__(self, history: Path) -> None:
        self._history = history
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            readline.parse_and_bind("tab: complete")
        readline.set_completer_delims(" \t\n")
        readline.set_history_length(_MOST_LINES)
        # Bytes that are no UTF-8 would be no text for a server either.
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")
        with suppress(OSError):
            readline.read_history_file(history)

    def read(self) -> str | None:
        """Returns the next message; None at Ctrl-D, or at Ctrl-C with nothing typed.

        Ctrl-C with something typed drops that.
        """
        while True:
            try:
                line = input(PROMPT)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                if readline.get_line_buffer():
                    continue
                return None
            try:
                return self._message_from(line)
            except (EOFError, KeyboardInterrupt):
                print()

    def save(self) -> None:
        """Keeps the history, for this user alone. Without a place for it, it is forgotten."""
        with suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)

    def _message_from(self, line: str) -> str:
        """Returns the message that begins with ``line``."""
        if line.lstrip().startswith(BLOCK):
            lines = [line.lstrip().removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(input(MORE))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        else:
            lines = [line]
            while not COMMAND.fullmatch(line) and select.select([sys.stdin], [], [], _PASTE_S)[0]:
                lines.append(input(MORE))
        return "\n".join(lines).strip()


@contextmanager
def keys_not_shown() -> Iterator[None]:
    """Keeps what is typed within the block from being shown. It is read at the next prompt."""
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class ChatSession:
    """One chat with one server, from its first message to its end."""

    def __init__(self, server: Server, conversation: Conversation, sampling: Sampling, screen: ChatScreen) -> None:
        self._server = server
        self._conversation = conversation
        self._sampling = sampling
        self._screen = screen

    def run(self, reader: LineReader, look: Callable[[], Sequence[str]]) -> None:
        """Returns when the user ends the chat. ``look`` returns what the user has to know of the cluster, and may
        raise if that has ended."""
        self._screen.note(
            f"{self._server.model} at {self._server.url}. /help shows the commands, Ctrl-C ends an answer, and Ctrl-D "
            "ends the chat."
        )
        while (text := reader.read()) is not None:
            try:
                for line in look():
                    self._screen.note(line)
                if self._does(text):
                    continue
                return
            except ChatRefused as exc:
                self._screen.problem(str(exc))
            except KeyboardInterrupt:
                self._screen.end()

    def _does(self, text: str) -> bool:
        """Does what one message wants, and returns whether the chat goes on. Raises ChatRefused."""
        command = COMMAND.fullmatch(text)
        if command is None:
            if text:
                self._answer(self._conversation.ask(text))
            return True
        name, words = command[1], (command[2] or "").strip()
        match name:
            case "/help" | "/?":
                for known, meaning in COMMANDS.items():
                    self._screen.note(f"  {known:18}{meaning}")
                self._screen.note('A message that begins with """ goes on over several lines, until """.')
            case "/read":
                if not words:
                    raise ChatRefused("which file? /read FILE puts one into the next message")
                size = self._conversation.read(words)
                self._screen.note(f"{words} goes with the next message, {size:,} bytes")
            case "/regen":
                self._answer(self._conversation.ask_again())
            case "/reset":
                self._conversation.reset()
                self._screen.note("the conversation is forgotten")
            case "/system":
                self._set_system(words)
            case "/markdown":
                if words not in ("on", "off"):
                    raise ChatRefused("/markdown takes on or off")
                self._screen.markdown = words == "on"
            case _ if name in _QUIT:
                return False
            case _:
                names = [command.split()[0] for command in COMMANDS]
                raise ChatRefused(f"there is no command {name}{suggestion(name, names)}; /help shows all")
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "-" else text
        self._screen.note(
            f"the system prompt: {self._conversation.system}" if self._conversation.system else "no system prompt"
        )

    def _answer(self, messages: Sequence[Message]) -> None:
        """Shows an answer, until it ends or the user ends it."""
        answer, problem, is_stopped = Answer(), "", False
        with keys_not_shown():
            try:
                asyncio.run(stream_answer(self._server, messages, self._sampling, answer, self._screen.add))
            except AskFailed as exc:
                problem = str(exc)
            except KeyboardInterrupt:
                is_stopped = True
            finally:
                self._screen.end()
            self._conversation.answered(answer.text)
            if is_stopped:
                self._screen.note(f"stopped by you after {time.monotonic() - answer.began_s:.1f} s")
            if problem:
                self._screen.problem(problem)
            if line := latency_line(answer, self._timeline(answer)):
                self._screen.note(line)

    def _timeline(self, answer: Answer) -> Timeline | None:
        if not (self._server.tells_nodes and answer.request_id):
            return None
        return asyncio.run(read_timeline(self._server, answer.request_id))
