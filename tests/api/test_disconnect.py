"""Tests that a node frees all that a request holds when its client leaves, however far the request has come."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pdserve.api.generation.engine_client import EngineClient
from pdserve.api.node.node_metrics import NodeMetrics
from pdserve.api.node.serving_node import ServingNode
from pdserve.api.requests.grammar_check import GrammarCheck
from pdserve.api.requests.preparing import WORKERS
from pdserve.api.requests.tokenizer import Tokenizer, load_tokenizer
from pdserve.api.routes.app import create_app
from pdserve.config import (
    CacheConfig,
    CpuConfig,
    EngineConfig,
    GrammarConfig,
    HttpConfig,
    LogConfig,
    ModelConfig,
    SchedulerConfig,
    StreamConfig,
    TransferConfig,
)
from pdserve.http.outlet import OUTLET, Outlet
from pdserve.http.routes import DirectRoutes
from pdserve.settings import cache_folder
from pdserve.wire.discovery import NodeSizes, Role
from pdserve.wire.ids import new_id
from tests.api.behaviour import Behaviour
from tests.api.node import MODEL, WAIT_S, NodeUnderTest
from tests.api.plain_http import get
from tests.api.stepped_node import Flow
from tests.api.test_app import metrics
from tests.eventually import eventually
from tests.http.http_serving import http_serving


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize(
    ("behaviour", "stream", "interval"),
    [
        (Behaviour.HOLD, True, 1),
        (Behaviour.HOLD, True, 10),
        (Behaviour.HOLD, False, 1),
        (Behaviour.SILENT, True, 1),
    ],
)
def test_closed_connection(
    behaviour: Behaviour, stream: bool, interval: int, choices: int, node: NodeUnderTest
) -> None:
    """The client leaves in a stream (with or without tokens that wait), during an answer, or before its first byte."""
    before = len(node.submits())
    aborts = metrics(node)['pdserve_request_failure_total{reason="abort"}']
    connection = http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=WAIT_S)
    body = {"model": MODEL, "prompt": "x", "seed": behaviour, "n": choices, "stream": stream}
    body["stream_interval"] = interval
    connection.request("POST", "/v1/completions", body=json.dumps(body))
    if behaviour is Behaviour.HOLD and stream:
        assert connection.getresponse().readline().startswith(b"data: ")
    eventually(lambda: len(node.submits()) == before + 1)
    assert not {submit.local_id for submit in node.submits()[before:]} & node.aborted()
    assert connection.sock is not None or stream
    connection.close()
    node.wait_aborted(choices, before)
    assert eventually(lambda: metrics(node)['pdserve_request_failure_total{reason="abort"}'] == aborts + choices)


def test_a_choice_that_is_over_is_aborted_while_another_goes_on(node: NodeUnderTest) -> None:
    before = len(node.submits())
    connection = http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=WAIT_S)
    # These are seeds of HOLD, whose answer a stop string ends, and of SILENT.
    body = {"model": MODEL, "prompt": "x", "seed": Behaviour.SILENT - 1, "n": 2, "stop": ",", "stream": True}
    connection.request("POST", "/v1/completions", body=json.dumps(body))
    response = connection.getresponse()
    while b'"finish_reason":"stop"' not in response.readline():
        pass
    [submit] = node.submits()[before:]
    [other] = submit.children
    eventually(lambda: submit.local_id in node.aborted())
    assert other.local_id not in node.aborted()
    response.close()
    connection.close()
    node.wait_aborted(2, before)


def test_many_at_once_leave_nothing(node: NodeUnderTest) -> None:
    """The node still serves requests after many clients have left at once."""
    before = len(node.submits())
    connections = []
    for _ in range(40):
        connection = http.client.HTTPConnection(urlsplit(node.url).netloc, timeout=WAIT_S)
        body = {"model": MODEL, "prompt": "x", "seed": Behaviour.SILENT, "stream": True}
        connection.request("POST", "/v1/completions", body=json.dumps(body))
        connections.append(connection)
    eventually(lambda: len(node.submits()) == before + 40)
    for connection in connections:
        connection.close()
    node.wait_aborted(40, before)
    assert get(f"{node.url}/health").status == 200


# ------------------------------------------------------------------ step by step, in this process


def engine_config(
    model_dir: Path, scheduler: SchedulerConfig | None = None, stream: StreamConfig | None = None
) -> EngineConfig:
    return EngineConfig(
        role=Role.MIXED,
        boot_id=new_id(),
        secret=b"",
        model_dir=str(model_dir),
        cache_dir=str(cache_folder(os.environ)),
        model=ModelConfig(),
        cache=CacheConfig(),
        scheduler=scheduler or SchedulerConfig(),
        transfer=TransferConfig(),
        cpu=CpuConfig(),
        log=LogConfig(),
        stream=stream or StreamConfig(),
    )


@asynccontextmanager
async def app_in_process(
    model_dir: Path, tokenizer: Tokenizer, journal: Path, stream: StreamConfig | None = None
) -> AsyncIterator[tuple[DirectRoutes, EngineClient]]:
    command = [sys.executable, "-m", "tests.api.scripted_engine", str(journal)]
    engine = EngineClient(engine_config(model_dir), command=command)
    try:
        ready = await engine.start()
        node = ServingNode(
            name="node",
            role=Role.MIXED,
            model=MODEL,
            engine=engine,
            ready=ready,
            sizes=NodeSizes("tiny", "float32", "CPU, 1 core", "torch", 1, 1, 64, 64, 8, 64),
            tokenizer=tokenizer,
            tickets=None,
            metrics=NodeMetrics(lambda: engine.stats),
            timeout_s=60.0,
            max_body_bytes=10_000,
            stream=stream or StreamConfig(),
            grammars=GrammarCheck(model_dir, GrammarConfig()),
        )
        yield create_app(node), engine
    finally:
        await engine.stop(5.0)


class Cycle:
    """The server's side of a request whose body is still to be received, until the client has left."""

    more_body = True
    disconnected = False
    response_complete = False
    chunked_encoding = True


class Transport(asyncio.Transport):
    """A transport that accepts everything and sends nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def new_outlet() -> Outlet:
    outlet = Outlet(Transport(), Flow(), lambda: None)
    outlet.begin(Cycle())  # type: ignore[arg-type]  # all of a cycle that these requests use
    return outlet


def scope(outlet: Outlet | None = None) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"node")],
        "client": ("127.0.0.1", 1),
        "extensions": {OUTLET: outlet or new_outlet()},
    }


async def test_gone_before_the_stream_is_read(model_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "seed": Behaviour.HOLD, "stream": True}).encode()
    outlet, sent = new_outlet(), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message["type"])
        outlet.tell_disconnect()
        await asyncio.Event().wait()

    async with app_in_process(model_dir, tokenizer, tmp_path / "journal") as (app, engine):
        await asyncio.wait_for(app(scope(outlet), receive, send), WAIT_S)
        assert engine.open_requests == 0
    assert sent == ["http.response.start"]
    told = (tmp_path / "journal").read_text()
    assert '"kind":"abort","local_ids":[1]' in told


@pytest.mark.parametrize("behaviour", [Behaviour.SILENT, Behaviour.HOLD])
async def test_cancelled_at_any_time(
    behaviour: Behaviour, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The server cancels a request's task like this when it stops."""
    body = json.dumps({"model": MODEL, "prompt": "x", "seed": behaviour, "n": 2, "stream": True}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        pass

    async with app_in_process(model_dir, tokenizer, tmp_path / "journal") as (app, engine):
        before = asyncio.all_tasks()
        for turns in range(16):
            call = asyncio.ensure_future(app(scope(), receive, send))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert engine.open_requests == 0
            assert asyncio.all_tasks() == before


@pytest.mark.parametrize("cancelled", [False, True], ids=["the client leaves", "the server ends"])
async def test_gone_while_a_long_prompt_is_tokenised(
    cancelled: bool, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that waited for a thread are never tokenised, and the engine receives no message."""
    tokenizer = load_tokenizer(model_dir)
    body = json.dumps({"model": MODEL, "prompt": ["word " * 400] * 2, "seed": 0}).encode()
    begun, go_on, calls = threading.Semaphore(0), threading.Event(), []
    encode = tokenizer.encode

    def held(text: str, **options: Any) -> list[int]:
        calls.append(text)
        begun.release()
        go_on.wait(WAIT_S)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", held)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        pass

    async with app_in_process(model_dir, tokenizer, tmp_path / "journal") as (app, engine):
        before = asyncio.all_tasks()
        outlets = [new_outlet() for _ in range(WORKERS + 3)]
        requests = [asyncio.ensure_future(app(scope(outlet), receive, send)) for outlet in outlets]
        for _ in range(WORKERS):
            assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
        for outlet, request in zip(outlets, requests, strict=True):
            if cancelled:
                request.cancel()
            else:
                outlet.tell_disconnect()
        await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), WAIT_S)
        assert asyncio.all_tasks() == before
        assert engine.open_requests == 0
        go_on.set()
    assert len(calls) == WORKERS, "one of two prompts each, of the requests that had begun"
    assert '"kind":"submit"' not in (tmp_path / "journal").read_text()


async def test_a_node_without_an_engine_does_not_live(model_dir: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It ends soon; whoever probes it meanwhile must not take it for one that serves."""
    async with (
        app_in_process(model_dir, tokenizer, tmp_path / "journal") as (app, engine),
        http_serving(app, HttpConfig()) as (host, port),
    ):
        statuses = []
        for probe in ("live", "health", "ready"):
            statuses.append((await asyncio.to_thread(get, f"http://{host}:{port}/{probe}")).status)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await asyncio.wait_for(engine.wait_lost(), WAIT_S)
        for probe in ("live", "health", "ready"):
            statuses.append((await asyncio.to_thread(get, f"http://{host}:{port}/{probe}")).status)
    assert statuses == [200] * 3 + [503] * 3
