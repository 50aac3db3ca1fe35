"""Tests that ``pdserve live`` asks the server that a process is, and believes nothing else."""

from __future__ import annotations

import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from pdserve.cli.live import NotLive, ServerAddress, ask, run, server_address
from pdserve.errors import ConfigError

PYTHON = ["/opt/pdserve/bin/python", "/opt/pdserve/bin/pdserve"]


@contextmanager
def answering(status: int, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answers GET /live with ``status`` within the block, and yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/live" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("words", "environ", "found"),
    [
        ([*PYTHON, "decode", "--port", "8001"], {}, ServerAddress("127.0.0.1", 8001, "")),
        (["pdserve", "prefill", "--port=8001"], {"PDSERVE_HOST": "0.0.0.0"}, ServerAddress("127.0.0.1", 8001, "")),
        (["pdserve", "mixed"], {"PDSERVE_PORT": "9", "PDSERVE_HOST": "10.1.2.3"}, ServerAddress("10.1.2.3", 9, "")),
        (["pdserve", "proxy", "--host", "::"], {}, ServerAddress("::1", 8000, "")),
        (["/sbin/docker-init", "--", "pdserve", "up"], {}, ServerAddress("127.0.0.1", 8000, "")),
        (
            ["pdserve", "proxy"],
            {"PDSERVE_TLS_CERT": "/c.pem", "PDSERVE_TLS_KEY": "/k.pem"},
            ServerAddress("127.0.0.1", 8000, "/c.pem"),
        ),
        (
            ["pdserve", "up"],
            {"PDSERVE_TLS_CERT": "/c.pem", "PDSERVE_TLS_KEY": "/k.pem"},
            ServerAddress("127.0.0.1", 8000, "/c.pem"),
        ),
    ],
)
def test_the_command_line_and_the_environment_say_where_a_server_is(
    words: list[str], environ: dict[str, str], found: ServerAddress
) -> None:
    assert server_address(words, environ) == found


@pytest.mark.parametrize("words", [[], ["pdserve"], ["pdserve", "doctor"], ["sleep", "9"], ["sh", "-c", "pdserve up"]])
def test_a_process_that_serves_nothing_does_not_live_as_a_server(words: list[str]) -> None:
    with pytest.raises(NotLive, match="none of pdserve up, serve, proxy"):
        server_address(words, {})


def test_a_port_that_the_system_chose_is_not_known() -> None:
    with pytest.raises(ConfigError, match="--port"):
        server_address(["pdserve", "decode"], {})


def test_only_200_means_that_a_server_lives() -> None:
    with answering(200) as port:
        ask(ServerAddress("127.0.0.1", port, ""), 10.0)
    with pytest.raises(NotLive, match="does not answer"):
        ask(ServerAddress("127.0.0.1", port, ""), 10.0)
    with answering(503) as port, pytest.raises(NotLive, match="status 503"):
        ask(ServerAddress("127.0.0.1", port, ""), 10.0)


def test_https_is_asked_with_the_servers_own_certificate_whatever_name_that_is_for(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued, other = authority.issue_cert("proxy.example"), authority.issue_cert("other.example")
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(serving)
    for name, certificate in (("own.pem", issued), ("other.pem", other)):
        certificate.cert_chain_pems[0].write_to_path(tmp_path / name)
    with answering(200, serving) as port:
        ask(ServerAddress("127.0.0.1", port, str(tmp_path / "own.pem")), 10.0)
        with pytest.raises(NotLive, match="CERTIFICATE_VERIFY_FAILED"):
            ask(ServerAddress("127.0.0.1", port, str(tmp_path / "other.pem")), 10.0)


def test_the_process_that_is_named_is_asked() -> None:
    with answering(200) as port:
        program = ["-c", "import sys; print(flush=True); sys.stdin.read()", "pdserve", "decode", "--port", str(port)]
        with subprocess.Popen([sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            assert run(["--pid", str(server.pid)], {}) == 0
    with pytest.raises(NotLive, match=f"there is no process {server.pid}"):
        run(["--pid", str(server.pid)], {})
    with pytest.raises(NotLive, match="none of pdserve"):
        run(["--pid", str(os.getpid())], {})
