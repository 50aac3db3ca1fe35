"""Copies of KV blocks on all ranks of a node: rank 0 says what, and hears when all have done it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

from pdserve.engine.followers import Followers
from pdserve.engine.kv_connector.block_mover import BlockMover, Key
from pdserve.wire.rank import Download, Upload


class RanksMover(Generic[Key]):
    """Satisfies ``Mover``. The other ranks get each order between the same steps as rank 0's own mover.

    Every rank carries out its orders one after another, so counting them says which are done everywhere.
    """

    def __init__(self, own: BlockMover[Key], followers: Followers) -> None:
        """``own`` is this object's to close."""
        self._own, self._followers = own, followers
        self._done_here: deque[Key] = deque()
        self._done_everywhere = 0

    @property
    def failure(self) -> str | None:
        return self._own.failure

    def download(self, key: Key, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._followers.tell(Download(list(blocks), list(slots)))
        self._own.download(key, blocks, slots)

    def upload(self, key: Key, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._followers.tell(Upload(list(slots), list(blocks)))
        self._own.upload(key, slots, blocks)

    def done(self) -> list[Key]:
        self._done_here += self._own.done()
        everywhere = self._followers.copied
        ended = []
        while self._done_here and self._done_everywhere < everywhere:
            ended.append(self._done_here.popleft())
            self._done_everywhere += 1
        return ended

    def close(self, timeout_s: float) -> None:
        self._own.close(timeout_s)
