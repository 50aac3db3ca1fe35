"""Host memory for transfers is given out whole, in turn, and comes back."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.kv_connector.staging_slots import StagingSlots
from pdserve.wire.ids import TransferId, new_id


def transfer() -> TransferId:
    return TransferId(new_id(), 0, b"boot")


def test_what_never_fits_is_named() -> None:
    slots = StagingSlots(4)
    assert slots.misfit(4) is None
    assert "5 blocks do not fit the 4" in (slots.misfit(5) or "")


def test_a_large_one_is_not_overtaken() -> None:
    slots = StagingSlots(4)
    first, large, small = transfer(), transfer(), transfer()
    for asking, count in ((first, 3), (large, 4), (small, 1)):
        slots.ask(asking, count)
    assert list(slots.granted()) == [(first, (0, 1, 2))]
    slots.give_back((0, 1, 2))
    assert list(slots.granted()) == [(large, (0, 1, 2, 3))]
    assert slots.withdraw(small)
    assert not slots.withdraw(large)


@given(st.lists(st.integers(1, 6), max_size=30), st.randoms(use_true_random=False))
def test_no_slot_has_two_owners_and_all_are_served(counts: list[int], random: Random) -> None:
    slots = StagingSlots(6)
    waiting = {transfer(): count for count in counts}
    order = list(waiting)
    for asking, count in waiting.items():
        slots.ask(asking, count)
    held: list[tuple[int, ...]] = []
    served: list[TransferId] = []
    while len(served) < len(order):
        for granted, own in slots.granted():
            assert len(own) == waiting[granted]
            assert not set(own) & {slot for other in held for slot in other}
            held.append(own)
            served.append(granted)
        if held:
            slots.give_back(held.pop(random.randrange(len(held))))
    assert served == order
    for own in held:
        slots.give_back(own)
    assert slots.num_free == 6
