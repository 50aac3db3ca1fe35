"""Answers in the form of ``POST /v1/messages``: Anthropic's message, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from pdserve.api.answers.openai_response import ChatTokenLogprob, Usage
from pdserve.api.dialects.answer_blocks import AnswerEnd, Block, BlockKind
from pdserve.api.message.json_text import as_object
from pdserve.errors import RequestError

if TYPE_CHECKING:  # A build that describes the interface has no tokeniser.
    from pdserve.api.answers.answer_form import AnswerOptions

StopCause: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicText(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class AnthropicThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""
    """Always empty: nobody checks that the model has thought it."""


class AnthropicToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw
    """A JSON object."""


AnthropicBlock: TypeAlias = AnthropicText | AnthropicThinking | AnthropicToolUse


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int
    """The tokens with which the model thinks, with their markers."""


class AnthropicUsage(msgspec.Struct):
    """Each token of the prompt is counted once: as new, as one that a cache keeps now, or as one that it had."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: ThinkingTokens


class AnthropicAnswer(msgspec.Struct, tag_field="type", tag="message"):
    """Anthropic's ``message`` object."""

    id: str
    model: str
    content: list[AnthropicBlock]
    stop_reason: StopCause | None
    stop_sequence: str | None
    usage: AnthropicUsage
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    """The answer to ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class AnswerChange(msgspec.Struct):
    stop_reason: StopCause
    stop_sequence: str | None


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicAnswer


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnthropicBlock


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | InputPiece


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: AnswerChange
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class MessageEvents:
    """Makes the events of one message."""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options

    def begin(self) -> list[msgspec.Struct]:
        # What of the prompt was in a cache, or is now, is known at the end: the last usage says it.
        usage = AnthropicUsage(len(self._options.prompt_ids[0]), 0, 0, 0, ThinkingTokens(0))
        return [MessageStart(self._answer([], None, None, usage))]

    def open(self, block: Block) -> list[msgspec.Struct]:
        return [ContentBlockStart(block.index, _block(block))]

    def piece(self, block: Block, text: str, logprobs: list[ChatTokenLogprob]) -> msgspec.Struct:
        match block.kind:
            case BlockKind.REASONING:
                return ContentBlockDelta(block.index, ThinkingPiece(text))
            case BlockKind.CALL:
                return ContentBlockDelta(block.index, InputPiece(text))
        return ContentBlockDelta(block.index, TextPiece(text))

    def close(self, block: Block, *, cut: bool) -> list[msgspec.Struct]:  # the last event says it
        return [ContentBlockStop(block.index)]

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> list[msgspec.Struct]:
        answer = self.complete(blocks, end)
        assert answer.stop_reason is not None
        change = AnswerChange(answer.stop_reason, answer.stop_sequence)
        return [MessageDelta(change, answer.usage), MessageStop()]

    def fail(self, blocks: Sequence[Block], error: RequestError) -> list[msgspec.Struct]:
        return []

    def complete(self, blocks: Sequence[Block], end: AnswerEnd) -> AnthropicAnswer:
        """Returns the message when it has ended."""
        content = [_block(block, cut=end.cut and block is blocks[-1]) for block in blocks]
        return self._answer(content, _stop_cause(blocks, end), end.stop_string, self._usage(end.usage))

    def _usage(self, usage: Usage) -> AnthropicUsage:
        prompt, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
        block = self._options.cached_block
        kept = max(prompt // block * block - cached, 0) if block else 0
        thinking = ThinkingTokens(usage.completion_tokens_details.reasoning_tokens)
        return AnthropicUsage(prompt - cached - kept, usage.completion_tokens, kept, cached, thinking)

    def _answer(
        self, content: list[AnthropicBlock], cause: StopCause | None, stop_string: str | None, usage: AnthropicUsage
    ) -> AnthropicAnswer:
        name = f"msg_{self._options.answer.id.hex()}"
        return AnthropicAnswer(name, self._options.model, content, cause, stop_string, usage)


def _block(block: Block, *, cut: bool = False) -> AnthropicBlock:
    """Returns the block. ``cut`` says whether the limit of tokens has ended it: half of a call's arguments are none."""
    match block.kind:
        case BlockKind.REASONING:
            return AnthropicThinking(block.text)
        case BlockKind.CALL:
            arguments = as_object(block.text or "{}")
            whole = not cut or arguments == block.text.encode()
            return AnthropicToolUse(block.call_id, block.name, msgspec.Raw(arguments if whole else b"{}"))
    return AnthropicText(block.text)


def _stop_cause(blocks: Sequence[Block], end: AnswerEnd) -> StopCause:
    if end.cut:
        return "max_tokens"
    if any(block.kind is BlockKind.CALL for block in blocks):
        return "tool_use"
    return "end_turn" if end.stop_string is None else "stop_sequence"
