"""Requests look for a route again when the registry has changed, at the times they name, and at the end of the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from pdserve.wire.discovery import Role
from pdserve_proxy.registry.snapshot import RegistryView
from pdserve_proxy.relay import route_wait
from pdserve_proxy.relay.route_wait import RouteWait
from pdserve_proxy.routing.router import Route
from tests.proxy.cluster import node_info

FOUND = Route(node_info("found", Role.MIXED, "http://127.0.0.1:1"), ())
LONG_S = 600.0


class Changes:
    """The part of a registry that tells of changes."""

    def __init__(self) -> None:
        self.changed: Callable[[], object] = lambda: None
        self.heard: Callable[[bytes], object] = lambda _: None

    def on_change(self, callback: Callable[[], object]) -> None:
        self.changed = callback

    def on_node(self, callback: Callable[[bytes], object]) -> None:
        self.heard = callback


@pytest.fixture(autouse=True)
def looks_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_wait, "PAUSE_S", 0.001)


async def wait(
    found: Sequence[Route | None], for_s: float, changes: Changes | None = None, look_after_s: Sequence[float] = ()
) -> tuple[Route | None, int]:
    """Returns what a wait finds whose looks find these, and how many looks it took."""
    changes, looks, now_s = changes or Changes(), 0, asyncio.get_running_loop().time()
    waits = RouteWait(cast(RegistryView, changes))

    def choose() -> Route | None:
        nonlocal looks
        looks += 1
        asyncio.get_running_loop().call_soon(changes.changed if looks % 2 else lambda: changes.heard(b"a node"))
        return found[min(looks, len(found)) - 1]

    async with asyncio.timeout(10.0):
        route = await waits.route(choose, now_s + for_s, [now_s + after_s for after_s in look_after_s])
    return route, looks


async def test_a_route_that_is_there_is_not_waited_for() -> None:
    assert await wait([FOUND], 0.0) == (FOUND, 1)


async def test_each_change_of_the_registry_is_a_reason_to_look_again() -> None:
    assert await wait([None, None, None, FOUND], LONG_S) == (FOUND, 4)


class NoChanges(Changes):
    def on_change(self, callback: Callable[[], object]) -> None:
        pass

    def on_node(self, callback: Callable[[bytes], object]) -> None:
        pass


async def test_without_a_change_it_looks_at_the_times_that_are_named_and_at_the_end() -> None:
    assert await wait([None, FOUND], LONG_S, NoChanges(), [-1.0, 0.2, LONG_S]) == (FOUND, 2)
    assert await wait([None], 0.2, NoChanges()) == (None, 3)
    assert await wait([None, FOUND], 0.2, NoChanges(), [LONG_S]) == (FOUND, 2)
