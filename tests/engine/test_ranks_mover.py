"""A copy is done when every rank has done it."""

from __future__ import annotations

from typing import Any

from pdserve.engine.kv_connector.ranks_mover import RanksMover
from pdserve.wire.rank import Download, Order, Upload
from tests.engine.test_staged_transfers import ScriptedMover


class ScriptedFollowers:
    """Other ranks that are as far as a test says."""

    def __init__(self) -> None:
        self.told: list[Order] = []
        self.copied = 0

    def tell(self, order: Order) -> None:
        self.told.append(order)


def test_the_slowest_rank_decides() -> None:
    own: Any = ScriptedMover()
    followers: Any = ScriptedFollowers()
    mover: RanksMover[str] = RanksMover(own, followers)
    mover.download("a", (1,), (2,))
    mover.upload("b", (3,), (4,))
    mover.download("c", (5,), (6,))
    assert followers.told == [Download([1], [2]), Upload([3], [4]), Download([5], [6])]
    assert (own.downloads, own.uploads) == ([((1,), (2,)), ((5,), (6,))], [((3,), (4,))])
    own.finish(2)
    assert mover.done() == []
    followers.copied = 1
    assert mover.done() == ["a"]
    followers.copied = 3
    assert mover.done() == ["b"]
    own.finish()
    assert mover.done() == ["c"]


def test_a_failure_here_is_the_failure() -> None:
    own: Any = ScriptedMover()
    followers: Any = ScriptedFollowers()
    mover: RanksMover[str] = RanksMover(own, followers)
    assert mover.failure is None
    own.failure = "RuntimeError"
    assert mover.failure == "RuntimeError"
