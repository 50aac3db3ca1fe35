"""Tests, without a cluster, that the manifests have only what pdserve understands and agree with each other."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.config import NodeConfig, ProxyConfig
from pdserve.settings import ROOTS, load, resolve_secret
from pdserve.settings.setting import settings_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "base"
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("overlays/*/kustomization.yaml"))
PODS = ["proxy", "prefill", "decode"]


def documents(folder: Path) -> list[dict[str, Any]]:
    """Returns all resources and patches that the folder's kustomization names."""
    (kustomization,) = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    files = [name for name in kustomization.get("resources", []) if name.endswith(".yaml")]
    files += [patch["path"] for patch in kustomization.get("patches", [])]
    return [document for name in files for document in yaml.safe_load_all((folder / name).read_text())]


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [item for item in items if item["name"] == name]
    return found


def resource(kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in documents(BASE) if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def workload(role: str) -> dict[str, Any]:
    return resource("Deployment" if role == "proxy" else "StatefulSet", f"pdserve-{role}")


def container(role: str) -> dict[str, Any]:
    (only,) = workload(role)["spec"]["template"]["spec"]["containers"]
    assert only["name"] == role
    found: dict[str, Any] = only
    return found


def environ(role: str, overlay: Path | None) -> dict[str, str]:
    """Returns the environment that the process of ``role`` would have in a pod at 10.1.2.3."""
    values = dict(resource("ConfigMap", "pdserve-settings")["data"])
    entries = container(role)["env"]
    if overlay is not None:
        for patch in documents(overlay):
            if patch["metadata"]["name"] == f"pdserve-{role}":
                entries = entries + patch["spec"]["template"]["spec"]["containers"][0]["env"]
    for entry in entries:
        source = entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"] == {"name": "pdserve-secret", "key": "PDSERVE_SECRET"}
            value = "s" * 64
        elif "fieldRef" in source:
            value = {"status.podIP": "10.1.2.3", "metadata.name": f"pdserve-{role}-0"}[source["fieldRef"]["fieldPath"]]
        else:
            value = entry["value"]
        assert isinstance(value, str), entry
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    return values


def configured(role: str, overlay: Path | None = None) -> Any:
    """Returns the configuration that the container would start with. Raises ConfigError for unknown settings."""
    subcommand, *flags = container(role)["args"]
    assert subcommand == role
    root = ProxyConfig if role == "proxy" else NodeConfig
    return load(root, flags, environ(role, overlay), prog=f"pdserve {role}")


@pytest.mark.parametrize(("role", "overlay"), [*itertools.product(PODS, [None, *OVERLAYS])], ids=str)
def test_every_container_starts_with_settings_that_pdserve_takes(
    role: str, overlay: Path | None, tmp_path: Path
) -> None:
    config = configured(role, overlay)
    assert config.http.host == "0.0.0.0"
    assert resolve_secret(config.security, [config.http.host], tmp_path) == b"s" * 64


def test_every_variable_is_a_setting_also_where_a_role_does_not_use_it() -> None:
    known = {setting.env for root in ROOTS for setting in settings_of(root)}
    for path in DEPLOY.rglob("*.yaml"):
        assert set(re.findall(r"PDSERVE_[A-Z_]+", path.read_text())) <= known, path


@pytest.mark.parametrize("role", PODS)
def test_ports_are_those_that_are_listened_to(role: str) -> None:
    config = configured(role)
    ports = {port["name"]: port["containerPort"] for port in container(role)["ports"]}
    expected = {"http": config.http.port}
    if role == "proxy":
        expected["control"] = config.registry.control_port
    if role != "proxy":
        expected["transfer"] = config.transfer.port
        assert config.transfer.host == "0.0.0.0"
        assert config.transfer.advertise == "10.1.2.3"
    assert ports == expected
    if role != "proxy":
        assert config.http.advertise == f"http://10.1.2.3:{config.http.port}"
    annotations = workload(role)["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.http.port)


@pytest.mark.parametrize("role", PODS)
def test_probes_and_grace(role: str) -> None:
    pod, own = workload(role)["spec"]["template"]["spec"], container(role)
    ports = {port["name"] for port in own["ports"]}
    for probe, path in (("livenessProbe", "/live"), ("readinessProbe", "/ready")):
        assert own[probe]["httpGet"]["path"] == path
        assert own[probe]["httpGet"]["port"] in ports
    assert pod["terminationGracePeriodSeconds"] > configured(role).http.drain_s + 15
    mounts = {mount["name"] for mount in own["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("role", PODS)
def test_kubernetes_adds_no_variables_of_its_own(role: str) -> None:
    """Kubernetes would otherwise set PDSERVE_PORT to tcp://… in every pod, because of the Service named pdserve."""
    assert workload(role)["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_services_lead_to_pods_and_ports_that_are_there() -> None:
    pods = [workload(role)["spec"]["template"] for role in PODS]
    services = [item for item in documents(BASE) if item["kind"] == "Service"]
    assert len(services) == 4
    for service in services:
        spec = service["spec"]
        (pod,) = [pod for pod in pods if spec["selector"].items() <= pod["metadata"]["labels"].items()]
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in spec["ports"]} <= ports


def test_nodes_find_the_proxy_by_its_control_service() -> None:
    service = resource("Service", "pdserve-control")
    (port,) = service["spec"]["ports"]
    assert port["port"] == configured("proxy").registry.control_port
    assert service["spec"]["publishNotReadyAddresses"] is True
    for role in ("prefill", "decode"):
        assert configured(role).discovery.proxies == (f"tcp://pdserve-control:{port['port']}",)


@pytest.mark.parametrize("role", PODS)
def test_selectors_match_and_stateful_sets_have_their_service(role: str) -> None:
    spec = workload(role)["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    if role != "proxy":
        assert resource("Service", spec["serviceName"])["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_patches_change_what_is_there(overlay: Path) -> None:
    (kustomization,) = yaml.safe_load_all((overlay / "kustomization.yaml").read_text())
    assert [(overlay / path).resolve() for path in kustomization["resources"]] == [BASE]
    for patch in documents(overlay):
        target = resource(patch["kind"], patch["metadata"]["name"])["spec"]["template"]["spec"]
        pod = patch["spec"]["template"]["spec"]
        volumes = {volume["name"] for part in (target, pod) for volume in part.get("volumes", [])}
        for changed in pod["containers"]:
            named(target["containers"], changed["name"])
            assert {mount["name"] for mount in changed.get("volumeMounts", [])} <= volumes


def test_there_are_the_overlays_that_the_docs_name() -> None:
    assert [path.name for path in OVERLAYS] == ["cpu", "gpu-rdma"]


def test_the_image_is_built_from_what_the_project_declares() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    torch = next(need for need in project["project"]["dependencies"] if need.startswith("torch=="))
    assert f" {torch}\n" in text
    for need in project["project"]["optional-dependencies"]["demo"]:
        assert need in text
    for root in project["tool"]["setuptools"]["packages"]["find"]["where"]:
        assert f"COPY {'pdserve' if root == '.' else root} " in text
    assert "gpu" in project["project"]["optional-dependencies"]
    assert 'ENTRYPOINT ["pdserve"]' in text
