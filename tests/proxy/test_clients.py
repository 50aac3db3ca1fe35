"""A running proxy checks its clients' keys and applies its limits."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import openai
import pytest

from pdserve.config import AdmissionConfig, ProxyConfig, RegistryConfig, RoutingConfig, RoutingPolicy
from pdserve.errors import ConfigError, Unauthorized
from pdserve.wire.discovery import NodeLoad, Role
from pdserve.wire.proxy_workers import ApiKey
from pdserve.wire.terms import TICKET_HEADER
from pdserve_proxy.credentials import ApiKeys, read_api_keys
from tests.proxy.cluster import (
    Cluster,
    cluster,
    error_of,
    eventually,
    metric,
    node_info,
    proxy_config,
    ticket_of,
)
from tests.proxy.fake_node import Exchange, FakeNode

ALICE, BOB = "alices-key-0123456789", "bobs-key-0123456789"


def config_with(**fields: object) -> ProxyConfig:
    admission = msgspec.convert({"api_keys": (ALICE, BOB), **fields}, AdmissionConfig)
    return dataclasses.replace(proxy_config(), admission=admission)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Held:
    """A node that answers when it is let go."""

    def __init__(self) -> None:
        self.entered = 0
        self.let_go = asyncio.Event()

    async def __call__(self, exchange: Exchange) -> None:
        self.entered += 1
        await self.let_go.wait()
        await exchange.answer(200, b"{}")


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong-key-0123456789", f"Basic {ALICE}", ALICE])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/tokenizer_info", "/v1/models", "/v1/models/m"]
)
async def test_without_a_valid_key_a_request_gets_openais_401(authorization: str | None, path: str) -> None:
    async with FakeNode() as node, cluster(config_with()) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        headers = {} if authorization is None else {"authorization": authorization}
        method = "GET" if path.startswith(("/v1/models", "/tokenizer_info")) else "POST"
        async with running.http.request(method, path, data=b"{", headers=headers) as response:
            body = msgspec.json.decode(await response.read(), type=dict[str, dict[str, object]])
            assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert str(body["error"]["code"]).endswith("_api_key")
        assert node.requests == []


async def cache_owner(key: str, config: ProxyConfig, **headers: str) -> bytes:
    """Returns the owner whose cached prompts a new proxy's node may use for a request with this key."""
    async with FakeNode() as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with running.http.post("/v1/completions", json={"model": "m"}, headers={**bearer(key), **headers}) as got:
            assert got.status == 200
        return ticket_of(node).terms.cache_owner


async def test_the_ticket_names_the_owner_of_the_key_alike_at_every_proxy(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"carol carols-first-key-012345\ncarol carols-second-key-01234\n{BOB}\n")
    many = config_with(api_key_file=str(file), api_keys=(ALICE,))
    alice, bob = await cache_owner(ALICE, config_with()), await cache_owner(BOB, config_with())
    assert len({alice, bob, b""}) == 3
    assert await cache_owner(ALICE, many) == alice
    assert await cache_owner(BOB, many) == bob, "the place of a key in a list or file does not count"
    carol = await cache_owner("carols-first-key-012345", many)
    assert carol == await cache_owner("carols-second-key-01234", many) not in (alice, bob, b"")
    forged = base64.urlsafe_b64encode(b"a ticket that the client has made").decode()
    assert await cache_owner(BOB, config_with(), **{TICKET_HEADER: forged}) == bob


async def test_prompts_are_shared_by_all_without_keys_and_where_the_setting_says_so() -> None:
    assert await cache_owner("any", proxy_config()) == b""
    assert await cache_owner(ALICE, config_with(share_prefixes="all")) == b""


async def test_the_same_prompt_of_other_owners_goes_to_other_nodes() -> None:
    """Prefix affinity would crowd one node for nothing: their blocks are not found there."""
    keys = tuple(f"one-of-many-keys-{number:04}" for number in range(8))
    config = dataclasses.replace(
        config_with(api_keys=keys), routing=RoutingConfig(policy=RoutingPolicy.PREFIX_AFFINITY)
    )
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeNode()) for _ in range(4)]
        running = await stack.enter_async_context(cluster(config))
        nodes = (node_info(f"x{number}", Role.MIXED, fake.url) for number, fake in enumerate(fakes))
        await running.add(*nodes, load=NodeLoad())
        taken: dict[str, set[int]] = {}

        async def idle() -> bool:
            return await metric(running, "pdserve_proxy_requests_in_flight") == 0

        for key in keys * 3:
            await eventually(idle, "no request is load of any node")
            before = [len(fake.requests) for fake in fakes]
            async with running.http.post(
                "/v1/completions", json={"model": "m", "prompt": "p" * 5000}, headers=bearer(key)
            ) as got:
                assert got.status == 200
            (node,) = (place for place, fake in enumerate(fakes) if len(fake.requests) > before[place])
            taken.setdefault(key, set()).add(node)
    assert all(len(places) == 1 for places in taken.values()), "each owner's prompt has its node"
    assert len(set.union(*taken.values())) > 1


async def test_a_valid_key_lets_in_stays_at_the_proxy_and_is_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with FakeNode() as node, cluster(config_with()) as running:
            await running.add(node_info("x", Role.MIXED, node.url))
            for path in ("/v1/completions", "/tokenize", "/detokenize"):
                async with running.http.post(path, json={"model": "m"}, headers=bearer(BOB)) as response:
                    assert response.status == 200
                assert node.requests[-1].path == path
                assert BOB not in str(node.requests[-1])
            async with openai.AsyncOpenAI(base_url=f"{running.addresses.url}/v1", api_key=ALICE) as client:
                assert [model.id async for model in client.models.list()] == ["m"]
            async with openai.AsyncOpenAI(base_url=f"{running.addresses.url}/v1", api_key="no" * 10) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            for path in ("/ready", "/metrics", "/instances"):
                async with running.http.get(path) as response:
                    assert response.status == 200
                    assert BOB not in await response.text()
    assert ALICE not in caplog.text
    assert BOB not in caplog.text


async def test_a_key_may_come_as_anthropic_s_clients_send_it() -> None:
    async with FakeNode() as node, cluster(config_with()) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for headers, status in (({"x-api-key": BOB}, 200), ({"x-api-key": BOB * 2}, 401), ({"x-api-key": ""}, 401)):
            async with running.http.post("/v1/messages", json={"model": "m"}, headers=headers) as response:
                assert response.status == status
            for path in ("/v1/models", "/v1/models/m"):
                async with running.http.get(path, headers=headers) as response:
                    assert response.status == status
        wrong = {"x-api-key": BOB, "authorization": "Bearer wrong"}
        async with running.http.post("/v1/messages", json={"model": "m"}, headers=wrong) as response:
            assert response.status == 401
            assert (await response.json())["error"]["type"] == "authentication_error"
    assert len(node.requests) == 1


async def test_a_key_has_its_share_and_no_more() -> None:
    held = Held()
    async with FakeNode(held) as node, cluster(config_with(max_in_flight_per_key=2)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def send(key: str) -> tuple[int, str | None]:
            async with running.http.post("/v1/completions", json={}, headers=bearer(key)) as response:
                await response.read()
                return response.status, response.headers.get("retry-after")

        alice = [asyncio.create_task(send(ALICE)) for _ in range(2)]
        await eventually(lambda: held.entered == 2, "both are at the node")
        assert await send(ALICE) == (429, "1")
        bob = asyncio.create_task(send(BOB))
        await eventually(lambda: held.entered == 3, "the other key has its own share")
        held.let_go.set()
        assert await asyncio.gather(*alice, bob) == [(200, None)] * 3
        assert await send(ALICE) == (200, None)


async def test_a_key_s_share_is_counted_in_answers() -> None:
    held = Held()
    async with FakeNode(held) as node, cluster(config_with(max_in_flight_per_key=8)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def send(**fields: object) -> int:
            async with running.http.post("/v1/completions", json=fields, headers=bearer(ALICE)) as response:
                await response.read()
                return response.status

        under_way = [asyncio.create_task(send(prompt=["a", "b"], n=3)), asyncio.create_task(send(n=2))]
        await eventually(lambda: held.entered == 2, "both are at the node")
        assert await send() == 429
        held.let_go.set()
        assert set(await asyncio.gather(*under_way)) == {200}
        assert await send(n=128) == 200, "more than its share goes in alone"


async def test_beside_a_request_for_a_thousand_answers_an_ordinary_one_gets_its_turn() -> None:
    held = Held()
    large = {"prompt": ["text"] * 8, "n": 128}

    async def behave(exchange: Exchange) -> None:
        if b"prompt" in exchange.request.body:
            await held(exchange)
        else:
            await exchange.answer(200, b"{}")

    async with FakeNode(behave) as node, cluster(config_with(max_in_flight=1088, queue_timeout_s=0.2)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def send() -> int:
            async with running.http.post("/v1/completions", json=large, headers=bearer(BOB)) as response:
                await response.read()
                return response.status

        first, second = (asyncio.create_task(send()) for _ in range(2))
        await eventually(lambda: held.entered == 2, "both are at the node")
        assert await send() == 503, "two of them have all places"
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await _complete(running) == 200
        held.let_go.set()
        assert await second == 200


async def test_the_load_of_a_request_is_the_answers_that_it_asks_for() -> None:
    """A heartbeat's load replaces what the proxy has counted, so heartbeats say what there is, and come seldom."""
    held = Held()
    config = dataclasses.replace(
        proxy_config(),
        registry=RegistryConfig(control_port=0, heartbeat_ms=60_000),
        routing=RoutingConfig(policy=RoutingPolicy.LEAST_LOADED),
    )

    def load_of(node: FakeNode) -> NodeLoad:
        return NodeLoad(running=sum(8 if b"prompt" in request.body else 1 for request in node.requests))

    async with FakeNode(held) as one, FakeNode(held) as other, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, one.url), load=lambda: load_of(one))
        await running.add(node_info("y", Role.MIXED, other.url), load=lambda: load_of(other))

        async def send(**fields: object) -> int:
            async with running.http.post("/v1/completions", json=fields) as response:
                await response.read()
                return response.status

        tasks = [asyncio.create_task(send(prompt=["a", "b"], n=4))]
        await eventually(lambda: held.entered == 1, "it is at a node")
        for entered in range(2, 6):
            tasks.append(asyncio.create_task(send()))
            await eventually(lambda entered=entered: held.entered == entered, "it is at a node")
        assert sorted(len(node.requests) for node in (one, other)) == [1, 4]
        held.let_go.set()
        assert set(await asyncio.gather(*tasks)) == {200}


async def test_beyond_the_limit_requests_wait_and_beyond_the_queue_they_get_503() -> None:
    held = Held()
    async with FakeNode(held) as node, cluster(config_with(max_in_flight=1, max_queued=2)) as running:
        await running.add(node_info("x", Role.MIXED, node.url))

        async def send() -> tuple[int, str | None]:
            async with running.http.post("/v1/completions", json={}, headers=bearer(ALICE)) as response:
                await response.read()
                return response.status, response.headers.get("retry-after")

        async def waiting(count: int) -> bool:
            return await metric(running, "pdserve_proxy_requests_queued") == count

        tasks = [asyncio.create_task(send()) for _ in range(3)]
        await eventually(lambda: waiting(2), "two wait")
        await eventually(lambda: held.entered == 1, "one is at the node")
        assert await send() == (503, "1")
        leaver = tasks.pop()  # One of the waiting requests leaves, so its place is free again.
        leaver.cancel()
        await eventually(lambda: waiting(1), "one waits")
        tasks.append(asyncio.create_task(send()))
        held.let_go.set()
        assert await asyncio.gather(*tasks) == [(200, None)] * 3


async def test_a_request_whose_turn_does_not_come_in_the_settings_time_gets_503() -> None:
    held = Held()
    config = config_with(max_in_flight=1, max_queued=5, queue_timeout_s=0.1)
    async with FakeNode(held) as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        first = asyncio.create_task(_complete(running))
        await eventually(lambda: held.entered == 1, "one is at the node")
        async with running.http.post("/v1/completions", json={}, headers=bearer(ALICE)) as response:
            assert (response.status, response.headers.get("retry-after")) == (503, "1")
            assert error_of(await response.read())["code"] == "queue_timeout"
        held.let_go.set()
        assert await first == 200
        assert await _complete(running) == 200
        assert len(node.requests) == 2


async def _complete(running: Cluster) -> int:
    async with running.http.post("/v1/completions", json={}, headers=bearer(ALICE)) as response:
        await response.read()
        return response.status


async def test_beyond_the_settings_number_connections_are_refused() -> None:
    config = proxy_config()
    config = dataclasses.replace(config, http=dataclasses.replace(config.http, max_client_connections=2))
    async with cluster(config) as running:
        host, _, port = running.addresses.url.removeprefix("http://").partition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for reader, writer in held:
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b'"ok"}')
        reader, last = await asyncio.open_connection(host, int(port))
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        for writer in (last, *(writer for _, writer in held)):
            writer.close()


def test_neither_search_nor_comparison_sees_a_key() -> None:
    """The proxy looks up and compares a MAC under a secret of the process: no key, and nothing a client chooses."""
    given = [ApiKey("alice", ALICE), ApiKey("bob", BOB)]
    one, other = ApiKeys(given), ApiKeys(given)
    held = [set(keys._keys) for keys in (one, other)]
    assert [len(macs) for macs in held] == [2, 2]
    assert held[0].isdisjoint(held[1]), "each process has a secret of its own"
    for name in (ALICE, BOB):
        assert not any(name.encode() in mac or mac in name.encode() for mac in held[0])
    assert {len(mac) for mac in held[0]} == {hashlib.sha256().digest_size}
    assert (one.caller(f"Bearer {ALICE}"), other.caller(f"Bearer {BOB}")) == ("alice", "bob")


def test_keys_of_one_name_own_the_same_and_any_other_is_an_owner_itself(tmp_path: Path) -> None:
    """An unnamed key's line may be another key's after the file has changed."""
    file, new = tmp_path / "keys", "c" * 24
    owners: list[list[str]] = []
    for text in (f"alice {ALICE}\n{BOB}\n", f"alice {new}\n# gone\n\n{BOB}\n{ALICE}\n"):
        file.write_text(text)
        keys = ApiKeys(read_api_keys(AdmissionConfig(api_key_file=str(file))))
        owners.append([keys.owner(f"Bearer {key}") for key in (ALICE if not owners else new, BOB)])
        last = keys.owner(None, ALICE)
    assert owners[0] == owners[1]
    assert len({*owners[0], last}) == 3
    assert not any(key in owner for key in (ALICE, BOB) for owner in (*owners[0], last))
    assert ApiKeys([]).owner(None) == ""


def test_keys_in_a_file_may_have_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\nalice {ALICE}\n{BOB}\n")
    keys = ApiKeys(read_api_keys(AdmissionConfig(api_key_file=str(file))))
    assert (keys.caller(f"Bearer {ALICE}"), keys.caller(f"bearer  {BOB}")) == ("alice", "line-4")
    with pytest.raises(Unauthorized):
        keys.caller(f"Bearer {ALICE}x")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "short\n", f"{ALICE}\n{ALICE}\n", f"a b {ALICE}\n", "k" * 600 + "\n", "\x00\xff"]
)
def test_a_file_that_cannot_be_meant_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_api_keys(AdmissionConfig(api_key_file=str(file)))
    assert ALICE not in str(caught.value)


def test_no_key_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_api_keys(AdmissionConfig(api_key_file=str(tmp_path / "none")))
