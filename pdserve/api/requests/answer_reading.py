"""How the answers to one request are read: which calls they may have, and where they begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pdserve.api.message.formats import NO_FORMATS, MessageFormats
from pdserve.api.message.harmony import HarmonyReasoningTokens
from pdserve.api.message.message_parser import MessageParser
from pdserve.api.message.reasoning import ReasoningParser, ReasoningTokens, TokenCount
from pdserve.api.requests.openai_request import ChatRequest, GenerationRequest
from pdserve.api.requests.tools import NO_TOOLS, ToolUse, tool_use
from pdserve.config import ReasoningFormat, ToolFormat
from pdserve.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """What the parsers of one request's answers look for."""

    formats: MessageFormats = NO_FORMATS
    """Those that its answers have."""
    tools: ToolUse = NO_TOOLS
    show_reasoning: bool = True

    @property
    def markers(self) -> frozenset[str]:
        """The texts that the parsers have to see, though a vocabulary may have them as special tokens."""
        reasoning = self.formats.reasoning_markers
        thinking = () if reasoning is None else reasoning.tokens
        return frozenset((*thinking, *self.formats.call_markers))

    def parser(self, prompt_ending: str) -> MessageParser | None:
        """Returns a new parser for one answer to a prompt that ends so; None if all of the answer is content."""
        formats, tools = self.formats, self.tools
        if formats.harmony:
            whole = formats.harmony_parser(tools.callable, prompt_ending, parallel=tools.parallel)
            return MessageParser(None, whole, show_reasoning=self.show_reasoning, tells_calls=not tools.named)
        calls = formats.call_parser(tools.callable, parallel=tools.parallel)
        markers = formats.reasoning_markers
        reasoning = None if markers is None else ReasoningParser(markers, formats.reasoning_start(prompt_ending))
        if calls is None and reasoning is None:
            return None
        return MessageParser(reasoning, calls, show_reasoning=self.show_reasoning, tells_calls=not tools.named)

    def reasoning_tokens(self, prompt_ending: str, token_bytes: Callable[[int], bytes]) -> TokenCount | None:
        """Returns a new count of the tokens with which one answer thinks; None if none of them does."""
        if self.formats.reasoning is ReasoningFormat.HARMONY:
            parser = self.formats.harmony_parser(self.tools.callable, prompt_ending, parallel=self.tools.parallel)
            return HarmonyReasoningTokens(parser, token_bytes)
        markers = self.formats.reasoning_markers
        if markers is None:
            return None
        return ReasoningTokens(markers, self.formats.reasoning_start(prompt_ending), token_bytes)


def answer_reading(request: GenerationRequest, formats: MessageFormats, *, structured: bool = False) -> AnswerReading:
    """Returns how answers of a model that writes ``formats`` are read. Raises InvalidRequest.

    ``structured`` says whether a grammar of the request's own is that of the complete answer, unless calls are forced.
    """
    if not isinstance(request, ChatRequest):
        return AnswerReading()
    tools = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)
    if tools.forced and formats.calls is ToolFormat.NONE:
        raise InvalidRequest(
            "this server reads no tool calls: 'tool_choice' can only be 'none' or 'auto'", param="tool_choice"
        )
    if formats.harmony:
        # Every answer has its markers. A grammar is that of its last message.
        return AnswerReading(formats, tools, show_reasoning=request.include_reasoning is not False)
    if not tools.callable:
        formats = replace(formats, calls=ToolFormat.NONE)
    if structured and not tools.forced:
        # The grammar has no place for reasoning, also where the prompt begins it.
        formats = replace(formats, reasoning=ReasoningFormat.NONE)
    return AnswerReading(formats, tools, show_reasoning=request.include_reasoning is not False)
