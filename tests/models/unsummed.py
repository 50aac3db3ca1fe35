"""A rank alone, whose results tests add up themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Unsummed:
    """A rank whose results the test adds up."""

    rank: int
    size: int

    def begin_step(self) -> None:
        pass

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("experts gather nothing")

    def finish_step(self) -> None:
        pass

    def warmed_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class Ungathered(Unsummed):
    """One rank, which takes its part of the sums and of the logits for the whole."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x
