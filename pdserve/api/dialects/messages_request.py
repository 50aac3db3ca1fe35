"""Turns the body of ``POST /v1/messages``, in Anthropic's form, into a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pdserve.api.dialects.dialect_request import (
    DialectRequest,
    Parts,
    ToolEntries,
    TranslatedChat,
    drop_nulls,
    read_part,
    translated,
)
from pdserve.api.requests.chat_messages import unknown_role
from pdserve.api.requests.request_fields import MAX_MESSAGES, Positive, StopList, unsupported
from pdserve.errors import InvalidRequest

_ROLES = ("user", "assistant", "system")


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation. The blocks of its content are checked as they are translated."""

    role: Annotated[str, Meta(extra_json_schema={"enum": [*_ROLES]})]
    """What an operator says within the conversation has the role ``system``."""
    content: str | Parts


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Positive | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Whether the answer shows what the model thinks. It does if missing."""


class PromptRequest(DialectRequest, kw_only=True):
    """The part of a request to ``/v1/messages`` that becomes the prompt: the body of its ``/count_tokens``."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Parts | None = None
    tools: ToolEntries | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The JSON Schema that the text of an answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputSettings(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesRequest(PromptRequest, kw_only=True):
    """The body of ``POST /v1/messages``."""

    max_tokens: Positive
    stop_sequences: StopList | None = None
    output_config: OutputSettings | None = None
    metadata: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Annotated[list[Any], Meta(max_length=64)] | None = None


class TextBlock(msgspec.Struct, kw_only=True):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True):
    thinking: str


class RedactedThinkingBlock(msgspec.Struct, kw_only=True):
    """Thinking that nobody can read, and no template can show."""


class ToolUseBlock(msgspec.Struct, kw_only=True):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, kw_only=True):
    tool_use_id: str
    content: str | Parts | None = None


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


_TEXTS: Mapping[str, type[TextBlock]] = {"text": TextBlock}
_USER_BLOCKS: Mapping[str, type[msgspec.Struct]] = {"text": TextBlock, "tool_result": ToolResultBlock}
_ASSISTANT_BLOCKS: Mapping[str, type[msgspec.Struct]] = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}
_TOOLS = {"custom": AnthropicTool}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_messages(request: PromptRequest) -> TranslatedChat:
    """Returns the chat request that asks for the same. Raises InvalidRequest that names the field."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for place, message in enumerate(request.messages):
        where = f"messages[{place}].content"
        match message.role:
            case "user":
                messages += _user_messages(message.content, where)
            case "assistant":
                messages.append(_assistant_message(message.content, where))
            case "system":
                messages.append({"role": "system", "content": _text(message.content, where)})
            case role:
                raise unknown_role(role, f"messages[{place}]", _ROLES)
    messages = list(_joined(messages))
    # An answer goes on with an assistant's message at the end, if there is one.
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    chosen = _tool_choice(request)
    max_tokens = stop = None
    output = OutputSettings()
    if isinstance(request, MessagesRequest):
        _refuse_others(request)
        max_tokens, stop, output = request.max_tokens, request.stop_sequences, request.output_config or output
    return translated(
        _with_thinking(request),
        messages,
        max_tokens=max_tokens,
        stop=stop,
        reasoning_effort=output.effort,
        response_format=None if output.format is None else _response_format(output.format),
        continue_final_message=True if continued else None,
        include_reasoning=False if request.thinking is not None and request.thinking.display == "omitted" else None,
        tools=[_tool(tool, f"tools[{place}]") for place, tool in enumerate(request.tools or ())] or None,
        tool_choice=None if chosen is None else _chat_tool_choice(chosen),
        parallel_tool_calls=False if chosen is not None and chosen.disable_parallel_tool_use else None,
    )


def _joined(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields messages. Neighbours of one role are one message, as Anthropic has it, but for results of tools."""
    for role, neighbours in groupby(messages, key=itemgetter("role")):
        said = list(neighbours)
        if role == "tool" or len(said) == 1:
            yield from said
            continue
        message = {name: value for one in said for name, value in one.items()}
        for name in ("content", "reasoning_content"):
            if name in message:
                message[name] = "\n".join(text for one in said if (text := one.get(name)))
        if "tool_calls" in message:
            message["tool_calls"] = [call for one in said for call in one.get("tool_calls", ())]
        yield message


def unheeded_fields_of_messages(request: MessagesRequest) -> tuple[str, ...]:
    """Returns the names of the fields that have no effect: no budget bounds what a model thinks."""
    bounded = request.thinking is not None and request.thinking.budget_tokens is not None
    return ("thinking.budget_tokens",) if bounded else ()


def _refuse_others(request: MessagesRequest) -> None:
    for name, asked in (("container", request.container), ("mcp_servers", request.mcp_servers)):
        if asked:
            raise unsupported(name)


def _response_format(wanted: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.schema, "strict": True}}


def _with_thinking(request: PromptRequest) -> PromptRequest:
    """Returns ``request`` with what it says of thinking as an argument of the chat template."""
    if request.thinking is None:
        return request
    thinks = {"enable_thinking": request.thinking.type != "disabled"}
    return msgspec.structs.replace(request, chat_template_kwargs={**thinks, **(request.chat_template_kwargs or {})})


def _user_messages(content: str | list[Any], where: str) -> list[dict[str, Any]]:
    """Returns a message for each result of a tool, and one for the text beside them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    texts = []
    for place, raw in enumerate(content):
        match read_part(raw, _USER_BLOCKS, f"{where}[{place}]"):
            case TextBlock(text=text):
                texts.append(text)
            case ToolResultBlock(tool_use_id=call, content=result):
                text = _text(result or "", f"{where}[{place}].content")
                results.append({"role": "tool", "tool_call_id": call, "content": text})
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant_message(content: str | list[Any], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts = [], []
    calls: list[dict[str, Any]] = []
    for place, raw in enumerate(content):
        match read_part(raw, _ASSISTANT_BLOCKS, f"{where}[{place}]"):
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=text):
                thoughts.append(text)
            case ToolUseBlock(id=call, name=name, input=arguments):
                function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
                calls.append({"id": call, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | Sequence[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([read_part(raw, _TEXTS, f"{where}[{place}]").text for place, raw in enumerate(content)])


def _tool(raw: dict[str, Any], where: str) -> dict[str, Any]:
    tool = read_part(raw, _TOOLS, where, default="custom")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": drop_nulls({**function, "strict": tool.strict})}


def _tool_choice(request: PromptRequest) -> AnthropicToolChoice | None:
    if request.tool_choice is None:
        return None
    try:
        choice = msgspec.convert(request.tool_choice, AnthropicToolChoice)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"'tool_choice' is not acceptable: {exc}", param="tool_choice") from exc
    if request.tools:
        return choice
    if choice.type in ("any", "tool"):
        raise InvalidRequest(f"'tool_choice' of type {choice.type!r} needs 'tools'", param="tool_choice")
    return None


def _chat_tool_choice(choice: AnthropicToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise InvalidRequest("'tool_choice' of type 'tool' needs 'name'", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
