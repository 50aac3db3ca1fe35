"""How the cores of a machine are shared out: between nodes, and between the ranks of one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def partition(cores: Sequence[int], parts: int) -> list[tuple[int, ...]]:
    """``cores`` in ``parts`` shares as even as possible, larger ones first; round-robin where there are too few.

    Two processes that compute on one core cost each other far more than half their speed: shares overlap only then.
    """
    if parts > len(cores):
        return [(cores[index % len(cores)],) for index in range(parts)]
    size, larger = divmod(len(cores), max(parts, 1))
    starts = [index * size + min(index, larger) for index in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]
