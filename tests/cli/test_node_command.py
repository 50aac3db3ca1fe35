"""Tests how ``pdserve role`` and ``pdserve drain`` find a node, and what they say where they cannot.

``tests/cluster/test_role_switch.py`` has them command real nodes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdserve.cli.main import main
from pdserve.cli.node_commands import Commander
from pdserve.config import CommandConfig, SecurityConfig, TrustConfig
from pdserve.wire.command import COMMAND_HEADER, COMMAND_PATH
from tests.processes import SECRET

BOOT = "0f" * 16


def instance(name: str, url: str, boot_id: str = BOOT) -> dict[str, object]:
    return {
        "name": name, "role": "decode", "state": "serving", "control": "", "model": "m", "fingerprint": "f",
        "heartbeat_age_s": 0.1, "url": url, "boot_id": boot_id,
    }  # fmt: skip


class Server(BaseHTTPRequestHandler):
    """A proxy that lists ``instances``, and a node that answers commands with ``answer``."""

    instances: list[dict[str, object]]
    status = 200
    answer: object = {"role": "prefill", "before": "decode", "draining": False, "uninformed": []}
    commands: list[str]
    on_command: Callable[[], None] = staticmethod(lambda: None)

    def do_GET(self) -> None:
        self._respond(200, self.instances)

    def do_POST(self) -> None:
        assert self.path == COMMAND_PATH
        self.commands.append(self.headers[COMMAND_HEADER])
        type(self).on_command()
        self._respond(self.status, self.answer)

    def _respond(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(*names: str, **changed: object) -> Iterator[tuple[str, type[Server]]]:
    """Yields the URL of a proxy that lists nodes of these names, all of which are the same server."""
    handler: type[Server] = type("Changed", (Server,), {"commands": [], "instances": [], **changed})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    url = f"http://127.0.0.1:{server.server_port}"
    handler.instances = [instance(name, url if index == 0 else f"{url}/{index}") for index, name in enumerate(names)]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield url, handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(*argv: str) -> int:
    return main(argv, {"PDSERVE_SECRET": SECRET})


@pytest.mark.parametrize("by_url", [False, True])
def test_a_node_is_found_by_name_or_url(by_url: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with served("d0", "d1") as (url, server):
        assert run("role", url if by_url else "d0", "prefill", "--proxy-url", url) == 0
        assert len(server.commands) == 1
    assert capsys.readouterr().out == "d0 is a prefill node now; it was a decode node\n"


def test_it_says_which_proxies_do_not_know_yet(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"role": "prefill", "before": "prefill", "draining": False, "uninformed": ["tcp://10.0.0.1:8100"]}
    with served("d0", answer=answer) as (url, _):
        assert run("role", "--node", "d0", "--role", "prefill", "--proxy-url", url) == 0
    said = capsys.readouterr().out
    assert "d0 is a prefill node already" in said
    assert "tcp://10.0.0.1:8100 has not acknowledged it yet" in said


@pytest.mark.parametrize(
    ("names", "node", "said"),
    [
        (("d0", "d1"), "d2", "knows no node 'd2'; it knows d0, d1"),
        ((), "d2", "it knows none"),
        (("d0", "d0"), "d0", "2 nodes have the name 'd0'; give the URL of one of them"),
    ],
)
def test_a_node_that_is_not_the_one(
    names: tuple[str, ...], node: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(*names) as (url, server):
        assert run("drain", node, "--proxy-url", url) == 1
        assert server.commands == []
    assert said in capsys.readouterr().err


def test_a_refusal_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with served("d0", status=401, answer={"error": {"message": "wrong signature"}}) as (url, _):
        assert run("drain", "d0", "--proxy-url", url) == 1
    assert "d0 refuses: wrong signature" in capsys.readouterr().err


def test_a_node_that_does_not_end_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"role": "decode", "before": "decode", "draining": True, "uninformed": []}
    with served("d0", answer=answer) as (url, _):
        assert run("drain", "d0", "--proxy-url", url, "--drain-wait-s", "0") == 0
        assert run("drain", "d0", "--proxy-url", url, "--drain-wait-s", "0.01") == 1
    shown = capsys.readouterr()
    assert shown.out == "d0 drains\n" * 2
    assert "d0 still drains after 0.01 s" in shown.err


DRAINS = {"role": "decode", "before": "decode", "draining": True, "uninformed": []}


def test_a_node_that_has_left_the_list_still_drains_until_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (url, proxy):
        with served("d0", answer=DRAINS) as (node_url, node):
            proxy.instances = [instance("d0", node_url)]
            node.on_command = proxy.instances.clear
            assert run("drain", "d0", "--proxy-url", url, "--drain-wait-s", "0.01") == 1
            assert proxy.instances == []
        assert "d0 still drains" in capsys.readouterr().err
        proxy.instances = [instance("d0", node_url)]
        commander = Commander(CommandConfig("d0", url), TrustConfig(), SecurityConfig(), {"PDSERVE_SECRET": SECRET})
        assert commander.has_ended(commander.find())


def test_a_node_has_ended_when_it_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    def restart() -> None:
        server.instances = [instance("d0", url, "1f" * 16)]

    with served("d0", answer=DRAINS) as (url, server):
        server.on_command = restart
        assert run("drain", "d0", "--proxy-url", url) == 0
    assert "d0 has ended" in capsys.readouterr().out


def test_a_proxy_that_does_not_answer_does_not_end_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    def garble() -> None:
        server.instances = [{}]

    with served("d0", answer=DRAINS) as (url, server):
        server.on_command = garble
        assert run("drain", "d0", "--proxy-url", url, "--drain-wait-s", "0.01") == 1
    assert "d0 still drains" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("role", "d0", "king"), "'king' is no role; there are prefill, decode, mixed"),
        (("role", "d0"), "which role? A node is one of prefill, decode, mixed"),
        (("role", "d0", "prefill", "x"), "unexpected argument 'x'"),
        (("drain",), "which node?"),
    ],
)
def test_wrong_words(argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert said in capsys.readouterr().err


def test_a_proxy_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("role", "d0", "decode", "--proxy-url", "http://127.0.0.1:1") == 1
    assert "http://127.0.0.1:1: " in capsys.readouterr().err
