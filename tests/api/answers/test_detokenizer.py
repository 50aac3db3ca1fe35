"""Tests that pieces of text add up to the whole and never cut a character, whatever the tokens and the cuts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pdserve.api.answers.detokenizer import (
    REPLACEMENT,
    BytesDetokenizer,
    Detokenizer,
    TokenBytes,
    WindowDetokenizer,
    byte_level_bytes,
    piece_bytes,
)
from pdserve.api.requests.tokenizer import Tokenizer
from tests.examples import examples

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SPECIAL = 2


def sentencepiece_like() -> Backend:
    """Returns a backend like Llama 2's: it marks spaces, has tokens for single bytes, and strips the first space."""
    chars = [chr(code) for code in range(0x21, 0x7F)] + ["▁", "é", "漢"]
    names = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *chars, "▁a", "▁the"]
    backend = Backend(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="module")
def byte_level(tokenizer: Tokenizer) -> Backend:
    return tokenizer._backend


@pytest.fixture(scope="module")
def sentencepiece() -> Backend:
    return sentencepiece_like()


def window(backend: Backend, skip: frozenset[int] = frozenset()) -> Detokenizer:
    return WindowDetokenizer(lambda ids: str(backend.decode(ids, skip_special_tokens=False)), skip)


def pieces(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Returns the pieces of text that come out for ``ids``, cut at the places ``cuts``."""
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    parts = [detokenizer.add(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return [*parts, detokenizer.flush()]


CUTS = st.lists(st.integers(0, 1_000), max_size=20)


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=examples(200))
def test_byte_level_text(byte_level: Backend, text: str, cuts: list[int]) -> None:
    ids = byte_level.encode(text, add_special_tokens=False).ids
    detokenizer = BytesDetokenizer(TokenBytes(byte_level.id_to_token, byte_level_bytes), frozenset())
    assert "".join(pieces(detokenizer, ids, cuts)) == byte_level.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(0, 49_151), max_size=40), cuts=CUTS)
@settings(max_examples=examples(300))
def test_byte_level_any_tokens(byte_level: Backend, ids: list[int], cuts: list[int]) -> None:
    """The ids may also be tokens whose bytes together are not valid UTF-8."""
    detokenizer = BytesDetokenizer(TokenBytes(byte_level.id_to_token, byte_level_bytes), frozenset())
    assert "".join(pieces(detokenizer, ids, cuts)) == byte_level.decode(ids, skip_special_tokens=False)


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=examples(200))
def test_window_agrees_on_byte_level_text(byte_level: Backend, text: str, cuts: list[int]) -> None:
    ids = byte_level.encode(text, add_special_tokens=False).ids
    assume(byte_level.decode(ids) == text)  # This vocabulary lacks the tokens of a few bytes.
    assert "".join(pieces(window(byte_level), ids, cuts)) == text


@given(text=TEXTS, cuts=CUTS)
@settings(max_examples=examples(200))
def test_sentencepiece_text(sentencepiece: Backend, text: str, cuts: list[int]) -> None:
    ids = sentencepiece.encode(text).ids
    assert "".join(pieces(window(sentencepiece), ids, cuts)) == sentencepiece.decode(ids, skip_special_tokens=False)


@given(ids=st.lists(st.integers(259, 357), max_size=40), cuts=CUTS)
@settings(max_examples=examples(200))
def test_sentencepiece_any_tokens_that_are_text(sentencepiece: Backend, ids: list[int], cuts: list[int]) -> None:
    assert "".join(pieces(window(sentencepiece), ids, cuts)) == sentencepiece.decode(ids)


@given(text=TEXTS, at=st.integers(0, 100), cuts=CUTS)
@settings(max_examples=examples(100))
def test_skipped_tokens_leave_no_trace(sentencepiece: Backend, text: str, at: int, cuts: list[int]) -> None:
    ids = sentencepiece.encode(text).ids
    with_special = [*ids[:at], SPECIAL, *ids[at:]]
    assert "".join(pieces(window(sentencepiece, frozenset({SPECIAL})), with_special, cuts)) == sentencepiece.decode(ids)


@pytest.mark.parametrize("make", ["byte_level", "sentencepiece"])
def test_no_character_is_shown_in_halves(make: str, request: pytest.FixtureRequest) -> None:
    backend: Backend = request.getfixturevalue(make)
    text = "é 漢字 👩‍👩‍👧 ok"
    detokenizer: Detokenizer = (
        BytesDetokenizer(TokenBytes(backend.id_to_token, byte_level_bytes), frozenset())
        if make == "byte_level"
        else window(backend)
    )
    shown = [detokenizer.add([token_id]) for token_id in backend.encode(text, add_special_tokens=False).ids]
    assert not any(REPLACEMENT in piece for piece in shown)
    assert "".join(shown) == text
    assert detokenizer.flush() == ""


def test_an_incomplete_end_is_flushed(tokenizer: Tokenizer, byte_level: Backend) -> None:
    first, *_ = byte_level.encode("👧", add_special_tokens=False).ids
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    assert detokenizer.add([first]) == ""
    assert detokenizer.flush() == REPLACEMENT


def test_special_tokens_are_skipped_or_shown_as_asked(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("Hi", add_special_tokens=False), SPECIAL]
    assert tokenizer.detokenizer(skip_special_tokens=True).add(ids) == "Hi"
    assert tokenizer.detokenizer(skip_special_tokens=False).add(ids) == "Hi<|im_end|>"


def test_work_does_not_grow_with_the_output(sentencepiece: Backend) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(sentencepiece.decode(ids, skip_special_tokens=False))

    ids = sentencepiece.encode("the same words again 漢字 and again " * 50).ids
    detokenizer = WindowDetokenizer(decode, frozenset())
    for token_id in ids:
        detokenizer.add([token_id])
    assert longest <= 8


def test_each_token_of_a_byte_level_vocabulary_is_looked_at_once(byte_level: Backend) -> None:
    """The detokenizer keeps no more of an output than a part of one character."""
    looked_at: Counter[int] = Counter()

    class Counted(TokenBytes):
        def __getitem__(self, token_id: int) -> bytes:
            looked_at[token_id] += 1
            return super().__getitem__(token_id)

    ids = byte_level.encode("the same words again 漢字 and again " * 50, add_special_tokens=False).ids
    detokenizer = BytesDetokenizer(Counted(byte_level.id_to_token, byte_level_bytes), frozenset())
    for token_id in ids:
        detokenizer.add([token_id])
        kept, _ = detokenizer._decoder.getstate()
        assert len(kept) < 4
    assert looked_at == Counter(ids)


def test_garbage_bytes_are_not_held_for_ever(sentencepiece: Backend) -> None:
    detokenizer = window(sentencepiece)
    stray: Callable[[], str] = lambda: detokenizer.add([3 + 0x80])  # noqa: E731
    assert REPLACEMENT in "".join(stray() for _ in range(5))


@pytest.mark.parametrize(
    ("piece", "data"),
    [("\u2581the", b" the"), ("<0xE2>", b"\xe2"), ("<0x0A>", b"\n"), ("<s>", b"<s>"), ("\u00fc", "\u00fc".encode())],
)
def test_bytes_of_pieces(piece: str, data: bytes) -> None:
    assert piece_bytes(piece) == data


def test_bytes_of_tokens_make_up_their_text(tokenizer: Tokenizer) -> None:
    text = "Hello, world! 漢字 👩\u200d👩\u200d👧\n\tok"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    """A request may allow only tokens that have no text."""
    looked_at = 0

    def decode(ids: list[int]) -> str:
        nonlocal looked_at
        looked_at += len(ids)
        return "".join("" if token_id == 0 else chr(token_id) for token_id in ids)

    text = "Hi" + "\0" * 500 + " there" + "\0" * 40 + "!"
    detokenizer = WindowDetokenizer(decode, frozenset())
    shown = "".join(detokenizer.add([ord(char)]) for char in text) + detokenizer.flush()
    assert shown == "Hi there!"
    assert looked_at < 20 * len(text)
