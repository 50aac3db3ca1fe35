"""Numbers of rows that decode steps are padded to, so that a few captured graphs serve steps of any size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FEW = (1, 2, 4)
STEP, COARSE_STEP = 8, 64
COARSE_ABOVE = 128
"""Beyond so many rows a step computes enough that 64 rows of padding no longer matter."""


def decode_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24 and so on, the last one ``max_rows``."""
    sizes = [*FEW, *range(STEP, COARSE_ABOVE, STEP), *range(COARSE_ABOVE, max_rows, COARSE_STEP)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds so many rows; None if none does."""
    at = bisect_left(buckets, rows)
    return buckets[at] if at < len(buckets) else None
