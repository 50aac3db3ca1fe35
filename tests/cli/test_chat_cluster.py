"""``pdserve chat MODEL``: a cluster that starts with the chat and ends with it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from pdserve.cli.chat.command import cluster_environ
from pdserve.config import ChatConfig, UpConfig
from pdserve.settings import load, load_with_file
from tests.cli.terminal import pdserve_in_terminal
from tests.eventually import eventually
from tests.processes import cluster_processes, command_has, wait_until_gone

PROMPT = ">>> "
SMALL = ("--prefill", "0", "--decode", "0", "--mixed", "1", "--kv-cache-mib", "64", "--max-model-len", "512")


def up_of(*argv: str, **environ: str) -> UpConfig:
    """Returns the settings that the cluster of such a chat has."""
    config, file = load_with_file(ChatConfig, argv, environ, prog="pdserve chat")
    return load(UpConfig, [], cluster_environ(config, environ, file), prog="pdserve up")


def has_engine(marker: str) -> bool:
    found = False
    for pid in cluster_processes(marker):
        with suppress(OSError):
            found |= command_has(pid, "pdserve.engine")
    return found


def test_a_cluster_has_the_settings_of_its_chat(tmp_path: Path) -> None:
    assert up_of() == UpConfig()
    given = up_of("--model", "/m", "--max-model-len", "512", "--prefill", "2", "--ask", "Why?")
    assert (given.model.path, given.model.max_model_len, given.cluster.prefill) == ("/m", 512, 2)
    assert given.cluster.ask == ""
    assert up_of(PDSERVE_MODEL="/m", PDSERVE_PORT="1").model.path == "/m"
    file = tmp_path / "settings.toml"
    file.write_text("[cluster]\nprefill = 3\n[http]\ndrain-s = 7\n[talk]\nsystem = 'Be brief.'\n")
    assert up_of("--config", str(file)).cluster.prefill == 3
    # A flag goes before the file, also where it says what is so by default.
    assert up_of("--config", str(file), "--prefill", "1").cluster.prefill == 1


@pytest.mark.integration
def test_it_starts_a_cluster_and_ends_it(tiny_model: Path, tmp_path: Path) -> None:
    flags = (str(tiny_model), *SMALL, "--max-tokens", "5")
    with pdserve_in_terminal("chat", *flags, XDG_STATE_HOME=str(tmp_path)) as one:
        assert "all 1 nodes are ready" in one.until(PROMPT, 150)
        one.line("How?")
        assert "answer at mixed-0" in one.until(PROMPT)
        assert len(cluster_processes(str(tmp_path))) >= 5  # the chat, up, the proxy, the node and its engine
        one.press_ctrl_d()
        assert one.wait() == 0
        assert "Traceback" not in one.rest()
    wait_until_gone(str(tmp_path))


@pytest.mark.integration
def test_a_cluster_that_ends_is_told_and_one_that_is_left_ends(tiny_model: Path, tmp_path: Path) -> None:
    with pdserve_in_terminal("chat", str(tiny_model), *SMALL, XDG_STATE_HOME=str(tmp_path)) as one:
        one.until(PROMPT, 150)
        (up,) = [pid for pid in cluster_processes(str(tmp_path)) if command_has(pid, "up")]
        os.kill(up, signal.SIGKILL)
        # With ``up`` itself, all that it has started ends.
        eventually(lambda: cluster_processes(str(tmp_path)) == {one.process.pid}, "the cluster has ended")
        one.line("How?")
        one.until("the cluster was killed by SIGKILL")
        assert one.wait() == 1
    wait_until_gone(str(tmp_path))


@pytest.mark.integration
def test_killed_while_its_cluster_starts_it_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    with pdserve_in_terminal("chat", str(tiny_model), *SMALL, XDG_STATE_HOME=str(tmp_path)) as one:
        # The engine loads its libraries now.
        eventually(lambda: has_engine(str(tmp_path)), "an engine has been started")
        one.process.kill()
        wait_until_gone(str(tmp_path))


@pytest.mark.integration
def test_a_cluster_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pdserve_in_terminal("chat", str(tmp_path), *SMALL, XDG_STATE_HOME=str(tmp_path)) as one:
        shown = one.until("the cluster did not start; the lines above say why")
        assert "has no tokenizer.json" in shown
        assert one.wait() == 1
