"""What every piece on its way is labelled with: its transfer's tag, then its index."""

from __future__ import annotations

from pdserve.wire.transfer import INDEX_BITS

_INDEX_MASK = (1 << INDEX_BITS) - 1


def label_of(tag: int, index: int) -> int:
    """Of ``LABEL_BITS`` bits."""
    return tag << INDEX_BITS | index


def tag_of(label: int) -> int:
    """Which transfer the sender means."""
    return label >> INDEX_BITS


def index_of(label: int) -> int:
    """Which piece of it."""
    return label & _INDEX_MASK
