"""What a full KV block is called by: a hash of all that its keys and values depend on.

They depend on every token up to the block's end, so its hash is taken over its tokens and the hash of the block before
it, and that of the first block over the salt. Equal hashes mean equal tokens from the start on, under the same salt: at
256 bits nobody finds two prompts with one hash, so nobody gets another prompt's blocks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 32
_ROOT = b"pdserve salt"


def extend_hashes(hashes: list[bytes], token_ids: Sequence[int], count: int, block_size: int, salt: str) -> None:
    """Append to ``hashes`` until the first ``count`` blocks of ``token_ids`` have theirs. They must be full blocks."""
    if len(hashes) >= count:
        return
    last = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=_ROOT).digest()
    pack = struct.Struct(f"<{block_size}I").pack
    for block in range(len(hashes), count):
        tokens = pack(*token_ids[block * block_size : (block + 1) * block_size])
        last = hashlib.blake2b(last + tokens, digest_size=HASH_BYTES).digest()
        hashes.append(last)
