"""Turns the body of ``POST /v1/responses`` into a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.api.dialects.dialect_request import (
    MAX_PARTS,
    SamplingRequest,
    TranslatedChat,
    drop_nulls,
    read_part,
    translated,
)
from pdserve.api.requests.openai_request import MAX_MESSAGES, Positive, StopString
from pdserve.errors import InvalidRequest

MAX_TOOLS = 1_024
MAX_METADATA = 16

Parts: TypeAlias = Annotated[list[Any], Meta(max_length=MAX_PARTS)]


class TextFormat(msgspec.Struct, kw_only=True):
    """What the text of an answer has to be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, kw_only=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingRequest, kw_only=True):
    """The body of ``POST /v1/responses``. The items of its ``input`` are checked as they are translated."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    stream_options: ResponsesStreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    max_tool_calls: Positive | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content, or of a tool's output."""

    text: str


class RefusalPart(msgspec.Struct, kw_only=True):
    refusal: str


class MessageItem(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct, kw_only=True):
    call_id: str
    output: str | Parts


class ReasoningItem(msgspec.Struct, kw_only=True):
    summary: Parts | None = None
    content: Parts | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    """The one function that the model has to call."""

    name: str


class AllowedFunctions(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


_ITEMS: Mapping[str, type[msgspec.Struct]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
_TEXTS: Mapping[str, type[msgspec.Struct]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "text": TextPart,
    "refusal": RefusalPart,
}
_REASONING_TEXTS = {"reasoning_text": TextPart, "text": TextPart}
_SUMMARY_TEXTS = {"summary_text": TextPart}
_TOOLS = {"function": FunctionTool}
_TOOL_CHOICES: Mapping[str, type[msgspec.Struct]] = {"function": NamedFunction, "allowed_tools": AllowedFunctions}


def chat_of_response(request: ResponsesRequest) -> TranslatedChat:
    """Returns the chat request that asks for the same. Raises InvalidRequest that names the field."""
    _refuse_others(request)
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        messages += _messages(request.input)
    reasoning = request.reasoning or ReasoningSettings()
    return translated(
        request,
        messages,
        max_tokens=request.max_output_tokens,
        stop=request.stop,
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(request.tool_choice) if request.tools else None,
        parallel_tool_calls=request.parallel_tool_calls if request.tools else None,
        response_format=_response_format(request.text),
        reasoning_effort=reasoning.effort,
    )


def _refuse_others(request: ResponsesRequest) -> None:
    refused = {
        "previous_response_id": request.previous_response_id is not None,
        "conversation": request.conversation is not None,
        "prompt": request.prompt is not None,
        "background": bool(request.background),
        "truncation": request.truncation == "auto",
        "top_logprobs": bool(request.top_logprobs),
        "include": "message.output_text.logprobs" in (request.include or ()),
    }
    for name, asked in refused.items():
        if asked:
            advice = _ADVICE.get(name, "")
            raise InvalidRequest(
                f"{name!r} is not supported by pdserve{advice}", param=name, code="unsupported_parameter"
            )


_ADVICE = {
    "previous_response_id": ", which stores no responses: send the items of the conversation as 'input'",
    "conversation": ", which stores no conversations: send their items as 'input'",
    "truncation": " other than 'disabled'",
}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items as chat messages. What the assistant said and called in a row is one message."""
    messages: list[dict[str, Any]] = []
    for place, raw in enumerate(items):
        where = f"input[{place}]"
        match read_part(raw, _ITEMS, where, default="message"):
            case MessageItem(role="assistant", content=content):
                text = _text(content, f"{where}.content", _TEXTS)
                turn = _assistant_turn(messages)
                turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
            case MessageItem(role=role, content=content):
                messages.append({"role": role, "content": _text(content, f"{where}.content", _TEXTS)})
            case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
                calls = _assistant_turn(messages).setdefault("tool_calls", [])
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case FunctionCallOutputItem(call_id=call_id, output=output):
                text = _text(output, f"{where}.output", _TEXTS)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case ReasoningItem(summary=summary, content=content):
                text = _text(content or [], f"{where}.content", _REASONING_TEXTS) or _text(
                    summary or [], f"{where}.summary", _SUMMARY_TEXTS
                )
                if text:
                    _assistant_turn(messages)["reasoning_content"] = text
    return messages


def _assistant_turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message at the end of ``messages``, which gets one if it ends otherwise."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | list[Any], where: str, kinds: Mapping[str, type[msgspec.Struct]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for place, raw in enumerate(content):
        match read_part(raw, kinds, f"{where}[{place}]"):
            case TextPart(text=text) | RefusalPart(refusal=text):
                texts.append(text)
    return "\n".join(texts)


def _tool(raw: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": "function", "function": drop_nulls(msgspec.structs.asdict(read_part(raw, _TOOLS, where)))}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    match read_part(choice, _TOOL_CHOICES, "tool_choice"):
        case NamedFunction(name=name):
            return {"type": "function", "function": {"name": name}}
        case AllowedFunctions(mode=mode, tools=tools):
            named = [read_part(tool, {"function": NamedFunction}, "tool_choice.tools") for tool in tools]
            functions = [{"type": "function", "function": {"name": tool.name}} for tool in named]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    return None


def _response_format(text: TextSettings | None) -> dict[str, Any] | None:
    wanted = None if text is None else text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema is None or wanted.name is None:
        raise InvalidRequest("'text.format' of type 'json_schema' needs 'name' and 'schema'", param="text.format")
    schema = drop_nulls(msgspec.structs.asdict(wanted))
    del schema["type"]
    return {"type": "json_schema", "json_schema": schema}
