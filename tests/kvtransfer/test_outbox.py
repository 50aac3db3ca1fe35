from __future__ import annotations

import pytest

from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling import SampledToken
from pdserve_kvtransfer.events import (
    BlocksReleased,
    FailureKind,
    FetchCancelled,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    TransferEvent,
)
from pdserve_kvtransfer.outbox import Outbox

ONE = TransferId(new_id(), 0, new_id())
TWO = TransferId(new_id(), 0, new_id())


@pytest.fixture
def outbox() -> Outbox:
    made = Outbox()
    made.opened(ONE)
    return made


def test_events_come_in_order_and_once(outbox: Outbox) -> None:
    events: list[TransferEvent] = [FirstTokenArrived(ONE, (SampledToken(1),), 0), FetchLanded(ONE, 0.1, 10)]
    for event in events:
        outbox.put(event)
    assert outbox.take_news() and not outbox.take_news()
    assert outbox.drain() == events
    assert outbox.drain() == []


@pytest.mark.parametrize(
    ("end", "quarantined"),
    [
        (FetchLanded(ONE, 0.1, 10), ()),
        (FetchFailed(ONE, "why", 1, (4, 5), FailureKind.REFUSED), (4, 5)),
        (FetchCancelled(ONE, (6,)), (6,)),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_cancel_rules_whatever_is_on_its_way(
    outbox: Outbox, end: FetchLanded | FetchFailed | FetchCancelled, quarantined: tuple[int, ...], before: bool
) -> None:
    if before:
        assert outbox.cancel(ONE)
    outbox.put(FirstTokenArrived(ONE, (SampledToken(1),), 0))
    outbox.put(end)
    outbox.put(BlocksReleased((9,)))
    if not before:
        assert outbox.cancel(ONE)
    assert outbox.drain() == [FetchCancelled(ONE, quarantined), BlocksReleased((9,))]


def test_an_end_that_was_seen_cannot_be_cancelled(outbox: Outbox) -> None:
    outbox.put(FetchLanded(ONE, 0.1, 10))
    outbox.drain()
    assert not outbox.cancel(ONE)
    assert not outbox.cancel(TWO)


def test_a_transfer_is_fetched_once_at_a_time(outbox: Outbox) -> None:
    with pytest.raises(ValueError, match="already"):
        outbox.opened(ONE)
    outbox.put(FetchLanded(ONE, 0.1, 10))
    outbox.drain()
    outbox.opened(ONE)
