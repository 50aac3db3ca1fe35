"""Tests that operations which ended are all found, in order, without a look at every operation in each turn."""

from __future__ import annotations

from pdserve_kvtransfer.ucx.ucxx_poster import CHECKED_AT_ONCE, InFlight, borrowed

MANY = 20 * CHECKED_AT_ONCE


class Operation:
    def __init__(self) -> None:
        self.ended = False
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.ended


def posted(count: int) -> tuple[InFlight[Operation], list[Operation]]:
    in_flight: InFlight[Operation] = InFlight()
    operations = [Operation() for _ in range(count)]
    for operation in operations:
        in_flight.add(operation)
    return in_flight, operations


def test_what_ended_is_taken_once_and_in_order() -> None:
    in_flight, operations = posted(MANY)
    for operation in operations[: CHECKED_AT_ONCE + 3]:
        operation.ended = True
    assert in_flight.take_done() == operations[: CHECKED_AT_ONCE + 3]
    assert in_flight.take_done() == []
    assert in_flight.take_all() == operations[CHECKED_AT_ONCE + 3 :]
    assert not in_flight


def test_a_turn_looks_at_few_of_those_that_wait() -> None:
    in_flight, operations = posted(MANY)
    in_flight.take_done()
    assert sum(operation.looks for operation in operations) == CHECKED_AT_ONCE


def test_before_a_sleep_all_are_looked_at_once() -> None:
    in_flight, operations = posted(MANY)
    operations[-1].ended = True
    assert in_flight.take_done() == []
    assert not in_flight.settled()
    assert in_flight.take_done() == [operations[-1]]
    assert in_flight.settled()
    assert in_flight.take_all() == operations[:-1]


def test_few_are_settled_at_once() -> None:
    in_flight, _ = posted(CHECKED_AT_ONCE - 1)
    in_flight.take_done()
    assert in_flight.settled()


def test_borrowed_bytes_are_the_same_and_keep_no_memory() -> None:
    memory = bytearray(b"0123456789")
    part = memoryview(memory)[2:6]
    kept = borrowed(part)
    assert bytes(kept) == b"2345"
    memory[2:6] = b"abcd"
    assert bytes(kept) == b"abcd"
    part.release()
    memory.append(0)  # A buffer that something still exports could not grow.
    assert not bytes(borrowed(memoryview(bytearray())))
