"""Answers in the form of ``POST /v1/responses``: OpenAI's response object, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pdserve.api.answers.openai_response import ChatTokenLogprob, Usage
from pdserve.api.dialects.answer_blocks import AnswerEnd, Block, BlockKind
from pdserve.api.dialects.responses_request import (
    ReasoningSettings,
    ResponsesRequest,
    TextFormat,
    TextSettings,
    namespaces_of,
)
from pdserve.errors import RequestError

if TYPE_CHECKING:  # A build that describes the interface has no tokeniser.
    from pdserve.api.answers.answer_form import AnswerOptions

_ID_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: tuple[()] = ()
    encrypted_content: None = None


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET
    """The namespace of the function, if it has one."""


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall
OutputPart: TypeAlias = OutputText | ReasoningText


class CachedInput(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseObject(msgspec.Struct):
    """OpenAI's ``response`` object."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningSettings
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    user: str | None
    object: Literal["response"] = "response"
    background: bool = False
    error: ResponseError | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    service_tier: str = "default"
    store: bool = False
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"


class ResponseCreated(msgspec.Struct, tag_field="type", tag="response.created"):
    response: ResponseObject


class ResponseInProgress(msgspec.Struct, tag_field="type", tag="response.in_progress"):
    response: ResponseObject


class ResponseCompleted(msgspec.Struct, tag_field="type", tag="response.completed"):
    response: ResponseObject


class ResponseIncomplete(msgspec.Struct, tag_field="type", tag="response.incomplete"):
    response: ResponseObject


class ResponseFailed(msgspec.Struct, tag_field="type", tag="response.failed"):
    response: ResponseObject


class OutputItemAdded(msgspec.Struct, tag_field="type", tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(msgspec.Struct, tag_field="type", tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ContentPartAdded(msgspec.Struct, tag_field="type", tag="response.content_part.added"):
    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class ContentPartDone(msgspec.Struct, tag_field="type", tag="response.content_part.done"):
    item_id: str
    output_index: int
    part: OutputPart
    content_index: int = 0


class OutputTextDelta(msgspec.Struct, tag_field="type", tag="response.output_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(msgspec.Struct, tag_field="type", tag="response.output_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(msgspec.Struct, tag_field="type", tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    delta: str
    content_index: int = 0


class ReasoningTextDone(msgspec.Struct, tag_field="type", tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    text: str
    content_index: int = 0


class ArgumentsDelta(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, tag_field="type", tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseEvents:
    """Makes the events of one response."""

    def __init__(self, request: ResponsesRequest, options: AnswerOptions) -> None:
        self._request = request
        self._options = options
        self._namespaces = namespaces_of(request.tools or ())

    def begin(self) -> list[msgspec.Struct]:
        response = self._response("in_progress", [], None)
        return [ResponseCreated(response), ResponseInProgress(response)]

    def open(self, block: Block) -> list[msgspec.Struct]:
        item = self._item(block, "in_progress")
        if isinstance(item, OutputFunctionCall):
            return [OutputItemAdded(block.index, item)]
        part, item.content = item.content[0], []
        return [OutputItemAdded(block.index, item), ContentPartAdded(item.id, block.index, part)]

    def piece(self, block: Block, text: str, logprobs: list[ChatTokenLogprob]) -> msgspec.Struct:
        match block.kind:
            case BlockKind.REASONING:
                return ReasoningTextDelta(self._id(block), block.index, text)
            case BlockKind.CALL:
                return ArgumentsDelta(self._id(block), block.index, text)
        return OutputTextDelta(self._id(block), block.index, text, logprobs=logprobs)

    def close(self, block: Block, *, cut: bool) -> list[msgspec.Struct]:
        item = self._item(block, _status(cut=cut))
        done: list[msgspec.Struct]
        match item:
            case OutputReasoning():
                part = ContentPartDone(item.id, block.index, item.content[0])
                done = [ReasoningTextDone(item.id, block.index, block.text), part]
            case OutputFunctionCall():
                done = [ArgumentsDone(item.id, block.index, item.name, block.text)]
            case OutputMessage():
                part = ContentPartDone(item.id, block.index, item.content[0])
                done = [OutputTextDone(item.id, block.index, block.text, logprobs=list(block.logprobs)), part]
        return [*done, OutputItemDone(block.index, item)]

    def end(self, blocks: Sequence[Block], end: AnswerEnd) -> list[msgspec.Struct]:
        response = self.complete(blocks, end)
        return [ResponseIncomplete(response) if end.cut else ResponseCompleted(response)]

    def fail(self, blocks: Sequence[Block], error: RequestError) -> list[msgspec.Struct]:
        items = [self._item(block, _status(cut=block is blocks[-1])) for block in blocks]
        response = self._response("failed", items, None)
        response.error = ResponseError(_error_code(error), error.message)
        return [ResponseFailed(response)]

    def complete(self, blocks: Sequence[Block], end: AnswerEnd) -> ResponseObject:
        """Returns the response when it has ended."""
        items = [self._item(block, _status(cut=end.cut and block is blocks[-1])) for block in blocks]
        return self._response(_status(cut=end.cut), items, _usage(end.usage))

    def _item(self, block: Block, status: ItemStatus) -> OutputItem:
        match block.kind:
            case BlockKind.REASONING:
                return OutputReasoning(self._id(block), status, [ReasoningText(block.text)])
            case BlockKind.CALL:
                namespace, name = self._namespaces.get(block.name, (UNSET, block.name))
                return OutputFunctionCall(self._id(block), status, block.call_id, name, block.text, namespace)
        return OutputMessage(self._id(block), status, [OutputText(block.text, logprobs=list(block.logprobs))])

    def _id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._options.answer.id.hex()}{block.index:02x}"

    def _response(
        self, status: ResponseStatus, output: list[OutputItem], usage: ResponseUsage | None
    ) -> ResponseObject:
        request, answer = self._request, self._options.answer
        return ResponseObject(
            id=f"resp_{answer.id.hex()}",
            created_at=answer.created,
            model=self._options.model,
            status=status,
            output=output,
            usage=usage,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning or ReasoningSettings(),
            temperature=1.0 if request.temperature is None else request.temperature,
            text=request.text or TextSettings(format=TextFormat()),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
            max_tool_calls=request.max_tool_calls,
            previous_response_id=request.previous_response_id,
            store=self._options.stored,
            top_logprobs=request.top_logprobs or 0,
        )


def _status(*, cut: bool) -> ItemStatus:
    return "incomplete" if cut else "completed"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        CachedInput(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        usage.total_tokens,
    )


def _error_code(error: RequestError) -> Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status == 400 else "server_error"
