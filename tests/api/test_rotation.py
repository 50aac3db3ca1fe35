"""Tests that a running node and its engine take a new cluster secret on SIGHUP."""

from __future__ import annotations

import base64
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from pdserve.config import DiscoveryConfig, ModelConfig, NodeConfig, SecurityConfig
from pdserve.control.frame import Opener, Purpose, Sealer, Secrets
from pdserve.errors import AuthenticationFailed
from pdserve.wire.discovery import Ack, NodeHello, ProxyWelcome, Register, ToProxy
from pdserve.wire.engine import Renew
from pdserve.wire.ids import new_id
from pdserve.wire.terms import TICKET_HEADER
from pdserve.wire.version import SPOKEN
from tests.api.node import MODEL, NodeUnderTest, scripted_node
from tests.api.plain_http import post
from tests.eventually import eventually
from tests.terms import made_ticket

pytestmark = pytest.mark.integration

OLD, NEW = "the-old-secret-of-the-cluster", "the-new-secret-of-the-cluster"


class Ear:
    """A proxy that listens to one node, with an ``Opener`` for each secret."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        to_proxy: Any = ToProxy
        own = new_id()
        self._openers: dict[str, Opener[ToProxy]] = {
            secret: Opener(secret.encode(), Purpose.DISCOVERY, to_proxy, receiver=own) for secret in (OLD, NEW)
        }
        self._secrets = Secrets(OLD.encode())
        self._sealer = Sealer(self._secrets, Purpose.DISCOVERY, own)
        self.boot_id = b""

    def close(self) -> None:
        self.socket.close(linger=0)

    def signed_with(self) -> str:
        """Returns which secret the next message is signed with, and answers it with the same secret."""
        assert self.socket.poll(10_000)
        route, frame = self.socket.recv_multipart()
        for secret, opener in self._openers.items():
            try:
                message = opener.open(frame)
            except AuthenticationFailed:
                continue
            self.boot_id = message.node.boot_id if isinstance(message, Register) else message.boot_id
            answer: Ack | ProxyWelcome = Ack(self.boot_id, known=True)
            if isinstance(message, NodeHello):
                answer = ProxyWelcome(self.boot_id, message.nonce, SPOKEN.newest, SPOKEN.oldest, 50)
            self._secrets.renew(secret.encode())
            self.socket.send_multipart([route, self._sealer.seal(answer, self.boot_id)])
            return secret
        raise AssertionError("signed with neither")


def test_tickets_heartbeats_and_the_engine_follow_the_file(model_dir: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(OLD)

    def ask(node: NodeUnderTest, sealer: Sealer, boot_id: bytes) -> int:
        ticket = made_ticket(boot_id, 1)
        header = base64.urlsafe_b64encode(sealer.seal(ticket)).rstrip(b"=").decode()
        body = {"model": MODEL, "prompt": "x", "seed": 0}
        return post(f"{node.url}/v1/completions", body, **{TICKET_HEADER.replace("-", "_"): header}).status

    def hang_up(node: NodeUnderTest, expected: str) -> str:
        node.process.popen.send_signal(signal.SIGHUP)
        return node.process.wait_for(lambda line: expected in line)

    with zmq.Context() as context, closing(Ear(context)) as ear:
        config = NodeConfig(
            model=ModelConfig(served_model_name=MODEL),
            discovery=DiscoveryConfig(proxies=(ear.address,), heartbeat_ms=50),
            security=SecurityConfig(secret_file=str(secret)),
        )
        with scripted_node(config, model_dir, tmp_path) as node:
            assert ear.signed_with() == OLD
            old, new = (Sealer(one.encode(), Purpose.TICKET, new_id()) for one in (OLD, NEW))
            assert (ask(node, old, ear.boot_id), ask(node, new, ear.boot_id)) == (200, 401)
            secret.write_text(f"{NEW}\n{OLD}\n")
            hang_up(node, "SIGHUP: read again: 2 cluster secret")
            assert (ask(node, old, ear.boot_id), ask(node, new, ear.boot_id)) == (200, 200)
            eventually(lambda: ear.signed_with() == NEW)
            eventually(lambda: [m.secret for m in node.told() if isinstance(m, Renew)] == [f"{NEW}\n{OLD}".encode()])
            for broken, why in (
                ("short", "has 5 characters"),
                ("\n", "has 0 characters"),
                (f"{NEW}\n" * 3, "has 3 lines"),
            ):
                secret.write_text(broken)
                assert "SIGHUP: nothing is changed" in hang_up(node, why)
            assert (ask(node, old, ear.boot_id), ask(node, new, ear.boot_id)) == (200, 200)
            secret.write_text(NEW)
            hang_up(node, "SIGHUP: read again: 1 cluster secret")
            hang_up(node, "SIGHUP: read again, and nothing is new: 1 cluster secret")
            assert (ask(node, old, ear.boot_id), ask(node, new, ear.boot_id)) == (401, 200)
