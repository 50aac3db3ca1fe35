"""The tokens of reasoning are counted by their bytes, however markers are cut into tokens."""

from __future__ import annotations

import pytest

from pdserve.api.message.reasoning import THINK, ReasoningStart, ReasoningTokens


def count(tokens: list[str], start: ReasoningStart = ReasoningStart.BEFORE, group: int = 1) -> int:
    texts = [token.encode() for token in tokens]
    counter = ReasoningTokens(THINK, start, lambda token_id: texts[token_id])
    for first in range(0, len(tokens), group):
        counter.add(range(first, min(first + group, len(tokens))))
    return counter.count


@pytest.mark.parametrize("group", [1, 2, 9])
@pytest.mark.parametrize(
    ("tokens", "start", "expected"),
    [
        (["<think>", "Hm", ".", "</think>", "Yes"], ReasoningStart.BEFORE, 4),
        (["\n", "<th", "ink>H", "m</", "think", ">Yes", "!"], ReasoningStart.BEFORE, 6),
        (["Hm", ".", "</think>", "Yes"], ReasoningStart.INSIDE, 3),
        (["Hm", "."], ReasoningStart.INSIDE, 2),
        (["Yes", "<think>", "no", "</think>"], ReasoningStart.BEFORE, 0),
        (["Yes"], ReasoningStart.BEHIND, 0),
        ([" " * 65, "<think>", "no"], ReasoningStart.BEFORE, 0),
        (["<", "b>"], ReasoningStart.BEFORE, 0),
        (["<think>", "a", "<", "/think", "x", "</think>"], ReasoningStart.BEFORE, 6),
        ([], ReasoningStart.INSIDE, 0),
    ],
)
def test_reasoning_is_counted_with_its_markers(
    tokens: list[str], start: ReasoningStart, expected: int, group: int
) -> None:
    assert count(tokens, start, group) == expected
