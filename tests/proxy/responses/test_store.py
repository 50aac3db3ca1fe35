"""The store keeps what fits, gives it to its owner alone, and counts every byte exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_proxy.responses.store import (
    OVERHEAD_BYTES,
    Begun,
    FinishedResponse,
    ResponseKey,
    ResponseStore,
    StoreLimits,
)

LIMITS = StoreLimits(memory_bytes=2**20, responses=100, ttl_s=60.0)


class Client:
    """One owner of responses in a store."""

    def __init__(self, store: ResponseStore, owner: str = "a", numbers: Iterator[int] | None = None) -> None:
        self.store = store
        self.owner = owner
        self.now = 0.0
        self._numbers = numbers or iter(range(10**6))

    def begin(self, previous: str | None = None, said: str = "hi") -> tuple[ResponseKey, Begun | None]:
        key = ResponseKey(self.owner.encode(), next(self._numbers))
        items = json.dumps([said]).encode()
        return key, self.store.begin(key, self.owner, previous, items, said.encode(), self.now)

    def say(self, name: str, previous: str | None = None, said: str = "hi", answer: str = "ho") -> bool:
        key, begun = self.begin(previous, said)
        assert begun is not None
        return self.store.finish(key, FinishedResponse(name, json.dumps([answer]).encode(), b"{}"), self.now)

    def body(self, name: str) -> bytes | None:
        return self.store.body(self.owner, name, self.now)

    def items(self, name: str) -> list[str] | None:
        found = self.store.input_items(self.owner, name, self.now)
        return None if found is None else json.loads(found)

    def delete(self, name: str) -> bool:
        return self.store.delete(self.owner, name, self.now)


def test_a_conversation_is_all_that_was_said_in_order() -> None:
    client = Client(ResponseStore(LIMITS))
    client.say("r1", said="one", answer="two")
    client.say("r2", "r1", said="three", answer="four")
    assert client.items("r2") == ["one", "two", "three"]
    _, begun = client.begin("r2")
    assert begun == Begun(b'["one","two","three","four"]', b"one", accepted=True)
    _, again = client.begin("r1")
    assert again is not None
    assert again.history == b'["one","two"]'


def test_what_is_not_there_cannot_be_told_from_what_is_another_s() -> None:
    store = ResponseStore(LIMITS)
    mine, other = Client(store, "a"), Client(store, "b")
    mine.say("r1")
    for name in ("r1", "r0"):
        assert (other.body(name), other.items(name), other.delete(name), other.begin(name)[1]) == (None,) * 2 + (
            False,
            None,
        )
    assert mine.body("r1") == b"{}"


def test_a_deleted_response_is_gone_and_those_behind_it_go_on() -> None:
    client = Client(ResponseStore(LIMITS))
    client.say("r1", said="one", answer="two")
    client.say("r2", "r1", said="three")
    assert client.delete("r1")
    assert not client.delete("r1")
    assert (client.body("r1"), client.items("r2")) == (None, ["one", "two", "three"])
    assert client.delete("r2")
    assert client.store.taken_bytes == 0


def test_responses_are_kept_for_their_time() -> None:
    client = Client(ResponseStore(LIMITS))
    client.say("r1")
    client.now = 59.0
    client.say("r2", "r1")
    assert client.body("r1") is not None
    client.now = 61.0
    assert (client.body("r1"), client.body("r2") is not None) == (None, True)
    client.now = 200.0
    assert client.body("r2") is None
    assert client.store.taken_bytes == 0


def test_the_oldest_make_room() -> None:
    client = Client(ResponseStore(StoreLimits(2**20, 2, 60.0)))
    for name in ("r1", "r2", "r3"):
        assert client.say(name)
    assert [client.body(name) is not None for name in ("r1", "r2", "r3")] == [False, True, True]
    small = Client(ResponseStore(StoreLimits(100 * OVERHEAD_BYTES, 100, 60.0)))
    for number in range(200):
        assert small.say(f"r{number}")
        assert small.store.taken_bytes <= 100 * OVERHEAD_BYTES
    assert 1 < len(small.store) < 100
    assert small.body("r199") is not None


def test_what_is_too_large_is_not_kept_and_drops_nothing() -> None:
    client = Client(ResponseStore(StoreLimits(100_000, 100, 60.0)))
    client.say("r1")
    _, begun = client.begin(said="x" * 13_000)
    assert begun == Begun(accepted=False)
    assert not client.say("r2", answer="x" * 13_000)
    assert client.body("r1") is not None


def test_a_response_that_never_came_leaves_nothing() -> None:
    client = Client(ResponseStore(LIMITS))
    client.say("r1")
    before = client.store.taken_bytes
    key, _ = client.begin("r1")
    client.begin("r1")
    assert client.store.taken_bytes > before
    client.store.abandon(key)
    client.store.abandon(key)
    client.store.abandon_all(b"another")
    assert client.store.taken_bytes > before
    client.store.abandon_all(b"a")
    assert client.store.taken_bytes == before
    assert not client.store.finish(key, FinishedResponse("r9", b"[]", b"{}"), 0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "finish", "abandon", "delete", "wait"]),
            st.integers(0, 5),
            st.integers(0, 5),
            st.integers(0, 3_000),
        ),
        max_size=60,
    )
)
def test_memory_is_bounded_and_all_of_it_comes_back(steps: list[tuple[str, int, int, int]]) -> None:
    limits = StoreLimits(16 * 1024, 4, 60.0)
    client = Client(ResponseStore(limits))
    store, begun, number = client.store, dict[int, ResponseKey](), 0
    for kind, which, other, size in steps:
        match kind:
            case "begin" if which not in begun:
                key, found = client.begin(f"r{other}" if other else None, "x" * size)
                if found is not None and found.accepted:
                    begun[which] = key
            case "finish" if which in begun:
                number += 1
                answer = json.dumps(["y" * size]).encode()
                store.finish(begun.pop(which), FinishedResponse(f"r{number % 5 + 1}", answer, b"{}"), client.now)
            case "abandon" if which in begun:
                store.abandon(begun.pop(which))
            case "delete":
                client.delete(f"r{other}")
            case "wait":
                client.now += 20
        assert 0 <= store.taken_bytes <= limits.memory_bytes + limits.share_bytes
        assert len(store) <= limits.responses
    store.abandon_all(b"a")
    client.now += 100
    assert client.body("r1") is None
    assert store.taken_bytes == 0


@pytest.mark.parametrize("turns", [1_000])
def test_a_long_conversation_is_given_up_without_recursion(turns: int) -> None:
    client = Client(ResponseStore(StoreLimits(2**30, 10**6, 60.0)))
    client.say("r0")
    for number in range(turns):
        client.say(f"r{number + 1}", f"r{number}")
    client.now = 100.0
    assert client.body("r0") is None
    assert client.store.taken_bytes == 0
