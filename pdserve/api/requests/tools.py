"""The fields of a chat request that name functions, and what they mean for the prompt and for the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.errors import InvalidRequest

MAX_TOOLS = 128

NAME_PATTERN = r"\A[A-Za-z0-9_.-]{1,128}\Z"
FunctionName: TypeAlias = Annotated[str, Meta(pattern=NAME_PATTERN)]
Description: TypeAlias = Annotated[str, Meta(max_length=65_536)]


class FunctionSpec(msgspec.Struct, omit_defaults=True):
    """One function that the model may call."""

    name: FunctionName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    """The JSON Schema of the arguments. A function without it has none."""
    strict: bool | None = None
    """Whether every call has to follow the schema."""


class Tool(msgspec.Struct):
    """An entry of ``tools``."""

    type: Literal["function"]
    function: FunctionSpec


Tools: TypeAlias = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class FunctionReference(msgspec.Struct):
    """The function that a ``tool_choice`` means."""

    name: FunctionName


class ToolReference(msgspec.Struct):
    """An entry of ``tool_choice.allowed_tools.tools``."""

    type: Literal["function"]
    function: FunctionReference


class AllowedTools(msgspec.Struct):
    """The functions among which the model may choose, of those in ``tools``."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1, max_length=MAX_TOOLS)]


class NamedToolChoice(msgspec.Struct, tag_field="type", tag="function"):
    """A ``tool_choice`` that asks for a call of one function."""

    function: FunctionReference


class AllowedToolChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """A ``tool_choice`` that allows some functions alone."""

    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which functions the prompt names, and which calls its answer may have."""

    shown: tuple[Tool, ...] = ()
    callable: Mapping[str, ToolSchema] = field(default_factory=dict)
    """Those that the answer may call, by name."""
    forced: bool = False
    """Whether the answer has to be calls."""
    named: bool = False
    """Whether the request names the function that is called. Then a call is no finish reason, as OpenAI has it."""
    parallel: bool = True
    """Whether the answer may have several calls."""


NO_TOOLS = ToolUse()


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """Returns what the three fields mean together. Raises InvalidRequest if they contradict each other."""
    known: dict[str, ToolSchema] = {}
    for index, tool in enumerate(tools or ()):
        function = tool.function
        if function.name in known:
            raise InvalidRequest(
                f"'tools' has two functions of the name {function.name!r}", param=f"tools[{index}].function.name"
            )
        known[function.name] = ToolSchema(function.name, function.parameters or {}, strict=bool(function.strict))
    if choice == "none" or (not known and choice in (None, "auto")):
        return NO_TOOLS
    if not known:
        raise InvalidRequest("'tool_choice' needs 'tools'", param="tool_choice")
    shown, several = tuple(tools or ()), parallel is not False
    match choice:
        case NamedToolChoice():
            named = _known(known, choice.function.name, "tool_choice.function.name")
            return ToolUse(shown, {named.name: named}, forced=True, named=True, parallel=False)
        case AllowedToolChoice(allowed_tools=allowed):
            names = [
                _known(known, entry.function.name, f"tool_choice.allowed_tools.tools[{index}].function.name")
                for index, entry in enumerate(allowed.tools)
            ]
            callable_ = {schema.name: schema for schema in names}
            return ToolUse(shown, callable_, forced=allowed.mode == "required", parallel=several)
    return ToolUse(shown, known, forced=choice == "required", parallel=several)


def _known(known: Mapping[str, ToolSchema], name: str, param: str) -> ToolSchema:
    if name not in known:
        raise InvalidRequest(f"{param!r} is no function of 'tools': {name!r}", param=param)
    return known[name]
