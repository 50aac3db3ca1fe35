"""Tests that forced calls are valid on a real model, wherever its prompt was computed."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.cluster.nodes import MODEL, ServedCluster, http

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


def forced(cluster: ServedCluster, **fields: Any) -> dict[str, Any]:
    """Returns the only choice of a chat whose answer has to be a call. No prefix cache has its prompt."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [
            {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMETERS}},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "cache_salt": uuid.uuid4().hex,
    }
    reply = http(cluster.url + "/v1/chat/completions", body | fields)
    assert reply.status == 200, reply.body
    [choice] = reply.json()["choices"]
    return dict(choice)


@pytest.mark.timeout(300)
def test_a_forced_call_is_valid_through_prefill_and_decode_nodes(
    pd_cluster: ServedCluster, mixed_cluster: ServedCluster
) -> None:
    answers = [forced(cluster, temperature=1.5, seed=7) for cluster in (pd_cluster, mixed_cluster)]
    functions = [[call["function"] for call in answer["message"]["tool_calls"]] for answer in answers]
    assert functions[0] == functions[1]
    assert [answer["finish_reason"] for answer in answers] == ["tool_calls"] * 2
    [function] = functions[0]
    arguments = json.loads(function["arguments"])
    assert function["name"] == "get_weather"
    assert list(arguments) == ["city", "unit", "days"]
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.timeout(300)
def test_what_agents_send_goes_through_prefill_and_decode_nodes(pd_cluster: ServedCluster) -> None:
    """A schema with dead ends, a call that is no JSON, results beside text, and a stop string."""
    closed = {**PARAMETERS, "patternProperties": {"^(city|unit|days)$": {}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": closed}}]
    answer = forced(pd_cluster, tools=tools, temperature=1.5, seed=7)
    [call] = answer["message"]["tool_calls"]
    assert list(json.loads(call["function"]["arguments"])) == ["city", "unit", "days"]
    broken = {**call, "function": {"name": "get_weather", "arguments": '{"city": "Par\nis'}}
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"},
        {"role": "user", "content": "Again."},
    ]
    again = forced(pd_cluster, messages=said, stop=["city", "{"])
    assert again["finish_reason"] == "tool_calls"
    assert json.loads(again["message"]["tool_calls"][0]["function"]["arguments"])["days"]
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": endless}}]
    body = {"model": MODEL, "messages": said[1:2], "tools": tools, "max_tokens": 9}
    refused = http(pd_cluster.url + "/v1/chat/completions", body)
    assert (refused.status, refused.json()["error"]["code"]) == (400, "invalid_grammar")
    assert "'$defs.node'" in refused.json()["error"]["message"]
