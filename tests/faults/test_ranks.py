"""Tests that a node of several ranks gives the right tokens, and that the whole node ends when a rank ends or hangs."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Node, http
from tests.eventually import eventually
from tests.faults.test_node_death import engine_pid
from tests.faults.test_shutdown import cpu_seconds, own_temporary_folder
from tests.processes import alive, pdserve
from tests.tiny_models import Reference, save_tiny_chat_model

__all__ = ["own_temporary_folder"]

PROMPT = list(range(3, 40))
NEW_TOKENS = 12
LONG_ANSWER = 6000
"""The tokens of an answer that takes seconds, even with a tiny model."""
FLAGS = (
    "--served-model-name",
    "tiny",
    "--dtype",
    "fp32",
    "--kv-cache-mib",
    "8",
    "--max-num-batched-tokens",
    "16",
    "--max-num-seqs",
    "8",
    "--tensor-parallel-size",
    "2",
)


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny model with the demo model's tokenizer."""
    positions = 2 * LONG_ANSWER
    return save_tiny_chat_model(demo_model, tmp_path_factory.mktemp("tiny"), max_position_embeddings=positions)


@dataclass(frozen=True)
class Ranks(Node):
    """A mixed node, with the processes of its further ranks."""

    followers: list[int]

    def complete(self, **more: object) -> Any:
        body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return http(self.url + "/v1/completions", {**body, **more}, timeout_s=60)

    @contextmanager
    def streaming(self) -> Iterator[Callable[[], bytes]]:
        """Streams an answer that takes seconds, reads its first token, and yields a function that returns the rest."""
        body = {"model": "tiny", "prompt": PROMPT, "ignore_eos": True, "max_tokens": LONG_ANSWER, "stream": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data: ")
            yield response.read


@contextmanager
def ranks(model: Path, *flags: str) -> Iterator[Ranks]:
    with pdserve("mixed", "--model", str(model), *FLAGS, *flags) as process:
        url = process.listening().url
        engine = engine_pid(Node("", process, url))
        followers = [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]
        assert len(followers) == 1
        yield Ranks("", process, url, followers)


def gone(node: Ranks) -> bool:
    return not any(alive(pid) for pid in node.followers)


def wanted(model: Path) -> list[int]:
    return Reference(model, NEW_TOKENS).answer(PROMPT)


def test_two_ranks_answer_as_one_idle_for_nothing_and_leave_nothing(model: Path, own_temporary_folder: Path) -> None:
    with ranks(model) as node:
        assert node.complete(max_tokens=NEW_TOKENS).json()["choices"][0]["token_ids"] == wanted(model)
        started, before = time.monotonic(), sum(map(cpu_seconds, node.followers))
        time.sleep(1.5)  # The test measures a time in which nothing happens.
        share = (sum(map(cpu_seconds, node.followers)) - before) / (time.monotonic() - started)
        assert share < 0.05
        node.process.terminate()
        assert node.process.wait() == 0
        assert gone(node)
    left = [path for path in own_temporary_folder.iterdir() if not path.name.startswith("torchinductor")]
    assert left == []


def test_a_rank_killed_under_a_request_ends_the_node(model: Path) -> None:
    with ranks(model) as node:
        with node.streaming() as rest_of_answer:
            os.kill(node.followers[0], signal.SIGKILL)
            text = rest_of_answer()
        assert b'"error"' in text
        assert b"[DONE]" not in text
        assert node.process.wait() == 1
        assert f"tensor-parallel rank 1 (process {node.followers[0]}) was killed by SIGKILL" in node.process.output


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_the_node(model: Path) -> None:
    """In every run, one that idles hangs here, and one under a request in ``tests/engine/test_tp_ranks.py``."""
    with ranks(model, "--tp-timeout-ms", "3000") as node:
        with node.streaming() as rest_of_answer:
            os.kill(node.followers[0], signal.SIGSTOP)
            text = rest_of_answer()
        assert b'"error"' in text
        assert node.process.wait() == 1
        assert "tensor-parallel rank 1 hangs: no sign of it for 3.0 s" in node.process.output
        eventually(lambda: gone(node), "the stopped process is gone")


def test_an_idle_rank_that_hangs_ends_the_node(model: Path) -> None:
    """No step waits for it, so only its own silence shows that it hangs."""
    with ranks(model, "--engine-silence-ms", "2000") as node:
        os.kill(node.followers[0], signal.SIGSTOP)
        assert node.process.wait() == 1
        assert "tensor-parallel rank 1 hangs: no sign of life for 2.0 s" in node.process.output
        eventually(lambda: gone(node), "the stopped process is gone")
