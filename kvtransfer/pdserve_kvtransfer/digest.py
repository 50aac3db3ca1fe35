"""Checksums of KV blocks: the sender announces them on the authenticated channel, the receiver compares what landed.

XXH3 (Collet, 2019), 64 bits. It is no signature, and needs none: what it must equal comes in a signed frame. Seeded
with the block's place in its transfer, so that a block of another transfer, or of another index, does not fit either.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def digest(piece: memoryview, label: int) -> int:
    """Of a piece's bytes under the label (``pdserve_kvtransfer.label``) that it travels with."""
    return xxh3_64_intdigest(piece, seed=label)
