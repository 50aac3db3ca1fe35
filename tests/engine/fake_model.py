"""A model and a KV cache that knows, for each token, from which tokens and under which salt it was computed.

A slot holds a digest of all tokens up to its own, computed from the slot before it, as real keys and values depend on
all tokens before them. A step first checks its whole context. A block that was shared, moved, evicted or overwritten
wrongly fails an assertion at once, and so does a block of a request with another salt, even if its tokens are the same.

It may have cache groups. A step checks what the window of each of its tokens holds, and that a state is that of all
tokens before the step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from pdserve.wire.cache_groups import GroupBlocks, GroupSpec, Keep, laid_out
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


def groups_of(keeps: Sequence[tuple[Keep, int, int]], num_blocks: int, layers: int = 1) -> tuple[GroupBlocks, ...]:
    """Returns cache groups, of each of which its keep, window and number of blocks are given, behind one of all.

    That one has so many ``layers``. A state is as large as two blocks of a layer.
    """
    specs = [GroupSpec("all", Keep.ALL, layers, 1, 16 * layers, "fp32")]
    for i, (keep, window, _) in enumerate(keeps, 1):
        specs.append(GroupSpec(f"group {i}", keep, 1, 1, 32 if keep is Keep.LATEST else 16, "fp32", window))
    counts = [num_blocks, *(count for _, _, count in keeps)]
    return laid_out(specs, counts, [spec.head_bytes for spec in specs])[0]


class FakeModel:
    """The blocks of one engine."""

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[GroupBlocks] = ()) -> None:
        """Without ``groups`` there is one, of ``num_blocks``."""
        self.block_size = block_size
        self._bounded = groups[1:]
        self._has_whole = not groups or groups[0].spec.layers > 0
        total = groups[-1].ids.stop if groups else num_blocks
        self.memory = [[EMPTY] * block_size for _ in range(total)]

    def run(
        self,
        known: Sequence[int],
        start: int,
        tokens: Sequence[int],
        block_table: Sequence[int],
        salt: str,
        others: Sequence[Sequence[int]] = (),
    ) -> list[int]:
        """Writes ``tokens`` at ``start``; returns the digest after each. ``known`` is what the context must hold.

        ``others`` are the tables of the other groups (``StepRow``).
        """
        wanted = digests(known[:start])
        if self._has_whole:
            self._check(block_table, range(start), wanted, salt)
        digest = wanted[-1] if wanted else 0
        new = []
        for token in tokens:
            digest = after(digest, token)
            new.append(digest)
        if self._has_whole:
            self._write(block_table, start, new, salt)
        for group, table in zip(self._bounded, others, strict=True):
            if group.spec.keep is Keep.LATEST:
                source, destination = table
                assert destination in group.ids
                assert source != destination or len(tokens) == 1
                state = self.memory[source][0] if start else EMPTY
                assert source in group.ids if start else source == -1
                assert state == (Slot(wanted[-1], salt) if start else EMPTY), "the state is not that of these tokens"
                self.memory[destination] = [Slot(digest, salt)] * self.block_size
            else:
                assert all(block == -1 or block in group.ids for block in table)
                seen = range(max(0, start - group.spec.window + 1), start)
                self._check(table, seen, wanted[seen.start :], salt)
                self._write(table, start, new, salt)
        return new

    def _check(self, table: Sequence[int], places: range, wanted: Sequence[int], salt: str) -> None:
        blocks = [table[place // self.block_size] for place in places]
        assert -1 not in blocks, "a block was given back that a token sees"
        context = [self.memory[block][place % self.block_size] for block, place in zip(blocks, places, strict=True)]
        assert [slot.digest for slot in context] == list(wanted), (
            "the KV cache holds something else than the request's tokens"
        )
        assert {slot.salt for slot in context} <= {salt}, "a request was given blocks of another salt"

    def _write(self, table: Sequence[int], start: int, new: Sequence[int], salt: str) -> None:
        for position, digest in enumerate(new, start):
            block = table[position // self.block_size]
            assert block != -1, "a token has no block"
            self.memory[block][position % self.block_size] = Slot(digest, salt)

    def copy(self, copies: dict[int, int]) -> None:
        read = {destination: list(self.memory[source]) for destination, source in copies.items()}
        for destination, content in read.items():
            self.memory[destination] = content

    def clear(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory[block] = [EMPTY] * self.block_size
