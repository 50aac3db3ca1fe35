"""Checksums of KV blocks: the sender announces them on the authenticated channel, the receiver compares what landed.

XXH3 (Collet, 2019), 64 bits. It is no signature, and needs none: what it must equal comes in a signed frame. Seeded
with the block's place in its transfer, so that a block of another transfer, or of another index, does not fit either.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from pdserve.wire.transfer import INDEX_BITS


def digest(block: memoryview, tag: int, index: int) -> int:
    """Of one block's bytes as block ``index`` of the transfer ``tag``."""
    return xxh3_64_intdigest(block, seed=tag << INDEX_BITS | index)
