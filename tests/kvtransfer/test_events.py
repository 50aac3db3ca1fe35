from __future__ import annotations

import pytest

from pdserve.wire.ids import TransferId, new_id
from pdserve.wire.sampling_params import SampledToken
from pdserve_kvtransfer.events import (
    BlocksReleased,
    EventQueue,
    FailureKind,
    FetchCancelled,
    FetchEnd,
    FetchFailed,
    FetchLanded,
    FirstTokenArrived,
    TransferEvent,
)

ONE = TransferId(new_id(), 0, new_id())
TWO = TransferId(new_id(), 0, new_id())


@pytest.fixture
def event_queue() -> EventQueue:
    made = EventQueue()
    made.open(ONE)
    return made


def test_events_come_in_order_and_once(event_queue: EventQueue) -> None:
    events: list[TransferEvent] = [FirstTokenArrived(ONE, (SampledToken(1),), 0), FetchLanded(ONE, 0.1, 10)]
    for event in events:
        event_queue.put(event)
    assert event_queue.take_news() and not event_queue.take_news()
    assert event_queue.drain() == events
    assert event_queue.drain() == []


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
    event_queue: EventQueue, end: FetchEnd, quarantined: tuple[int, ...], before: bool
) -> None:
    if before:
        assert event_queue.cancel(ONE)
    event_queue.put(FirstTokenArrived(ONE, (SampledToken(1),), 0))
    event_queue.put(end)
    event_queue.put(BlocksReleased((9,)))
    if not before:
        assert event_queue.cancel(ONE)
    assert event_queue.drain() == [FetchCancelled(ONE, quarantined), BlocksReleased((9,))]


def test_an_end_that_was_seen_cannot_be_cancelled(event_queue: EventQueue) -> None:
    event_queue.put(FetchLanded(ONE, 0.1, 10))
    event_queue.drain()
    assert not event_queue.cancel(ONE)
    assert not event_queue.cancel(TWO)


def test_a_transfer_is_fetched_once_at_a_time(event_queue: EventQueue) -> None:
    with pytest.raises(ValueError, match="already"):
        event_queue.open(ONE)
    event_queue.put(FetchLanded(ONE, 0.1, 10))
    event_queue.drain()
    event_queue.open(ONE)
