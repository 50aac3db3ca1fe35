"""Tests that what leads to pdserve in Kubernetes keeps long streams alive, and fits the manifests of ``deploy``."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from pdserve.config import NodeConfig, ProxyConfig
from tests.deploy.deploy_tools import DeployTool, check_objects, run_tool
from tests.deploy.manifests import DEPLOY, Manifest, Rendering, named, parse
from tests.deploy.rendering import by_name
from tests.example_programs.programs import EXAMPLES

FOLDER = EXAMPLES / "kubernetes"
SCHEMAS = DEPLOY.parent / "tests" / "deploy" / "schemas"
LONGEST_S = NodeConfig().request.timeout_s
NGINX = "nginx.ingress.kubernetes.io/"

needs_tools = [pytest.mark.deploy, pytest.mark.integration]


def manifest(name: str) -> Manifest:
    found: Manifest = yaml.safe_load((FOLDER / name).read_text())
    return found


def service_port(port: Any) -> Manifest:
    """Returns the port of the Service ``pdserve`` that has this number or name."""
    (found,) = [each for each in named(Rendering.CPU, "Service", "pdserve")["spec"]["ports"] if port in each.values()]
    return dict(found)


def test_the_ingress_waits_as_long_as_a_request_may_take_and_holds_nothing_back() -> None:
    annotations = manifest("ingress.yaml")["metadata"]["annotations"]
    assert annotations[NGINX + "proxy-buffering"] == "off"
    assert float(annotations[NGINX + "proxy-read-timeout"]) >= LONGEST_S
    assert float(annotations[NGINX + "proxy-send-timeout"]) >= LONGEST_S
    assert annotations[NGINX + "proxy-body-size"] == f"{ProxyConfig().http.max_body_bytes >> 20}m"


def test_the_route_waits_as_long_as_a_request_may_take() -> None:
    route = manifest("http-route.yaml")
    jsonschema.validate(route, json.loads((SCHEMAS / "HTTPRoute.json").read_text()))
    (rule,) = route["spec"]["rules"]
    for timeout in rule["timeouts"].values():
        assert float(timeout.removesuffix("s")) >= LONGEST_S


def test_both_lead_to_the_service_of_the_proxies() -> None:
    (rule,) = manifest("ingress.yaml")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"]["name"] == "pdserve"
    assert service_port(path["backend"]["service"]["port"]["name"])["targetPort"] == "http"
    (rule,) = manifest("http-route.yaml")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["name"] == "pdserve"
    assert service_port(backend["port"])["targetPort"] == "http"


@pytest.mark.parametrize(
    "slip", [{"timeouts": {"request": "10 minutes"}}, {"timeout": {}}, {"backendRefs": []}], ids=str
)
def test_the_routes_schema_finds_slips(slip: Manifest) -> None:
    route = manifest("http-route.yaml")
    route["spec"]["rules"][0] |= slip
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(route, json.loads((SCHEMAS / "HTTPRoute.json").read_text()))


class TestWithTools:
    pytestmark = needs_tools

    def test_the_ingress_follows_the_schema_of_kubernetes(self) -> None:
        check_objects(FOLDER / "ingress.yaml", "1.37")

    def test_all_together_is_the_cluster_with_an_ingress_and_scaled_nodes(self) -> None:
        objects = by_name(parse(run_tool(DeployTool.KUBECTL, "kustomize", FOLDER)))
        plain = by_name(parse(Rendering.CPU.path.read_text()))
        added = objects.keys() - plain.keys()
        assert added == {
            ("Ingress", "pdserve"),
            ("ScaledObject", "pdserve-prefill"),
            ("ScaledObject", "pdserve-decode"),
        }
        assert plain.keys() <= objects.keys()
        for role in ("prefill", "decode"):
            assert "replicas" not in objects["StatefulSet", f"pdserve-{role}"]["spec"]
            (queue, *_) = objects["ScaledObject", f"pdserve-{role}"]["spec"]["triggers"]
            assert "_queue_" in queue["metadata"]["query"]
        assert {found["metadata"]["namespace"] for found in objects.values()} == {"pdserve"}
