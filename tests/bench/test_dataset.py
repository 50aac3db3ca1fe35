"""Tests that each kind of dataset is recognised by its fields, and that a wrong line is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench import dataset as module
from pdserve.bench.dataset import Dataset, open_dataset
from pdserve.bench.load import Session, Turn
from pdserve.config.bench import DatasetConfig
from pdserve.errors import BenchError

VOCABULARY = 1000


def written(folder: Path, text: str) -> Path:
    file = folder / "requests.jsonl"
    file.write_text(text)
    return file


def opened(folder: Path, objects: Sequence[Any], *, as_list: bool = False, **config: Any) -> Dataset:
    text = json.dumps(objects, indent=1) if as_list else "".join(json.dumps(each) + "\n" for each in objects)
    return open_dataset(DatasetConfig(str(written(folder, text)), **config), 64, VOCABULARY, 0)


def all_sessions(dataset: Dataset) -> list[Session]:
    return list(dataset.sessions(0, len(dataset.turns)))


def all_turns(dataset: Dataset) -> list[list[Turn]]:
    return [list(session.turns) for session in all_sessions(dataset)]


@pytest.mark.parametrize("as_list", [False, True])
def test_prompts_with_and_without_the_lengths_of_their_answers(tmp_path: Path, as_list: bool) -> None:
    lines = [
        {"prompt": "Hello"},
        {"prompt": [5, 6], "output_tokens": 7},
        {"text_input": "ä [", "max_tokens": 9, "more": [{"x": 1}]},
    ]
    dataset = opened(tmp_path, lines, as_list=as_list)
    assert not dataset.timed
    jobs = [turn.job for (turn,) in all_turns(dataset)]
    assert [job.prompt for job in jobs] == ["Hello", [5, 6], "ä ["]
    assert [(job.output_tokens, job.exact) for job in jobs] == [(64, False), (7, True), (9, False)]
    assert {job.path for job in jobs} == {"/v1/completions"}


def test_messages_go_as_they_are_with_their_tools(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello", "name": "n"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (((turn,),)) = all_turns(opened(tmp_path, [{"messages": messages, "tools": tools}]))
    assert turn.job.messages == messages
    assert turn.job.sampling == {"tools": tools}
    assert turn.job.path == "/v1/chat/completions"


SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "One?"},
            {"from": "gpt", "value": "1"},
            {"from": "human", "value": "Two?"},
            {"from": "gpt", "value": "2"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "Three?"}]},
]


@pytest.mark.parametrize("as_list", [False, True])
def test_sharegpt_becomes_conversations_without_its_answers(tmp_path: Path, as_list: bool) -> None:
    dataset = opened(tmp_path, SHAREGPT, as_list=as_list)
    assert (dataset.left_out, list(dataset.turns)) == (1, [2, 1])
    first, second = all_turns(dataset)
    assert [message["content"] for message in first[0].job.messages] == ["Be brief.", "One?"]
    assert [message["content"] for message in first[1].job.messages] == ["Two?"]
    assert all(turn.continues for turn in (*first, *second))
    assert list(opened(tmp_path, SHAREGPT, turns=1).turns) == [1, 1]


def trace(*lines: tuple[int, int, list[int]]) -> list[dict[str, Any]]:
    return [{"timestamp": at, "input_length": length, "output_length": 3, "hash_ids": ids} for at, length, ids in lines]


def test_a_trace_in_mooncakes_shape_shares_the_prefixes_that_its_hashes_share(tmp_path: Path) -> None:
    lines = trace((2000, 1000, [1, 2]), (2500, 900, [1, 2]), (5000, 700, [1, 9]))
    dataset = opened(tmp_path, lines)
    assert dataset.timed
    assert dataset.last_at_s == 3.0
    assert [session.at_s for session in all_sessions(dataset)] == [0.0, 0.5, 3.0]
    first, second, third = (list(turn.job.prompt) for (turn,) in all_turns(dataset))
    assert [len(first), len(second), len(third)] == [1000, 900, 700]
    assert second == first[:900]
    assert third[:512] == first[:512] != third[-512:]
    assert third[512:] != first[512:700]
    assert all(3 <= token < VOCABULARY for token in first if isinstance(token, int))
    assert all_turns(dataset)[0][0].job.exact


def test_times_pass_faster_or_are_left_out(tmp_path: Path) -> None:
    lines = trace((0, 4, [1]), (8000, 4, [2]))
    assert opened(tmp_path, lines, speed=4.0).last_at_s == 2.0
    assert not opened(tmp_path, lines, speed=0.0).timed


def test_lines_of_one_session_become_its_turns_wherever_they_stand(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "timestamp": 0, "prompt": "a1"},
        {"session_id": "b", "timestamp": 100, "prompt": "b1"},
        {"prompt": "alone", "timestamp": 150},
        {"session_id": "a", "delay": 250, "prompt": "a2"},
        {"session_id": "b", "timestamp": 400, "prompt": "b2", "delay": 500},
        {"session_id": "a", "delay": 750, "prompt": "a3"},
    ]
    dataset = opened(tmp_path, lines)
    assert list(dataset.turns) == [3, 2, 1]
    assert dataset.requests(1, 2) == 3
    turns = all_turns(dataset)
    assert [[turn.job.prompt for turn in each] for each in turns] == [["a1", "a2", "a3"], ["b1", "b2"], ["alone"]]
    assert [turn.think_s for turn in turns[0]] == [0.0, 0.25, 0.75]
    assert [turn.at_s for turn in turns[1]] == [0.1, 0.4]
    assert [session.at_s for session in all_sessions(dataset)] == [0.0, 0.1, 0.15]


def test_an_object_may_hold_a_whole_session(tmp_path: Path) -> None:
    turns = [{"text": "a", "timestamp": 1000}, {"text": "b", "delay": 500, "output_length": 6}]
    (session,) = all_turns(opened(tmp_path, [{"session_id": "s", "turns": turns}]))
    assert [turn.job.messages[0]["content"] for turn in session] == ["a", "b"]
    assert [turn.think_s for turn in session] == [0.0, 0.5]
    assert (session[1].job.output_tokens, session[1].job.exact) == (6, True)


def test_a_part_of_the_file(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [{"prompt": str(number)} for number in range(6)])
    prompts = [turn.job.prompt for session in dataset.sessions(2, 3) for turn in session.turns]
    assert prompts == ["2", "3", "4"]


GOOD = '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "\n{oops\n", "requests.jsonl, line 3: JSON is malformed"),
        (GOOD + '{"prompt": 5}\n', "line 2: Expected `str | array | null`, got `int` - at `$.prompt`"),
        (GOOD + '{"text": "a"}\n', "line 2: it has none of prompt, messages, conversations, turns or input_length"),
        (GOOD + '{"prompt": "a", "messages": []}\n', "line 2: it has both prompt and messages"),
        (GOOD + '{"messages": []}\n', "line 2: it has no messages"),
        (GOOD + '{"turns": [{"text": ""}]}\n', "line 2: its turn 1 has neither text nor messages"),
        (GOOD + '{"input_length": 513, "hash_ids": [1]}\n', "line 2: its 1 hash_ids of 512 tokens do not make its"),
        (GOOD + '{"input_length": 0}\n', "line 2: Expected `int` >= 1"),
        (GOOD + '{"prompt": "a", "timestamp": 5}\n', "line 2: it has a timestamp, and those before it have none"),
        ('{"prompt": "a", "timestamp": 5}\n' + GOOD, "line 2: it has no timestamp, and those before it have one"),
        (
            '{"prompt": "a", "timestamp": 5}\n{"prompt": "a", "timestamp": 4}\n',
            "line 2: its timestamp, 4, is before the last one, 5",
        ),
        ('[{"prompt": "a"}, {"prompt": 5}]', "entry 2: Expected `str | array | null`"),
        ('[{"prompt": "a"}, {"prompt"', "entry 2: Expecting"),
        ('[{"prompt": "a"}, {"prompt": "b"}', "entry 3: Expecting value"),
        ('[{"prompt": "a", "session_id": 1}]', "entry 1: it has a session_id, which only JSON lines may have"),
        ("\n", "requests.jsonl has no request"),
        ("[]", "requests.jsonl has no request"),
        (
            '{"conversations": [{"from": "gpt", "value": "a"}]}\n',
            "requests.jsonl has no request: no person says anything in its conversations",
        ),
    ],
)
def test_a_wrong_object_is_named_before_anything_is_sent(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchError) as failure:
        open_dataset(DatasetConfig(str(written(tmp_path, text))), 64, VOCABULARY, 0)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BenchError, match="--dataset: there is no file '/nowhere'"):
        open_dataset(DatasetConfig("/nowhere"), 64, VOCABULARY, 0)


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    for text in (b'{"prompt": "\xff"}', b'[{"prompt": "\xff"}]'):
        (tmp_path / "f").write_bytes(text)
        with pytest.raises(BenchError, match="it is not UTF-8"):
            open_dataset(DatasetConfig(str(tmp_path / "f")), 64, VOCABULARY, 0)


def test_a_list_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = [{"prompt": 'é\n"]' * number, "output_tokens": number + 1} for number in range(40)]
    monkeypatch.setattr(module, "_READ", 7)
    dataset = opened(tmp_path, objects, as_list=True)
    assert [turn.job.prompt for (turn,) in all_turns(dataset)] == [each["prompt"] for each in objects]


def test_an_object_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OBJECT", 50)
    monkeypatch.setattr(module, "_READ", 20)
    for text in ('{"prompt": "' + "a" * 60, '[{"prompt": "' + "a" * 1000):
        with pytest.raises(BenchError, match=r"line 1: it has more than|entry 1: Unterminated"):
            open_dataset(DatasetConfig(str(written(tmp_path, text))), 64, VOCABULARY, 0)
