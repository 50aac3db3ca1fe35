"""Rendered manifests as typed objects. A field or kind that nothing here does is refused: nothing goes untried."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import msgspec
import yaml

NOT_RUN = (
    "HorizontalPodAutoscaler",
    "PersistentVolumeClaim",
    "PodDisruptionBudget",
    "ScaledObject",
    "ServiceAccount",
)
"""Kinds that only an API server and its controllers could run. Schemas are all that looks at them."""

_BYTES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


class ManifestError(Exception):
    """A manifest says what the stand-in for Kubernetes cannot do."""


class Fields(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """An object of a manifest."""


class Metadata(Fields, frozen=True):
    name: str
    namespace: str = "default"
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Requirement(Fields, frozen=True):
    """One of a selector's ``matchExpressions``."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels
        raise ManifestError(f"a selector has the operator {self.operator}")


class Selector(Fields, frozen=True):
    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def selects(self, labels: Mapping[str, str]) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            each.holds(labels) for each in self.match_expressions
        )


class KeyReference(Fields, frozen=True):
    name: str
    key: str
    optional: bool = False


class FieldReference(Fields, frozen=True):
    field_path: str
    api_version: str = "v1"


class ValueSource(Fields, frozen=True):
    secret_key_ref: KeyReference | None = None
    config_map_key_ref: KeyReference | None = None
    field_ref: FieldReference | None = None


class Variable(Fields, frozen=True):
    name: str
    value: str = ""
    value_from: ValueSource | None = None


class NameReference(Fields, frozen=True):
    name: str


class VariableSource(Fields, frozen=True):
    config_map_ref: NameReference


class ContainerPort(Fields, frozen=True):
    name: str
    container_port: int
    protocol: str = "TCP"


class HttpGet(Fields, frozen=True):
    path: str
    port: str | int
    scheme: str = "HTTP"


class Exec(Fields, frozen=True):
    command: tuple[str, ...]


class Probe(Fields, frozen=True):
    """How the kubelet asks whether a container has started, lives or is ready. The defaults are Kubernetes's."""

    http_get: HttpGet
    initial_delay_seconds: float = 0
    period_seconds: float = 10
    timeout_seconds: float = 1
    success_threshold: int = 1
    failure_threshold: int = 3


class Hook(Fields, frozen=True):
    exec: Exec


class Lifecycle(Fields, frozen=True):
    pre_stop: Hook


class Resources(Fields, frozen=True):
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Capabilities(Fields, frozen=True):
    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()


class SeccompProfile(Fields, frozen=True):
    type: str


class ContainerSecurity(Fields, frozen=True):
    allow_privilege_escalation: bool = True
    read_only_root_filesystem: bool = False
    capabilities: Capabilities = Capabilities()
    run_as_non_root: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None


class PodSecurity(Fields, frozen=True):
    run_as_non_root: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    fs_group_change_policy: str = "Always"
    seccomp_profile: SeccompProfile | None = None


class Mount(Fields, frozen=True):
    name: str
    mount_path: str
    read_only: bool = False


class EmptyDir(Fields, frozen=True):
    size_limit: str = ""
    medium: str = ""


class SecretFiles(Fields, frozen=True):
    secret_name: str
    default_mode: int = 0o644


class Volume(Fields, frozen=True):
    name: str
    empty_dir: EmptyDir | None = None
    secret: SecretFiles | None = None


class Container(Fields, frozen=True):
    name: str
    image: str
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    image_pull_policy: str = "IfNotPresent"
    env: tuple[Variable, ...] = ()
    env_from: tuple[VariableSource, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None
    readiness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    resources: Resources = Resources()
    security_context: ContainerSecurity = ContainerSecurity()
    volume_mounts: tuple[Mount, ...] = ()

    def port(self, port: str | int) -> int:
        """Returns the number of a port that is given by name or number."""
        if isinstance(port, int):
            return port
        for each in self.ports:
            if each.name == port:
                return each.container_port
        raise ManifestError(f"the container {self.name} has no port named {port}")


class PodSpec(Fields, frozen=True):
    containers: tuple[Container, ...]
    security_context: PodSecurity = PodSecurity()
    volumes: tuple[Volume, ...] = ()
    termination_grace_period_seconds: float = 30
    automount_service_account_token: bool = True
    enable_service_links: bool = True
    service_account_name: str = "default"
    # The scheduler's, and there is one machine.
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = {}


class TemplateMetadata(Fields, frozen=True):
    labels: dict[str, str]
    annotations: dict[str, str] = {}


class Template(Fields, frozen=True):
    metadata: TemplateMetadata
    spec: PodSpec

    @property
    def container(self) -> Container:
        (only,) = self.spec.containers
        return only


class RollingUpdate(Fields, frozen=True):
    max_surge: str | int = "25%"
    max_unavailable: str | int = "25%"
    partition: int = 0


class Strategy(Fields, frozen=True):
    type: str = "RollingUpdate"
    rolling_update: RollingUpdate = RollingUpdate()


class WorkloadSpec(Fields, frozen=True):
    """What Deployments and StatefulSets say. Each says some of it."""

    selector: Selector
    template: Template
    replicas: int = 1
    min_ready_seconds: float = 0
    revision_history_limit: int = 10
    progress_deadline_seconds: float = 600
    strategy: Strategy = Strategy()
    service_name: str = ""
    pod_management_policy: str = "OrderedReady"
    update_strategy: Strategy = Strategy()


class WorkloadKind(Enum):
    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"


class Workload(Fields, frozen=True):
    api_version: str
    kind: WorkloadKind
    metadata: Metadata
    spec: WorkloadSpec


class ServicePort(Fields, frozen=True):
    port: int
    target_port: str | int
    name: str = ""
    protocol: str = "TCP"


class ServiceSpec(Fields, frozen=True):
    selector: dict[str, str]
    ports: tuple[ServicePort, ...]
    type: str = "ClusterIP"
    cluster_ip: str = msgspec.field(default="", name="clusterIP")
    publish_not_ready_addresses: bool = False
    session_affinity: str = "None"

    @property
    def headless(self) -> bool:
        return self.cluster_ip == "None"


class Service(Fields, frozen=True):
    api_version: str
    kind: str
    metadata: Metadata
    spec: ServiceSpec


class ConfigMap(Fields, frozen=True):
    api_version: str
    kind: str
    metadata: Metadata
    data: dict[str, str]


class Block(Fields, frozen=True):
    cidr: str
    except_: tuple[str, ...] = msgspec.field(default=(), name="except")


class PolicyPeer(Fields, frozen=True):
    pod_selector: Selector | None = None
    namespace_selector: Selector | None = None
    ip_block: Block | None = None


class PolicyPort(Fields, frozen=True):
    port: str | int | None = None
    end_port: int | None = None
    protocol: str = "TCP"


class PolicyRule(Fields, frozen=True):
    ports: tuple[PolicyPort, ...] = ()
    from_: tuple[PolicyPeer, ...] = msgspec.field(default=(), name="from")
    to: tuple[PolicyPeer, ...] = ()


class PolicySpec(Fields, frozen=True):
    pod_selector: Selector
    policy_types: tuple[str, ...]
    ingress: tuple[PolicyRule, ...] = ()
    egress: tuple[PolicyRule, ...] = ()


class NetworkPolicy(Fields, frozen=True):
    api_version: str
    kind: str
    metadata: Metadata
    spec: PolicySpec


class ScrapeEndpoint(Fields, frozen=True):
    port: str
    path: str = "/metrics"
    interval: str = "30s"
    scrape_timeout: str = "10s"
    honor_labels: bool = False
    metric_relabelings: tuple[dict[str, Any], ...] = ()
    relabelings: tuple[dict[str, Any], ...] = ()


class NamespaceSelector(Fields, frozen=True):
    match_names: tuple[str, ...] = ()
    any: bool = False


class PodMonitorSpec(Fields, frozen=True):
    selector: Selector
    pod_metrics_endpoints: tuple[ScrapeEndpoint, ...]
    namespace_selector: NamespaceSelector = NamespaceSelector()
    job_label: str = ""
    pod_target_labels: tuple[str, ...] = ()


class PodMonitor(Fields, frozen=True):
    api_version: str
    kind: str
    metadata: Metadata
    spec: PodMonitorSpec


class Rule(Fields, frozen=True):
    expr: str
    alert: str = ""
    record: str = ""
    for_: str = msgspec.field(default="", name="for")
    keep_firing_for: str = msgspec.field(default="", name="keep_firing_for")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class RuleGroup(Fields, frozen=True):
    name: str
    rules: tuple[Rule, ...]
    interval: str = ""


class RuleSpec(Fields, frozen=True):
    groups: tuple[RuleGroup, ...]


class PrometheusRule(Fields, frozen=True):
    api_version: str
    kind: str
    metadata: Metadata
    spec: RuleSpec


@dataclass(frozen=True)
class Manifests:
    """All that was rendered."""

    workloads: list[Workload] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    config_maps: list[ConfigMap] = field(default_factory=list)
    policies: list[NetworkPolicy] = field(default_factory=list)
    monitors: list[PodMonitor] = field(default_factory=list)
    rules: list[PrometheusRule] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def config_map(self, name: str) -> Mapping[str, str]:
        for each in self.config_maps:
            if each.metadata.name == name:
                return each.data
        raise ManifestError(f"there is no ConfigMap {name}")


def read_manifests(text: str) -> Manifests:
    """Returns the objects of rendered YAML. Raises ManifestError for what the stand-in does not know."""
    found = Manifests()
    for document in yaml.safe_load_all(text):
        if document is not None:
            _add(found, document)
    for workload in found.workloads:
        _check(workload)
    return found


def quantity(text: str) -> float:
    """Returns a number of Kubernetes's: ``500m``, ``2`` or ``3Gi``."""
    if match := re.fullmatch(r"(\d+)m", text):
        return int(match[1]) / 1000
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|)", text):
        return float(match[1]) * _BYTES[match[2]]
    raise ManifestError(f"{text!r} is no quantity that is known here")


def _add(found: Manifests, document: dict[str, Any]) -> None:
    match document["kind"]:
        case "Deployment" | "StatefulSet":
            found.workloads.append(_as(Workload, document))
        case "Service":
            found.services.append(_as(Service, document))
        case "ConfigMap":
            found.config_maps.append(_as(ConfigMap, document))
        case "NetworkPolicy":
            found.policies.append(_as(NetworkPolicy, document))
        case "PodMonitor":
            found.monitors.append(_as(PodMonitor, document))
        case "PrometheusRule":
            found.rules.append(_as(PrometheusRule, document))
        case kind if kind in NOT_RUN:
            found.not_run.append(f"{kind} {document['metadata']['name']}")
        case kind:
            raise ManifestError(f"{kind} {document['metadata']['name']}: this kind is not known here")


T = TypeVar("T", bound=Fields)


def _as(kind: type[T], document: dict[str, Any]) -> T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as exc:
        raise ManifestError(f"{document['kind']} {document['metadata']['name']}: {exc}") from exc


def _check(workload: Workload) -> None:
    """Refuses what has a field that is known, and a value that is not done here."""
    name, template = workload.metadata.name, workload.spec.template
    spec = template.spec
    problems = []
    if len(spec.containers) != 1:
        problems.append("one container a pod is what runs here")
    if spec.enable_service_links or spec.automount_service_account_token:
        problems.append("no variables of Services and no token of an account are made here: set both fields to false")
    if any((volume.empty_dir is None) == (volume.secret is None) for volume in spec.volumes):
        problems.append("a volume is an emptyDir or a secret here")
    if not workload.spec.selector.selects(template.metadata.labels):
        problems.append("its selector does not select its own pods")
    if problems:
        raise ManifestError(f"{workload.kind.value} {name}: {'; '.join(problems)}")


def named(items: Iterable[Workload], name: str) -> Workload:
    for each in items:
        if each.metadata.name == name:
            return each
    raise ManifestError(f"there is no workload {name}")
