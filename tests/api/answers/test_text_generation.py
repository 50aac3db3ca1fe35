"""Tests that tokens, their text and their log probabilities stay together, however the engine's outputs are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.api.answers.detokenizer import BytesDetokenizer, TokenBytes, WindowDetokenizer, byte_level_bytes
from pdserve.api.answers.stop_strings import StopStrings, StopTable
from pdserve.api.answers.text_generation import ChoiceText, TextDelta
from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.wire.engine import FinishReason, RequestOutput
from pdserve.wire.sampling_params import TokenLogprobs
from tests.examples import examples

PIECES = [b"a", b"b", b"ab", b"ba", b" ", "é".encode(), b"\xc3", b"\xa9", b"\xa9a", b"\xf0\x9f", b"\x98", b"\x80", b""]
EOS = len(PIECES)


def choice_text(
    stops: list[str], *, include: bool = False, min_tokens: int = 0, resumable: bool = False, windows: bool = False
) -> ChoiceText:
    known = TokenBytes(lambda _: None, byte_level_bytes)
    known.update(enumerate(PIECES))
    detokenizer = WindowDetokenizer(
        lambda ids: b"".join(known[i] for i in ids).decode(errors="replace"), frozenset({EOS})
    )
    return ChoiceText(
        0,
        detokenizer if windows else BytesDetokenizer(known, frozenset({EOS})),
        StopStrings(StopTable(stops), include=include),
        frozenset(),
        min_tokens,
        resumable=resumable,
    )


def deltas_of(text: ChoiceText, tokens: list[int], cuts: set[int], *, reported: bool = True) -> list[TextDelta]:
    """Returns the deltas of a choice. A token's log probability is its number; the last token is the stop token."""
    return rest_of(text, tokens, 0, cuts, reported)


@dataclass
class Meaning:
    """The answer that is right when all of it is known."""

    text: str
    tokens: list[int]
    """The tokens that are reported, by their numbers."""
    ends: list[float]
    """The length of text that must be shown before each token is reported."""


def meaning(tokens: list[int], stops: list[str], include: bool, min_tokens: int) -> Meaning:
    known = TokenBytes(lambda _: None, byte_level_bytes)
    known.update(enumerate(PIECES))
    detokenizer, lengths, whole = BytesDetokenizer(known, frozenset()), [0], ""
    for token in tokens:
        whole += detokenizer.add([token])
        lengths.append(len(whole))
    ends = [math.inf] * (len(tokens) + 1)
    for i in reversed(range(len(tokens))):
        ends[i] = lengths[i + 1] if lengths[i + 1] > lengths[i] else ends[i + 1]
    settled = lengths[min(min_tokens, len(tokens))]
    shown = whole + detokenizer.flush()
    matches = [
        (end, end - len(stop))
        for stop in stops
        for end in range(settled + 1, len(shown) + 1)
        if shown[:end].endswith(stop)
    ]
    if len(tokens) <= min_tokens:
        matches = []
    if not matches:
        return Meaning(shown, list(range(len(tokens))), ends)
    end, start = min(matches)
    cut = end if include else start
    return Meaning(shown[:cut], [i for i in range(len(tokens)) if lengths[i] < cut], ends)


@settings(max_examples=examples(400))
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    st.lists(st.sampled_from(["a", "ab", "bb", "aab", "é", "aé", "\ufffd"]), max_size=2),
    st.booleans(),
    st.integers(0, 6),
    st.sets(st.integers(1, 14)),
)
@example([0, 1], ["ab"], False, 1, {1})
@example([6, 7], [], False, 0, {1})
@example([6], ["\ufffd"], False, 1, set())
def test_tokens_go_out_with_their_text(
    answer: list[int], stops: list[str], include: bool, min_tokens: int, cuts: set[int]
) -> None:
    wanted = meaning(answer, stops, include, min_tokens)
    deltas = deltas_of(choice_text(stops, include=include, min_tokens=min_tokens), [*answer, EOS], cuts)
    assert "".join(delta.text for delta in deltas) == wanted.text
    assert [int(token.logprobs.chosen) for delta in deltas for token in delta.tokens if token.logprobs] == wanted.tokens
    shown, reported = 0, 0
    for delta in deltas[:-1]:
        shown, reported = shown + len(delta.text), reported + len(delta.tokens)
        assert reported == sum(end <= shown for end in wanted.ends), "no sooner and no later than their text"
    assert [delta.outcome for delta in deltas] == [None] * (len(deltas) - 1) + [ChoiceOutcome.STOP]


@pytest.mark.parametrize("scores_only", [False, True])
def test_the_model_s_end_is_told_of_an_answer_and_not_of_scores_alone(scores_only: bool) -> None:
    detokenizer = WindowDetokenizer(lambda ids: "", frozenset({EOS}))
    text = ChoiceText(0, detokenizer, StopStrings(StopTable([])), frozenset(), scores_only=scores_only)
    delta = text.add(RequestOutput(1, [EOS], FinishReason.STOP))
    wanted = (ChoiceOutcome.LENGTH, None) if scores_only else (ChoiceOutcome.STOP, EOS)
    assert (delta.outcome, delta.matched_stop) == wanted


@settings(max_examples=examples(200))
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    st.lists(st.sampled_from(["a", "ab", "bb", "aab", "é", "aé", "\ufffd"]), max_size=2),
    st.booleans(),
    st.integers(0, 6),
    st.sets(st.integers(1, 14)),
)
def test_an_answer_does_not_depend_on_how_many_tokens_come_at_once(
    answer: list[int], stops: list[str], reported: bool, min_tokens: int, cuts: set[int]
) -> None:
    def answer_of(cuts: set[int]) -> tuple[str, list[int], ChoiceOutcome | None]:
        deltas = deltas_of(choice_text(stops, min_tokens=min_tokens), [*answer, EOS], cuts, reported=reported)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return "".join(delta.text for delta in deltas), token_ids, deltas[-1].outcome

    assert answer_of(cuts) == answer_of(set(range(1, 15)))


@settings(max_examples=examples(400))
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    st.lists(st.sampled_from(["a", "ab", "bb", "aab", "é", "aé", "\ufffd"]), max_size=2),
    st.booleans(),
    st.integers(0, 6),
    st.sets(st.integers(1, 14)),
    st.booleans(),
    st.booleans(),
)
@example([0, 6], ["ab"], False, 0, {1, 2}, True, False)
@example([2, 0], ["aé", "ab"], False, 0, {1, 2}, True, False)
def test_another_node_goes_on_after_any_delta(
    answer: list[int], stops: list[str], include: bool, min_tokens: int, cuts: set[int], reported: bool, windows: bool
) -> None:
    """The client has some deltas of one node: what another node makes of the tokens after theirs is the rest."""

    def new_text() -> ChoiceText:
        return choice_text(stops, include=include, min_tokens=min_tokens, resumable=True, windows=windows)

    tokens = [*answer, EOS]
    deltas = deltas_of(new_text(), tokens, cuts, reported=reported)
    for count in range(1, len(deltas) + 1):
        has = [token_id for delta in deltas[:count] for token_id in delta.token_ids]
        text = new_text()
        assert list(text.resume(has, logprobs=reported).token_ids) == list(has)
        rest = [] if text.stopped else rest_of(text, tokens, len(has), cuts, reported)
        assert "".join(delta.text for delta in rest) == "".join(delta.text for delta in deltas[count:])
        ids, later_ids = (
            [token_id for delta in part for token_id in delta.token_ids] for part in (rest, deltas[count:])
        )
        assert ids == later_ids
        shown, later_shown = ([token for delta in part for token in delta.tokens] for part in (rest, deltas[count:]))
        assert shown == later_shown
        assert text.stopped or rest[-1].outcome == deltas[-1].outcome


def rest_of(text: ChoiceText, tokens: list[int], start: int, cuts: set[int], reported: bool) -> list[TextDelta]:
    """The deltas after the first ``start`` tokens, which end the answer if they are all."""
    if start == len(tokens):
        return [text.add(RequestOutput(0, [], FinishReason.STOP))]
    edges = [start, *sorted(cut for cut in cuts if start < cut < len(tokens)), len(tokens)]
    deltas = []
    for begin, end in pairwise(edges):
        finish = FinishReason.STOP if end == len(tokens) else None
        logprobs = [TokenLogprobs(float(i), 1, ()) for i in range(begin, end)] if reported else None
        deltas.append(text.add(RequestOutput(0, tokens[begin:end], finish, logprobs=logprobs)))
        if deltas[-1].outcome is not None:
            break
    return deltas


@pytest.mark.parametrize("held", [[0], [6], [0, 6]])
def test_a_resumable_choice_that_fails_shows_nothing_that_was_held_back(held: list[int]) -> None:
    """Another node has that text in the same state, and may show it with what follows."""
    text = choice_text(["ab"], resumable=True)
    assert text.add(RequestOutput(0, held)).text == ""
    assert text.add(RequestOutput(0, [], FinishReason.ERROR)).text == ""
    assert text.break_off().text == ""


@pytest.mark.parametrize("held", [[0], [6], [0, 6]])
def test_what_was_held_back_is_shown_when_an_answer_breaks_off(held: list[int]) -> None:
    text = choice_text(["ab"])
    assert text.add(RequestOutput(0, held)).text == ""
    assert text.break_off().text == "".join(PIECES[i].decode(errors="replace") for i in held)


def test_offsets_are_those_of_the_text() -> None:
    tokens = [2, 4, 6, 7, 0, EOS]  # "ab", " ", "é" in two tokens, "a"
    [delta] = deltas_of(choice_text([]), tokens, set())
    assert delta.text == "ab éa"
    assert [token.offset for token in delta.tokens] == [0, 2, 3, 3, 4]


def test_without_log_probabilities_nothing_is_reported() -> None:
    delta = choice_text([]).add(RequestOutput(0, [0, 1], None))
    assert delta.text == "ab"
    assert not delta.tokens
