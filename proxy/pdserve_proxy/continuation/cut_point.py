"""Finds the token of an answer behind which a planned move leaves the new node little to replay.

A node that has prepared has all blocks that were full then. When the answer is cut, it replays the tokens behind them,
each as a row of its own, and the client waits for that. So the proxy lets the old node go on until a block has just
become full, has the new node prepare once more, and cuts then: only the tokens are left that came meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from pdserve.wire.journal import Journal
from pdserve.wire.prepared import Prepared

FEW_TOKENS = 4
"""So many tokens of a choice are replayed in little more time than a step takes that computes one."""


class FullBlockWatch:
    """Says when a block of an answer has just become full. It is shown every entry once, however many there are."""

    def __init__(self, prepared: Prepared) -> None:
        """``prepared`` is what the new node has said."""
        self._prepared = prepared
        self._came: Counter[int] = Counter()
        self._wanted: int | None = None

    def show(self, later: Journal) -> bool | None:
        """Takes what came since the last call, at first since the node prepared.

        Returns whether the node should prepare once more now; None if it need not at all.
        """
        for number, choice in later.choices.items():
            self._came[number] += len(choice.token_ids)
        most = max(self._came.values(), default=0)
        if self._wanted is None:
            more = tokens_to_wait(lacking_now(self._prepared.lacking, later).values(), self._prepared)
            if more is None:
                return None
            self._wanted = most + more
        return most >= self._wanted


def lacking_now(lacking: Mapping[int, int], later: Journal) -> dict[int, int]:
    """Returns what a prepared node lacks of each choice that is not over, with the tokens that came ``later``."""
    over = {number for number, choice in later.choices.items() if choice.over}
    return {number: tokens + len(later.emitted(number)) for number, tokens in lacking.items() if number not in over}


def tokens_to_wait(lacking: Collection[int], prepared: Prepared) -> int | None:
    """Returns after how many more tokens of each choice the node should prepare once more; None if it need not.

    ``lacking`` is what it lacks of each choice now. Choices that have begun together become full together. Of others
    the best is taken: the sum of what they lack is the least.
    """
    block_tokens = prepared.block_tokens
    if max(lacking, default=0) <= FEW_TOKENS or block_tokens == 0:
        return None
    if max(prepared.lacking.values(), default=0) > block_tokens:
        # Its holders did not give it all full blocks: they would not do that the next time.
        return None

    def left_after(more: int) -> int:
        # A choice's last token is never in a block: its logits are what the next step is for.
        return sum((tokens + more - 1) % block_tokens for tokens in lacking)

    return min(range(block_tokens), key=left_after)
