"""Tests that counts which are continued as a request grows are those of all its tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.request import TokenCounts

TOKENS = st.lists(st.integers(0, 40), max_size=60)


class Watched(list[int]):
    """A list that counts how many of its tokens are read."""

    num_read = 0

    def __getitem__(self, index: object) -> object:  # type: ignore[override]  # of both forms, one is used
        found = super().__getitem__(index)  # type: ignore[call-overload]  # as above
        self.num_read += len(found)
        return found


@given(prompt=TOKENS, parts=st.lists(TOKENS, max_size=6))
def test_they_are_those_of_all_tokens_at_any_time(prompt: list[int], parts: list[list[int]]) -> None:
    counts, token_ids = TokenCounts(), list(prompt)
    for part in parts:
        token_ids += part
        present = counts.present(token_ids).tolist()
        assert len(present) == len(set(present))
        assert set(present) == set(token_ids)
        tokens, times = counts.generated(token_ids, len(prompt))
        assert dict(zip(tokens.tolist(), times.tolist(), strict=True)) == Counter(token_ids[len(prompt) :])


def test_a_step_reads_only_what_is_new() -> None:
    counts, token_ids = TokenCounts(), Watched(range(1000))
    counts.present(token_ids)
    for _ in range(10):
        token_ids.append(5)
        counts.present(token_ids)
        counts.generated(token_ids, 1000)
    assert token_ids.num_read == 20
