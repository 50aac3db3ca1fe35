"""``pdserve chat`` at a real cluster: which nodes answered, what became of a lost one, and what Ctrl-C ends.

In every run, ``tests/cli/test_chat_cluster.py`` has a real node, and ``tests/cli/test_chat.py`` a scripted one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import pdserve_in_terminal
from tests.cluster.nodes import Cluster, cluster, http, sample
from tests.eventually import eventually
from tests.processes import clean_environ

pytestmark = [pytest.mark.integration, pytest.mark.nightly]

PROMPT = ">>> "


@pytest.fixture(scope="module")
def slow_trio(slow_tiny_model: Path) -> Iterator[Cluster]:
    """Yields a prefill node and two decode nodes, whose answers take seconds."""
    with cluster(slow_tiny_model, "--dtype", "float32", decode=2) as running:
        yield running


def answering(url: str) -> str:
    """Returns the name of the node whose answer is under way; empty if none is."""
    under_way = http(f"{url}/status").json()["report"]["under_way"]
    return next((one["decode"] for one in under_way if one["stage"] == "answer"), "")


def test_the_line_after_an_answer_names_the_nodes(slow_trio: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pdserve", "chat", slow_trio.url, "--max-tokens", "8"],
        input="What is the weather like in a place where it never rains?",
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert (
        " + 8 answer tokens, cut off at the most tokens that it may have; prompt at prefill-0, answer at decode-"
        in (done.stderr)
    )


def test_ctrl_c_cancels_the_request_in_the_cluster(slow_trio: Cluster, tmp_path: Path) -> None:
    gone = sample(slow_trio.url, "proxy_outcomes_total", outcome="client_gone")
    with pdserve_in_terminal("chat", slow_trio.url, XDG_STATE_HOME=str(tmp_path)) as one:
        one.until(PROMPT)
        one.line("How?")
        node = eventually(lambda: answering(slow_trio.url), "an answer is under way")
        one.press_ctrl_c()
        shown = one.until(PROMPT)
        assert "stopped by you" in shown
        assert f"answer at {node}" in shown
        slow_trio.until_idle()
        assert sample(slow_trio.url, "proxy_outcomes_total", outcome="client_gone") == gone + 1


def test_an_answer_whose_node_is_lost_goes_on_and_the_line_says_so(slow_trio: Cluster, tmp_path: Path) -> None:
    """It is the last test of the module: it kills a node."""
    with pdserve_in_terminal("chat", slow_trio.url, "--max-tokens", "400", XDG_STATE_HOME=str(tmp_path)) as one:
        one.until(PROMPT)
        one.line("How?")
        name = eventually(lambda: answering(slow_trio.url), "an answer is under way")
        (lost,) = [node for node in slow_trio.decode if node.name == name]
        (other,) = [node for node in slow_trio.decode if node.name != name]
        lost.process.popen.kill()
        shown = " ".join(one.until(PROMPT).split())
    assert f"answer at {other.name}; resumed at {other.name} after its node was lost, with a pause of" in shown
    assert "400 answer tokens" in shown
