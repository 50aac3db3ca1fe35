"""Changes that make the manifests fit a small machine. Everything else runs as it was rendered."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lab.deploy_containers.stand_in.manifests import Container, Manifests, Resources, Template, Workload

SETTINGS = {
    # Several engines on two cores.
    "PDSERVE_KV_CACHE_MIB": "128",
    # Every prompt goes through a prefill node: on two shared cores, computing it where it is would mostly be sooner.
    "PDSERVE_DISAGGREGATION": "always",
}
CORES = "1"


def changes() -> list[str]:
    """Returns in words what ``fitted`` changes."""
    return [f"limits.cpu: {CORES}", *(f"{name}: {value}" for name, value in SETTINGS.items())]


def fitted(manifests: Manifests, image: str) -> Manifests:
    """Returns the manifests with another image, a core a pod, and ``SETTINGS``."""
    workloads = [_workload(each, image) for each in manifests.workloads]
    config_maps = [
        msgspec.structs.replace(each, data=each.data | SETTINGS) if each.metadata.name == "pdserve-settings" else each
        for each in manifests.config_maps
    ]
    return Manifests(
        workloads,
        manifests.services,
        config_maps,
        manifests.policies,
        manifests.monitors,
        manifests.rules,
        manifests.not_run,
    )


def _workload(workload: Workload, image: str) -> Workload:
    template = workload.spec.template
    containers = tuple(_container(each, image) for each in template.spec.containers)
    spec = msgspec.structs.replace(template.spec, containers=containers)
    changed: Template = msgspec.structs.replace(template, spec=spec)
    return msgspec.structs.replace(workload, spec=msgspec.structs.replace(workload.spec, template=changed))


def _container(container: Container, image: str) -> Container:
    resources = Resources(container.resources.requests | {"cpu": CORES}, container.resources.limits | {"cpu": CORES})
    # Variables of the pod's own would go before the ConfigMap's.
    env: Sequence[object] = [variable for variable in container.env if variable.name not in SETTINGS]
    return msgspec.structs.replace(container, image=image, resources=resources, env=tuple(env))
