"""A structured answer that another node goes on with is the answer of one node, and follows its grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.grammars.compiling import load_vocabulary
from tests.api.node import MODEL
from tests.api.scripted_engine import EOS
from tests.api.stepped_node import stepped_node
from tests.api.test_resumed_answers import CHAT, MESSAGES, TEXT, by_choice, events_of, journal_of
from tests.nightly import nightly

pytestmark = pytest.mark.integration  # each node starts the process that tries grammars

ITEMS = {"type": "array", "items": {"enum": ["ab", 12, None, "\u00fc"]}, "minItems": 1, "maxItems": 4}


def is_of_items(text: str) -> bool:
    items = json.loads(text)
    return 1 <= len(items) <= 4 and all(item in ITEMS["items"]["enum"] for item in items)  # type: ignore[index]  # mypy takes the values for objects


def is_of_characters(text: str) -> bool:
    return re.fullmatch("[\u00e9\u4e16\U0001f600]{2,4}", text) is not None


def is_tagged(text: str) -> bool:
    return re.fullmatch("<a>(12|\u00fc)</a>([,;]12)?", text) is not None


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "12|\u00fc"}, "end": "</a>"}
BOUND = [TAG, {"type": "optional", "content": {"type": "or", "elements": [const(",12"), const(";12")]}}]
FREE = {"type": "triggered_tags", "triggers": ["e", "a"], "tags": [{**TAG, "begin": "e"}, {**TAG, "begin": "ab"}]}


def tagged(asked: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": asked}}


FREE_TEXT = {**tagged(FREE), "max_tokens": 6}
"""Its answers go on until they are full."""
STRUCTURES: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"guided_json": ITEMS}, is_of_items),
    # Each of these characters is several tokens, and a token may have parts of two.
    ({"guided_regex": "(\u00e9|\u4e16|\U0001f600){2,4}"}, is_of_characters),
    ({"guided_choice": ["a choice", "another"]}, lambda text: text in ("a choice", "another")),
    (FREE_TEXT, lambda _: False),
    (tagged({"type": "sequence", "elements": BOUND}), is_tagged),
]
PROMPTS = {
    CHAT: {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2},
    TEXT: {"prompt": ["x", "y"], "stop": ["12"], "include_stop_str_in_output": True},
}


@pytest.fixture(scope="module")
def vocabulary(model_dir: Path) -> LLTokenizer:
    return load_vocabulary(model_dir, [EOS])


def whole_texts(events: list[bytes]) -> list[str]:
    """Returns the texts of the answers that came to their own end."""
    texts: dict[int, str] = {}
    ended = []
    for event in events:
        data = event[event.index(b"data: ") + 6 :]
        for choice in [] if data.startswith(b"[DONE]") else json.loads(data)["choices"]:
            index, delta = choice["index"], choice.get("delta", choice)
            texts[index] = texts.get(index, "") + (delta.get("content") or delta.get("text") or "")
            if choice["finish_reason"] == "stop" and not choice.get("stop_reason"):
                ended.append(index)
    return [texts[index] for index in ended]


# The route says how events are written, and the group how many tokens an event has.
@pytest.mark.parametrize(("path", "group"), [(CHAT, 1), (TEXT, 3), nightly(TEXT, 1), nightly(CHAT, 3)])
async def test_every_prefix_can_be_resumed(
    path: str, group: int, tokenizer: Tokenizer, vocabulary: LLTokenizer, model_dir: Path
) -> None:
    async with (
        stepped_node(tokenizer, (), group, model_dir=model_dir, vocabulary=vocabulary) as first,
        stepped_node(tokenizer, (), group, model_dir=model_dir, vocabulary=vocabulary) as second,
    ):
        for structure, fits in STRUCTURES:
            body = {"model": MODEL, "stream": True, "seed": 8, "max_tokens": 40, **PROMPTS[path], **structure}
            whole = await first.begin(path, body)
            assert whole.status == 200, whole.body
            events = events_of(whole.body)
            texts = whole_texts(events)
            assert texts or structure is FREE_TEXT
            assert all(map(fits, texts)), texts
            for count in range(len(events) + 1):
                rest = await second.resume(path, body, journal_of(events[:count]))
                assert rest.status == 200, rest.body
                assert by_choice(events[:count] + events_of(rest.body)) == by_choice(events), f"after {count}"
