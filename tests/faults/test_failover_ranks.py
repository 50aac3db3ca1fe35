"""Answers of a node of several ranks go on at another such node when one of its ranks is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.nodes import cluster
from tests.faults.test_failover import FLAGS, requests, until_received
from tests.faults.test_node_death import engine_pid
from tests.tiny_models import save_tiny_chat_model

ONLY = ("greedy", "several", "several in whole")


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of many layers, whose heads can be divided among two ranks."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 4_096}
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), **shape)


@pytest.mark.nightly
def test_answers_go_on_when_a_rank_dies(model: Path) -> None:
    """In every run, ``test_ranks.py`` shows that such a node ends, and ``test_failover.py`` that answers then go on."""
    with cluster(model, *FLAGS, "--tensor-parallel-size", "2", prefill=0, decode=0, mixed=2) as running:
        unbroken = {name: client.answer() for name, client in requests("unbroken", running.url, ONLY).items()}
        clients = requests("killed", running.url, ONLY)
        until_received(clients["greedy"], 3000)
        victim = running.answering(clients["greedy"].label)
        (other,) = (node for node in running.decode if node is not victim)
        engine = engine_pid(victim)
        (follower,) = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        os.kill(int(follower), signal.SIGKILL)
        for client in clients.values():
            client.answer().like(unbroken[client.name])
        assert victim.process.wait() == 1
        assert " resumed from=" in running.proxy.output
        running.decode.remove(victim)
        running.until_idle()
        assert other.idle
