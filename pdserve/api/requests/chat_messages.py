"""Brings the messages of a chat into the plain form that chat templates take, and renders them.

Contents become single strings, and the arguments of calls become objects, because templates write them as JSON. A
template that knows no tools is given the conversation in words that any model can read.

The templates of Harmony models take a form of their own (``harmony_messages``). They show one call of a message, and
take the result behind it for that of this call; they refuse a message that has a call, a text and reasoning; they drop
what system and developer say behind the first message without a word; and they fail where a function or a parameter has
no description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.api.message.harmony import EFFORTS, is_harmony
from pdserve.api.message.json_text import as_object
from pdserve.api.requests.chat_template import REASONING
from pdserve.api.requests.openai_request import ChatRequest, TokenizeRequest
from pdserve.api.requests.tools import Tool, tool_use
from pdserve.errors import InvalidRequest

if TYPE_CHECKING:  # A build that describes the interface has no tokeniser.
    from pdserve.api.requests.tokenizer import Tokenizer

_LEADING = ("system", "developer")
"""The roles of instructions."""


def harmony_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns plain messages for such a template. Raises InvalidRequest for instructions that it would drop."""
    head = list(takewhile(lambda one: one["role"] in _LEADING, messages))
    leading = len(head)
    later = next((at for at in range(leading, len(messages)) if messages[at]["role"] in _LEADING), None)
    if later is not None:
        raise InvalidRequest(
            f"this model's chat template takes instructions at the beginning alone: 'messages[{later}].role' cannot be "
            f"{messages[later]['role']!r} behind other messages",
            param=f"messages[{later}].role",
        )
    if leading > 1:
        head = [{**head[0], "content": "\n\n".join(one["content"] for one in head)}]
    return head + _one_by_one(messages[leading:])


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with one call each, which has its result right behind it."""
    rendered: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or []
        if not calls:
            rendered.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        rendered += _calls_with_results(message, calls, results)
    return rendered


def _calls_with_results(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], results: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    rendered: list[dict[str, Any]] = []
    thought, text = next(filter(None, map(message.get, REASONING)), ""), message["content"]
    own = {name: value for name, value in message.items() if name not in ("tool_calls", *REASONING)}
    for number, call in enumerate(calls):
        one = {**own, "content": "", "tool_calls": [call]}
        if number == 0 and (thought or text):
            # The template has one place for both, which is that of reasoning.
            one["reasoning_content"] = "\n\n".join(filter(None, (thought, text)))
        rendered += [one, *_results_of(call, results, last=number == len(calls) - 1)]
    return rendered


def _results_of(call: Mapping[str, Any], results: list[dict[str, Any]], *, last: bool) -> list[dict[str, Any]]:
    """Takes the results of a call out of ``results``: those with its id, or the next one that has none.

    The last call gets all that are left.
    """
    if last:
        taken, results[:] = list(results), []
        return taken
    found = [one for one in results if "tool_call_id" in one and one["tool_call_id"] == call.get("id")]
    if not found:
        found = [one for one in results if "tool_call_id" not in one][:1]
    results[:] = [one for one in results if not any(one is taken for taken in found)]
    return found


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a function with a description, of its own and of each parameter, which may be empty."""
    function = dict(tool["function"])
    function.setdefault("description", "")
    parameters = function.get("parameters", {})
    properties = parameters.get("properties")
    if isinstance(properties, dict):
        named = {
            name: {"description": "", **(schema if isinstance(schema, dict) else {})}
            for name, schema in properties.items()
        }
        function["parameters"] = {**parameters, "properties": named}
    return {**tool, "function": function}


def check_effort(variables: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for a reasoning effort that no Harmony model knows.

    ``variables`` are those of the template, of which the client has ``given`` some by name.
    """
    effort = variables.get("reasoning_effort", EFFORTS[0])
    if effort not in EFFORTS:
        param = "chat_template_kwargs.reasoning_effort" if "reasoning_effort" in given else "reasoning_effort"
        raise InvalidRequest(
            f"{param!r} must be one of {', '.join(EFFORTS)} for this model, and not {str(effort)[:_SHOWN_CHARS]!r}",
            param=param,
        )


ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of every chat. A template that names another one in quotes has that role too."""
TEXT_PARTS = ("text", "input_text", "output_text")
_READ = ("type", "text")
_SHOWN_CHARS = 64
"""A message shows so much of what the client sent."""
MAX_CALLS = 1_024
"""How many calls one message may have."""


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with their contents as single strings.

    Raises InvalidRequest that names the message and the field.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def last_answer(request: ChatRequest) -> str:
    """Returns the text of the last message if the model has written it, and nothing otherwise."""
    last = plain_messages(request.messages[-1:])[0]
    return str(last["content"]) if last["role"] == "assistant" else ""


def unread_part_fields(messages: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Returns the names of the fields that parts of contents have beside their text, each once."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(f"messages.content.{name}" for name in dict.fromkeys(chain.from_iterable(parts)) if name not in _READ)


def render_chat(request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, created: int) -> str:
    """Returns the conversation as the model's template renders it at the time ``created``. Raises InvalidRequest."""
    continued = bool(request.continue_final_message)
    generation_prompt = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    if continued and generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' excludes 'add_generation_prompt'", param="continue_final_message"
        )
    messages = plain_messages(request.messages or [])
    check_roles(messages, tokenizer.chat_template)
    tools = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls).shown
    shown = [_shown(tool) for tool in tools]
    if is_harmony(tokenizer.chat_template):
        messages, shown = harmony_messages(messages), [described(tool) for tool in shown]
    elif "developer" not in tokenizer.chat_template:
        messages = without_developer(messages)
    if "tools" not in tokenizer.chat_template:
        messages = spelled_out(messages, tools)
    return tokenizer.render_chat(
        messages,
        tools=shown,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        created=created,
        template_kwargs=template_kwargs(request, tokenizer.chat_template),
    )


def check_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Raises InvalidRequest if neither chats in general nor ``template`` know the role of a message.

    Most templates would write any role, and the model would read a turn of somebody whom it has never met.
    """
    for role, index in {message["role"]: index for index, message in reversed([*enumerate(messages)])}.items():
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise unknown_role(role, f"messages[{index}]", ROLES)


def template_kwargs(request: ChatRequest | TokenizeRequest, template: str) -> dict[str, Any]:
    """Returns the variables that the template gets beside the conversation. Raises InvalidRequest."""
    given = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if is_harmony(template):
        variables = given if effort is None else {"reasoning_effort": effort, **given}
        check_effort(variables, given)
        return variables
    if effort is None:
        return given
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort, **given}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none", **given}
    return given


def unheeded_fields(request: ChatRequest, template: str) -> tuple[str, ...]:
    """Returns the names of the fields that have no effect because the template does not know them."""
    known = request.reasoning_effort is None or "reasoning_effort" in template or "enable_thinking" in template
    return () if known else ("reasoning_effort",)


def without_developer(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages for a template that knows no developer: he speaks as the system.

    What system and developer say at the beginning is one message, because many templates take no second one.
    """
    rendered = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    head = list(takewhile(lambda one: one["role"] == "system", rendered))
    if len(head) < 2 or all(one["role"] == "system" for one in messages[: len(head)]):
        return rendered
    return [{**head[0], "content": "\n\n".join(one["content"] for one in head)}, *rendered[len(head) :]]


def spelled_out(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns messages for a template that knows no tools: functions, calls and results are in their contents.

    What was put in words is one message with its neighbours of the same role, as templates want turns to alternate.
    """
    rendered: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    joins = False
    for message in messages:
        worded = _in_words(message)
        joins_next = worded is not message
        if rendered and rendered[-1]["role"] == worded["role"] and (joins or joins_next):
            texts[-1].append(worded["content"])
            rendered[-1], joins_next = {**rendered[-1], **worded}, True
        else:
            texts.append([worded["content"]])
            rendered.append(worded)
        joins = joins_next
    # Thousands of messages may be one: what has come of it is not copied with each of them.
    rendered = [
        {**one, "content": "\n".join(filter(None, parts))} if len(parts) > 1 else one
        for one, parts in zip(rendered, texts, strict=True)
    ]
    if not tools:
        return rendered
    lines = "\n".join(_encode(_shown(tool)) for tool in tools)
    words = (
        f"You can call these functions. Each line describes one, as JSON:\n{lines}\n\n"
        'To call a function, write <tool_call>\n{"name": its name, "arguments": an object of its arguments}\n'
        "</tool_call>. Results come back between <tool_response> and </tool_response>."
    )
    if rendered and rendered[0]["role"] == "system":
        return [{**rendered[0], "content": f"{rendered[0]['content']}\n\n{words}"}, *rendered[1:]]
    return [{"role": "system", "content": words}, *rendered]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [f"<tool_call>\n{_encode(call['function'])}\n</tool_call>" for call in message["tool_calls"]]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [message["content"], *calls]))}


def _shown(tool: Tool) -> dict[str, Any]:
    """Returns what a template gets of a function."""
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": tool.type, "function": {name: value for name, value in fields.items() if value is not None}}


def _plain(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"'{where}.role' must be a non-empty string", param=f"{where}.role")
    if message.get("function_call") is not None or role == "function":
        raise InvalidRequest(
            f"'{where}' has OpenAI's former form of function calls: use 'tool_calls' and the role 'tool'",
            param=f"{where}.function_call" if role != "function" else f"{where}.role",
        )
    # OpenAI's clients send back what they got, with null for what was not there; templates ask whether it is there.
    plain = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id"):
        if not isinstance(plain.get(name, ""), str):
            raise InvalidRequest(f"'{where}.{name}' must be a string", param=f"{where}.{name}")
    calls = _calls(plain.pop("tool_calls", None), role, f"{where}.tool_calls")
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain["reasoning"])
    return {**plain, "content": _text(message, role, f"{where}.content"), **({"tool_calls": calls} if calls else {})}


def _calls(calls: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Returns the calls of a message with their arguments as objects."""
    if calls is None:
        return []
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise InvalidRequest(f"'{where}' must be a list of at most {MAX_CALLS} calls", param=where)
    if calls and role != "assistant":
        raise InvalidRequest(f"'{where}' belongs to a message of the role 'assistant'", param=where)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise InvalidRequest(f"'{where}' must be a call with 'type': 'function' and a 'function'", param=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"'{where}.function.name' must be a non-empty string", param=f"{where}.function.name")
    if not isinstance(call.get("id", ""), str):
        raise InvalidRequest(f"'{where}.id' must be a string", param=f"{where}.id")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, dict):
        return arguments
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        # A model may have written no JSON, and this node has given it to the client so.
        return _object.decode(as_object(arguments))
    raise InvalidRequest(f"'{where}' must be a JSON object, as a string", param=where)


def _text(message: Mapping[str, Any], role: str, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))
    raise InvalidRequest(f"'{where}' must be a string or a non-empty list of text parts", param=where)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise not_text(where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{where}.text' must be a string", param=f"{where}.text")
    return text


def unknown_role(role: str, where: str, known: Sequence[str]) -> InvalidRequest:
    """Returns the error that says, in every dialect, which roles the message at ``where`` may have."""
    return InvalidRequest(
        f"'{where}.role' must be one of {', '.join(known)}, and not {role[:_SHOWN_CHARS]!r}", param=f"{where}.role"
    )


def not_text(where: str, wanted: str = "text") -> InvalidRequest:
    """Returns the error that says, in every dialect, that the part at ``where`` must be of the type ``wanted``."""
    return InvalidRequest(f"'{where}.type' must be {wanted!r}: this model reads text only", param=f"{where}.type")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_object = msgspec.json.Decoder(dict[str, Any])
