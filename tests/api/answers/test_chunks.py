"""Tests that the fast path writes the same bytes as the full one."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.api.answers import answer as sse
from pdserve.api.answers.answer import ChunkEncoder, ChunkStream, FullChunks, PlainChunks, chunk_stream
from pdserve.api.answers.answer_form import CHAT_FORM, TEXT_FORM, AnswerForm, AnswerOptions, PlainChoices, PromptScores
from pdserve.api.answers.logprobs import ShownToken
from pdserve.api.answers.openai_response import Envelope
from pdserve.api.answers.text_generation import TextDelta
from pdserve.api.generation.request_log import ChoiceOutcome
from pdserve.wire.sampling_params import TokenLogprobs
from pdserve.wire.terms import AnswerIdentity

SURFACES = st.sampled_from([CHAT_FORM, TEXT_FORM])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ['"', '""', "\\", "\x00\x1f\x7f"]
)
OUTCOMES = st.sampled_from([None, None, None, *ChoiceOutcome])
PLAIN = {CHAT_FORM: PlainChoices(CHAT_FORM), TEXT_FORM: PlainChoices(TEXT_FORM)}


def options(
    echoes: Sequence[str], plain: PlainChoices | None, *, logprobs: bool = False, ids: bool = False
) -> AnswerOptions:
    return AnswerOptions(
        AnswerIdentity(bytes(16), 1),
        model="m",
        fingerprint="fp",
        prompt_ids=[[1]] * len(echoes),
        echoes=echoes,
        token_bytes=lambda token_id: b"t%d" % token_id,
        logprobs=logprobs,
        token_ids=ids,
        plain=plain,
    )


def stream_of(form: AnswerForm, encoder: ChunkEncoder, options: AnswerOptions) -> ChunkStream:
    """Returns the stream of a response to prompts whose log probabilities nobody wants."""
    return chunk_stream(form, encoder, options, PromptScores(form, options))


@given(
    SURFACES,
    st.builds(Envelope, id=TEXTS, object=TEXTS, created=st.integers(0, 2**40), model=TEXTS, system_fingerprint=TEXTS),
    st.booleans(),
    st.lists(TEXTS, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), TEXTS, OUTCOMES), max_size=12),
)
@example(
    CHAT_FORM,
    Envelope('""', "", 0, '"":""', ""),
    True,
    ['""'],
    [(0, "", None), (0, '""', None), (0, "x", ChoiceOutcome.STOP)],
)
def test_both_ways_give_the_same_bytes(
    form: AnswerForm,
    envelope: Envelope,
    include_usage: bool,
    echoes: list[str],
    events: list[tuple[int, str, ChoiceOutcome | None]],
) -> None:
    """This holds for any text, choice and order. With an echo, a choice's first chunk has more text than its delta."""
    encoder = ChunkEncoder(envelope, include_usage=include_usage)
    fast = stream_of(form, encoder, options(echoes, PLAIN[form]))
    full = stream_of(form, encoder, options(echoes, None))
    assert isinstance(fast.chunks, PlainChunks)
    assert isinstance(full.chunks, FullChunks)
    for choice, text, outcome in events:
        delta = TextDelta(choice % len(echoes), text, [1], outcome)
        data = fast.events(delta)
        assert data == full.events(delta)
        for line in data.split(b"\n\n")[:-1]:
            json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize("form", [CHAT_FORM, TEXT_FORM])
def test_the_envelope_is_encoded_once_and_then_nothing_but_text(
    form: AnswerForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[type] = []

    class Encoder:
        def encode(self, value: object) -> bytes:
            encoded.append(type(value))
            return msgspec.json.encode(value)

    monkeypatch.setattr(sse, "_encoder", Encoder())
    stream = stream_of(
        form, ChunkEncoder(Envelope("i", "o", 1, "m", "f"), include_usage=True), options([""], PlainChoices(form))
    )
    for number in range(20):
        assert stream.events(TextDelta(0, f"text {number}", [number], ChoiceOutcome.STOP if number == 19 else None))
    assert encoded == [Envelope] + [str] * 20


@pytest.mark.parametrize(("logprobs", "ids"), [(True, False), (False, True)])
def test_what_is_more_than_text_takes_the_full_path(logprobs: bool, ids: bool) -> None:
    encoder = ChunkEncoder(Envelope("i", "o", 1, "m", "f"), include_usage=False)
    stream = stream_of(TEXT_FORM, encoder, options([""], PLAIN[TEXT_FORM], logprobs=logprobs, ids=ids))
    delta = TextDelta(0, "x", [5], None, [ShownToken(5, TokenLogprobs(-1.0, 1, ()), 0)] if logprobs else ())
    choice = msgspec.json.decode(stream.events(delta).removeprefix(b"data: "))["choices"][0]
    assert choice.get("token_ids") == ([5] if ids else None)
    assert (choice["logprobs"] is not None) is logprobs
