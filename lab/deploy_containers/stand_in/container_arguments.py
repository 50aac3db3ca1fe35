"""The command line with which podman runs a pod's container as Kubernetes would."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.deploy_containers.stand_in.manifests import Container, ManifestError, Manifests, Template, quantity

Secrets = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Identity:
    """What is one pod's own, beside its template."""

    name: str
    namespace: str
    address: str
    network: str
    """The path of its network namespace, which outlives its containers."""
    folder: Path
    """Its volumes, which outlive its containers, too."""
    cores: Sequence[int]
    """Empty: any."""
    name_server: str


def environment(template: Template, pod: Identity, manifests: Manifests, secrets: Secrets) -> dict[str, str]:
    """Returns the container's variables. ``$(NAME)`` is one that was given before."""
    container = template.container
    found: dict[str, str] = {}
    for source in container.env_from:
        found |= manifests.config_map(source.config_map_ref.name)
    for variable in container.env:
        source_of = variable.value_from
        if source_of is None:
            value: str | None = re.sub(r"\$\((\w+)\)", lambda match: found.get(match[1], match[0]), variable.value)
        elif source_of.secret_key_ref is not None:
            reference = source_of.secret_key_ref
            value = secrets.get(reference.name, {}).get(reference.key)
            if value is None and not reference.optional:
                raise ManifestError(f"{pod.name}: there is no {reference.key} in a Secret {reference.name}")
        elif source_of.config_map_key_ref is not None:
            reference = source_of.config_map_key_ref
            value = manifests.config_map(reference.name)[reference.key]
        else:
            assert source_of.field_ref is not None
            value = _field(source_of.field_ref.field_path, template, pod)
        if value is not None:
            found[variable.name] = value
    return found


def _field(path: str, template: Template, pod: Identity) -> str:
    if match := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
        return template.metadata.labels[match[1]]
    fields = {"metadata.name": pod.name, "metadata.namespace": pod.namespace, "status.podIP": pod.address}
    if path not in fields:
        raise ManifestError(f"{pod.name}: the field {path} is not known here")
    return fields[path]


def container_arguments(template: Template, pod: Identity, variables: Mapping[str, str]) -> list[str]:
    """Returns what follows ``podman run`` and the container's name."""
    container = template.container
    return [
        *("--hostname", pod.name, "--network", f"ns:{pod.network}", "--dns", pod.name_server),
        *_search(pod.namespace),
        *_security(template, pod),
        *_resources(container, pod),
        *_volumes(template, pod),
        *(word for name, value in variables.items() for word in ("--env", f"{name}={value}")),
        *(("--entrypoint", json.dumps(container.command)) if container.command else ()),
        _image(container.image),
        *container.args,
    ]


def volume_folders(template: Template, pod: Identity) -> dict[str, Path]:
    """Returns the folder of each volume of a pod."""
    return {volume.name: pod.folder / volume.name for volume in template.spec.volumes}


def _search(namespace: str) -> list[str]:
    domains = (f"{namespace}.svc.cluster.local", "svc.cluster.local", "cluster.local")
    return [*(word for domain in domains for word in ("--dns-search", domain)), "--dns-option", "ndots:5"]


def _security(template: Template, pod: Identity) -> list[str]:
    of_pod, own = template.spec.security_context, template.container.security_context
    user = own.run_as_user if own.run_as_user is not None else of_pod.run_as_user
    group = own.run_as_group if own.run_as_group is not None else of_pod.run_as_group
    if (of_pod.run_as_non_root or own.run_as_non_root) and not user:
        raise ManifestError(f"{pod.name}: runAsNonRoot, and its user is root or not given")
    if of_pod.seccomp_profile is not None and of_pod.seccomp_profile.type != "RuntimeDefault":
        raise ManifestError(f"{pod.name}: the seccomp profile {of_pod.seccomp_profile.type} is not known here")
    arguments = []
    if user is not None:
        arguments += ["--user", str(user) if group is None else f"{user}:{group}"]
    if of_pod.fs_group is not None:
        arguments += ["--group-add", str(of_pod.fs_group)]
    if own.read_only_root_filesystem:
        # Podman would otherwise mount /tmp, /run and others itself, which Kubernetes does not.
        arguments += ["--read-only", "--read-only-tmpfs=false"]
    if not own.allow_privilege_escalation:
        arguments += ["--security-opt", "no-new-privileges"]
    for capability in own.capabilities.drop:
        arguments += ["--cap-drop", capability]
    for capability in own.capabilities.add:
        arguments += ["--cap-add", capability]
    return arguments


def _resources(container: Container, pod: Identity) -> list[str]:
    limits = container.resources.limits
    if unknown := set(limits) - {"cpu", "memory"}:
        raise ManifestError(f"{pod.name}: limits of {sorted(unknown)} are not known here")
    arguments = []
    if "memory" in limits:
        size = str(int(quantity(limits["memory"])))
        arguments += ["--memory", size, "--memory-swap", size]
    if pod.cores:
        arguments += ["--cpuset-cpus", ",".join(map(str, pod.cores))]
    elif "cpu" in limits:
        arguments += ["--cpus", str(quantity(limits["cpu"]))]
    return arguments


def exclusive_cores(container: Container) -> int:
    """Returns how many whole cores a kubelet with the static CPU policy would give to a container alone, or 0."""
    limits = container.resources.limits
    cpu = quantity(limits.get("cpu", "0"))
    # What has a limit and no request requests its limit.
    requests = limits | container.resources.requests
    guaranteed = all(
        quantity(requests[name]) == quantity(limits.get(name, "0")) for name in ("cpu", "memory") if name in requests
    )
    return int(cpu) if guaranteed and "memory" in limits and cpu == int(cpu) else 0


def _volumes(template: Template, pod: Identity) -> list[str]:
    folders = volume_folders(template, pod)
    arguments = []
    for mount in template.container.volume_mounts:
        if mount.name not in folders:
            raise ManifestError(f"{pod.name}: there is no volume {mount.name}")
        arguments += ["--volume", f"{folders[mount.name]}:{mount.mount_path}:{'ro' if mount.read_only else 'rw'}"]
    return arguments


def _image(name: str) -> str:
    """Returns an image that was built on this machine by the name that podman has given it."""
    return name if "/" in name else f"localhost/{name}"
