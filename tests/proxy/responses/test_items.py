"""Items of an input get types and ids, and are listed in pages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdserve.errors import InvalidRequest
from pdserve_proxy.responses.items import MAX_ITEMS, input_items, output_items, page


def items_of(given: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(input_items(msgspec.Raw(json.dumps(given).encode())))
    return found


def test_a_text_is_a_message_of_the_user() -> None:
    [item] = items_of('He said "hi"\n')
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": 'He said "hi"\n'}],
    }


def test_items_keep_what_they_have_and_get_what_they_lack() -> None:
    given: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": None},
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": "mine"},
        {},
    ]
    found = items_of(given)
    ids = [item.pop("id") for item in found]
    assert len(set(ids)) == len(ids)
    assert [each.partition("_")[0] for each in ids] == ["msg", "msg", "fc", "mine", "msg"]
    assert found[0]["content"] == [{"type": "output_text", "text": "Yes", "annotations": []}]
    assert found[1] == {**given[1], "type": "message"}
    assert found[2] == {name: value for name, value in given[2].items() if name != "id"}
    assert found[3] == {name: value for name, value in given[3].items() if name != "id"}
    assert found[4] == {"type": "message"}


def test_what_later_responses_go_on_from_has_no_log_probabilities() -> None:
    part = {"type": "output_text", "text": '"logprobs":[{', "annotations": [], "logprobs": []}
    scored = {**part, "logprobs": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    message = {"type": "message", "role": "assistant", "id": "m"}
    output = msgspec.json.encode([{**message, "content": [scored, part]}, call])
    assert json.loads(output_items(output)) == [{**message, "content": [part, part]}, call]
    plain = msgspec.json.encode([{**message, "content": [part]}, call])
    assert output_items(plain) == plain


@pytest.mark.parametrize("given", [7, None, {"a": 1}, [7], ["x"], [{"type": 3}], [{}] * (MAX_ITEMS + 1)])
def test_what_is_no_input_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        items_of(given)
    assert refused.value.param == "input"


@pytest.mark.parametrize(("limit", "newest_first"), [(2, True), (2, False), (3, True), (100, False)])
def test_pages_put_together_are_the_whole_list(limit: int, newest_first: bool) -> None:
    items = [{"id": f"i{number}"} for number in range(5)]
    encoded = json.dumps(items).encode()
    found: list[dict[str, str]] = []
    after: str | None = None
    while True:
        got = page(encoded, after=after, limit=limit, newest_first=newest_first)
        shown = [json.loads(bytes(raw)) for raw in got.data]
        assert (got.first_id, got.last_id) == (shown[0]["id"], shown[-1]["id"])
        found += shown
        after = got.last_id
        if not got.has_more:
            break
    assert found == (items[::-1] if newest_first else items)
    with pytest.raises(InvalidRequest):
        page(encoded, after="x", limit=1, newest_first=False)
