"""Tests that a Harmony model calls functions and answers with a structure through prefill and decode nodes.

In every run, ``tests/api/test_harmony.py`` has such a model in one node, and ``test_tool_calls.py`` calls through both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from tests.api.harmony_model import save_harmony_model
from tests.api.test_tool_calls import assembled
from tests.cluster.nodes import MODEL, http, served
from tests.cluster.test_tool_calls import PARAMETERS

pytestmark = pytest.mark.integration

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


def likely(tokenizer: Tokenizer, *texts: str) -> dict[str, float]:
    """Returns biases with which the model goes on with one of these texts wherever its grammar lets it."""
    return {str(tokenizer.encode(text, add_special_tokens=False)[0]): 100.0 for text in texts}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_calls_and_structures_come_through_prefill_and_decode_nodes(tiny_model: Path, tmp_path: Path) -> None:
    folder = save_harmony_model(tiny_model, tmp_path / "harmony")
    tokenizer = load_tokenizer(folder)
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "max_tokens": 150,
        "temperature": 1.5,
        "seed": 7,
    }
    forced = {
        **asked,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "logit_bias": likely(tokenizer, " to"),
    }
    schema = {"name": "weather", "strict": True, "schema": PARAMETERS}
    structured = {
        **asked,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "logit_bias": likely(tokenizer, "final"),
        "reasoning_effort": "low",
    }
    with served(folder, dtype="fp32") as running:
        url = f"{running.url}/v1/chat/completions"
        whole = http(url, forced)
        assert whole.status == 200, whole.body
        [choice] = whole.json()["choices"]
        [message] = assembled(http(url, {**forced, "stream": True}).body)
        [answer] = http(url, structured).json()["choices"]
        refused = http(url, {**structured, "reasoning_effort": "minimal"})
        assert all(node.metric("prefills_total", source="remote") for node in running.decode)
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert 1 <= json.loads(call["function"]["arguments"])["days"] <= 9
    [streamed] = message["calls"].values()
    assert streamed["function"] == call["function"]
    assert set(json.loads(answer["message"]["content"])) == {"city", "unit", "days"}
    assert (refused.status, refused.json()["error"]["param"]) == (400, "reasoning_effort")
