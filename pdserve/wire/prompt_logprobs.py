"""The log probabilities of a prompt's tokens, packed as arrays of numbers.

A prompt may have a hundred thousand tokens. As arrays they cost the step loop and the transfer thread no time for each
token, and they keep every bit of what the model gave.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

from pdserve.wire.sampling_params import TokenLogprobs

NUMBER_BYTES = 4
MAX_SENT_BYTES = 3 * 2**20
"""How many bytes of log probabilities one message between hosts carries. They fit into a frame."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities by the model's own distribution, of some tokens that follow each other.

    The first token of a prompt has none. All numbers are little-endian and have four bytes.
    """

    top_count: Annotated[int, msgspec.Meta(ge=0)]
    """How many of the likeliest tokens each token has beside it."""
    chosen: bytes
    """A floating-point number for each token."""
    ranks: bytes
    """An integer for each token: its rank by probability, where 1 is the likeliest."""
    top_ids: bytes
    """The ids of the likeliest tokens, ``top_count`` for each token, the likeliest first."""
    top_logprobs: bytes
    """The floating-point numbers of ``top_ids``."""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) // NUMBER_BYTES

    def fits(self, num_tokens: int, top_count: int) -> bool:
        """Returns whether this has numbers for so many tokens, and for so many of the likeliest beside each."""
        tokens, top = num_tokens * NUMBER_BYTES, num_tokens * top_count * NUMBER_BYTES
        lengths = (len(self.chosen), len(self.ranks), len(self.top_ids), len(self.top_logprobs))
        return self.top_count == top_count and lengths == (tokens, tokens, top, top)

    def tokens(self, start: int, end: int) -> list[TokenLogprobs]:
        """Returns what is known of the tokens from ``start`` to ``end``, as far as there are so many."""
        end, count = min(end, self.num_tokens), self.top_count
        chosen, ranks = _floats(self.chosen, start, end), _integers(self.ranks, start, end)
        ids = _integers(self.top_ids, start * count, end * count)
        logprobs = _floats(self.top_logprobs, start * count, end * count)
        top = list(zip(ids, logprobs, strict=True))
        return [
            TokenLogprobs(own, rank, tuple(top[index * count : (index + 1) * count]))
            for index, (own, rank) in enumerate(zip(chosen, ranks, strict=True))
        ]


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Returns parts that follow each other as one. There is at least one."""
    if len(parts) == 1:
        return parts[0]
    return PromptLogprobs(
        parts[0].top_count,
        b"".join(part.chosen for part in parts),
        b"".join(part.ranks for part in parts),
        b"".join(part.top_ids for part in parts),
        b"".join(part.top_logprobs for part in parts),
    )


def can_be_sent(num_tokens: int, top_count: int) -> bool:
    """Returns whether one message between hosts can carry what is known of so many tokens."""
    return num_tokens * (1 + top_count) * 2 * NUMBER_BYTES <= MAX_SENT_BYTES


def _floats(packed: bytes, start: int, end: int) -> tuple[float, ...]:
    return struct.unpack(f"<{max(end - start, 0)}f", packed[start * NUMBER_BYTES : end * NUMBER_BYTES])


def _integers(packed: bytes, start: int, end: int) -> tuple[int, ...]:
    return struct.unpack(f"<{max(end - start, 0)}I", packed[start * NUMBER_BYTES : end * NUMBER_BYTES])
