"""A model and a KV cache that knows, for each token, from which tokens and under which salt it was computed.

A slot holds a digest of all tokens up to its own, computed from the slot before it, as real keys and values depend on
all tokens before them. A step first checks its whole context. A block that was shared, moved, evicted or overwritten
wrongly fails an assertion at once, and so does a block of a request with another salt, even if its tokens are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.wire.sampling_params import PromptLogprobs

VOCAB = 40
EOS = 2


def after(digest: int, token: int) -> int:
    return hash((digest, token))


def digests(tokens: Sequence[int]) -> list[int]:
    """Returns the digest of every prefix, the shortest first."""
    found, digest = [], 0
    for token in tokens:
        digest = after(digest, token)
        found.append(digest)
    return found


def choose(digest: int, seed: int) -> int:
    """Returns the token after a prefix, from 2 (end of sequence) to 41."""
    return 2 + hash((digest, seed)) % VOCAB


def answer(prompt: Sequence[int], seed: int, max_tokens: int, max_len: int) -> list[int]:
    """Returns the answer that a request must get, whatever happens to it."""
    tokens = list(prompt)
    digest = digests(tokens)[-1]
    while len(tokens) < min(len(prompt) + max_tokens, max_len):
        token = choose(digest, seed)
        tokens.append(token)
        if token == EOS:
            break
        digest = after(digest, token)
    return tokens[len(prompt) :]


def prompt_logprobs(prompt: Sequence[int], places: range) -> PromptLogprobs:
    """Returns the log probabilities of the tokens at these places of a prompt, each made of all tokens before it."""
    before = [digest % 1000 for digest in digests(prompt)]
    numbers = [float(before[place - 1] + prompt[place]) for place in places]
    return PromptLogprobs(0, struct.pack(f"<{len(numbers)}f", *numbers), bytes(4 * len(numbers)), b"", b"")


def talkative(prompt: Sequence[int], max_tokens: int) -> int:
    """Returns a seed whose answer does not end before ``max_tokens``."""
    return next(seed for seed in range(1000) if len(answer(prompt, seed, max_tokens, 10_000)) == max_tokens)


class Slot(NamedTuple):
    """The keys and values of one token."""

    digest: int
    salt: str


EMPTY = Slot(-1, "")


class FakeModel:
    """The blocks of one engine."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.memory = [[EMPTY] * block_size for _ in range(num_blocks)]

    def run(
        self, known: Sequence[int], start: int, tokens: Sequence[int], block_table: Sequence[int], salt: str
    ) -> list[int]:
        """Writes ``tokens`` at ``start``; returns the digest after each. ``known`` is what the context must hold."""
        context = [self.memory[block_table[i // self.block_size]][i % self.block_size] for i in range(start)]
        wanted = digests(known[:start])
        assert [slot.digest for slot in context] == wanted, (
            "the KV cache holds something else than the request's tokens"
        )
        assert {slot.salt for slot in context} <= {salt}, "a request was given blocks of another salt"
        digest = wanted[-1] if wanted else 0
        new = []
        for position, token in enumerate(tokens, start):
            digest = after(digest, token)
            new.append(digest)
            self.memory[block_table[position // self.block_size]][position % self.block_size] = Slot(digest, salt)
        return new

    def copy(self, copies: dict[int, int]) -> None:
        read = {destination: list(self.memory[source]) for destination, source in copies.items()}
        for destination, content in read.items():
            self.memory[destination] = content

    def clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory[block] = [EMPTY] * self.block_size
