"""What a conversation has so far, and what its next message takes along. This module does no I/O but read files."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.errors import PdserveError

MAX_FILE_BYTES = 2**20
"""The largest file that a message takes along. A longer one fits into few models' contexts."""

Message = dict[str, str]
"""One message of the conversation, in OpenAI's form."""


class ChatRefused(PdserveError):
    """The user's command or file cannot be used. The message says why, for the user to read at the prompt."""


class Conversation:
    """The messages of user and model, under one system prompt."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []
        self._files: list[str] = []
        self._last_question = ""
        self._is_answered = False

    @property
    def turns(self) -> int:
        """How many questions have an answer."""
        return len(self._turns) // 2

    def ask(self, text: str) -> list[Message]:
        """Returns the messages to send for the question ``text``, with the files that were read for it."""
        self._last_question = "\n\n".join([*self._files, text]) if text else "\n\n".join(self._files)
        self._files.clear()
        self._is_answered = False
        return self._messages()

    def ask_again(self) -> list[Message]:
        """Returns the messages to send for another answer to the last question. Raises ChatRefused without one."""
        if not self._last_question:
            raise ChatRefused("there is no question yet to answer again")
        if self._is_answered:
            del self._turns[-2:]
            self._is_answered = False
        return self._messages()

    def answered(self, text: str) -> None:
        """Keeps the answer, or what there is of it. Without any text the question counts as not asked."""
        if text:
            question: Message = {"role": "user", "content": self._last_question}
            self._turns += [question, {"role": "assistant", "content": text}]
            self._is_answered = True

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._turns.clear()
        self._files.clear()
        self._last_question = ""
        self._is_answered = False

    def read(self, name: str) -> int:
        """Puts the file ``name`` into the next message, and returns its size in bytes. Raises ChatRefused."""
        try:
            path = Path(name).expanduser()
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as exc:
            raise ChatRefused(f"cannot read {name}: {exc.strerror}") from exc
        except (RuntimeError, ValueError) as exc:  # there is no such user, or no file has such a name
            raise ChatRefused(f"cannot read {name}: {exc}") from exc
        if len(data) > MAX_FILE_BYTES:
            raise ChatRefused(
                f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB, the most that a message takes along"
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as exc:
            raise ChatRefused(f"{name} is not a text in UTF-8") from exc
        fence = _fence(text)
        self._files.append(f"{path.name}:\n\n{fence}\n{text.rstrip()}\n{fence}")
        return len(data)

    def _messages(self) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns, {"role": "user", "content": self._last_question}]


def _fence(text: str) -> str:
    """Returns a Markdown fence that the text does not have itself."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)
