"""Tests how the operator's commands are taken from the page, and that somebody judges each of them."""

from __future__ import annotations

import os
import subprocess

import pytest
import yaml

from lab.deploy_containers.by_hand import (
    BREAKS,
    EXPECTED,
    IMAGE,
    NODES,
    PAGE,
    PROXIES,
    Block,
    Watch,
    blocks,
    judge,
    parted,
    script,
)
from lab.deploy_containers.report import Findings
from lab.deploy_containers.stand_in.podman import LABEL, Podman
from tests.deploy.deploy_tools import DeployTool, run_tool
from tests.deploy.manifests import DEPLOY

COMMANDS = blocks(PAGE.read_text())


def done(without: str = "") -> list[Block]:
    """Returns the page's blocks as if each had shown what it should, but for one text."""
    found = []
    for i, commands in enumerate(COMMANDS):
        word = next(word for word in EXPECTED if word in commands)
        found.append(Block(commands, "\n".join(text for text in EXPECTED[word] if text != without), i, i + 1))
    return found


def test_every_block_is_judged_and_its_image_is_the_products() -> None:
    assert all(any(word in commands for word in EXPECTED) for commands in COMMANDS)
    assert set(BREAKS) <= set(EXPECTED)
    assert any(IMAGE in commands for commands in COMMANDS)
    found = Findings()
    judge(done(), Watch(), found)
    assert found.problems == []
    assert {figure.of for figure in found.figures} == {"", *BREAKS.values()}


@pytest.mark.parametrize("missing", sorted({text for texts in EXPECTED.values() for text in texts}))
def test_what_is_not_shown_is_a_problem(missing: str) -> None:
    found = Findings()
    judge(done(missing), Watch(), found)
    assert len(found.problems) == sum(missing in texts for texts in EXPECTED.values())
    assert all(repr(missing) in problem for problem in found.problems)


def test_commands_that_nobody_expected_and_missing_ones_are_problems() -> None:
    found = Findings()
    judge([*done()[:-1], Block("docker swarm init\n", "", 0, 1)], Watch(), found)
    assert len(found.problems) == 2


def test_the_script_runs_every_block_with_this_machines_podman() -> None:
    runtime = Podman(("echo", "podman"), ("--ulimit=nofile=9:9",))
    commands = ['docker run --name a pdserve:0.2.0 "b c"\n', "docker ps | tr a-z A-Z\nfalse\n", "printf unfinished"]
    text = script(commands, runtime, "localhost/it:1")
    said = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, timeout=20).stdout
    found = parted(commands, said)
    assert [block.commands for block in found] == commands
    assert found[0].output.strip() == (
        f"podman run --label {LABEL}={os.getpid()} --pull never --ulimit=nofile=9:9 --name a localhost/it:1 b c"
    )
    assert found[1].output.strip() == "PODMAN PS"
    assert found[2].output.strip() == "unfinished"
    assert found[0].begun <= found[0].ended == found[1].begun
    cut = said[: said.rindex("=== block")]
    assert [block.commands for block in parted(commands, cut)] == commands[:2]


@pytest.mark.parametrize("commands", COMMANDS)
def test_every_block_is_one_that_bash_can_read(commands: str) -> None:
    subprocess.run(["bash", "-n", "-c", commands], check=True, timeout=20)


def test_the_cluster_counts_as_broken_from_the_first_bad_look_to_the_last() -> None:
    watch = Watch([(1.0, True), (2.0, False), (3.0, True), (4.0, False), (9.0, False)])
    assert watch.broken_s(0.0, 5.0) == pytest.approx(2.2)
    assert watch.broken_s(0.0, 1.5) == 0.0


def prometheus() -> tuple[str, str]:
    """Returns the page's configuration of Prometheus, and the command in its first line that makes the rules."""
    text = PAGE.read_text().partition("```yaml\n")[2].partition("```")[0]
    return text, text.partition("\n")[0].partition("; ")[2].partition(" > ")[0]


def test_prometheus_asks_every_process_with_the_labels_of_the_rules() -> None:
    (job,) = yaml.safe_load(prometheus()[0])["scrape_configs"]
    asked = {target: part["labels"] for part in job["static_configs"] for target in part["targets"]}
    assert asked == {
        f"{name}:{8000 if name in PROXIES else 8001}": {"namespace": "pdserve", "component": name.partition("-")[0]}
        for name in (*NODES, *PROXIES)
    }


def test_the_rules_for_prometheus_are_those_of_kubernetes() -> None:
    done = subprocess.run(prometheus()[1], shell=True, cwd=DEPLOY.parent, capture_output=True, check=True, timeout=20)
    assert yaml.safe_load(done.stdout) == yaml.safe_load((DEPLOY / "monitoring" / "rules.yaml").read_text())["spec"]


@pytest.mark.deploy
@pytest.mark.integration
def test_prometheus_takes_configuration_and_rules(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("prometheus")
    text, command = prometheus()
    (folder / "prometheus.yaml").write_text(text)
    rules = subprocess.run(command, shell=True, cwd=DEPLOY.parent, capture_output=True, check=True, timeout=20).stdout
    (folder / "rules.yaml").write_bytes(rules)
    run_tool(DeployTool.PROMTOOL, "check", "config", folder / "prometheus.yaml")
