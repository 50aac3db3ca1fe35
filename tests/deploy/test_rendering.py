"""Tests, with kubectl, helm, promtool and Kubernetes' schemas, what is rendered: ``make test-manifests``."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.alert_cases import CASES, TRIGGERS
from tests.deploy.deploy_tools import DeployTool, ToolFailed, check_objects, run_tool
from tests.deploy.manifests import (
    DEPLOY,
    NODES,
    OVERLAYS,
    Manifest,
    Rendering,
    Workload,
    named,
    parse,
    rendered,
)
from tests.deploy.rendering import by_name, helm_template, kustomized, of_chart

pytestmark = [pytest.mark.deploy, pytest.mark.integration]

CHART = DEPLOY / "chart"
SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = ("1.27", "1.32", "1.37")

each_rendering = pytest.mark.parametrize("rendering", Rendering, ids=lambda part: part.value)


@each_rendering
def test_kustomize_gives_what_is_committed(rendering: Rendering) -> None:
    assert by_name(parse(kustomized(rendering))) == by_name(rendered(rendering)), "python -m tests.deploy.rendering"


@each_rendering
def test_the_chart_gives_the_same_object_by_object(rendering: Rendering) -> None:
    assert by_name(of_chart(rendering)) == by_name(rendered(rendering))


@pytest.mark.parametrize("values", ["values.yaml", *(f"values-{overlay.value}.yaml" for overlay in OVERLAYS)])
def test_helm_finds_no_fault_with_the_chart(values: str) -> None:
    said = run_tool(DeployTool.HELM, "lint", "--strict", CHART, "--values", CHART / values)
    assert "0 chart(s) failed" in said


def test_the_chart_is_whole_when_it_is_packed(tmp_path: Path) -> None:
    """The folders of manifests in it are links."""
    run_tool(DeployTool.HELM, "package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.iterdir()
    text = run_tool(
        DeployTool.HELM, "template", "--namespace", "pdserve", "pdserve", archive, "--values", CHART / "values-cpu.yaml"
    )
    assert by_name(parse(text)) == by_name(rendered(Rendering.CPU))


def test_helm_refuses_a_secret_as_a_value() -> None:
    with pytest.raises(ToolFailed, match="PDSERVE_SECRET"):
        helm_template("--set-string", "settings.PDSERVE_SECRET=0123456789abcdef")


def test_values_reach_the_objects_that_they_are_about(tmp_path: Path) -> None:
    init = {"name": "fetch", "image": "fetcher:1"}
    peer = {"podSelector": {"matchLabels": {"app": "chat"}}}
    collector = {
        "to": [{"podSelector": {"matchLabels": {"app": "collector"}}}],
        "ports": [{"protocol": "TCP", "port": 4317}],
    }
    values = {
        "image": {"repository": "registry.example/pdserve", "tag": "9", "pullSecrets": ["pull"]},
        "secret": {"existingSecret": "mine"},
        "apiKeys": {"existingSecret": "keys-of-clients"},
        "model": {"existingClaim": "claim", "initContainers": [init]},
        "proxy": {"replicas": 3, "settings": {"PDSERVE_POLICY": "prefix-affinity", "PDSERVE_DRAIN_S": "30"}},
        "decode": {"replicas": 5, "nodeSelector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}]},
        "networkPolicy": {"clients": [peer], "prometheus": [peer], "extraEgress": [collector]},
    }
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    objects = by_name(helm_template("--values", str(path)))
    pods = {which: objects[which.kind, f"pdserve-{which.value}"]["spec"]["template"]["spec"] for which in Workload}
    own = {which: pod["containers"][0] for which, pod in pods.items()}
    for which, pod in pods.items():
        assert own[which]["image"] == "registry.example/pdserve:9"
        assert pod["imagePullSecrets"] == [{"name": "pull"}]
        assert {"name": "secret", "secret": {"secretName": "mine", "defaultMode": 0o440}} in pod["volumes"]
        assert (pod.get("initContainers") == [init]) is (which in NODES)
    proxy = {entry["name"]: entry["value"] for entry in own[Workload.PROXY]["env"]}
    assert proxy["PDSERVE_POLICY"] == "prefix-affinity"
    assert proxy["PDSERVE_DRAIN_S"] == "30"
    assert proxy["PDSERVE_API_KEY_FILE"] == "/etc/pdserve-keys/keys"
    assert len(proxy) == len(own[Workload.PROXY]["env"])
    assert {"name": "api-keys", "secret": {"secretName": "keys-of-clients", "defaultMode": 0o440}} in pods[
        Workload.PROXY
    ]["volumes"]
    assert objects["Deployment", "pdserve-proxy"]["spec"]["replicas"] == 3
    assert objects["StatefulSet", "pdserve-decode"]["spec"]["replicas"] == 5
    assert pods[Workload.DECODE]["nodeSelector"] == {"gpu": "yes"}
    assert pods[Workload.DECODE]["tolerations"] == [{"operator": "Exists"}]
    assert objects["ConfigMap", "pdserve-settings"]["data"]["PDSERVE_MODEL"] == "/models/model"
    for name in ("pdserve-clients", "pdserve-metrics"):
        assert objects["NetworkPolicy", name]["spec"]["ingress"][0]["from"] == [peer]
    assert collector in objects["NetworkPolicy", "pdserve-dns"]["spec"]["egress"]
    without = by_name(helm_template("--set", "networkPolicy.enabled=false"))
    assert "NetworkPolicy" not in {kind for kind, _ in without}


def set_values(*values: str) -> list[str]:
    return [part for value in values for part in ("--set-string" if "PDSERVE_" in value else "--set", value)]


@pytest.mark.parametrize(
    ("values", "proxy_s", "prefill_s", "decode_s"),
    [
        ([], 625, 90, 90),
        (["settings.PDSERVE_DRAIN_S=300"], 625, 315, 315),
        (["decode.settings.PDSERVE_DRAIN_S=120.5", "settings.PDSERVE_DRAIN_S=10"], 625, 90, 136),
        (["proxy.settings.PDSERVE_DRAIN_S=1800"], 1820, 90, 90),
        (["proxy.settings.PDSERVE_DRAIN_S=5"], 625, 90, 90),
    ],
    ids=str,
)
def test_pods_get_the_time_that_their_drain_needs(
    values: list[str], proxy_s: int, prefill_s: int, decode_s: int
) -> None:
    objects = by_name(helm_template(*set_values(*values)))
    found = [
        objects[which.kind, f"pdserve-{which.value}"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for which in (Workload.PROXY, Workload.PREFILL, Workload.DECODE)
    ]
    assert found == [proxy_s, prefill_s, decode_s]


@pytest.mark.parametrize(
    ("values", "ranges"),
    [
        (["settings.PDSERVE_UCX_TCP_PORTS=50000-50099"], [(50000, 50099)]),
        (
            ["prefill.settings.PDSERVE_UCX_TCP_PORTS=50000-50099", "settings.PDSERVE_UCX_TCP_PORTS=51000-51001"],
            [(51000, 51001), (50000, 50099)],
        ),
    ],
    ids=str,
)
def test_the_network_policy_opens_the_ports_that_ucx_takes(values: list[str], ranges: list[tuple[int, int]]) -> None:
    spec = by_name(helm_template(*set_values(*values)))["NetworkPolicy", "pdserve-nodes"]["spec"]
    wanted = [{"protocol": "TCP", "port": 8200}]
    wanted += [{"protocol": "TCP", "port": first, "endPort": last} for first, last in ranges]
    assert spec["ingress"][1]["ports"] == spec["egress"][1]["ports"] == wanted
    assert spec["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8001}]
    assert spec["egress"][0]["ports"] == [{"protocol": "TCP", "port": 8100}]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["settings.PDSERVE_UCX_TCP_PORTS="], "a range such as 42000-42999 is needed"),
        (["decode.settings.PDSERVE_UCX_TCP_PORTS=42000"], "of decode nodes"),
        (["proxy.settings.PDSERVE_DRAIN_S=long"], "PDSERVE_DRAIN_S of the proxy"),
        (["autoscaling.enabled=true", "autoscaling.minReplicas=9"], "more than maxReplicas, 8"),
        (["model.hub.name=org/name", "model.existingClaim=claim"], "give one of them"),
    ],
    ids=str,
)
def test_helm_refuses_values_that_contradict_each_other(values: list[str], why: str) -> None:
    with pytest.raises(ToolFailed, match=why):
        helm_template(*set_values(*values))


def test_without_network_policies_ucx_may_take_any_port() -> None:
    helm_template(*set_values("settings.PDSERVE_UCX_TCP_PORTS=", "networkPolicy.enabled=false"))


def test_scaling_asks_about_the_releases_own_namespace() -> None:
    found = helm_template("--set", "autoscaling.enabled=true", namespace="chat")
    queries = [
        trigger["metadata"]["query"]
        for one in found
        if one["kind"] == "ScaledObject"
        for trigger in one["spec"]["triggers"]
    ]
    assert len(queries) == 3
    assert all('namespace="chat"' in query and 'pdserve"' not in query for query in queries)


def test_monitoring_gets_the_labels_that_an_operator_looks_for() -> None:
    flags = ("monitoring.enabled=true", "monitoring.labels.release=prometheus")
    found = helm_template(*(part for flag in flags for part in ("--set", flag)))
    for kind in ("PodMonitor", "PrometheusRule"):
        (one,) = [each for each in found if each["kind"] == kind]
        assert one["metadata"]["labels"] == {"app.kubernetes.io/name": "pdserve", "release": "prometheus"}


def test_alerts_lead_to_where_the_page_is_kept() -> None:
    kept = "https://wiki.example/pdserve/runbooks/{alert}.html"
    found = helm_template("--set", "monitoring.enabled=true", "--set", f"monitoring.runbook={kept}")
    (rules,) = [each for each in found if each["kind"] == "PrometheusRule"]
    for group in rules["spec"]["groups"]:
        for rule in group["rules"]:
            assert (
                rule["annotations"].get("runbook_url") == f"https://wiki.example/pdserve/runbooks/{rule['alert']}.html"
            )
            assert "runbook" not in rule["annotations"]
    with pytest.raises(ToolFailed, match="runbook"):
        helm_template("--set", "monitoring.enabled=true", "--set", "monitoring.runbook=docs/mine.md")


def test_components_add_what_they_say(tmp_path: Path) -> None:
    """An overlay of a user's own, with the components that the overlays of the project do not have."""
    folder = DEPLOY / "overlays" / "cpu"
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(folder, tmp_path)],
        # hub-model is another model than the one of the component model. overlays/hub has it.
        "components": [
            os.path.relpath(path.parent, tmp_path)
            for path in DEPLOY.glob("components/*/kustomization.yaml")
            if path.parent.name != "hub-model"
        ],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = by_name(parse(run_tool(DeployTool.KUBECTL, "kustomize", tmp_path)))
    (proxy,) = objects["Deployment", "pdserve-proxy"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "PDSERVE_API_KEY_FILE", "value": "/etc/pdserve-keys/keys"} in proxy["env"]
    flags = ["--values", f"{CHART}/values-cpu.yaml", "--set", "model.existingClaim=pdserve-model"]
    for value in ("apiKeys.existingSecret=pdserve-api-keys", "autoscaling.enabled=true"):
        flags += ["--set", value]
    assert objects == by_name(helm_template(*flags))
    for which in Workload:
        assert ("replicas" in objects[which.kind, f"pdserve-{which.value}"]["spec"]) is (which is Workload.PROXY)


def overlay_of_the_page(folder: str) -> dict[tuple[str, str], Manifest]:
    """Returns what the page's overlay in ``folder`` gives."""
    page = (DEPLOY.parent / "docs" / "how-to" / "kubernetes.md").read_text()
    (overlay,) = re.findall(rf"```yaml\n# {folder}/kustomization.yaml.*?\n(.*?)```", page, re.DOTALL)
    with tempfile.TemporaryDirectory(dir=DEPLOY.parent) as beside:
        (Path(beside) / "kustomization.yaml").write_text(overlay)
        return by_name(parse(run_tool(DeployTool.KUBECTL, "kustomize", beside)))


def test_the_pages_own_overlay_is_one() -> None:
    objects = overlay_of_the_page("mine")
    decode = objects["StatefulSet", "pdserve-decode"]["spec"]
    assert decode["replicas"] == 4
    assert decode["template"]["spec"]["containers"][0]["image"] == "registry.example/pdserve:0.2.0"
    assert objects["ConfigMap", "pdserve-settings"]["data"]["PDSERVE_SERVED_MODEL_NAME"] == "chat"


def test_the_pages_monitoring_has_the_label_and_is_otherwise_the_same() -> None:
    objects, plain = overlay_of_the_page("watch"), by_name(rendered(Rendering.MONITORING))
    assert objects.keys() == plain.keys()
    for name, found in objects.items():
        assert found["metadata"]["labels"].pop("release") == "kube-prometheus-stack"
        assert found == plain[name]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda part: part.value)
def test_objects_follow_the_schemas_of_kubernetes(overlay: Rendering, version: str) -> None:
    check_objects(overlay.path, version)


def test_the_schemas_find_slips(tmp_path: Path) -> None:
    slip = tmp_path / "slip.yaml"
    slip.write_text(Rendering.CPU.path.read_text().replace("terminationGracePeriodSeconds", "terminationGracePeriod"))
    with pytest.raises(ToolFailed, match="'terminationGracePeriod' was unexpected"):
        check_objects(slip, KUBERNETES[-1])


def custom_schema(found: Manifest) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{found['kind']}.json").read_text())
    return schema


@pytest.mark.parametrize("rendering", [Rendering.MONITORING, Rendering.AUTOSCALING], ids=lambda part: part.value)
def test_custom_objects_follow_their_schemas(rendering: Rendering, tmp_path: Path) -> None:
    builtin = [found for found in rendered(rendering) if found["apiVersion"] == "v1"]
    for found in rendered(rendering):
        if found not in builtin:
            jsonschema.validate(found, custom_schema(found))
    path = tmp_path / "builtin.yaml"
    path.write_text(yaml.safe_dump_all(builtin))
    check_objects(path, KUBERNETES[-1])


def test_promtool_takes_the_rules_and_they_fire_when_they_should(tmp_path: Path) -> None:
    spec = named(Rendering.MONITORING, "PrometheusRule", "pdserve")["spec"]
    by_alert = {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"]}
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(spec))
    run_tool(DeployTool.PROMTOOL, "check", "rules", rules)
    tests = [case.for_promtool(by_alert[case.alert]) for case in CASES]
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    run_tool(DeployTool.PROMTOOL, "test", "rules", cases)


def test_what_the_autoscaler_asks_for_is_a_number_also_without_requests(tmp_path: Path) -> None:
    tests = [case.for_promtool(named(Rendering.AUTOSCALING, "ScaledObject", case.scaled)["spec"]) for case in TRIGGERS]
    cases = tmp_path / "cases.yaml"
    cases.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    run_tool(DeployTool.PROMTOOL, "test", "rules", cases)
