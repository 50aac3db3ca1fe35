"""Tests, without a cluster, that the manifests have only what pdserve understands and agree with each other."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdserve.config import NodeConfig, ProxyConfig
from pdserve.settings import ROOTS, load, resolve_secret
from pdserve.settings.setting import settings_of
from tests.deploy.manifests import (
    DEPLOY,
    HEADER,
    NODES,
    OVERLAYS,
    Manifest,
    Rendering,
    Workload,
    container,
    named,
    of_kind,
    pod,
    rendered,
    sources_digest,
    workload,
)

ROOT = DEPLOY.parent
DOCS = ROOT / "docs"
CHART = DEPLOY / "chart"
EVERY_POD = [*itertools.product(OVERLAYS, Workload)]
CPU = Rendering.CPU

each_pod = pytest.mark.parametrize(("overlay", "which"), EVERY_POD, ids=lambda part: part.value)
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda part: part.value)


def environ(overlay: Rendering, which: Workload) -> dict[str, str]:
    """Returns the environment that the workload's process would have in a pod at 10.1.2.3."""
    own = container(overlay, which)
    (source,) = own["envFrom"]
    values: dict[str, str] = dict(named(overlay, "ConfigMap", source["configMapRef"]["name"])["data"])
    for entry in own["env"]:
        if "secretKeyRef" in entry.get("valueFrom", {}):
            value = f"from the Secret {entry['valueFrom']['secretKeyRef']['name']}"
        elif "valueFrom" in entry:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            value = {"status.podIP": "10.1.2.3", "metadata.name": f"pdserve-{which.value}-0"}[path]
        else:
            value = entry["value"]
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], value)
    assert all(isinstance(value, str) for value in values.values())
    return values


def configured(overlay: Rendering, which: Workload) -> Any:
    """Returns the configuration that the container would start with. Raises ConfigError for unknown settings."""
    subcommand, *flags = container(overlay, which)["args"]
    assert subcommand == which.value
    root = ProxyConfig if which is Workload.PROXY else NodeConfig
    return load(root, flags, environ(overlay, which), prog=f"pdserve {subcommand}")


@pytest.mark.parametrize("rendering", Rendering, ids=lambda part: part.value)
def test_what_is_rendered_is_from_todays_sources(rendering: Rendering) -> None:
    first = rendering.path.read_text().partition("\n")[0]
    assert first == HEADER + sources_digest(), "python -m tests.deploy.rendering, then make test-manifests"


@each_pod
def test_every_container_starts_with_settings_that_pdserve_takes(
    overlay: Rendering, which: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(overlay, which)
    assert config.http.host == "0.0.0.0"
    assert capsys.readouterr().err == "", "a setting has a former name"
    assert not config.security.secret
    with pytest.raises(Exception, match="/etc/pdserve/secret"):
        resolve_secret(config.security, [config.http.host], tmp_path)


@each_pod
def test_the_secret_is_a_file_from_a_secret_that_the_pods_user_may_read(overlay: Rendering, which: Workload) -> None:
    (mount,) = [mount for mount in container(overlay, which)["volumeMounts"] if mount["name"] == "secret"]
    (volume,) = [volume for volume in pod(overlay, which)["volumes"] if volume["name"] == "secret"]
    assert configured(overlay, which).security.secret_file == f"{mount['mountPath']}/secret"
    assert volume["secret"] == {"secretName": "pdserve-secret", "defaultMode": 0o440}
    assert pod(overlay, which)["securityContext"]["fsGroup"] == 10001
    assert not of_kind(overlay, "Secret")


def test_every_variable_is_a_setting_also_where_a_role_does_not_use_it() -> None:
    known = {setting.env for root in ROOTS for setting in settings_of(root)}
    for path in [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.tpl"), *DEPLOY.rglob("*.md")]:
        assert set(re.findall(r"PDSERVE_[A-Z_]+\b(?!\*)", path.read_text())) - {"PDSERVE_"} <= known, path


@each_pod
def test_ports_are_those_that_are_listened_to(overlay: Rendering, which: Workload) -> None:
    config = configured(overlay, which)
    ports = {port["name"]: port["containerPort"] for port in container(overlay, which)["ports"]}
    if which is Workload.PROXY:
        assert ports == {"http": config.http.port, "control": config.registry.control_port}
        assert config.registry.control_host == "0.0.0.0"
    else:
        assert ports == {"http": config.http.port, "transfer": config.transfer.port}
        assert config.http.advertise == f"http://10.1.2.3:{config.http.port}"
        assert config.transfer.host == "0.0.0.0"
        assert config.transfer.advertise == "10.1.2.3"


@each_pod
def test_probes_ask_what_is_served_and_mounts_have_volumes(overlay: Rendering, which: Workload) -> None:
    own, spec = container(overlay, which), pod(overlay, which)
    # A node that fetches its model lives already, and loads its weights after that, when nothing is listened to.
    started = "/ready" if overlay is Rendering.HUB and which in NODES else "/live"
    for probe, path in (("startupProbe", started), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
        assert own[probe]["httpGet"] == {"path": path, "port": "http"}
    mounts = {mount["name"] for mount in own["volumeMounts"]}
    claims = workload(overlay, which)["spec"].get("volumeClaimTemplates", [])
    assert mounts == {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}


@each_pod
def test_grace_is_enough_for_the_drain(overlay: Rendering, which: Workload) -> None:
    own, spec = container(overlay, which), pod(overlay, which)
    before = int(own["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in own else 0
    assert spec["terminationGracePeriodSeconds"] >= before + configured(overlay, which).http.drain_s + 15


@each_overlay
def test_proxies_wait_for_the_longest_request(overlay: Rendering) -> None:
    longest = configured(overlay, Workload.DECODE).request.timeout_s
    assert configured(overlay, Workload.PROXY).http.drain_s >= longest


@each_pod
def test_pods_have_whole_cores_of_their_own(overlay: Rendering, which: Workload) -> None:
    resources = container(overlay, which)["resources"]
    assert resources["requests"] == resources["limits"], "the pod's class would not be Guaranteed"
    assert re.fullmatch("[0-9]+", resources["limits"]["cpu"])
    assert "memory" in resources["limits"]


@each_overlay
def test_a_proxys_memory_has_room_for_what_it_may_hold(overlay: Rendering) -> None:
    config = configured(overlay, Workload.PROXY)
    limit = container(overlay, Workload.PROXY)["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    held = config.admission.body_memory_mib + config.relay.journal_mib
    assert held <= int(limit.removesuffix("Gi")) * 1024 / 2


@each_pod
def test_kubernetes_gives_pods_neither_variables_nor_a_token(overlay: Rendering, which: Workload) -> None:
    """Kubernetes would otherwise set PDSERVE_PORT to tcp://… in every pod, because of the Service named pdserve."""
    spec = pod(overlay, which)
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert named(overlay, "ServiceAccount", spec["serviceAccountName"])["automountServiceAccountToken"] is False


@each_pod
def test_pods_keep_the_restricted_standard_but_for_root_with_rdma(overlay: Rendering, which: Workload) -> None:
    security, own = pod(overlay, which)["securityContext"], container(overlay, which)["securityContext"]
    root = overlay is Rendering.GPU_RDMA and which in NODES
    assert security["runAsUser"] == (0 if root else 10001)
    assert security["runAsNonRoot"] is not root
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["capabilities"] == ({"drop": ["ALL"], "add": ["IPC_LOCK"]} if root else {"drop": ["ALL"]})
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True


@each_overlay
def test_services_lead_to_pods_and_ports_that_are_there(overlay: Rendering) -> None:
    pods = [workload(overlay, which)["spec"]["template"] for which in Workload]
    services = of_kind(overlay, "Service")
    assert len(services) == 4
    for service in services:
        spec = service["spec"]
        (target,) = [each for each in pods if spec["selector"].items() <= each["metadata"]["labels"].items()]
        ports = {port["name"] for port in target["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in spec["ports"]} <= ports


@each_overlay
def test_nodes_find_every_proxy_behind_the_headless_control_service(overlay: Rendering) -> None:
    spec = named(overlay, "Service", "pdserve-control")["spec"]
    (port,) = spec["ports"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True, "a proxy is ready only once nodes have found it"
    assert port["port"] == configured(overlay, Workload.PROXY).registry.control_port
    for which in NODES:
        assert configured(overlay, which).discovery.proxies == (f"tcp://pdserve-control:{port['port']}",)


@each_pod
def test_selectors_budgets_and_spread_are_about_these_pods(overlay: Rendering, which: Workload) -> None:
    spec = workload(overlay, which)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    budget = named(overlay, "PodDisruptionBudget", f"pdserve-{which.value}")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    assert budget["maxUnavailable"] < spec["replicas"]
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels
    if which in NODES:
        assert named(overlay, "Service", spec["serviceName"])["spec"]["clusterIP"] == "None"


@each_overlay
def test_an_old_proxy_goes_after_a_new_one_has_come(overlay: Rendering) -> None:
    spec = workload(overlay, Workload.PROXY)["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@each_overlay
def test_prefill_and_decode_nodes_differ_by_their_role_alone(overlay: Rendering) -> None:
    prefill, decode = (yaml.safe_dump(workload(overlay, which)) for which in NODES)
    assert prefill.replace("prefill", "decode") == decode


@pytest.mark.parametrize("which", NODES, ids=lambda part: part.value)
def test_a_node_keeps_the_model_that_it_has_fetched(which: Workload) -> None:
    own, found = container(Rendering.HUB, which), environ(Rendering.HUB, which)
    (claim,) = workload(Rendering.HUB, which)["spec"]["volumeClaimTemplates"]
    (mount,) = [each for each in own["volumeMounts"] if each["name"] == claim["metadata"]["name"]]
    assert found["HF_HOME"].startswith(mount["mountPath"] + "/")
    assert found["HF_TOKEN"] == "from the Secret pdserve-hub"
    assert re.fullmatch("[^/]+/[^/]+", found["PDSERVE_MODEL"])
    probe = own["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600, "a download takes long"


@pytest.mark.parametrize("rendering", Rendering, ids=lambda part: part.value)
def test_every_object_is_in_the_namespace_that_the_page_names(rendering: Rendering) -> None:
    assert {found["metadata"]["namespace"] for found in rendered(rendering)} == {"pdserve"}


@pytest.mark.parametrize("which", NODES, ids=lambda part: part.value)
def test_what_scales_is_there(which: Workload) -> None:
    scaled = named(Rendering.AUTOSCALING, "ScaledObject", f"pdserve-{which.value}")["spec"]
    target = scaled["scaleTargetRef"]
    found = workload(CPU, which)
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        found["apiVersion"],
        found["kind"],
        found["metadata"]["name"],
    )
    assert scaled["minReplicaCount"] == found["spec"]["replicas"]


def test_prometheus_asks_every_pod_at_the_port_that_has_metrics() -> None:
    spec = named(Rendering.MONITORING, "PodMonitor", "pdserve")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    for which in Workload:
        assert endpoint["port"] in {port["name"] for port in container(CPU, which)["ports"]}
        labels = workload(CPU, which)["spec"]["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()


def schema() -> Manifest:
    found: Manifest = json.loads((CHART / "values.schema.json").read_text())
    return found


@pytest.mark.parametrize("path", sorted(CHART.glob("values*.yaml")), ids=lambda path: path.stem)
def test_the_charts_schema_takes_the_charts_values(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), schema())


def test_the_charts_schema_knows_every_value() -> None:
    def keys(value: Manifest, path: str = "") -> set[str]:
        found = {f"{path}.{key}" for key in value}
        return found.union(*(keys(part, f"{path}.{key}") for key, part in value.items() if isinstance(part, dict)))

    def known(part: Manifest, path: str = "") -> set[str]:
        if "$ref" in part:
            part = schema()["definitions"][part["$ref"].rpartition("/")[2]]
        properties = {key: each for key, each in part.get("properties", {}).items() if key != "global"}
        found = {f"{path}.{key}" for key in properties}
        return found.union(*(known(each, f"{path}.{key}") for key, each in properties.items()))

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    empty = {f".{which.value}.resources.{kind}" for which in Workload for kind in ("requests", "limits")}
    assert known(schema()) - empty == keys(values)


@pytest.mark.parametrize(
    "values",
    [
        {"settings": {"PDSERVE_SECRET": "s" * 64}},
        {"proxy": {"settings": {"PDSERVE_API_KEY": "k"}}},
        {"settings": {"PDSERVE_BLOCK_SIZE": 16}},
        {"settings": {"LD_PRELOAD": "x"}},
        {"proxy": {"replicas": 0}},
        {"decode": {"resources": {"requests": {}}}},
        {"networkpolicy": {}},
    ],
    ids=str,
)
def test_the_charts_schema_refuses_secrets_and_slips(values: Manifest) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema())


def test_versions_are_the_products() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]
    images = {overlay: {container(overlay, which)["image"] for which in Workload} for overlay in OVERLAYS}
    plain, gpu = {f"pdserve:{project['version']}"}, {f"pdserve:{project['version']}-gpu"}
    assert images == {Rendering.CPU: plain, Rendering.HUB: plain, Rendering.GPU: gpu, Rendering.GPU_RDMA: gpu}


def test_every_command_of_the_pages_names_the_namespace() -> None:
    pages = [page.read_text() for folder in ("how-to", "reference", "runbooks") for page in DOCS.glob(f"{folder}/*.md")]
    commands = re.findall(r"kubectl ([^`\n|;]*)", "\n".join(pages).replace("`kubectl apply`", ""))
    assert len(commands) > 24
    for command in commands:
        assert command.startswith(("-n pdserve ", "create namespace", "label namespace")), command
