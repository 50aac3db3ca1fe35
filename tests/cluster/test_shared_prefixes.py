"""Tests whose prompts a client's requests find in prefix caches: those of its key's owner, at every proxy, or all."""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass

import pytest

from tests.cluster.nodes import MODEL, Cluster

ALICE, BOB, CAROL = (name * 4 for name in ("alice", "bobby", "carol"))
ALICES_SECOND = "another-key-of-alice"
KEYS = f"alice {ALICE}\nalice {ALICES_SECOND}\nbob {BOB}\n{CAROL}\n"
"""The keys of the proxies, with their owners."""


@dataclass(frozen=True)
class Proxies:
    """Three proxies of the same nodes and keys."""

    first: str
    second: str
    sharing: str
    """The proxy with ``--share-prefixes all``."""


@pytest.fixture
def proxies(tiny_pair: Cluster) -> Proxies:
    _, first, second, sharing = tiny_pair.others
    return Proxies(first, second, sharing)


def cached(url: str, key: str, seed: int, route: str = "/v1/completions", **more: object) -> int:
    """Returns how many tokens of a prompt were cached when a client with this key sends it."""
    words = " ".join(random.Random(seed).choices(["one", "two", "three", "four", "five"], k=120))
    asked = {"prompt": words} if route == "/v1/completions" else {"messages": [{"role": "user", "content": words}]}
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, **asked, **more}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    with urllib.request.urlopen(
        urllib.request.Request(url + route, json.dumps(body).encode(), headers), timeout=120
    ) as response:
        usage = json.loads(response.read())["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_keys_of_one_owner_find_their_prompts_at_every_proxy_and_no_other_key_does(proxies: Proxies) -> None:
    assert cached(proxies.first, ALICE, 1) == 0
    for key in (BOB, CAROL):
        assert cached(proxies.first, key, 1) == 0
        assert cached(proxies.second, key, 1) > 0, "its own"
    for key in (ALICE, ALICES_SECOND):
        for url in (proxies.first, proxies.second):
            assert cached(url, key, 1) > 0


def test_a_clients_own_salt_keeps_apart_what_one_owner_sends_and_reaches_no_other_owner(proxies: Proxies) -> None:
    assert cached(proxies.first, ALICE, 2, cache_salt="s") == 0
    assert cached(proxies.first, ALICE, 2, cache_salt="s") > 0
    assert cached(proxies.first, ALICE, 2) == 0
    assert cached(proxies.first, BOB, 2, cache_salt="s") == 0
    assert cached(proxies.sharing, BOB, 2, cache_salt="s") == 0


def test_where_all_share_every_key_finds_them(proxies: Proxies) -> None:
    assert cached(proxies.sharing, ALICE, 3) == 0
    assert cached(proxies.sharing, BOB, 3) > 0
    assert cached(proxies.first, BOB, 3) == 0
