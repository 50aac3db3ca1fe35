"""Tests the life of a node, from its start to its exit status, through a drain or the death of its engine."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq

from pdserve.api.node.proxy_link import RegistrationStatus
from pdserve.api.node.server import NodeServer, answers_hash
from pdserve.config import (
    CacheConfig,
    DiscoveryConfig,
    DrainMode,
    HttpConfig,
    MessageConfig,
    ModelConfig,
    NodeConfig,
    SchedulerConfig,
    StreamConfig,
    Switch,
    ToolFormat,
)
from pdserve.control.frame import Opener, Purpose, Sealer
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH, CommandSigner, Drain
from pdserve.wire.discovery import (
    Ack,
    Deregister,
    NodeHeartbeat,
    NodeHello,
    NodeInfo,
    ProxyWelcome,
    Register,
    Role,
    ToProxy,
)
from pdserve.wire.engine import Shutdown
from pdserve.wire.ids import new_id
from pdserve.wire.terms import TICKET_HEADER, PrefillTarget
from pdserve.wire.version import SPOKEN
from tests.api.behaviour import ENGINE_FAILURE, REPLY_TEXT, Behaviour
from tests.api.node import MODEL, WAIT_S, NodeUnderTest, node_command, scripted_node
from tests.api.plain_http import Answer, get, post
from tests.api.scripted_engine import GATE, NEVER_READY
from tests.eventually import eventually
from tests.processes import SECRET, clean_environ, running
from tests.terms import made_ticket

pytestmark = pytest.mark.integration

BODY = {"model": MODEL, "prompt": "x"}


def config(drain_s: float = 10.0, proxies: tuple[str, ...] = (), stream: StreamConfig | None = None) -> NodeConfig:
    return NodeConfig(
        model=ModelConfig(served_model_name=MODEL),
        http=HttpConfig(drain_s=drain_s),
        discovery=DiscoveryConfig(proxies=proxies, heartbeat_ms=100),
        stream=stream or StreamConfig(),
    )


class Stream:
    """A streamed completion whose first event has been read."""

    def __init__(self, node: NodeUnderTest, behaviour: Behaviour, headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=WAIT_S)
        body = json.dumps({**BODY, "seed": behaviour, "stream": True})
        self._connection.request("POST", "/v1/completions", body=body, headers=headers or {})
        self._response = self._connection.getresponse()
        self.first = self._response.readline()

    def leave(self) -> None:
        self._response.close()
        self._connection.close()

    def rest(self) -> str:
        try:
            return self._response.read().decode()
        finally:
            self._connection.close()


def test_drain_lets_running_requests_finish(model_dir: Path, tmp_path: Path) -> None:
    with scripted_node(config(), model_dir, tmp_path) as node:
        stream = Stream(node, Behaviour.GATED)
        node.process.terminate()
        eventually(lambda: get(f"{node.url}/ready").status == 503)
        refused = post(f"{node.url}/v1/completions", {**BODY, "seed": 0})
        assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        assert get(f"{node.url}/health").status == 200
        node.journal.with_name(GATE).touch()
        events = (stream.first.decode() + stream.rest()).split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert texts_of("\n\n".join(events)) == REPLY_TEXT
        assert node.process.wait() == 0
        assert isinstance(node.told()[-1], Shutdown)


def texts_of(events: str) -> str:
    """Returns the text that the chunks among the events show."""
    chunks = [json.loads(event[6:]) for event in events.split("\n\n") if event.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if "choices" in chunk)


@pytest.mark.parametrize("interval", [1, 10])
def test_drain_is_bounded(interval: int, model_dir: Path, tmp_path: Path) -> None:
    stream_config = StreamConfig(interval=interval)
    with scripted_node(config(drain_s=0.2, stream=stream_config), model_dir, tmp_path) as node:
        stream = Stream(node, Behaviour.HOLD)
        node.process.terminate()
        rest = stream.rest()
        assert texts_of(stream.first.decode() + rest) == "Hello,"
        assert "event: error\n" in rest
        assert '"code":"shutting_down"' in rest
        assert "[DONE]" not in rest
        assert node.process.wait() == 0
        node.wait_aborted(1, since=0)


def test_an_answer_that_a_drain_cuts_short_can_be_had_elsewhere(model_dir: Path, tmp_path: Path) -> None:
    with scripted_node(config(drain_s=0.2), model_dir, tmp_path) as node, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, f"{node.url}/v1/completions", {**BODY, "seed": Behaviour.HOLD})
        eventually(node.submits)
        node.process.terminate()
        reply = waiting.result(20)
    assert (reply.status, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert int(reply.headers["retry-after"]) >= 1


def test_second_signal_cuts_the_drain_short(model_dir: Path, tmp_path: Path) -> None:
    with scripted_node(config(drain_s=600.0), model_dir, tmp_path) as node:
        stream = Stream(node, Behaviour.HOLD)
        node.process.popen.send_signal(signal.SIGINT)
        eventually(lambda: get(f"{node.url}/ready").status == 503)
        node.process.popen.send_signal(signal.SIGINT)
        assert "event: error\n" in stream.rest()
        assert node.process.wait() == 0


@pytest.mark.parametrize(
    ("behaviour", "message"), [(Behaviour.FAIL, ENGINE_FAILURE), (Behaviour.DIE, "ended with status 7")]
)
def test_engine_death_ends_the_node(behaviour: Behaviour, message: str, model_dir: Path, tmp_path: Path) -> None:
    """Readers get all that the engine produced, also tokens that waited for an interval."""
    with scripted_node(config(stream=StreamConfig(interval=10)), model_dir, tmp_path) as node:
        other = Stream(node, Behaviour.HOLD)
        eventually(lambda: get(f"{node.url}/metrics").text.count("generation_tokens_total 2.0"))
        whole = post(f"{node.url}/v1/completions", {**BODY, "seed": behaviour})
        assert whole.status == 500
        assert whole.json()["error"]["message"] == "the engine of this node failed"
        rest = other.rest()
        assert texts_of(other.first.decode() + rest) == "Hello,"
        assert "event: error\n" in rest
        assert message not in rest
        assert "[DONE]" not in rest
        assert node.process.wait() == 1
        assert any("ERROR" in line and message in line for line in node.process.lines)


def test_a_node_with_all_optimisations_off(node: NodeUnderTest, model_dir: Path, tmp_path: Path) -> None:
    """The stream has the same bytes, except for what differs between any two answers."""
    plain = StreamConfig(batched_dispatch=Switch.OFF, notify_size=0, fast_path=Switch.OFF)
    body = {**BODY, "seed": Behaviour.BURST, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    with scripted_node(config(stream=plain), model_dir, tmp_path) as unoptimised:
        answers = [
            re.sub(r'"id":"cmpl-\w+"|"created":\d+', "", post(f"{url}/v1/completions", body).text)
            for url in (unoptimised.url, node.url)
        ]
    assert answers[0] == answers[1]
    assert answers[0].endswith("data: [DONE]\n\n")


def test_the_nodes_interval_is_that_of_requests_without_one(model_dir: Path, tmp_path: Path) -> None:
    with scripted_node(config(stream=StreamConfig(interval=1_000)), model_dir, tmp_path) as node:
        answer = post(f"{node.url}/v1/completions", {**BODY, "seed": Behaviour.REPLY, "stream": True})
    assert texts_of(answer.text) == REPLY_TEXT
    shown = [event for event in answer.text.split("\n\n") if '"text":"' in event and '"text":""' not in event]
    assert len(shown) <= 2, "the first token, and all else at the end"


def test_the_engine_is_told_all_that_the_settings_say_of_it() -> None:
    given = NodeConfig(
        cache=CacheConfig(block_size=32), stream=StreamConfig(batched_dispatch=Switch.OFF, notify_size=3)
    )
    told = NodeServer(Role.MIXED, given, b"", Path(), Path(), ())._engine_config(new_id())
    shared = {field.name for field in fields(NodeConfig)} & {field.name for field in fields(told)}
    assert shared >= {"model", "cache", "scheduler", "stream", "transfer"}
    for name in shared:
        assert getattr(told, name) is getattr(given, name)


def test_a_node_tells_proxies_how_it_reads_answers(model_dir: Path, tmp_path: Path) -> None:
    with contextlib.closing(FakeProxy()) as proxy:
        reads_none = replace(config(proxies=(proxy.address,)), message=MessageConfig(tool_parser=ToolFormat.NONE))
        with scripted_node(reads_none, model_dir, tmp_path, Role.DECODE):
            info = proxy.receive(Register).node
            assert info.formats == "calls none, reasoning none"
            assert info.answers


def test_signal_while_the_engine_starts(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / NEVER_READY).touch()
    with running(node_command(config(), model_dir, tmp_path), clean_environ()) as process:
        process.wait_for(lambda line: "engine: loading weights" in line)
        process.terminate()
        assert process.wait() == 0


def test_engine_that_cannot_start(tmp_path: Path) -> None:
    """The folder has no tokenizer."""
    with pytest.raises(AssertionError, match=r"tokenizer|exit status 1"), scripted_node(config(), tmp_path, tmp_path):
        pass


def test_port_in_use(node: NodeUnderTest, model_dir: Path, tmp_path: Path) -> None:
    taken = urlsplit(node.url).port
    assert taken is not None
    second = NodeConfig(http=HttpConfig(port=taken))
    with pytest.raises(AssertionError, match="cannot serve HTTP"), scripted_node(second, model_dir, tmp_path):
        pass


def test_a_node_without_a_proxy_takes_no_commands(model_dir: Path, tmp_path: Path) -> None:
    with scripted_node(config(), model_dir, tmp_path) as node:
        assert post(f"{node.url}/internal/command", {}).status == 404


# ------------------------------------------------------------------ with a proxy


class FakeProxy:
    """The control socket of a proxy, and the tickets that the proxy makes."""

    def __init__(self, heartbeat_ms: int = 60_000) -> None:
        """It wants heartbeats at this interval. After three without an answer, the node greets again."""
        self._heartbeat_ms = heartbeat_ms
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._boot_id = new_id()
        self._acks = Sealer(SECRET.encode(), Purpose.DISCOVERY, self._boot_id)
        self._tickets = Sealer(SECRET.encode(), Purpose.TICKET, self._boot_id)
        self._opener: Opener[ToProxy] = Opener(
            SECRET.encode(),
            Purpose.DISCOVERY,
            ToProxy,  # type: ignore[arg-type]
            receiver=self._boot_id,
        )

    def receive(self, kind: type[Register] | type[Deregister] | type[NodeHeartbeat]) -> Any:
        """Returns the next message of this kind, and acknowledges every registration and heartbeat until then."""
        deadline = time.monotonic() + WAIT_S
        while self._socket.poll(int(max(deadline - time.monotonic(), 0) * 1000)):
            peer, frame = self._socket.recv_multipart()
            message = self._opener.open(frame)
            if isinstance(message, Register):
                self.registered = message.node
                self._answer(peer, message.node.boot_id, Ack(message.node.boot_id, True))
            elif isinstance(message, NodeHeartbeat):
                self._answer(peer, message.boot_id, Ack(message.boot_id, True))
            elif isinstance(message, NodeHello):
                welcome = ProxyWelcome(message.boot_id, message.nonce, SPOKEN.newest, SPOKEN.oldest, self._heartbeat_ms)
                self._answer(peer, message.boot_id, welcome)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} in {WAIT_S} s")

    def _answer(self, peer: bytes, boot_id: bytes, message: Ack | ProxyWelcome) -> None:
        self._socket.send_multipart([peer, self._acks.seal(message, boot_id)])

    def ticket(self, node: NodeInfo, deadline_s: float = 10.0, **more: Any) -> str:
        ticket = made_ticket(node.boot_id, 1, request_id="from-proxy", deadline_s=deadline_s, **more)
        return base64.urlsafe_b64encode(self._tickets.seal(ticket)).rstrip(b"=").decode()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def proxy() -> Iterator[FakeProxy]:
    with contextlib.closing(FakeProxy()) as proxy:
        yield proxy


def ask(node: NodeUnderTest, ticket: str | None, seed: int = 0) -> Answer:
    headers = {} if ticket is None else {TICKET_HEADER.replace("-", "_"): ticket}
    return post(f"{node.url}/v1/completions", {**BODY, "seed": seed}, **headers)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_node_of_a_proxy(role: Role, proxy: FakeProxy, model_dir: Path, tmp_path: Path) -> None:
    """A prefill node, too, serves every request that has a ticket: it may have been a decode node a moment ago."""
    with scripted_node(config(proxies=(proxy.address,)), model_dir, tmp_path, role) as node:
        info = proxy.receive(Register).node
        assert (info.url, info.role, info.model) == (node.url, role, MODEL)
        assert (info.capacity.max_model_len, info.fingerprint) == (256, "f" * 32)
        assert (info.protocol, info.oldest_protocol) == (SPOKEN.newest, SPOKEN.oldest)

        without = ask(node, None)
        assert without.status == 401
        assert "clients talk to the proxy" in without.json()["error"]["message"]

        target = PrefillTarget("prefill-1", "tcp://127.0.0.1:9", new_id())
        ticket = proxy.ticket(info, prefill=(target,))
        answer = ask(node, ticket)
        assert answer.status == 200
        assert answer.headers["x-request-id"] == "from-proxy"
        [submit] = node.submits()
        assert submit.terms.prefill == (target,)
        assert 9 < submit.terms.deadline_s <= 10

        assert ask(node, ticket).status == 401
        assert ask(node, "forged").status == 401
        assert len(node.submits()) == 1

        for route, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [1]})):
            assert post(f"{node.url}/{route}", body).json()["error"]["code"] == "no_ticket"
            ticketed = {TICKET_HEADER.replace("-", "_"): proxy.ticket(info)}
            answer = post(f"{node.url}/{route}", body, **ticketed)
            assert (answer.status, answer.headers["x-request-id"]) == (200, "from-proxy")
            assert post(f"{node.url}/{route}", body, **ticketed).status == 401, "a ticket is good once"

        late = ask(node, proxy.ticket(info, deadline_s=0.2), seed=Behaviour.SILENT)
        assert (late.status, late.json()["error"]["code"]) == (504, "deadline_exceeded")

        node.process.terminate()
        assert proxy.receive(Deregister).boot_id == info.boot_id
        assert node.process.wait() == 0


@pytest.mark.parametrize("drain", list(DrainMode))
def test_a_node_that_drains_stays_known_until_its_streams_have_moved(
    drain: DrainMode, model_dir: Path, tmp_path: Path
) -> None:
    # A proxy that answers no heartbeats for three of their intervals is not known any more, and not told farewell.
    with contextlib.closing(FakeProxy(500 if drain is DrainMode.MIGRATE else 60_000)) as proxy:
        settings = config(proxies=(proxy.address,), drain_s=600.0)
        settings = replace(settings, discovery=replace(settings.discovery, drain=drain))
        with scripted_node(settings, model_dir, tmp_path, Role.DECODE) as node:
            info = proxy.receive(Register).node
            if drain is DrainMode.MIGRATE:
                assert not proxy.receive(NodeHeartbeat).draining
            moved = Stream(node, Behaviour.HOLD, {TICKET_HEADER: proxy.ticket(info)})
            node.process.terminate()
            if drain is DrainMode.MIGRATE:
                while not proxy.receive(NodeHeartbeat).draining:
                    pass
                refused = ask(node, proxy.ticket(info))
                assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
                assert proxy.receive(NodeHeartbeat).draining
                moved.leave()
            assert proxy.receive(Deregister).boot_id == info.boot_id
            if drain is DrainMode.FINISH:
                assert not node.aborted()
                moved.leave()
            assert node.process.wait() == 0
            node.wait_aborted(1, since=0)


def test_a_drain_that_was_commanded_goes_on_at_the_first_signal(model_dir: Path, tmp_path: Path) -> None:
    with contextlib.closing(FakeProxy(500)) as proxy:
        settings = config(proxies=(proxy.address,), drain_s=600.0)
        with scripted_node(settings, model_dir, tmp_path, Role.DECODE) as node:
            proxy.receive(NodeHeartbeat)
            info = proxy.registered
            left = Stream(node, Behaviour.HOLD, {TICKET_HEADER: proxy.ticket(info)})
            command = CommandSigner(SECRET.encode()).sign(Drain(), info.boot_id)
            assert post(f"{node.url}{COMMAND_PATH}", {}, **{COMMAND_HEADER.replace("-", "_"): command}).status == 200
            node.process.terminate()
            for _ in range(3):
                while not proxy.receive(NodeHeartbeat).draining:
                    pass
            node.process.terminate()
            assert proxy.receive(Deregister).boot_id == info.boot_id
            assert node.process.wait() == 0
            assert "shutting_down" in left.rest()


def test_node_deregisters_when_its_engine_dies(proxy: FakeProxy, model_dir: Path, tmp_path: Path) -> None:
    with scripted_node(config(proxies=(proxy.address,)), model_dir, tmp_path, Role.DECODE) as node:
        info = proxy.receive(Register).node
        assert ask(node, proxy.ticket(info), seed=Behaviour.DIE).status == 500
        assert proxy.receive(Deregister).boot_id == info.boot_id
        assert node.process.wait() == 1


def test_a_node_is_ready_while_a_proxy_has_accepted_it(model_dir: Path, tmp_path: Path) -> None:
    with (
        contextlib.closing(FakeProxy(1_000)) as proxy,
        scripted_node(config(proxies=(proxy.address,)), model_dir, tmp_path, Role.DECODE) as node,
    ):
        early = get(f"{node.url}/ready")
        assert (early.status, early.json()["status"]) == (503, "unregistered")
        assert proxy.address in early.json()["reason"]
        assert get(f"{node.url}/live").status == get(f"{node.url}/health").status == 200
        proxy.receive(Register)
        eventually(lambda: get(f"{node.url}/ready").status == 200)
        proxy.close()
        gone = eventually(lambda: answer if (answer := get(f"{node.url}/ready")).status == 503 else None)
        assert gone.json()["status"] == "unregistered"


def test_a_wrong_secret_or_address_keeps_a_node_from_being_ready(model_dir: Path, tmp_path: Path) -> None:
    """A proxy does not answer what it cannot read. The node becomes ready as soon as one proxy accepts it."""
    with contextlib.closing(FakeProxy()) as silent, contextlib.closing(FakeProxy()) as good:
        nobody = "tcp://127.0.0.1:9"
        with scripted_node(config(proxies=(silent.address, nobody)), model_dir, tmp_path, Role.DECODE) as node:
            wanted = (
                f"{silent.address} {RegistrationStatus.SILENT.value}",
                f"{nobody} {RegistrationStatus.UNREACHED.value}",
            )
            eventually(lambda: all(text in get(f"{node.url}/ready").json()["reason"] for text in wanted))
            assert get(f"{node.url}/ready").status == 503
        both = config(proxies=(nobody, good.address))
        with scripted_node(both, model_dir, tmp_path, Role.PREFILL) as node:
            good.receive(Register)
            eventually(lambda: get(f"{node.url}/ready").status == 200)


def test_others_are_answered_while_a_template_renders_for_long(model_dir: Path, tmp_path: Path) -> None:
    """Any part of a message can make the rendering long, not only its content."""
    folder = shutil.copytree(model_dir, tmp_path / "slow")
    loops = "{% for i in range(3000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}Hi"
    (folder / "chat_template.jinja").write_text(loops)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "x" * 4_000})}}
    message = {"role": "assistant", "content": "Hi", "tool_calls": [call]}
    with scripted_node(config(), folder, tmp_path) as node, ThreadPoolExecutor(6) as pool:
        slow_body = {"model": MODEL, "messages": [message], "seed": Behaviour.BURST}
        slow = [pool.submit(post, f"{node.url}/v1/chat/completions", slow_body) for _ in range(6)]
        answered = 0
        while not all(answer.done() for answer in slow):
            assert post(f"{node.url}/v1/completions", {**BODY, "seed": Behaviour.BURST}).status == 200
            answered += 1
        assert [answer.result().status for answer in slow] == [200] * 6
    assert answered > 2 * len(slow)


def test_nodes_answer_alike_by_their_hash_only_with_the_settings_that_decide_on_answers() -> None:
    usual, alike = NodeConfig(), NodeConfig(cache=CacheConfig(kv_cache_mib=17), http=HttpConfig(port=9))
    assert answers_hash(usual, "template") == answers_hash(alike, "template")
    tools = next(choice for choice in type(usual.message.tool_parser) if choice is not usual.message.tool_parser)
    others = [
        NodeConfig(message=MessageConfig(tool_parser=tools)),
        NodeConfig(http=HttpConfig(max_body_bytes=1)),
        NodeConfig(scheduler=SchedulerConfig(max_num_seqs=1)),
        NodeConfig(model=ModelConfig(max_model_len=1)),
    ]
    hashes = {answers_hash(usual, "template"), answers_hash(usual, ""), *(answers_hash(one, "") for one in others)}
    assert len(hashes) == 2 + len(others)
