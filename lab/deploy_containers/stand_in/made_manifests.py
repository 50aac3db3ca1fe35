"""Small manifests for tests of the stand-in."""

from __future__ import annotations

from typing import Any

import msgspec

from lab.deploy_containers.stand_in.manifests import NetworkPolicy, Service, Workload


def _workload(kind: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {
            "replicas": 3,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "fsGroup": 10001},
                    "containers": [container()],
                    "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "key", "secret": {"secretName": "keys"}}],
                },
            },
            **spec,
        },
    }


def container() -> dict[str, Any]:
    return {
        "name": "web",
        "image": "shop:1",
        "args": ["serve"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "URL", "value": "http://$(POD_IP):8000/$(UNKNOWN)"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        "startupProbe": {"httpGet": {"path": "/live", "port": "http"}, "failureThreshold": 3},
        "livenessProbe": {"httpGet": {"path": "/live", "port": "http"}, "failureThreshold": 2},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "failureThreshold": 2},
        "resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "key", "mountPath": "/etc/keys", "readOnly": True},
        ],
    }


def deployment(**spec: Any) -> dict[str, Any]:
    return _workload("Deployment", **spec)


def stateful_set(**spec: Any) -> dict[str, Any]:
    return _workload("StatefulSet", serviceName="web", **spec)


def service(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}], **spec},
    }


def a_workload(document: dict[str, Any]) -> Workload:
    return msgspec.convert(document, Workload)


def a_service(**spec: Any) -> Service:
    return msgspec.convert(service(**spec), Service)


def a_policy(**spec: Any) -> NetworkPolicy:
    document = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "some", "namespace": "shop"},
        "spec": spec,
    }
    return msgspec.convert(document, NetworkPolicy)
