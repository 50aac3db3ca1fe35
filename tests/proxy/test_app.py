"""The routes that generate nothing, and errors of every kind in OpenAI's shape."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import openai
import pytest

from pdserve.config import AdmissionConfig, Switch
from pdserve.errors import ConfigError
from pdserve.wire.discovery import Role
from pdserve.wire.version import SPOKEN
from pdserve_proxy.server import run
from pdserve_proxy.serving import Addresses
from tests.proxy.cluster import Cluster, cluster, error_of, node_info, proxy_config
from tests.proxy.fake_node import Exchange, FakeNode, stream_events

PAGE = "https://chat.example.com"
FORM = "application/x-www-form-urlencoded"
"""The type of what ``curl -d`` sends, and of what any page may send anywhere."""


async def get(running: Cluster, path: str, method: str = "GET") -> tuple[int, dict[str, object]]:
    async with running.http.request(method, path) as response:
        return response.status, msgspec.json.decode(await response.read() or b"{}", type=dict[str, object])


async def test_models_come_from_the_registry() -> None:
    async with cluster() as running:
        assert (await get(running, "/v1/models"))[1]["data"] == []
        await running.add(
            node_info("a", Role.MIXED, model="org/one"),
            node_info("b", Role.MIXED, model="two"),
            node_info("c", Role.MIXED, model="two", max_model_len=128),
        )
        status, listed = await get(running, "/v1/models")
        assert (status, listed["object"]) == (200, "list")
        cards = msgspec.convert(listed["data"], list[dict[str, object]])
        assert [card["id"] for card in cards] == ["org/one", "two"]
        assert {card["object"] for card in cards} == {"model"}
        assert [(card["root"], card["max_model_len"]) for card in cards] == [("org/one", 256), ("two", 128)]
        assert (await get(running, "/v1/models/org/one")) == (200, cards[0])
        assert (await get(running, "/v1/models/")) == (200, listed)
        assert (await get(running, "/v1/models/three"))[0] == 404


async def test_ready_follows_the_routes_while_live_does_not() -> None:
    async with cluster() as running:
        await running.add(node_info("d", Role.DECODE))
        assert (await get(running, "/ready"))[0] == 503
        await running.add(node_info("p", Role.PREFILL))
        await running.ready()
        for path in ("/live", "/health", "/ping", "/version", "/v1/models"):
            async with running.http.get(path, headers={"x-request-id": "mine"}) as response:
                assert (response.status, response.headers["x-request-id"]) == (200, "mine")


async def test_instances_tell_what_is_registered() -> None:
    async with cluster() as running:
        info = node_info("p", Role.PREFILL)
        await running.add(info)
        async with running.http.get("/instances") as response:
            (entry,) = msgspec.json.decode(await response.read(), type=list[dict[str, object]])
        age = entry.pop("heartbeat_age_s")
        assert isinstance(age, float)
        assert 0 <= age < 5
        load = entry.pop("load")
        assert isinstance(load, dict)
        assert set(load) == {"running", "waiting", "free_blocks", "cache_used", "queue_s", "step_s"}
        assert entry == {
            "name": "p", "role": "prefill", "state": "serving", "url": info.url, "control": info.control,
            "model": "m", "fingerprint": "f", "boot_id": info.boot_id.hex(),
        "protocol": SPOKEN.newest,
        }  # fmt: skip


async def test_metrics_and_version() -> None:
    async with cluster() as running:
        await running.add(node_info("p", Role.PREFILL), node_info("q", Role.PREFILL))
        async with running.http.get("/metrics") as response:
            text = await response.text()
        assert 'pdserve_proxy_nodes{role="prefill"} 2.0' in text
        assert 'pdserve_proxy_nodes{role="decode"} 0.0' in text
        status, version = await get(running, "/version")
        assert status == 200
        assert isinstance(version["version"], str)
        status, info = await get(running, "/server_info")
        assert (status, info["process"], info["version"]) == (200, "proxy", version["version"])
        assert (info["models"], info["nodes"]) == (["m"], {"prefill": 2})


async def test_every_route_of_the_description_is_there() -> None:
    async with cluster() as running:
        paths = (await get(running, "/openapi.json"))[1]["paths"]
        assert isinstance(paths, dict)
        operations = [(path, method, each) for path, one in paths.items() for method, each in methods_of(one)]
        assert ("/v1/responses/{response_id}", "DELETE") in [operation[:2] for operation in operations]
        for path, method, described in operations:
            path = path.replace("{model}", "m").replace("{response_id}", "resp_1")
            async with running.http.request(method, path, data=b"{}") as response:
                # There is no node, and so no model and no response.
                needs_node = method == "POST" or path in ("/ready", "/tokenizer_info")
                missing = path == "/v1/models/m" or "resp_1" in path or path.endswith("/timeline")
                assert response.status == (503 if needs_node else 404 if missing else 200), path
                assert str(response.status) in described


def methods_of(path: dict[str, dict[str, dict[str, object]]]) -> list[tuple[str, dict[str, object]]]:
    """Returns the methods of one path of the description, with the statuses that each may have."""
    return [(name.upper(), each["responses"]) for name, each in path.items() if name in ("get", "post", "delete")]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "not_found_error"),
        ("POST", "/v1/nothing", 404, "not_found_error"),
        ("GET", "/v1/responses/resp_1/nowhere", 404, "not_found_error"),
        ("POST", "/v1/responses/resp_1", 405, "invalid_request_error"),
        ("POST", "/chat/completions", 404, "not_found_error"),
        ("POST", "/v1/chat/completions/", 404, "not_found_error"),
        ("POST", "/v1//completions", 404, "not_found_error"),
        ("GET", "/v1/models//x", 404, "not_found_error"),
        ("GET", "/v1/chat/completions", 405, "invalid_request_error"),
        ("DELETE", "/v1/models", 405, "invalid_request_error"),
    ],
)
async def test_errors_of_the_framework_have_openais_shape(method: str, path: str, status: int, kind: str) -> None:
    async with cluster() as running, running.http.request(method, path, allow_redirects=False) as response:
        body = msgspec.json.decode(await response.read(), type=dict[str, dict[str, object]])
        assert response.status == status
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-request-id"]
        assert ("allow" in response.headers) == (status == 405)
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["type"] == kind
        message = str(body["error"]["message"])
        assert status != 404 or (f"{method} {path}" in message and "/v1/chat/completions" in message)


async def test_scripts_of_allowed_pages_may_read_streams_refusals_and_the_proxys_own_routes() -> None:
    config = proxy_config()
    config = dataclasses.replace(config, http=dataclasses.replace(config.http, cors_origins=(PAGE,)))
    async with FakeNode(stream_events) as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for method, path, body, status in (
            ("POST", "/v1/chat/completions", b'{"model": "m", "stream": true}', 200),
            ("POST", "/v1/chat/completions", b'{"model": "other"}', 404),
            ("POST", "/v1/chat/completions", b"{", 400),
            ("GET", "/v1/models", b"", 200),
            ("GET", "/v1/nothing", b"", 404),
            ("OPTIONS", "/v1/chat/completions", b"", 200),
        ):
            headers = {"origin": PAGE, "content-type": "application/json"}
            async with running.http.request(method, path, data=body, headers=headers) as response:
                await response.read()
                assert (response.status, response.headers["access-control-allow-origin"]) == (status, PAGE)


async def test_what_is_read_of_a_node_names_its_model_in_the_query() -> None:
    async with FakeNode() as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url, model="org/one"))
        for query, model in (("", None), ("?model=org%2Fone", "org/one")):
            async with running.http.get(f"/tokenizer_info{query}") as response:
                assert response.status == 200
            asked = node.requests[-1]
            assert (asked.path, msgspec.json.decode(asked.body)) == ("/tokenizer_info", {"model": model})
        async with running.http.get("/tokenizer_info?model=other") as response:
            assert (response.status, error_of(await response.read())["code"]) == (404, "model_not_found")
        async with running.http.post("/tokenizer_info", json={}) as response:
            assert (response.status, response.headers["allow"]) == (405, "GET, OPTIONS")


@pytest.mark.parametrize("priorities", Switch)
async def test_clients_have_priorities_where_the_proxy_lets_them(priorities: Switch) -> None:
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(priorities=priorities))
    async with FakeNode() as node, cluster(config) as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for priority, refused in ((None, False), (0, False), (-1, True), (5.0, True), (0.5, False)):
            body = {"model": "m", "prompt": "x", "priority": priority}
            async with running.http.post("/v1/completions", json=body) as response:
                data = await response.read()
            if refused and priorities is Switch.OFF:
                assert (response.status, error_of(data)["param"]) == (400, "priority")
            else:
                assert response.status == 200  # a node refuses what is no whole number; this one takes all


async def test_a_page_cannot_generate_by_a_body_that_browsers_send_anywhere() -> None:
    async with FakeNode() as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        for headers in ({"content-type": "text/plain"}, {"content-type": FORM, "sec-fetch-site": "cross-site"}):
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
                async with running.http.post(path, data=b'{"model": "m"}', headers=headers) as response:
                    error = error_of(await response.read())
                    assert (response.status, error["code"]) == (415, "unsupported_content_type")
        assert node.requests == []
        async with running.http.post("/v1/completions", data=b'{"model": "m"}', headers={"content-type": FORM}) as curl:
            assert curl.status == 200


async def test_a_defect_of_ours_is_a_500_in_openais_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: bytes) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("pdserve_proxy.relayed_routes.read_body", broken)

    async with cluster() as running, running.chat() as response:
        body = msgspec.json.decode(await response.read(), type=dict[str, dict[str, object]])
        assert (response.status, body["error"]["type"]) == (500, "server_error")


async def test_the_openai_client_understands_a_stream_that_breaks() -> None:
    head = b'"id":"c","object":"chat.completion.chunk","created":1,"model":"m"'
    chunk = b"data: {" + head + b',"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'

    async def say_hi_and_die(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(chunk)
        exchange.die()

    async with FakeNode(say_hi_and_die) as node, cluster() as running:
        await running.add(node_info("x", Role.MIXED, node.url))
        async with openai.AsyncOpenAI(base_url=f"{running.addresses.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "?"}], stream=True
            )
            pieces = []
            with pytest.raises(openai.APIError, match="lost"):
                async for event in stream:
                    pieces.append(event.choices[0].delta.content)
            assert pieces == ["hi"]


async def test_without_a_secret_no_proxy_starts() -> None:
    with pytest.raises(ConfigError, match="secret"):
        async with asyncio.timeout(5):
            await run(proxy_config(), b"", asyncio.Event())


async def test_an_http_address_in_use_is_a_configuration_error() -> None:
    async with cluster() as running:
        port = int(running.addresses.url.rpartition(":")[2])
        announced: list[Addresses] = []
        with pytest.raises(ConfigError, match=str(port)):
            await run(proxy_config(http_port=port), b"s", asyncio.Event(), announced.append)
        assert announced == []
