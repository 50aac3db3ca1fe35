"""Runs ``pdserve up`` with the demo model: real processes answer a question and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from pdserve.cli.up.command import StartTimes, _what_starts
from pdserve.config import UpConfig
from pdserve.settings import cache_folder, load
from tests.eventually import eventually
from tests.nightly import nightly
from tests.processes import (
    Process,
    clean_environ,
    cluster_processes,
    command_has,
    pdserve,
    running,
    wait_until_gone,
)

pytestmark = pytest.mark.integration

SMALL = ("--port", "0", "--kv-cache-mib", "64", "--max-model-len", "512")
QUESTION = "What is the capital of France? Answer in one sentence."


def url_of(up: Process) -> str:
    """Returns the cluster's URL as soon as the cluster is ready."""
    line = up.wait_for(lambda line: line.startswith("OpenAI-compatible API: "))
    return line.removeprefix("OpenAI-compatible API: ").removesuffix("/v1")


def until(up: Process, words: str) -> None:
    up.wait_for(lambda line: words in line)


def nodes(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/instances", timeout=10) as response:
        return {instance["name"]: instance["role"] for instance in json.load(response)}


def borrows(url: str) -> bool:
    """Returns whether a node that answered a question has computed on another one's core."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        (model,) = json.load(response)["data"]
    body = json.dumps({"model": model["id"], "prompt": "How do you do?", "max_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
    with urllib.request.urlopen(f"{url}/instances", timeout=10) as response:
        addresses = [instance["url"] for instance in json.load(response)]
    for address in addresses:
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as response:
            found = re.search(r"^pdserve_borrowed_core_seconds_total (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None
        if float(found[1]) > 0:
            return True
    return False


@pytest.mark.usefixtures("demo_model")
def test_one_question_is_answered_over_prefill_and_decode_also_where_a_key_is_wanted(tmp_path: Path) -> None:
    key = "a-key-for-tests-only-0123456789"
    with pdserve("up", *SMALL, "--ask", QUESTION, XDG_STATE_HOME=str(tmp_path), PDSERVE_API_KEY=key) as up:
        status = up.wait(180)
    assert status == 0, up.output
    assert "The capital of France is Paris." in up.lines, up.output
    assert re.search(r"^TTFT [\d.]+ m?s, [\d.]+ tok/s, \d+ prompt \+ \d+ answer tokens$", up.output, re.MULTILINE)
    (log,) = tmp_path.glob("pdserve/logs/*/decode-0.log")
    assert "source=remote" in log.read_text()
    assert "source=remote" not in up.output
    # A slow machine's start has more lines that say what is waited for, and one with other engines has warnings.
    usual = [line for line in up.output.splitlines() if "] waiting for " not in line and " shares core" not in line]
    assert len(usual) <= 14, up.output
    assert re.search(r"KV cache  64 MiB: [\d,]+ tokens, \d+ full contexts of 512$", up.output, re.MULTILINE)
    assert key not in up.output + log.read_text()
    assert "all 2 nodes are ready" in up.output
    wait_until_gone(str(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, nightly(signal.SIGTERM)])
def test_it_starts_again_what_dies_and_lets_streams_end_when_it_is_stopped(
    number: signal.Signals, tiny_model: Path, tmp_path: Path
) -> None:
    """Its streams have their time, and then end with an error event: stopped engines have no answer in time."""
    flags = ("--model", str(tiny_model), "--prefill", "0", "--decode", "0", "--mixed", "2", "--drain-s", "3")
    environ = {"XDG_STATE_HOME": str(tmp_path), "PDSERVE_ENGINE_SILENCE_MS": "60000"}
    with pdserve("up", *SMALL, *flags, **environ) as up:
        url = url_of(up)
        everyone = {"mixed-0": "mixed", "mixed-1": "mixed"}
        assert nodes(url) == everyone
        if len(os.sched_getaffinity(0)) > 1:
            eventually(lambda: borrows(url), "the node that answers borrows the other one's core")
        for name in ("mixed-0", "proxy"):
            (process,) = [pid for pid in cluster_processes(str(tmp_path)) if command_has(pid, name)]
            os.kill(process, signal.SIGKILL)
            until(up, f"{name} was killed by SIGKILL")
            until(up, f"{name} serves again")
        eventually(lambda: nodes(url) == everyone, "both nodes are registered at the new proxy")

        engines = [pid for pid in cluster_processes(str(tmp_path)) if command_has(pid, "pdserve.engine")]
        assert len(engines) == len(everyone)
        (model,) = json.loads(urllib.request.urlopen(f"{url}/v1/models", timeout=10).read())["data"]
        body = {"model": model["id"], "prompt": "How?", "max_tokens": 400, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            for engine in engines:
                os.kill(engine, signal.SIGSTOP)
            up.popen.send_signal(number)
            until(up, "stopping: 1 answer has 3 s to finish; a second Ctrl-C ends it at once")
            rest = stream.read()
        assert b'"error"' in rest
        assert b"[DONE]" not in rest
        assert up.wait(60) == 0, up.output
    wait_until_gone(str(tmp_path))


def test_on_a_terminal_a_start_shows_what_each_node_does_and_how_long_the_last_one_took(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = (*SMALL, "--model", str(tiny_model), "--prefill", "0", "--decode", "0", "--mixed", "1", "--ask", "How?")
    what = _what_starts(load(UpConfig, flags, {}, prog="pdserve up"))
    times = StartTimes(cache_folder(os.environ))
    times.note(what, 1234.0)
    on_terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"
    command = [sys.executable, "-c", on_terminal, sys.executable, "-P", "-m", "pdserve", "up", *flags]
    own = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
    with running(command, clean_environ(**own)) as up:
        assert up.wait(180) == 0, up.output
    moves = [line for line in up.output.splitlines() if "mixed-0  loading libraries" in line]
    assert moves, up.output
    assert re.search(r" \d+ s; the last start took 1234 s", up.output), up.output
    # The region that moved is gone when the cluster is ready, and the block stands there once.
    assert up.output.count("  model     ") == 1
    assert 0 < (times.expected(what) or 0) < 1234
    wait_until_gone(str(tmp_path))


def test_a_node_that_cannot_start_stops_everything_and_says_why(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "nonsense"}')
    with pdserve("up", "--port", "0", "--model", str(model), XDG_STATE_HOME=str(tmp_path)) as up:
        assert up.wait(90) == 1
        assert re.search(r"(prefill|decode)-0 ended with status 1; its last lines:", up.output)
        assert str(model) in up.output
    wait_until_gone(str(tmp_path))


def test_what_is_stopped_before_its_nodes_start_leaves_no_compiler(tmp_path: Path) -> None:
    """As a first start, which compiles while it fetches its model. The hub never answers here."""
    compiler, compiles = tmp_path / "programs" / "g++", tmp_path / "compiles"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo one\necho > {compiles}\nexec sleep 60\n')
    compiler.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as hub:
        environ = {
            "PATH": f"{compiler.parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_STATE_HOME": str(tmp_path),
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "",
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "PDSERVE_DEVICE": "cpu",
        }
        with pdserve("up", *SMALL, "--model", "somebody/something", **environ) as up:
            eventually(compiles.exists, "the compiler is at work")
            up.terminate()
            assert up.wait(60) == 128 + signal.SIGTERM, up.output
    wait_until_gone(str(tmp_path))


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pdserve("proxy", "--port", "0", "--control-port", "0") as proxy:
        port = proxy.listening().url.rpartition(":")[2]
        with pdserve("up", "--port", port, "--model", str(tmp_path)) as up:
            assert up.wait(60) == 2
            assert f"--port {port} is taken: another program listens on 127.0.0.1:{port}" in up.output
            assert "starting" not in up.output
