"""Turns the body of ``POST /v1/responses`` into a chat request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.api.dialects.dialect_request import (
    MAX_TOOLS,
    DialectRequest,
    Parts,
    ToolEntries,
    TranslatedChat,
    drop_nulls,
    read_part,
    translated,
)
from pdserve.api.requests.chat_messages import unknown_role
from pdserve.api.requests.openai_request import check_values
from pdserve.api.requests.request_fields import MAX_MESSAGES, Positive, StopList, StopString, TopCount, unsupported
from pdserve.api.requests.tools import NAME_PATTERN
from pdserve.errors import InvalidRequest

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""What ``include`` says of log probabilities."""

Items: TypeAlias = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]


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


class ResponsesRequest(DialectRequest, kw_only=True):
    """The body of ``POST /v1/responses``. The items of its ``input`` are checked as they are translated."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: ToolEntries | None = None
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
    stop: StopString | StopList | None = None
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: TopCount | None = None
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
    role: str
    content: str | Parts


class FunctionCallItem(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    status: str | None = None


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


class NamespaceTool(msgspec.Struct, kw_only=True):
    """Functions that belong together. The model knows each of them by the namespace's name and its own."""

    name: str
    description: str
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct, kw_only=True):
    """The one function that the model has to call."""

    name: str


class AllowedFunctions(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: ToolEntries


_ROLES = ("user", "assistant", "system", "developer")
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
_TOOLS: Mapping[str, type[msgspec.Struct]] = {"function": FunctionTool, "namespace": NamespaceTool}
_FUNCTIONS = {"function": FunctionTool}
_NAME = re.compile(NAME_PATTERN)
_items_decoder = msgspec.json.Decoder(list[dict[str, Any]])
_TOOL_CHOICES: Mapping[str, type[msgspec.Struct]] = {"function": NamedFunction, "allowed_tools": AllowedFunctions}


def chat_of_response(request: ResponsesRequest, history: bytes | None = None) -> TranslatedChat:
    """Returns the chat request that asks for the same.

    ``history`` has the items before the request's own, as a JSON list, where a proxy stores responses. Raises
    InvalidRequest that names the field.
    """
    _refuse_others(request, stored=history is not None)
    messages = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    if history:
        check_values(history)
        _add_messages(messages, _items_decoder.decode(history), "previous_response_id")
    if isinstance(request.input, str):
        messages.append({"role": "user", "content": request.input})
    else:
        _add_messages(messages, request.input, "input")
    reasoning = request.reasoning or ReasoningSettings()
    scored = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    return translated(
        request,
        messages,
        max_tokens=request.max_output_tokens,
        stop=request.stop,
        logprobs=scored or None,
        top_logprobs=request.top_logprobs or None,
        tools=_functions(request.tools or ()) or None,
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls if request.tools else None,
        response_format=_response_format(request.text),
        reasoning_effort=reasoning.effort,
    )


def _refuse_others(request: ResponsesRequest, *, stored: bool) -> None:
    refused = {
        "previous_response_id": request.previous_response_id is not None and not stored,
        "conversation": request.conversation is not None,
        "prompt": request.prompt is not None,
        "background": bool(request.background),
        "truncation": request.truncation == "auto",
    }
    for name, asked in refused.items():
        if asked:
            raise unsupported(name, _ADVICE.get(name, ""))


_ADVICE = {
    "previous_response_id": " unless its proxy has the setting --store: send the items of the conversation as 'input'",
    "conversation": ", which stores no conversations: send their items as 'input'",
    "truncation": " other than 'disabled'",
}


def _add_messages(messages: list[dict[str, Any]], items: Sequence[Mapping[str, Any]], name: str) -> None:
    """Adds the items of ``name`` as chat messages.

    What the assistant said and called in a row is one message, and so is what the user said, and what ``instructions``
    and the system say before all others.
    """
    first = len(messages)
    for place, raw in enumerate(items):
        where = f"{name}[{place}]"
        match read_part(raw, _ITEMS, where, default="message"):
            case MessageItem(role=role) if role not in _ROLES:
                raise unknown_role(role, where, _ROLES)
            case MessageItem(role="assistant", content=content):
                text = _text(content, f"{where}.content", _TEXTS)
                turn = _assistant_turn(messages)
                turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text
            case MessageItem(role=role, content=content):
                text = _text(content, f"{where}.content", _TEXTS)
                starts = role == "system" and len(messages) == 1
                if messages and messages[-1]["role"] == role and (starts or (role == "user" and len(messages) > first)):
                    messages[-1]["content"] += f"\n\n{text}" if starts else f"\n{text}"
                else:
                    messages.append({"role": role, "content": text})
            case FunctionCallItem(status="incomplete") if name == "previous_response_id":
                pass  # The limit of tokens cut its arguments, and no template renders half of a call.
            case FunctionCallItem(call_id=call_id, name=called, arguments=arguments, namespace=namespace):
                calls = _assistant_turn(messages).setdefault("tool_calls", [])
                function = {"name": full_name(namespace, called), "arguments": arguments}
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


def full_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def namespaces_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Returns the namespaces of tools that were translated, and the functions' own names, by their full names."""
    spaces = [tool for tool in tools if tool["type"] == "namespace"]
    return {
        full_name(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in spaces
        for tool in space["tools"]
    }


def _functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns all functions as a chat has them. Each of a namespace says what the namespace is for.

    Raises InvalidRequest if two functions have one name, or one has no right name, by the place that the client knows.
    """
    functions: dict[str, dict[str, Any]] = {}

    def add(tool: FunctionTool, where: str) -> None:
        if not _NAME.match(tool.name):
            raise InvalidRequest(
                f"{f'{where}.name'!r} is not acceptable: names have up to 128 letters, digits and any of '_.-', "
                "with the names of their namespaces",
                param=f"{where}.name",
            )
        if tool.name in functions:
            raise InvalidRequest(f"'tools' has two functions of the name {tool.name!r}", param=f"{where}.name")
        functions[tool.name] = _function(tool)

    for place, raw in enumerate(tools):
        match read_part(raw, _TOOLS, f"tools[{place}]"):
            case FunctionTool() as tool:
                add(tool, f"tools[{place}]")
            case NamespaceTool(name=namespace, description=about, tools=inner):
                for number, each in enumerate(inner):
                    where = f"tools[{place}].tools[{number}]"
                    tool = read_part(each, _FUNCTIONS, where)
                    described = f"{about}\n{tool.description}" if tool.description else about
                    name = full_name(namespace, tool.name)
                    add(msgspec.structs.replace(tool, name=name, description=described), where)
    return list(functions.values())


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": drop_nulls(msgspec.structs.asdict(tool))}


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
