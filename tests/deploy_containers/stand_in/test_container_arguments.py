"""Tests that podman is told what a pod says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.deploy_containers.stand_in.container_arguments import (
    Identity,
    container_arguments,
    environment,
    exclusive_cores,
)
from lab.deploy_containers.stand_in.made_manifests import container, deployment
from lab.deploy_containers.stand_in.manifests import Container, ManifestError, Manifests, Template

POD = Identity("web-0", "shop", "10.244.0.7", "/run/netns/web-0", Path("/pods/web-0"), [1], "10.244.0.2")


def template(pod: dict[str, Any] | None = None, **changes: Any) -> Template:
    made = deployment()["spec"]["template"]
    made["spec"] |= pod or {}
    made["spec"]["containers"] = [container() | changes]
    return msgspec.convert(made, Template)


def test_the_whole_command_line() -> None:
    assert " ".join(container_arguments(template(), POD, {"A": "b"})) == (
        "--hostname web-0 --network ns:/run/netns/web-0 --dns 10.244.0.2 "
        "--dns-search shop.svc.cluster.local --dns-search svc.cluster.local --dns-search cluster.local "
        "--dns-option ndots:5 "
        "--user 10001 --group-add 10001 --read-only --read-only-tmpfs=false --security-opt no-new-privileges "
        "--cap-drop ALL --memory 1073741824 --memory-swap 1073741824 --cpuset-cpus 1 "
        "--volume /pods/web-0/tmp:/tmp:rw --volume /pods/web-0/key:/etc/keys:ro "
        "--env A=b localhost/shop:1 serve"
    )


def test_variables_are_filled_in_from_the_pod_and_from_secrets() -> None:
    found = environment(template(), POD, Manifests(), {"keys": {"token": "t"}})
    assert found == {"POD_IP": "10.244.0.7", "URL": "http://10.244.0.7:8000/$(UNKNOWN)", "TOKEN": "t"}


def test_a_missing_secret_is_refused_by_name() -> None:
    with pytest.raises(ManifestError, match="no token in a Secret keys"):
        environment(template(), POD, Manifests(), {})


@pytest.mark.parametrize(
    ("pod", "changes", "named"),
    [
        ({"securityContext": {"runAsNonRoot": True}}, {}, "its user is root or not given"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, {}, "Unconfined"),
        ({}, {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "nvidia.com/gpu"),
        ({"volumes": []}, {}, "there is no volume tmp"),
    ],
)
def test_what_cannot_be_done_is_refused(pod: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ManifestError, match=named):
        container_arguments(template(pod, **changes), POD, {})


@pytest.mark.parametrize(
    ("requests", "limits", "cores"),
    [
        ({"cpu": "2", "memory": "1Gi"}, {"cpu": "2", "memory": "1Gi"}, 2),
        ({}, {"cpu": "2", "memory": "1Gi"}, 2),
        ({"cpu": "1", "memory": "1Gi"}, {"cpu": "2", "memory": "1Gi"}, 0),
        ({"cpu": "1500m", "memory": "1Gi"}, {"cpu": "1500m", "memory": "1Gi"}, 0),
        ({"cpu": "2"}, {"cpu": "2"}, 0),
    ],
)
def test_cores_are_exclusive_where_requests_are_limits_in_whole_cores(
    requests: dict[str, str], limits: dict[str, str], cores: int
) -> None:
    made = msgspec.convert(container() | {"resources": {"requests": requests, "limits": limits}}, Container)
    assert exclusive_cores(made) == cores
