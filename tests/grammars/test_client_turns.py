"""Tests that clients take turns, whoever has more that waits."""

from __future__ import annotations

from pdserve.grammars.client_turns import ClientTurns


def taken(turns: ClientTurns[str]) -> list[str]:
    """Takes out all items, in their order."""
    items = []
    while (item := turns.take()) is not None:
        items.append(item)
    return items


def test_clients_take_turns_and_each_is_served_in_the_order_in_which_it_came() -> None:
    turns: ClientTurns[str] = ClientTurns()
    for client, items in ((b"a", "a1 a2 a3 a4"), (b"b", "b1 b2"), (b"c", "c1")):
        for item in items.split():
            turns.add(client, item)
    assert taken(turns) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_a_client_that_was_just_served_waits_for_the_others() -> None:
    turns: ClientTurns[str] = ClientTurns()
    turns.add(b"a", "a1")
    turns.add(b"b", "b1")
    assert turns.take() == "a1"
    turns.add(b"a", "a2")
    turns.add(b"c", "c1")
    assert taken(turns) == ["b1", "a2", "c1"]


def test_an_item_of_several_clients_is_served_in_the_first_turn_of_any() -> None:
    turns: ClientTurns[str] = ClientTurns()
    for client, item in ((b"a", "a1"), (b"a", "shared"), (b"b", "shared"), (b"b", "b1")):
        turns.add(client, item)
    assert (turns.count(b"a"), turns.count(b"b")) == (2, 2)
    assert taken(turns) == ["a1", "shared", "b1"]
    assert (turns.count(b"a"), turns.count(b"b")) == (0, 0)


def test_an_item_that_is_discarded_is_not_served() -> None:
    turns: ClientTurns[str] = ClientTurns()
    for client, item in ((b"a", "shared"), (b"b", "shared"), (b"b", "b1")):
        turns.add(client, item)
    turns.discard("shared")
    turns.discard("shared")
    assert turns.count(b"a") == 0
    assert taken(turns) == ["b1"]
