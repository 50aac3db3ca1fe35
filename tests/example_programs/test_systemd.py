"""Tests that systemd takes the example units, and that pdserve takes their command lines."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from pdserve.config import NodeConfig, ProxyConfig
from tests.example_programs.command_lines import node_config, proxy_config
from tests.example_programs.programs import EXAMPLES

UNITS = EXAMPLES / "systemd"
ROLES = ("proxy", "prefill", "decode")
PROGRAM = "/opt/pdserve/bin/pdserve"
SPECIFIERS = {"%H": "host-2", "%d": "/run/credentials/unit"}


def text_of(role: str) -> str:
    return (UNITS / f"pdserve-{role}.service").read_text()


def values(role: str, key: str) -> list[str]:
    """Returns the values of a key of the unit, in order, with specifiers replaced."""
    text = text_of(role)
    for specifier, value in SPECIFIERS.items():
        text = text.replace(specifier, value)
    return re.findall(rf"(?m)^{key}=(.*)$", text)


def environ(role: str) -> dict[str, str]:
    """Returns the variables that systemd gives the unit's process: those of the file prevail."""
    (file,) = values(role, "EnvironmentFile")
    lines = (UNITS / Path(file).name).read_text().splitlines()
    words = [word for line in values(role, "Environment") for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in [*words, *(line for line in lines if line and line[0] != "#")])


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(role: str, capsys: pytest.CaptureFixture[str]) -> ProxyConfig | NodeConfig:
    (command,) = values(role, "ExecStart")
    program, *words = shlex.split(command)
    assert program == PROGRAM
    if role == "proxy":
        return proxy_config(words, environ(role), capsys)
    return node_config(role, words, environ(role), capsys)


def test_there_is_a_unit_for_each_role() -> None:
    assert {path.name for path in UNITS.glob("*.service")} == {f"pdserve-{role}.service" for role in ROLES}


def test_pdserve_takes_the_command_line(role: str, config: ProxyConfig | NodeConfig) -> None:
    assert config.http.host == "0.0.0.0"
    if isinstance(config, ProxyConfig):
        assert config.admission.api_key_file in credentials(role)
    else:
        assert config.transfer.host == "0.0.0.0"
        assert config.discovery.proxies == ("tcp://10.0.0.1:8100",)
        assert environ(role)["XDG_CACHE_HOME"] == f"/var/cache/{values(role, 'CacheDirectory')[0]}"
    assert config.security.secret_file in credentials(role)


def credentials(role: str) -> set[str]:
    """Returns the files that systemd makes out of the unit's credentials."""
    return {f"{SPECIFIERS['%d']}/{value.partition(':')[0]}" for value in values(role, "LoadCredential")}


def test_a_unit_has_the_time_that_its_drain_needs(role: str, config: ProxyConfig | NodeConfig) -> None:
    (stop,) = values(role, "TimeoutStopSec")
    assert int(stop) >= config.http.drain_s + 30
    if isinstance(config, ProxyConfig):
        assert config.http.drain_s >= config.request.timeout_s


@pytest.mark.deploy
@pytest.mark.integration
def test_systemd_takes_the_unit(role: str, tmp_path: Path) -> None:
    """It reads /opt/pdserve/bin/pdserve too, so another program stands for it."""
    unit = tmp_path / f"pdserve-{role}.service"

    def verify(text: str) -> str:
        unit.write_text(text.replace(PROGRAM, "/bin/true"))
        done = subprocess.run(
            ["systemd-analyze", "verify", unit], text=True, capture_output=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    assert verify(text_of(role)) == ""
    assert "RestartSecs" in verify(text_of(role).replace("RestartSec=", "RestartSecs="))
