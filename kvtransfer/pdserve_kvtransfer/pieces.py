"""The pieces that blocks travel in: which ranks send which heads to which other ranks, their labels and digests.

These words mean the same in the whole package:

* A block has a *number*, which counts the blocks of its prompt and which both engines know (``first_block``), and an
  *id* in the KV cache of each engine, which the other engine is not told (``block_ids``).
* The *heads* of a block are those of its cache group: KV heads, or the units by which ranks split a state.
* A *piece* is the bytes of one block that one prefill rank sends to one decode rank, in one message.
* A *part* counts the pieces that make one block on the decode rank.
* An *index* counts the pieces of a whole prompt on the decode rank. If blocks of some groups have fewer parts than
  those of others, their indexes leave a gap.
* A *tag* names a transfer on its link. It is random, and the decode engine chooses it.
* A *label* is what a message carries: the tag of its transfer, then the index of its piece. A UCX tag consists of the
  label and of one more bit, which the link keeps for itself.

A rank holds a run of heads, or, if there are more ranks than heads, one head that other ranks hold too. In a block's
layout a run of heads is one run of bytes, so nothing is repacked. Where a group has no heads (0), each rank has the
whole block, as if that were its one head.

The sender announces each piece's *digest* on the authenticated channel, and the receiver compares it with the digest of
what landed. The digest is the 64-bit checksum XXH3 (Collet, 2019). It needs no key, because the expected value comes in
a signed frame. It is seeded with the label, so a piece of another transfer, or of another index, does not match either.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from pdserve.wire.transfer import INDEX_BITS


@dataclass(frozen=True, slots=True)
class Piece:
    """The run of heads in each piece from one prefill rank to one decode rank. Heads count from the rank's first."""

    source: int
    target: int
    source_head: int
    target_head: int
    heads: int
    part: int
    parts: int
    """The number of pieces that make one block of this group on the target."""
    most_parts: int
    """The most parts that a block of any group has on the target."""

    def index(self, block: int) -> int:
        """Returns the index of this piece of the prompt's block with this number."""
        return block * self.most_parts + self.part


MAX_RANKS = 256
"""The most ranks that a node may have: more than any has, and few enough to loop over."""


def heads_of(rank: int, ranks: int, heads: int) -> range:
    """Returns the heads that a rank holds. Raises ValueError if they cannot be spread evenly."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"a node has between 1 and {MAX_RANKS} ranks, not {ranks}")
    if not heads:
        return range(1)
    if heads % ranks == 0:
        each = heads // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % heads == 0:
        head = rank // (ranks // heads)
        return range(head, head + 1)
    raise ValueError(f"{heads} heads cannot be spread evenly over {ranks} ranks")


def group_maps(heads: Sequence[int], sources: int, targets: int) -> tuple[tuple[Piece, ...], ...]:
    """Returns ``head_map`` for each group, of which ``heads`` has the heads. Raises ValueError as that does."""
    maps = tuple(head_map(count, sources, targets) for count in heads)
    if len(maps) == 1:
        return maps
    most = [
        max(piece.parts for pieces in maps for piece in pieces if piece.target == target) for target in range(targets)
    ]
    return tuple(tuple(replace(piece, most_parts=most[piece.target]) for piece in pieces) for pieces in maps)


def head_map(heads: int, sources: int, targets: int) -> tuple[Piece, ...]:
    """Returns all pieces of a block, by target and then by head, if all blocks are of one group.

    Each head of each target comes from exactly one source. Raises ValueError if the heads cannot be spread evenly over
    either side.
    """
    heads_of(0, sources, heads)
    heads_of(0, targets, heads)
    held = [heads_of(source, sources, heads) for source in range(sources)]
    pieces: list[Piece] = []
    for target in range(targets):
        wanted = heads_of(target, targets, heads)
        runs = _runs(wanted, [_owner(head, held, target) for head in wanted])
        for part, (source, run) in enumerate(runs):
            source_head, target_head = run.start - held[source].start, run.start - wanted.start
            pieces.append(Piece(source, target, source_head, target_head, len(run), part, len(runs), len(runs)))
    return tuple(pieces)


def _owner(head: int, held: list[range], target: int) -> int:
    """Returns the source that sends a head to a target. If several hold it, different ones serve different targets."""
    owners = [source for source, heads in enumerate(held) if head in heads]
    return owners[target % len(owners)]


def _runs(heads: range, owners: list[int]) -> list[tuple[int, range]]:
    runs: list[tuple[int, range]] = []
    for head, owner in zip(heads, owners, strict=True):
        if runs and runs[-1][0] == owner:
            runs[-1] = (owner, range(runs[-1][1].start, head + 1))
        else:
            runs.append((owner, range(head, head + 1)))
    return runs


_INDEX_MASK = (1 << INDEX_BITS) - 1


def label_of(tag: int, index: int) -> int:
    """Returns the label of a piece, which has ``LABEL_BITS`` bits."""
    return tag << INDEX_BITS | index


def tag_of(label: int) -> int:
    """Returns the tag of the transfer that the sender means."""
    return label >> INDEX_BITS


def index_of(label: int) -> int:
    """Returns the index of the piece."""
    return label & _INDEX_MASK


def digest(piece: memoryview, label: int) -> int:
    """Returns the digest of a piece's bytes, seeded with the label that it travels with."""
    return xxh3_64_intdigest(piece, seed=label)


@dataclass(frozen=True, slots=True)
class CompiledXxhash:
    """The addresses of xxhash's own C functions, for compiled code."""

    digest: int | None
    """``uint64_t (const void *bytes, size_t length, uint64_t label)`` returns what ``digest`` returns."""
    secret: int | None
    """``void (void *secret, uint64_t seed)`` writes the 192 bytes that XXH3 makes of a seed. None if there is none."""


def compiled_xxhash() -> CompiledXxhash | None:
    """Returns the addresses, or None if xxhash was built without names for the functions."""
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
