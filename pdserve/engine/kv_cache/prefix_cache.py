"""Finds KV blocks again by their hash, and says which of them goes first when blocks run out.

Each full block has a hash of all that its keys and values depend on. They depend on every token up to the block's end,
so a block's hash covers its tokens and the hash of the block before it; the first block's covers the salt. Equal hashes
mean equal tokens from the start on, under the same salt: at 256 bits two prompts with one hash cannot be found, so no
request gets another prompt's blocks.

A block is added once its keys and values are final. It can be found while a request holds it (*in use*) and after the
last one has freed it (*idle*), until its memory is needed for other tokens: the least recently used block goes first.
Every operation takes constant time a block.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.wire.transfer import BLOCK_HASH_BYTES

_ROOT = b"pdserve salt"


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], count: int, block_size: int, salt: str) -> None:
    """Appends to ``hashes`` until it has one for each of the first ``count`` blocks, which are full."""
    if len(hashes) >= count:
        return
    last = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=BLOCK_HASH_BYTES, person=_ROOT).digest()
    pack = struct.Struct(f"<{block_size}I").pack
    for block in range(len(hashes), count):
        tokens = pack(*token_ids[block * block_size : (block + 1) * block_size])
        last = hashlib.blake2b(last + tokens, digest_size=BLOCK_HASH_BYTES).digest()
        hashes.append(last)


@dataclass(slots=True)
class Match:
    """The longest prefix of one list of hashes that was in the cache when it was last looked up."""

    blocks: list[int] = field(default_factory=list)
    as_of: int = 0
    """The number of blocks that the cache had forgotten when it was looked up."""
    usable: int = 0
    """How many of ``blocks`` every other group could go on from when that was last looked up."""
    usable_as_of: tuple[int, ...] = ()
    """The changes of the other groups' caches, and the number of blocks and of those asked for, at that time."""


class PrefixCache:
    """Knows the blocks' hashes and the order of idle blocks. The block manager knows which blocks are held."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_forgotten = 0
        self.num_changes = 0
        """How often a block was added or forgotten."""

    def __len__(self) -> int:
        """Returns the number of blocks that can be found."""
        return len(self._hash_of)

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def block_of(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, or None if the cache has none."""
        return self._block_of.get(block_hash)

    def match(self, hashes: Sequence[bytes], count: int, match: Match) -> None:
        """Brings ``match`` up to date with the longest prefix of the first ``count`` of ``hashes`` that is cached.

        ``hashes`` may have grown since the last time, and not changed otherwise. The search goes on where it ended last
        time, unless the cache has forgotten a block since: a request that waits is looked up in every step.
        """
        if match.as_of != self._num_forgotten:
            match.blocks.clear()
            match.as_of = self._num_forgotten
        for index in range(len(match.blocks), count):
            block = self._block_of.get(hashes[index])
            if block is None:
                break
            match.blocks.append(block)

    def add(self, block: int, block_hash: bytes) -> None:
        """Lets a block that is in use be found. If another block has the same hash, that one stays the one found."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.num_changes += 1

    def drop(self, block: int) -> None:
        """Forgets a block that is in use, if it was known."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._num_forgotten += 1
            self.num_changes += 1

    def rest(self, block: int) -> None:
        """Notes that a block has become idle."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """Notes that an idle block is in use again."""
        del self._idle[block]

    def evict(self) -> int:
        """Forgets the least recently used idle block and returns it."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        self._num_forgotten += 1
        self.num_changes += 1
        return block
