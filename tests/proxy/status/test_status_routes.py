"""The report, the page and the commands of a running proxy, with fake nodes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from pdserve.api.node.commands import CommandGate
from pdserve.config import AdmissionConfig, ProxyConfig, StatusConfig, StatusPage, WorkersConfig
from pdserve.control.journal import JOURNALED_ANSWER
from pdserve.errors import Unavailable
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, Command, CommandResult, Drain, SetRole
from pdserve.wire.discovery import NodeHeartbeat, NodeInfo, NodeLoad, Register, Role
from pdserve.wire.status import IncidentKind, RequestStage
from pdserve_proxy.recent import STEP_S
from pdserve_proxy.records.access_log import RequestCounts
from pdserve_proxy.registry.registry import Registry
from pdserve_proxy.status.report import (
    MAX_NODES_SHOWN,
    Reporter,
    SharedReport,
    StatusAnswer,
    StatusReport,
    relay_status,
)
from tests.proxy.cluster import SECRET, Cluster, cluster, error_of, eventually, node_info, proxy_config
from tests.proxy.fake_node import DONE, EVENTS, Exchange, FakeNode, stream_events

ADMIN_KEY, CLIENT_KEY = "a-key-of-an-admin", "a-key-of-a-client"
BEARER = {"authorization": f"Bearer {ADMIN_KEY}"}
PROMPT = "a secret that nobody else may read"


@pytest.fixture
def admins(tmp_path: Path) -> StatusConfig:
    file = tmp_path / "admins"
    file.write_text(f"ada {ADMIN_KEY}\n")
    return StatusConfig(admin_key_file=str(file))


def with_status(status: StatusConfig, workers: int = 1) -> ProxyConfig:
    return dataclasses.replace(proxy_config(), status=status, workers=WorkersConfig(workers))


async def answer_of(running: Cluster, headers: dict[str, str] | None = None) -> StatusAnswer:
    async with running.http.get("/status", headers=headers or {}) as response:
        assert response.status == 200, await response.text()
        return msgspec.json.decode(await response.read(), type=StatusAnswer)


async def report_of(running: Cluster) -> StatusReport:
    return (await answer_of(running)).report


@pytest.mark.parametrize("path", ["/instances", "/metrics", "/requests/r/timeline"])
async def test_a_page_whose_name_leads_to_loopback_sees_nothing(path: str) -> None:
    """Browsers take such a page for one of the proxy's own (DNS rebinding)."""
    async with cluster() as running:
        port = running.http._base_url.port if running.http._base_url is not None else None
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            async with running.http.get(path, headers={"host": host}) as response:
                assert response.status == 403, host
                assert error_of(await response.read())["code"] == "other_host"
        for host in (f"127.0.0.1:{port}", "localhost", "[::1]:8000"):
            async with running.http.get(path, headers={"host": host}) as response:
                assert response.status == (404 if "timeline" in path else 200), host


@pytest.mark.parametrize("path", ["/instances", "/metrics", "/requests/r/timeline"])
async def test_a_reverse_proxy_on_loopback_may_keep_its_own_name_if_it_sends_a_key(
    path: str, admins: StatusConfig
) -> None:
    config = dataclasses.replace(proxy_config(), status=admins, admission=AdmissionConfig(api_keys=(CLIENT_KEY,)))
    async with cluster(config=config) as running:
        for sent in (BEARER, {"authorization": f"Bearer {CLIENT_KEY}"}, {"x-api-key": CLIENT_KEY}):
            async with running.http.get(path, headers={"host": "pdserve.example", **sent}) as response:
                assert response.status == (200 if "timeline" not in path else 404 if sent is BEARER else 401), sent
        wrong = {"host": "pdserve.example", "x-api-key": "a-wrong-key-of-nobody"}
        async with running.http.get(path, headers=wrong) as response:
            assert response.status == (401 if "timeline" in path else 403)


class Making:
    """Makes reports, each of which takes as long as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.made = 0
        self.go_on = asyncio.Event()

    async def __call__(self) -> bytes:
        self.made += 1
        number = self.made
        await self.go_on.wait()
        return b"%d" % number


async def test_those_who_look_at_one_time_share_a_report_that_took_long() -> None:
    making = Making()
    report = SharedReport(making, lambda: making.now_s, lambda: making.now_s)
    looks = [asyncio.create_task(report()) for _ in range(50)]
    await eventually(lambda: making.made == 1, "the first look")
    looks[0].cancel()  # whoever leaves takes it from nobody
    making.now_s = 0.05
    making.go_on.set()
    assert await asyncio.gather(*looks[1:]) == [b"1"] * 49
    making.now_s = 0.54
    assert await report() == b"1", "for ten times as long as it took"
    making.now_s = 0.56
    assert await report() == b"2"
    assert await report() == b"3", "one that took no time is not shown again"


async def test_a_report_that_fails_fails_all_who_wait_and_the_next_one_is_made_anew() -> None:
    fails = True

    async def make() -> bytes:
        await asyncio.sleep(0)
        if fails:
            raise Unavailable("no")
        return b"made"

    report = SharedReport(make)
    found = await asyncio.gather(report(), report(), return_exceptions=True)
    assert [type(one) for one in found] == [Unavailable] * 2
    fails = False
    assert await report() == b"made"


def test_the_tokens_of_all_nodes_count_however_few_are_shown() -> None:
    now = 100.0
    registry = Registry(1.0, 3)
    nodes = [node_info(f"n{number}", Role.MIXED) for number in range(MAX_NODES_SHOWN + 10)]
    for node in nodes:
        registry.handle(Register(node), now)
    reporter = Reporter(1.0, registry.generated_lately, lambda: now)
    for tokens in (0, 50):
        now += 5.0
        for node in nodes:
            load = NodeLoad(running=1, generated_tokens=tokens)
            registry.handle(NodeHeartbeat(node.boot_id, load), now)
        found = reporter.report(registry.snapshot(), [])
    assert found.rates.generated_tokens_per_s == pytest.approx(10.0 * len(nodes))
    assert found.nodes_left_out == 10


async def test_a_stream_is_seen_from_its_arrival_to_its_end() -> None:
    go_on = [asyncio.Event() for _ in range(2)]

    async def in_steps(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await go_on[0].wait()
        await exchange.chunk(EVENTS[0])
        await go_on[1].wait()
        await exchange.chunk(DONE)
        await exchange.finish()

    async with FakeNode(in_steps) as server, cluster() as running:
        await running.add(node_info("p", Role.PREFILL), node_info("d", Role.DECODE, server.url))
        assert (await report_of(running)).stages == {}
        asking = asyncio.create_task(_stream(running))

        async def stage(wanted: RequestStage) -> bool:
            return (await report_of(running)).stages == {wanted: 1}

        await eventually(lambda: stage(RequestStage.PROMPT), "the node has it")
        (one,) = (await report_of(running)).under_way
        assert (one.request_id, one.path, one.decode, one.prefill) == ("mine", "/v1/chat/completions", "d", "p")
        assert one.sent_s is not None and one.prompt_done_s is None
        go_on[0].set()
        await eventually(lambda: stage(RequestStage.ANSWER), "its first event has come")
        go_on[1].set()
        await asking
        report = await report_of(running)
        assert report.under_way == ()
        (one,) = report.ended
        assert one.sent_s is not None and one.prompt_done_s is not None and one.ended_s is not None
        assert one.arrived_s <= one.sent_s <= one.prompt_done_s <= one.ended_s <= report.now_s
        assert (one.outcome, one.first_token, one.attempts) == ("ok", True, 1)
        assert report.outcomes["ok"] == 1
        assert report.rates.requests_per_s > 0
        assert report.latencies.ttft.p50 == one.prompt_done_s - one.arrived_s
        assert report.latencies.e2e.p99 == one.ended_s - one.arrived_s


async def _stream(running: Cluster) -> None:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
    async with running.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"}) as response:
        await response.read()


async def test_what_goes_wrong_is_told_without_the_prompt() -> None:
    async def break_off(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.chunk(EVENTS[0])
        exchange.die()

    async with FakeNode(break_off) as server, cluster() as running:
        node = node_info("d", Role.MIXED, server.url)
        await running.add(node)
        await _stream(running)
        async with running.http.get("/status") as response:
            body = await response.text()
        report = msgspec.json.decode(body, type=StatusAnswer).report
        failed = [one for one in report.incidents if one.kind is IncidentKind.REQUEST_FAILED]
        assert [(one.node, one.request, one.count) for one in failed] == [("d", "mine", 1)]
        assert "was lost" in failed[0].text
        assert report.ended[0].outcome == "upstream_lost"
        assert report.rates.failures_per_s > 0
        assert PROMPT not in body
        joined, *_ = report.incidents
        assert (joined.kind, joined.node) == (IncidentKind.NODE_JOINED, "d")


async def test_an_unexpected_answer_is_not_quoted() -> None:
    async def odd(exchange: Exchange) -> None:
        await exchange.answer(200, f"{PROMPT}\n".encode(), content_type=JOURNALED_ANSWER)

    async with FakeNode(odd) as server, cluster() as running:
        await running.add(node_info("d", Role.MIXED, server.url))
        async with running.http.post("/v1/completions", json={"model": "m"}) as response:
            assert response.status == 502
            assert PROMPT in await response.text()  # the client's own
        async with running.http.get("/status") as response:
            body = await response.text()
        assert PROMPT not in body
        assert "the node gave an unexpected answer" in body


async def test_what_clients_get_wrong_is_no_failure_of_the_cluster() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(400, b'{"error": {"message": "it is wrong"}}')

    async with FakeNode(refuse) as server, cluster() as running:
        await running.add(node_info("d", Role.MIXED, server.url))
        for body in ({"model": "none"}, {"model": "m"}):
            async with running.http.post("/v1/chat/completions", json=body) as response:
                assert 400 <= response.status < 500
        report = await report_of(running)
        assert [one.outcome for one in report.ended] == ["refused"]  # the other one had no node
        assert report.rates.failures_per_s == 0
        assert {one.kind for one in report.incidents} == {IncidentKind.NODE_JOINED}


async def test_a_lost_node_and_one_that_left_are_told() -> None:
    async with cluster() as running:
        await running.add(node_info("leaves", Role.MIXED), node_info("stays", Role.MIXED))
        await running.nodes.aclose()
        await running.dropped("leaves")
        incidents = (await report_of(running)).incidents
        left = [one.text for one in incidents if (one.kind, one.node) == (IncidentKind.NODE_LEFT, "leaves")]
        assert left == ["said goodbye and had not drained: its log says why"]


async def test_the_page_and_its_files_load_nothing_else() -> None:
    async with cluster() as running:
        for path, kind in (("/", "text/html"), ("/status.css", "text/css"), ("/status.js", "text/javascript")):
            async with running.http.get(path) as response:
                assert (response.status, response.content_type) == (200, kind)
                policy = response.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
                assert "unsafe" not in policy
                assert response.headers["x-content-type-options"] == "nosniff"
                text = await response.text()
            assert "innerHTML" not in text
            assert " style=" not in text and " onclick=" not in text  # what the policy forbids would do nothing
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text


async def test_without_the_page_its_routes_say_so() -> None:
    async with cluster(with_status(StatusConfig(StatusPage.OFF))) as running:
        for path in ("/", "/status", "/status.js"):
            async with running.http.get(path) as response:
                assert response.status == 404
                assert "--status-page" in str(error_of(await response.read())["message"])
        async with running.http.get("/", headers={"accept": "text/html,*/*;q=0.8"}) as response:
            assert response.status == 404
            assert response.content_type == "text/html"
            words = await response.text()
            assert "does not show its status page" in words
            assert "--admin-key-file" in words


async def test_the_first_look_has_the_last_minutes() -> None:
    async with FakeNode(stream_events) as server, cluster() as running:
        node = node_info("n", Role.MIXED, server.url)
        await running.add(node)
        body = {"model": "m", "stream": True}
        for _ in range(3):
            async with running.http.post("/v1/chat/completions", json=body) as response:
                await response.read()

        async def has_history() -> bool:
            return sum((await report_of(running)).history.requests_per_s) * STEP_S >= 3

        await eventually(has_history, "the end of the step of 5 s in which the requests ended")
        history = (await report_of(running)).history
        assert sum(history.requests_per_s) * history.step_s == pytest.approx(3)
        assert len(history.requests_per_s) == len(history.generated_tokens_per_s) <= 60


def test_the_history_is_that_of_all_processes_and_nodes_and_ends_where_the_present_step_begins() -> None:
    now = 1000.0
    registry = Registry(1.0, 3)
    node = node_info("n", Role.MIXED)
    registry.handle(Register(node), now)
    reporter = Reporter(1.0, registry.generated_lately, lambda: now)
    counts = [RequestCounts(), RequestCounts()]
    tokens = 5000  # from before this proxy began
    for second in range(21):
        now = 1000.0 + second
        registry.handle(NodeHeartbeat(node.boot_id, NodeLoad(running=1, generated_tokens=tokens)), now)
        tokens += 10
        counts[second % 2].ended_lately.add(now)
    found = reporter.report(registry.snapshot(), [relay_status(each) for each in counts]).history
    assert found.requests_per_s == (1.0, 1.0, 1.0, 1.0)
    # The first heartbeat tells no rate.
    assert found.generated_tokens_per_s == (8.0, 10.0, 10.0, 10.0)


async def test_keys_of_clients_show_the_status_where_no_admin_is() -> None:
    key = "a-key-of-a-client"
    config = dataclasses.replace(proxy_config(), admission=AdmissionConfig(api_keys=(key,)))
    async with cluster(config) as running:
        async with running.http.get("/status") as response:
            assert response.status == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert not (await answer_of(running, {"authorization": f"Bearer {key}"})).may_command


@pytest.mark.parametrize("path", ["/status", "/requests/r/timeline"])
async def test_where_admins_are_no_client_sees_the_others_requests(path: str, admins: StatusConfig) -> None:
    config = dataclasses.replace(with_status(admins), admission=AdmissionConfig(api_keys=(CLIENT_KEY,)))
    async with cluster(config) as running:
        for sent in ({}, {"authorization": f"Bearer {CLIENT_KEY}"}, {"x-api-key": CLIENT_KEY}):
            async with running.http.get(path, headers=sent) as response:
                assert response.status == 401, sent
        async with running.http.get(path, headers=BEARER) as response:
            assert response.status == (404 if "timeline" in path else 200)


async def test_keys_of_clients_command_nothing(admins: StatusConfig) -> None:
    key = "a-key-of-a-client"
    config = dataclasses.replace(with_status(admins), admission=AdmissionConfig(api_keys=(key,)))
    async with cluster(config) as running:
        assert (await answer_of(running, BEARER)).may_command
        async with running.http.post(
            "/commands", json={"node": "00", "command": {"kind": "drain"}}, headers={"authorization": f"Bearer {key}"}
        ) as response:
            assert response.status == 401
        async with running.http.post(  # an admin's key is none for requests
            "/v1/chat/completions", json={"model": "m"}, headers=BEARER
        ) as response:
            assert response.status == 401


class CommandedNode:
    """Takes commands as nodes do, and remembers them."""

    def __init__(self) -> None:
        self.info = node_info("d", Role.DECODE)
        self.commands: list[Command] = []
        self._gate = CommandGate(SECRET, self.info.boot_id)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[NodeInfo]:
        async with FakeNode(self._answer) as server:
            yield msgspec.structs.replace(self.info, url=server.url)

    async def _answer(self, exchange: Exchange) -> None:
        assert exchange.request.path == COMMAND_PATH
        command = self._gate.admit(exchange.request.headers[COMMAND_HEADER])
        self.commands.append(command)
        if isinstance(command, SetRole) and command.role is Role.MIXED:
            await exchange.answer(400, b'{"error": {"message": "not that role"}}')
            return
        await exchange.answer(200, msgspec.json.encode(CommandResult(Role.PREFILL, Role.DECODE, True)))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.integration)])
async def test_an_admin_drains_a_node_and_changes_its_role(admins: StatusConfig, workers: int) -> None:
    node = CommandedNode()
    async with node.serving() as info, cluster(with_status(admins, workers)) as running:
        await running.add(info, node_info("p", Role.PREFILL))
        await running.known_to_all()
        boot_id = info.boot_id.hex()
        orders = [{"kind": "drain"}, {"kind": "set_role", "role": "prefill"}]
        for order in orders:
            body = {"node": boot_id, "command": order}
            async with running.http.post("/commands", json=body, headers=BEARER) as response:
                assert response.status == 200, await response.text()
                assert (await response.json())["draining"] is True
        assert node.commands == [Drain(), SetRole(Role.PREFILL)]
        body = {"node": boot_id, "command": {"kind": "set_role", "role": "mixed"}}
        async with running.http.post("/commands", json=body, headers=BEARER) as response:
            assert response.status == 502
            assert "not that role" in str(error_of(await response.read())["message"])
        report = (await answer_of(running)).report
        assert report.workers == workers
        told = [one for one in report.incidents if one.kind is IncidentKind.COMMANDED]
        assert {one.text for one in told} == {"ada has had it drain", "ada has had it become a prefill node"}


async def test_pages_of_other_origins_command_nothing_even_with_a_key(admins: StatusConfig) -> None:
    """A page that is allowed to send requests is none of ours either, and no answer lets its script read the status."""
    http = dataclasses.replace(proxy_config().http, cors_origins=("https://chat.example.com",))
    config = dataclasses.replace(with_status(admins), http=http)
    async with cluster(config) as running:
        await running.add(node_info("d", Role.MIXED))
        order = {"node": "00", "command": {"kind": "drain"}}
        for origin in ("https://chat.example.com", "https://evil.example.com", "null"):
            sent = {**BEARER, "origin": origin}
            async with running.http.post("/commands", json=order, headers=sent) as response:
                assert response.status == 403
            async with running.http.get("/status", headers=sent) as response:
                assert response.status == 403
        own = {**BEARER, "origin": running.addresses.url}
        async with running.http.post("/commands", json=order, headers=own) as response:
            assert response.status == 404  # there is no such node
        async with running.http.get("/status", headers={"host": "evil.example.com"}) as response:
            assert response.status == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"node": "00", "command": {"kind": "drain"}}', 404),
        (b'{"node": "00", "command": {"kind": "explode"}}', 400),
        (b'{"node": "00", "command": {"kind": "drain"}, "more": 1}', 400),
        (b"[]", 400),
        (b"x" * 2000, 400),
    ],
)
async def test_odd_commands_are_refused(admins: StatusConfig, body: bytes, status: int) -> None:
    async with cluster(with_status(admins)) as running:
        headers = {**BEARER, "content-type": "application/json"}
        async with running.http.post("/commands", data=body, headers=headers) as response:
            assert response.status == status
            error_of(await response.read())
        async with running.http.post("/commands", data=body, headers=BEARER) as response:
            assert response.status == 415


@pytest.mark.integration
async def test_workers_are_reported_as_one_proxy() -> None:
    async with FakeNode(stream_events) as server, cluster(with_status(StatusConfig(), 2)) as running:
        await running.add(node_info("d", Role.MIXED, server.url))
        await running.known_to_all()
        await asyncio.gather(*(_stream_alone(running) for _ in range(16)))
        report = await report_of(running)
        assert report.workers == 2
        assert report.outcomes["ok"] == len(report.ended) == 16
        assert [one.ended_s for one in report.ended] == sorted(one.ended_s or 0.0 for one in report.ended)


async def _stream_alone(running: Cluster) -> None:
    """Asks on a connection of its own, so that the kernel spreads them over the workers."""
    async with running.http.post(
        "/v1/chat/completions", json={"model": "m", "stream": True}, headers={"connection": "close"}
    ) as response:
        await response.read()
