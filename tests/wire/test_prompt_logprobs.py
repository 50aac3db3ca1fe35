"""Tests that a frame holds the most that is known of a prompt and of its first tokens."""

from __future__ import annotations

import pytest

from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.wire.ids import TransferId
from pdserve.wire.sampling_params import (
    MAX_SENT_BYTES,
    NUMBER_BYTES,
    PromptLogprobs,
    SampledToken,
    TokenLogprobs,
    can_be_sent,
)
from pdserve.wire.transfer import FirstToken, ToDecode

SECRET = b"the secret of a cluster"
CHOICES = 128
NAMED_TOKENS = 128
ID = 2**31 - 1


@pytest.mark.parametrize("top_count", [0, 1, 20])
def test_what_can_be_sent_fits_into_a_frame_beside_all_first_tokens(top_count: int) -> None:
    tokens = MAX_SENT_BYTES // (2 * NUMBER_BYTES * (1 + top_count))
    assert can_be_sent(tokens, top_count)
    assert not can_be_sent(tokens + 1, top_count)
    own, top = b"\xff" * NUMBER_BYTES * tokens, b"\xff" * NUMBER_BYTES * tokens * top_count
    first = SampledToken(ID, TokenLogprobs(-0.1, ID, ((ID, -0.1),) * NAMED_TOKENS))
    message = FirstToken(
        TransferId(b"u" * 16, 0, b"d" * 16),
        (first,) * CHOICES,
        tokens,
        prompt_logprobs=PromptLogprobs(top_count, own, own, top, top),
    )
    frame = Sealer(SECRET, Purpose.TRANSFER, b"p" * 16).seal(message, b"d" * 16)
    opener: Opener[ToDecode] = Opener(SECRET, Purpose.TRANSFER, ToDecode, receiver=b"d" * 16)  # type: ignore[arg-type]
    assert opener.open(frame) == message
