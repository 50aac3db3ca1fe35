"""Tests that a copy is done when every rank has done it."""

from __future__ import annotations

from typing import Any

from pdserve.engine.kv_connector.staging.block_copier import RanksCopier
from pdserve.wire.rank import DownloadBlocks, Order, UploadBlocks
from tests.engine.kv_connector.test_staged_transfers import ScriptedCopier


class ScriptedRanks:
    """Further ranks, whose progress the test decides."""

    def __init__(self) -> None:
        self.told: list[Order] = []
        self.copied = 0

    def tell(self, order: Order) -> None:
        self.told.append(order)


def test_the_slowest_rank_decides() -> None:
    own: Any = ScriptedCopier()
    ranks: Any = ScriptedRanks()
    copier: RanksCopier[str] = RanksCopier(own, ranks)
    copier.download("a", (1,), (2,))
    copier.upload("b", (3,), (4,))
    copier.download("c", (5,), (6,))
    assert ranks.told == [DownloadBlocks([1], [2]), UploadBlocks([3], [4]), DownloadBlocks([5], [6])]
    assert (own.downloads, own.uploads) == ([((1,), (2,)), ((5,), (6,))], [((3,), (4,))])
    own.finish(2)
    assert copier.done() == []
    ranks.copied = 1
    assert copier.done() == ["a"]
    ranks.copied = 3
    assert copier.done() == ["b"]
    own.finish()
    assert copier.done() == ["c"]


def test_a_failure_here_is_the_failure() -> None:
    own: Any = ScriptedCopier()
    ranks: Any = ScriptedRanks()
    copier: RanksCopier[str] = RanksCopier(own, ranks)
    assert copier.failure is None
    own.failure = "RuntimeError"
    assert copier.failure == "RuntimeError"
