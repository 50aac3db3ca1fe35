"""Tests what is guessed from a request's own text, and what that takes."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import SupportsIndex, overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.speculation.guesses import (
    FIRST_RATES,
    LOOKED_UP,
    MOST_COMPARED,
    MOST_INDEXED,
    READ_AT_ONCE,
    OwnText,
    PromptText,
    Rates,
)


class Counted(list[int]):
    """Tokens that count how many of them are read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.reads = 0

    @overload
    def __getitem__(self, place: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> int | list[int]:
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(found, list) else 1
        return found


def own_text(prompt: PromptText | int = 0, engine: Rates | None = None) -> OwnText:
    """Returns what has read nothing, with the index of a prompt, or of one with so many tokens."""
    return OwnText(engine or Rates(FIRST_RATES), PromptText(prompt) if isinstance(prompt, int) else prompt)


def read(text: OwnText, tokens: Sequence[int], num_prompt_tokens: int) -> OwnText:
    """Reads all of the tokens, as many in a step as may be."""
    while text.read(tokens, num_prompt_tokens, READ_AT_ONCE):
        pass
    return text


def guessed(tokens: Sequence[int], count: int = 5, num_prompt_tokens: int | None = None) -> list[int]:
    text = read(own_text(), tokens, len(tokens) if num_prompt_tokens is None else num_prompt_tokens)
    return text.guesses(tokens, count) if text.matched else []


def drawn(count: int, kinds: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(kinds), k=count)


def test_what_followed_the_last_tokens_is_guessed() -> None:
    assert guessed([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]) == [4, 5, 6, 7, 8]
    assert guessed([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 2) == [4, 5]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 1, 2, 4]])
def test_without_a_source_nothing_is_guessed(tokens: list[int]) -> None:
    assert guessed(tokens) == []


def test_where_the_last_tokens_never_occurred_together_what_followed_the_last_one_is_guessed() -> None:
    assert guessed([1, 1], 2) == [1, 1]
    assert guessed([1, 2, 3, 4, 5, 9, 3], 2) == [4, 5]
    # What followed both comes before what followed the last one later.
    assert guessed([1, 2, 3, 7, 2, 8, 1, 2], 1) == [3]


def test_of_several_places_the_latest_is_the_source() -> None:
    assert guessed([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 1) == [5]


def test_a_place_in_the_answer_comes_before_one_in_the_prompt() -> None:
    assert guessed([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], 1, num_prompt_tokens=5) == [5]


@pytest.mark.parametrize("period", [1, 2, 3, 4, 7])
def test_a_text_that_repeats_its_end_goes_on_to_do_so(period: int) -> None:
    tokens = [10 + place % period for place in range(4 * period + LOOKED_UP)]
    assert guessed(tokens, 20) == [10 + (len(tokens) + place) % period for place in range(20)]


def test_a_source_stays_while_it_is_right_and_goes_when_it_is_wrong() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 2, 3]
    text = own_text()
    read(text, tokens, 7)
    assert text.guesses(tokens, 2) == [4, 5]
    tokens.append(4)
    read(text, tokens, 7)
    assert (text.matched, text.guesses(tokens, 2)) == (3, [5, 6])
    tokens.append(9)
    read(text, tokens, 7)
    assert (text.matched, text.guesses(tokens, 2)) == (0, [])


def test_a_longer_match_is_worth_more() -> None:
    rates = list[float]()
    for alike in (1, LOOKED_UP, 5, 9, MOST_COMPARED + 4):
        tokens = [*drawn(40, 10**6), 7, *range(100, 100 + alike), 8, 9, *range(100, 100 + alike)]
        text = own_text()
        read(text, tokens, len(tokens))
        assert text.matched == min(alike, MOST_COMPARED)
        rates.append(text.rate())
        assert text.rate(MOST_COMPARED) == FIRST_RATES[-1]
    assert rates == list(FIRST_RATES)


def test_a_request_learns_how_good_its_guesses_are_and_so_does_its_engine() -> None:
    """Each token says whether its guess was right, though nothing was drafted."""
    engine = Rates(FIRST_RATES)
    right, wrong = own_text(engine=engine), own_text(engine=engine)
    tokens = list(range(50)) * 2
    read(right, tokens, 50)
    assert right.rate() > FIRST_RATES[-1]
    tokens = list(range(50))
    for mistake in range(1000, 1020):
        tokens += [1, 2, mistake]
    tokens += [1, 2]
    read(wrong, tokens, 50)
    assert wrong.rate() < 0.1
    assert wrong.rate() < engine.rate(1) < FIRST_RATES[1]


def test_rates_stay_between_nothing_and_one_and_follow_what_is_recent() -> None:
    engine = Rates(FIRST_RATES)
    request = engine.of_request()
    for _ in range(200):
        request.note(0, True)
    assert 0.95 < request.rate(0) <= 1
    for _ in range(20):
        request.note(0, False)
    assert 0 <= request.rate(0) < 0.3 < engine.rate(0)
    assert engine.of_request().rate(0) == engine.rate(0)
    assert [request.rate(kind) for kind in (1, 2, 3, 4)] == list(FIRST_RATES[1:])


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 80), st.integers(1, 7))
def test_how_a_text_is_read_changes_no_guess(tokens: list[int], split: int, count: int) -> None:
    """A resumed answer is read at once, and others token by token."""
    num_prompt = min(split, len(tokens))
    text, known = own_text(), tokens[:num_prompt]
    read(text, known, num_prompt)
    for token in tokens[num_prompt:]:
        known.append(token)
        read(text, known, num_prompt)
    at_once = own_text()
    read(at_once, tokens, num_prompt)
    assert (text.matched, text.guesses(tokens, count)) == (at_once.matched, at_once.guesses(tokens, count))
    assert text.rate() == at_once.rate()
    if guesses := at_once.guesses(tokens, count):
        assert len(guesses) == count
        assert any(tokens[end - 1] == tokens[-1] and tokens[end] == guesses[0] for end in range(1, len(tokens)))


def test_all_answers_to_a_prompt_share_its_index() -> None:
    prompt = [*drawn(5000, 10**6), 1, 2, 3, 4]
    parent = own_text()
    child = own_text(parent.prompt)
    read(parent, [*prompt, 1], len(prompt))
    tokens = Counted([*prompt, 1, 2, 3])
    read(child, tokens, len(prompt))
    assert tokens.reads < 100
    assert child.guesses(tokens, 1) == [4]


def test_what_one_answer_says_is_no_source_of_another() -> None:
    prompt = [1, 2, 3, 4]
    parent = own_text()
    child = own_text(parent.prompt)
    read(parent, [*prompt, 7, 8, 9, 5], 4)
    tokens = [*prompt, 7, 8, 9]
    read(child, tokens, 4)
    assert child.matched == 0


@pytest.mark.parametrize("kinds", [1, 2, 1000, 10**6], ids=["all alike", "two", "few", "random"])
def test_a_step_reads_a_bounded_part_and_all_of_them_a_linear_one(kinds: int) -> None:
    """Whatever the text is: each token is read a constant number of times."""
    most = LOOKED_UP + MOST_COMPARED * 2 + 2 * LOOKED_UP + 2
    for length in (READ_AT_ONCE, 4 * READ_AT_ONCE):
        tokens, text, calls = Counted(drawn(length, kinds)), own_text(), 0
        num_read = 1
        while num_read:
            before = tokens.reads
            num_read = text.read(tokens, length // 2, READ_AT_ONCE)
            calls += 1
            assert num_read <= READ_AT_ONCE
            assert tokens.reads - before <= READ_AT_ONCE * most
        assert calls <= 2 + length // READ_AT_ONCE
        assert tokens.reads <= length * most
        before = tokens.reads
        read(text, tokens, length // 2)
        text.guesses(tokens, 7)
        assert tokens.reads - before <= 2 * 7


def test_a_long_prompt_is_read_in_parts_and_nothing_is_guessed_before() -> None:
    length = 3 * READ_AT_ONCE + 5
    tokens = [*drawn(length - 2, 10**6), 1, 2]
    text = own_text(length)
    tokens += [3, 4, 1, 2, 3]
    for left in (length + 5, length + 5 - READ_AT_ONCE, length + 5 - 2 * READ_AT_ONCE):
        assert text.read(tokens, length, READ_AT_ONCE) == min(left, READ_AT_ONCE)
        assert not text.matched
    read(text, tokens, length)
    assert text.guesses(tokens, 1) == [4]


def test_of_a_very_long_prompt_the_end_is_looked_up() -> None:
    prompt = [1, 2, 3, 4, *drawn(MOST_INDEXED, 10**6, seed=1), 5, 6, 7, 8]
    text = read(own_text(len(prompt)), [*prompt, 1, 2], len(prompt))
    assert not text.matched
    assert len(text.prompt.last_place) <= 2 * MOST_INDEXED
    assert read(text, [*prompt, 1, 2, 5, 6], len(prompt)).guesses([*prompt, 1, 2, 5, 6], 1) == [7]


def test_an_index_has_less_than_300_bytes_for_each_token() -> None:
    tokens = drawn(READ_AT_ONCE, 10**6)
    text = own_text()
    read(text, tokens, len(tokens))
    index = text.prompt.last_place
    assert len(index) <= 2 * len(tokens)
    own = sum(sys.getsizeof(run) for run in index if isinstance(run, tuple))
    places = sum(sys.getsizeof(place) for place in index.values())
    assert sys.getsizeof(index) + own + places < 300 * len(tokens)
