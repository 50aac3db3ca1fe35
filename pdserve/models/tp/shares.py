"""Says which part of a model each rank holds, and what a group of ranks can do.

Megatron-LM splits models in the same way (Shoeybi et al., 2019).
"""

from __future__ import annotations

from typing import Protocol

import torch

from pdserve.errors import ModelError


class TpGroup(Protocol):
    """The ranks that together compute one model. Every rank calls the same operations in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def begin_step(self) -> None:
        """Announces that this rank begins the next step. The others wait for a rank that does not."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, which may overwrite ``x``."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Joins ``[rows, n]`` of all ranks, in rank order.

        Returns ``[rows, size * n]`` on rank 0, which alone samples, and ``[rows, 0]`` on the others.
        """

    def finish_step(self) -> None:
        """Returns once all operations are done. Raises RankLost if another rank keeps them from that for too long."""

    def warmed_up(self) -> None:
        """Notes that all that steps need is compiled. Until then, another rank may take much longer."""

    def close(self) -> None: ...


class Alone:
    """The group of a rank that computes the whole model."""

    rank, size = 0, 1

    def begin_step(self) -> None:
        pass

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def finish_step(self) -> None:
        pass

    def warmed_up(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()


def share(tp: TpGroup, total: int, what: str) -> slice:
    """Returns this rank's contiguous part of ``total`` equal things. Raises ModelError with ``what`` if uneven."""
    if total % tp.size:
        fitting = [size for size in range(1, total + 1) if total % size == 0]
        raise ModelError(
            f"--tensor-parallel-size {tp.size} does not divide the model's {total} {what}; these do: {fitting}"
        )
    each = total // tp.size
    return slice(tp.rank * each, (tp.rank + 1) * each)


LEAST_CHANNELS = 512
"""Ranks share experts out where each would have fewer channels of every one.

Products of few channels are slow, and their weights in blocks of 256 numbers would be cut within a block.
"""


def shares_out_experts(ranks: int, experts: int, channels: int) -> bool:
    """Returns whether each of so many ranks has some of the experts, and not a part of the channels of each."""
    return ranks > 1 and experts % ranks == 0 and channels < LEAST_CHANNELS * ranks


def expert_share(tp: TpGroup, experts: int, channels: int) -> tuple[range, slice]:
    """Returns this rank's experts of a layer and its channels of each. Raises ModelError if neither can be shared."""
    if shares_out_experts(tp.size, experts, channels):
        each = experts // tp.size
        return range(tp.rank * each, (tp.rank + 1) * each), slice(0, channels)
    return range(experts), share(tp, channels, "channels of an expert")


def vocab_share(tp: TpGroup, vocab_size: int) -> slice:
    """Returns this rank's part of the vocabulary. All parts are equal, but the last ones may be smaller, or empty."""
    each = vocab_part(tp, vocab_size)
    return slice(min(tp.rank * each, vocab_size), min((tp.rank + 1) * each, vocab_size))


def vocab_part(tp: TpGroup, vocab_size: int) -> int:
    """Returns how many entries the largest part of the vocabulary has."""
    return -(-vocab_size // tp.size)


def kv_share(tp: TpGroup, heads: int, kv_heads: int) -> slice:
    """Returns the KV heads that this rank's query heads read.

    With more ranks than KV heads that is one head, which other ranks hold as well.
    """
    mine = share(tp, heads, "attention heads")
    group = heads // kv_heads
    if kv_heads % tp.size and tp.size % kv_heads:
        raise ModelError(
            f"--tensor-parallel-size {tp.size} neither divides the model's {kv_heads} KV heads "
            "nor is a multiple of them"
        )
    return slice(mine.start // group, (mine.stop - 1) // group + 1)


def spread(heads: slice, head_dim: int) -> slice:
    """Returns the rows of a projection that belong to these heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)
