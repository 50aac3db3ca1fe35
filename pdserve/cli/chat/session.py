"""The loop of a chat in a terminal: reads messages and commands, shows answers, and says how long they took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pdserve.cli.ask import AskFailed
from pdserve.cli.chat.conversation import ChatRefused, Conversation, Message
from pdserve.cli.chat.input import COMMAND, LineReader, keys_not_shown
from pdserve.cli.chat.latency import latency_line
from pdserve.cli.chat.server import Answer, Sampling, Server, read_timeline, stream_answer
from pdserve.cli.chat.terminal import Screen
from pdserve.settings.sources import suggestion
from pdserve.wire.timeline import Timeline

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


class ChatSession:
    """One chat with one server, from its first message to its end."""

    def __init__(self, server: Server, conversation: Conversation, sampling: Sampling, screen: Screen) -> None:
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
