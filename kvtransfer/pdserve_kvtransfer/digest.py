"""Checksums of KV blocks: the sender announces them on the authenticated channel, the receiver compares what landed.

XXH3 (Collet, 2019), 64 bits. It is no signature, and needs none: what it must equal comes in a signed frame. Seeded
with the block's place in its transfer, so that a block of another transfer, or of another index, does not fit either.
"""

from __future__ import annotations

import ctypes
import importlib.util
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest


def digest(piece: memoryview, label: int) -> int:
    """Of a piece's bytes under the label (``pdserve_kvtransfer.label``) that it travels with."""
    return xxh3_64_intdigest(piece, seed=label)


@dataclass(frozen=True, slots=True)
class CompiledXxhash:
    """Addresses of xxhash's own C functions, for compiled code."""

    digest: int | None
    """``uint64_t (const void *bytes, size_t length, uint64_t label)``: what ``digest`` returns."""
    secret: int | None
    """``void (void *secret, uint64_t seed)``: the 192 bytes that XXH3 makes of a seed. None if it is not to be had."""


def compiled_xxhash() -> CompiledXxhash | None:
    """None if xxhash was built without names for them."""
    module = importlib.util.find_spec("xxhash._xxhash")
    if module is None or module.origin is None:
        return None
    library = ctypes.CDLL(module.origin)
    # The first one uses the widest registers that the CPU has.
    names = ("XXH3_64bits_withSeed_dispatch", "XXH3_64bits_withSeed")
    found = [address for name in names if (address := _address(library, name)) is not None]
    return CompiledXxhash(found[0], _address(library, "XXH3_generateSecret_fromSeed")) if found else None


def _address(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, ctypes.c_void_p).value
