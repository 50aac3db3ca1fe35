"""Takes an answer in the Harmony format apart, which gpt-oss writes: messages with a header and a channel each.

<|channel|>analysis<|message|>I look it up.<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

What is in ``analysis`` is reasoning. A message to a function of the request is a call of it, in whatever channel it
stands and wherever in the header its recipient does, because the models write all of these. Everything else is content:
``final``, and what ``commentary`` says to nobody. Nothing of a header is ever shown. The model may leave out the marker
that ends one message or begins the next. Text that has no header where one belongs is content.

The format: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence

from pdserve.api.message.call_parser import MAX_BLANK, StateParser, begins, find_marker
from pdserve.api.message.json_text import JsonText
from pdserve.api.message.parts import PartsBuilder
from pdserve.api.message.tool_schemas import ToolSchema

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ENDS = (END, CALL, RETURN)
"""The markers that end a message and begin no other."""
LAST = (CALL, RETURN)
"""The markers that end an answer. The models have learned nothing that follows them."""
BODY_ENDS = (*ENDS, START, CHANNEL)
"""The markers that do not stand in a message."""
ASSISTANT = "assistant"
ANALYSIS = "analysis"
COMMENTARY = "commentary"
FINAL = "final"
FUNCTIONS = "functions."
RECIPIENT = "to="
EFFORTS = ("low", "medium", "high")
"""The reasoning efforts that the models have learned. Their templates write any other word, too."""
MAX_HEADER = 512
"""How many characters a header has at most, without its markers."""

_ROLE = re.compile(r"\s*([^\s<]+)")
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT_NAME = re.compile(rf"\b{RECIPIENT}([^\s<]+)")
_PARAGRAPH = "\n\n"
"""Stands between two messages of one kind."""


def is_harmony(template: str) -> bool:
    """Returns whether a chat template shows that its model writes this format."""
    return CHANNEL in template and MESSAGE in template


class Section(enum.Enum):
    """What the text is part of that comes next."""

    HEADER = "header"
    """A header, or what stands between two messages."""
    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    NOTHING = "nothing"
    """A message that the model writes in the name of somebody else."""


def begun(prompt: str) -> str:
    """Returns the message that ``prompt``, which may be the end of one, leaves to the answer to go on with.

    It is empty if there is none.
    """
    last = max(prompt.rfind(mark) for mark in (START, *ENDS))
    if last >= 0:
        return prompt[last:] if prompt.startswith(START, last) else ""
    # The end of a long message that the answer continues.
    return f"{START}{ASSISTANT}{CHANNEL}{FINAL}{MESSAGE}" if prompt.strip() and MESSAGE not in prompt else prompt


class HarmonyParser(StateParser):
    """Takes one answer apart. What it has reported of a text depends on the text alone."""

    def __init__(
        self, tools: Mapping[str, ToolSchema], prompt: str, *, parallel: bool = True, separates_reasoning: bool = True
    ) -> None:
        """``tools`` are the functions that may be called, by name. ``prompt`` is, or ends like, the answer's prompt.

        Unless ``parallel``, only the first call counts. Unless ``separates_reasoning``, reasoning is content.
        """
        super().__init__(tools, self._between, parallel=parallel)
        self.section = Section.HEADER
        self._separates_reasoning = separates_reasoning
        self._header = ""
        """What has come of a header, with its markers but ``START`` and ``MESSAGE``."""
        self._told: set[Section] = set()
        """The kinds of text of which there is a message."""
        self._arguments = JsonText()
        self._argued = False
        """Whether the call has arguments."""
        self._open(begun(prompt))

    @property
    def undecided(self) -> int:
        """How many of the last characters may still become content."""
        return len(self._waiting)

    def finish(self, parts: PartsBuilder) -> None:
        """Tells ``parts`` what was held back, when no more text follows."""
        self._parts, self._over = parts, True
        self._run()
        self._waiting = ""
        if self.section is Section.CALL:
            self._end_call()

    def _open(self, message: str) -> None:
        """Takes the beginning of a message that the prompt has."""
        self.add(message, PartsBuilder())
        self._waiting = ""
        if self.section is Section.HEADER and CHANNEL not in self._header:
            # A role alone: what follows is the rest of the header, or no Harmony at all.
            self._state = self._between

    def _between(self) -> bool:
        """Reads what stands before a header, or before the rest of one whose role is known."""
        rest = self._waiting.lstrip()
        blank = len(self._waiting) - len(rest)
        if blank <= MAX_BLANK:
            if not rest:
                return False
            for beginning in (*MARKERS, RECIPIENT):
                match begins(rest, beginning):
                    case True:
                        self._header += self._take(blank)
                        self._state = self._begin_header
                        return True
                    case None if not self._over:
                        return False
        self._begin_body(Section.CONTENT)
        return True

    def _begin_header(self) -> bool:
        self._state = self._read_header
        if self._waiting.startswith(START):
            self._take(len(START))
            self._header = ""
        return True

    def _read_header(self) -> bool:
        start, marker = find_marker(self._waiting, MARKERS)
        taken = min(start, MAX_HEADER + 1 - len(self._header))
        self._header += self._take(taken)
        if len(self._header) > MAX_HEADER:
            self._begin_message()
        elif marker == MESSAGE:
            self._take(len(marker))
            self._begin_message()
        elif marker == START:
            self._begin_header()
        elif marker in ENDS:
            self._end_message(marker)
        elif marker:
            self._header += self._take(len(marker))
        return bool(taken or marker)

    def _begin_message(self) -> None:
        header, self._header = self._header, ""
        channel, recipient = (found.search(header) for found in (_CHANNEL_NAME, _RECIPIENT_NAME))
        name = "" if recipient is None else recipient[1].removeprefix(FUNCTIONS)
        role = _ROLE.match(header)
        if role is not None and role[1] != ASSISTANT and not role[1].startswith(RECIPIENT):
            self._begin_body(Section.NOTHING)
        elif name in self._tools:
            self._begin_call(name)
        elif channel is not None and channel[1] == ANALYSIS and self._separates_reasoning:
            self._begin_body(Section.REASONING)
        else:
            self._begin_body(Section.CONTENT)

    def _begin_body(self, section: Section) -> None:
        if section in self._told:
            self._show(section, _PARAGRAPH)
        self._told.add(section)
        self.section, self._state, self._header = section, self._read_body, ""

    def _read_body(self) -> bool:
        if "<" not in self._waiting:
            self._show(self.section, self._take(len(self._waiting)))
            return False
        start, marker = find_marker(self._waiting, BODY_ENDS)
        if self._over and not marker:
            start = len(self._waiting)
        if start:
            self._show(self.section, self._take(start))
        if marker:
            self._end_message(marker)
        return bool(marker)

    def _show(self, section: Section, text: str) -> None:
        if section is Section.CONTENT:
            self._parts.content(text)
        elif section is Section.REASONING:
            self._parts.reasoning(text)

    def _end_message(self, marker: str) -> None:
        """Goes on behind a message. A marker that begins the next one is left to that."""
        if marker in ENDS:
            self._take(len(marker))
        self.section, self._state, self._header = Section.HEADER, self._between, ""

    def _begin_call(self, name: str) -> None:
        self._start_call(name)
        self._arguments, self._argued = JsonText(), False
        self.section, self._state = Section.CALL, self._read_arguments

    def _argue(self, arguments: str) -> None:
        self._argued = self._argued or bool(arguments)
        super()._argue(arguments)

    def _end_call(self) -> None:
        """A call without arguments has none of them, which JSON writes as an empty object."""
        if not self._argued:
            self._argue("{}")

    def _read_arguments(self) -> bool:
        """Reads arguments as JSON. A marker within one of their strings is part of that."""
        written: list[str] = []
        for index, char in enumerate(self._waiting):
            if char == "<" and not self._arguments.in_string:
                self._argue("".join(written))
                self._take(index)
                return self._end_arguments()
            if char.isspace() and not (self._argued or written):
                continue
            if (piece := self._arguments.add(char)) is None:
                self._argue("".join(written))
                self._take(index)
                self._state = self._read_broken
                return True
            written.append(piece)
            if self._arguments.over:
                self._argue("".join(written))
                self._take(index + 1)
                self._state = self._skip_rest
                return True
        self._argue("".join(written))
        self._take(len(self._waiting))
        return False

    def _end_arguments(self) -> bool:
        """Looks whether a marker ends the call here."""
        for marker in BODY_ENDS:
            match begins(self._waiting, marker):
                case True:
                    self._end_call()
                    self._end_message(marker)
                    return True
                case None if not self._over:
                    return False
        self._state = self._read_broken
        return True

    def _read_broken(self) -> bool:
        """Passes on arguments that are no JSON, as they are."""
        start, marker = find_marker(self._waiting, BODY_ENDS)
        if self._over and not marker:
            start = len(self._waiting)
        self._argue(self._take(start))
        if marker:
            self._end_message(marker)
        return bool(marker)

    def _skip_rest(self) -> bool:
        """Passes over what stands behind complete arguments."""
        start, marker = find_marker(self._waiting, BODY_ENDS)
        self._take(start)
        if marker:
            self._end_message(marker)
        return bool(marker)


def section_of(prompt: str) -> Section:
    """Returns what the answer to ``prompt``, which may be the end of one, begins with."""
    return HarmonyParser({}, prompt).section


class HarmonyReasoningTokens:
    """Counts the tokens of one answer's reasoning messages, with their headers and ends."""

    def __init__(self, parser: HarmonyParser, token_bytes: Callable[[int], bytes]) -> None:
        """``parser`` is a new one of the answer. ``token_bytes`` returns the bytes of one token by itself."""
        self.count = 0
        self._token_bytes = token_bytes
        self._parser = parser
        self._header = 0
        """How many tokens a header has that is not over."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        parser = self._parser
        for token_id in token_ids:
            before, piece = parser.section, self._token_bytes(token_id)
            if b"<" in piece or parser.unread or before in (Section.HEADER, Section.CALL):
                # Each byte is a character. The parser looks for markers, which have no others than ASCII has.
                parser.add(piece.decode("latin-1"), PartsBuilder())
            after = parser.section
            if Section.REASONING in (before, after):
                self.count += 1 + (self._header if before is Section.HEADER else 0)
            self._header = self._header + 1 if after is before is Section.HEADER else 0
