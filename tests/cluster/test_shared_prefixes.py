"""Tests whose prompts a client's requests find in prefix caches: those of its key's owner, at every proxy, or all."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.nodes import MODEL, cluster, http
from tests.eventually import eventually
from tests.processes import pdserve

ALICE, BOB, CAROL = (name * 4 for name in ("alice", "bobby", "carol"))
ALICES_SECOND = "another-key-of-alice"


@dataclass(frozen=True)
class Proxies:
    """Three proxies of the same nodes and keys."""

    first: str
    second: str
    sharing: str
    """The proxy with ``--share-prefixes all``."""


@pytest.fixture(scope="module", params=["mixed", "pair"])
def proxies(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxies]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice {ALICE}\nalice {ALICES_SECOND}\nbob {BOB}\n{CAROL}\n")
    flags = ("--api-key-file", str(keys))
    ports = ("--port", "0", "--control-port", "0")
    with ExitStack() as stack:
        second, sharing = (
            stack.enter_context(pdserve("proxy", *ports, *flags, *more)).listening()
            for more in ((), ("--share-prefixes", "all"))
        )
        nodes = ("--dtype", "fp32", "--proxy", second.control, "--proxy", sharing.control)
        roles = {"prefill": 0, "decode": 0, "mixed": 1} if request.param == "mixed" else {"prefill": 1, "decode": 1}
        running = stack.enter_context(cluster(tiny_model, *nodes, **roles, proxy_flags=flags))

        def registered() -> bool:
            known = (len(http(url + "/instances").json()) for url in (second.url, sharing.url))
            return all(count == sum(roles.values()) for count in known)

        eventually(registered, "every proxy knows the nodes")
        yield Proxies(running.url, second.url, sharing.url)


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
