"""Brings a conversation into the form that the chat templates of Harmony models take.

They show one call of a message, and take the result behind it for that of this call; they refuse a message that has a
call, a text and reasoning; they drop what system and developer say behind the first message without a word; and they
fail where a function or a parameter has no description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from pdserve.api.message.harmony import EFFORTS
from pdserve.api.requests.chat_template import REASONING
from pdserve.errors import InvalidRequest

_LEADING = ("system", "developer")
_SHOWN_CHARS = 64
"""An error shows so much of what the client sent."""


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
