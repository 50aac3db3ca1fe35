"""Tests that Compose would take the example, and that pdserve takes its command lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdserve.errors import ConfigError
from pdserve.settings import resolve_secret
from tests.example_programs.command_lines import node_config, proxy_config
from tests.example_programs.programs import EXAMPLES

SECRET = "0123456789abcdef" * 4
SCHEMA = json.loads((Path(__file__).parent / "compose_schema.json").read_text())
NODES = ("prefill", "decode")

Services = dict[str, dict[str, Any]]


def interpolated(part: Any, environ: dict[str, str]) -> Any:
    """Returns ``part`` of a parsed file with its variables replaced as Compose does it: in each string."""

    def value(found: re.Match[str]) -> str:
        name, how, other = found.groups()
        if environ.get(name):
            return environ[name]
        assert how == ":-", f"{name} is needed: {other}"
        return str(other)

    if isinstance(part, dict):
        return {key: interpolated(each, environ) for key, each in part.items()}
    if isinstance(part, list):
        return [interpolated(each, environ) for each in part]
    if not isinstance(part, str):
        return part
    replaced = re.sub(r"\$\{([A-Z_]+)(:-|:\?)([^}]*)\}", value, part)
    assert "$" not in replaced, "a variable in a form that this test does not know"
    return replaced


def project(**environ: str) -> dict[str, Any]:
    found: dict[str, Any] = interpolated(yaml.safe_load((EXAMPLES / "compose.yaml").read_text()), environ)
    return found


@pytest.fixture
def services() -> Services:
    found: Services = project(PDSERVE_SECRET=SECRET)["services"]
    return found


def test_it_follows_the_schema() -> None:
    jsonschema.validate(project(PDSERVE_SECRET=SECRET), SCHEMA)
    jsonschema.validate(project(PDSERVE_SECRET=SECRET, PREFILL_CORES="0-3,8", DECODE_CORES="4-7"), SCHEMA)


def test_it_does_not_start_without_a_secret() -> None:
    with pytest.raises(AssertionError, match="PDSERVE_SECRET is needed: make one with openssl"):
        project()


def test_pdserve_takes_every_command_line(
    services: Services, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert services.keys() == {"proxy", *NODES}
    proxy = proxy_config(services["proxy"]["command"], services["proxy"]["environment"], capsys)
    (published,) = services["proxy"]["ports"]
    assert published == f"127.0.0.1:{proxy.http.port}:{proxy.http.port}"
    for role in NODES:
        service = services[role]
        node = node_config(role, service["command"], service["environment"], capsys)
        assert node.discovery.proxies == (f"tcp://proxy:{proxy.registry.control_port}",)
        assert service["environment"]["PDSERVE_MODEL"] == "demo"
        assert service["hostname"] == role, "other containers find a node by the name that it says"
        for config in (proxy, node):
            assert resolve_secret(config.security, [config.http.host], tmp_path) == SECRET.encode()
            assert config.http.host == "0.0.0.0"
        assert node.transfer.host == proxy.registry.control_host == "0.0.0.0"
        assert int(service["stop_grace_period"].removesuffix("s")) >= node.http.drain_s + 30


def test_a_flag_that_pdserve_does_not_know_is_found(services: Services, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--prot"):
        proxy_config(["proxy", "--prot", "8000"], services["proxy"]["environment"], capsys)


def test_the_image_is_built_from_this_repository(services: Services) -> None:
    for service in services.values():
        context = EXAMPLES / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).is_file()
    volumes = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert volumes == project(PDSERVE_SECRET=SECRET)["volumes"].keys()
