"""Offers the blocks of running answers to the prefill nodes of their prompts. A decode node does so for KV return."""

from __future__ import annotations

from pdserve.engine.kv_connector.transfers import Fetches
from pdserve.engine.request import Request
from pdserve.engine.scheduling.batch_plan import BatchPlan
from pdserve.wire.transfer import MAX_HASHES

OFFER_S = 0.25
"""Offers are made so often, and at the end of each request."""
RETURNS_PER_S = 6
"""Where there are many streams, each is offered less often: a transfer costs each node some 3 ms of CPU time, and all
of them together are to take less than 2 % of a core. Requests that end come first, because nothing is offered of them
later."""
ALONE = 4
"""So many texts may come in transfers of their own, when they are offered together (``kv_return``)."""
TEXT_SHARE = 0.1
"""What each text costs at most that is offered with others, its offer included, as a part of what a transfer costs."""
MAX_AHEAD_S = 2.0
"""Where more requests end than offers may be made, those beyond this are not offered."""
BLOCKS_FOR_ONE = 256
"""An offer names all blocks of a text. So that long texts cost no more by the token than short ones, a text of so many
blocks is offered again when two of them are new, one of twice as many when three are, and so on."""


class ReturnOffers:
    """Names a text's blocks to the prefill node as soon as more of them are full than it was told.

    It looks at running requests four times a second at most, so a decode step costs nothing for it.
    """

    def __init__(self, transfers: Fetches, block_size: int) -> None:
        self._transfers = transfers
        self._block_size = block_size
        self._now = 0.0
        self._next_at = 0.0
        self._ends_at = 0.0
        """When so many ends could have been offered as were, if they had come evenly."""

    def stepped(self, plan: BatchPlan, now: float) -> None:
        """Offers what has become full, if it is time."""
        self._now = now
        if now < self._next_at:
            return
        made = sum(self._offer(work.request, BLOCKS_FOR_ONE) for work in plan.work)
        self._next_at = now + max(OFFER_S, together(made) / RETURNS_PER_S)

    def ended(self, request: Request) -> None:
        """Offers what has become full since the last time. The request still has its blocks."""
        if self._ends_at - self._now < MAX_AHEAD_S and self._offer(request, 0):
            self._ends_at = max(self._ends_at, self._now) + 1 / RETURNS_PER_S
            self._next_at = max(self._next_at, self._now) + 1 / RETURNS_PER_S

    def _offer(self, request: Request, blocks_for_one: int) -> bool:
        """Returns whether the request had something to offer."""
        target = (request.parent or request).return_to
        if target is None or request.terms.fetch_only or not request.num_generated_tokens:
            return False
        full = min(request.num_computed_tokens // self._block_size, len(request.block_hashes), MAX_HASHES)
        rest = full // blocks_for_one if blocks_for_one else 0
        if full - request.offered_blocks <= rest:
            return False
        request.offered_blocks = full
        self._transfers.offer(target, tuple(request.block_hashes[:full]), request.terms.prompt.request_id)
        return True


def together(texts: int) -> float:
    """Returns how many transfers of one text cost as much as those of so many texts that are offered together."""
    return min(texts, ALONE + TEXT_SHARE * texts)
