"""The simulated model, and the answers that requests must get from it, whatever happens to the cluster.

The model is a function of the salt and of all tokens before. It has two tokens in mind at each place: a greedy answer
takes the first, and one that is drawn takes either.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

VOCAB = 48
MAX_MODEL_LEN = 64
EOS = 2
LOGITS = (10.0, 9.0)
"""Those of the two likeliest tokens. All others have 0."""
FIRST_SHARE = 1 / (1 + math.exp(LOGITS[1] - LOGITS[0]))
"""How often the likeliest of the two is drawn."""


def beginning(salt: str) -> int:
    """Returns the digest before the first token."""
    return zlib.crc32(salt.encode())


def after(digest: int, token: int) -> int:
    return hash((digest, token))


def likeliest(digest: int) -> tuple[int, int]:
    """Returns the two likeliest tokens after a prefix: the end in one of 64 cases, otherwise some that have a text."""
    first = EOS if hash((digest, 1)) % 64 == 0 else 3 + hash((digest, 2)) % (VOCAB - 3)
    second = 3 + hash((digest, 3)) % (VOCAB - 3)
    return first, second if second != first else 3 + (second - 2) % (VOCAB - 3)


def text_of(tokens: Sequence[int]) -> str:
    """Returns the text that a client gets for these tokens."""
    return "".join(chr(0x4E00 + token) for token in tokens if token != EOS)


def tokens_of(prompt: Sequence[int], max_tokens: int, salt: str = "", seed: int | None = None) -> list[int]:
    """Returns the tokens of an answer: the likeliest ones, or with a seed those that it draws."""
    digest = beginning(salt)
    for token in prompt:
        digest = after(digest, token)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(token_at(likeliest(digest), len(tokens), seed))
        if tokens[-1] == EOS:
            break
        digest = after(digest, tokens[-1])
    return tokens


def token_at(two: tuple[int, int], position: int, seed: int | None) -> int:
    """Returns an answer's token at a position, of the two likeliest there: the first, or with a seed the drawn one."""
    return two[0] if seed is None else _drawn(*two, seed, position)


def _drawn(first: int, second: int, seed: int, position: int) -> int:
    """Returns the token at which the distribution of the two passes the number that seed and position stand for."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    number = (int.from_bytes(digest, "little") >> 11) * 2.0**-53
    if first < second:
        return first if number < FIRST_SHARE else second
    return second if number < 1 - FIRST_SHARE else first


def ranks_of(prompt: Sequence[int], salt: str = "") -> list[int]:
    """Returns the rank of each token of a prompt after the first one."""
    digest, ranks = beginning(salt), []
    for token, following in pairwise(prompt):
        digest = after(digest, token)
        two = likeliest(digest)
        ranks.append(two.index(following) + 1 if following in two else len(two) + 1)
    return ranks


@dataclass(frozen=True)
class Answer:
    """One answer as a client has to get it."""

    text: str
    finish_reason: str
    num_tokens: int
    """How many tokens the model generates for it, if it is not stopped by its text."""

    @classmethod
    def of(cls, tokens: Sequence[int], stop: str | None) -> Answer:
        """Returns the answer of these tokens, which ends before the text ``stop``."""
        text, reason = text_of(tokens), "stop" if tokens and tokens[-1] == EOS else "length"
        if stop is not None and stop in text:
            text, reason = text[: text.index(stop)], "stop"
        return cls(text, reason, len(tokens))
