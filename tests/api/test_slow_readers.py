"""Tests that a node's client that does not read delays only itself."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pdserve.config import ModelConfig, NodeConfig
from tests.api.behaviour import ENDLESS_TOKEN_TEXT, REPLY_TEXT, Behaviour
from tests.api.node import MODEL, WAIT_S, NodeUnderTest, scripted_node
from tests.api.plain_http import post
from tests.api.test_app import metrics
from tests.eventually import eventually

pytestmark = pytest.mark.integration

CHOICES = 128
TOKENS = 220
"""Tokens of each choice. With log probabilities, their chunks are more than all socket buffers can hold."""


@contextmanager
def reader(node: NodeUnderTest) -> Iterator[socket.socket]:
    """Yields the socket of a client that has asked for a long stream and reads nothing by itself."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "seed": Behaviour.ENDLESS,
        "n": CHOICES,
        "max_tokens": TOKENS,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
    }
    data = json.dumps(body).encode()
    address = urlsplit(node.url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.settimeout(WAIT_S)
        client.connect((address.hostname, address.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        yield client


def test_others_go_on_and_what_was_not_read_comes_in_fewer_chunks(model_dir: Path, tmp_path: Path) -> None:
    config = NodeConfig(model=ModelConfig(served_model_name=MODEL))
    with scripted_node(config, model_dir, tmp_path) as node, reader(node) as client:
        # The engine never waits for a reader: it computes all tokens while nothing is read.
        eventually(lambda: metrics(node)["pdserve_generation_tokens_total"] >= CHOICES * TOKENS)
        other = post(f"{node.url}/v1/completions", {"model": MODEL, "prompt": "x", "seed": Behaviour.REPLY})
        assert other.json()["choices"][0]["text"] == REPLY_TEXT
        data = b""
        while piece := client.recv(2**20):
            data += piece
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    events = re.findall(rb"data: (\{.*\})\n\n", data)
    words: Counter[int] = Counter()
    chunks = 0
    for event in events:
        [choice] = json.loads(event)["choices"]
        text = choice["delta"].get("content", "")
        chunks += bool(text)
        words[choice["index"]] += text.count(ENDLESS_TOKEN_TEXT)
    assert words == Counter(dict.fromkeys(range(CHOICES), TOKENS)), "nothing is lost"
    assert chunks < 0.9 * CHOICES * TOKENS, "tokens are merged when their reader lags"
