"""Reads the rendered manifests, and says whether they are those of today's sources."""

from __future__ import annotations

import hashlib
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
_RENDERED = DEPLOY / "rendered"
_SOURCES = ("base", "components", "overlays", "chart", "monitoring", "autoscaling")
HEADER = "# Written by python -m tests.deploy.rendering, from sources with the SHA-256 "

Manifest = dict[str, Any]


class Rendering(Enum):
    """What is rendered: each overlay, and what may be added to it."""

    CPU = "cpu"
    GPU = "gpu"
    GPU_RDMA = "gpu-rdma"
    HUB = "hub"
    MONITORING = "monitoring"
    AUTOSCALING = "autoscaling"

    @property
    def source(self) -> Path:
        return DEPLOY / "overlays" / self.value if self in OVERLAYS else DEPLOY / self.value

    @property
    def path(self) -> Path:
        return _RENDERED / f"{self.value}.yaml"


OVERLAYS = (Rendering.CPU, Rendering.GPU, Rendering.GPU_RDMA, Rendering.HUB)


class Workload(Enum):
    """What a pod of the cluster is."""

    PROXY = "proxy"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def kind(self) -> str:
        return "Deployment" if self is Workload.PROXY else "StatefulSet"


NODES = (Workload.PREFILL, Workload.DECODE)


def sources_digest() -> str:
    """Returns the SHA-256 of the names and contents of everything that is rendered."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        # A link of the chart leads to a folder that is counted itself.
        for path in sorted(path for path in (DEPLOY / folder).rglob("*") if path.is_file()):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(DEPLOY)} {content}\n".encode())
    return digest.hexdigest()


def parse(text: str) -> list[Manifest]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


@cache
def rendered(rendering: Rendering) -> list[Manifest]:
    return parse(rendering.path.read_text())


def of_kind(rendering: Rendering, kind: str) -> list[Manifest]:
    return [found for found in rendered(rendering) if found["kind"] == kind]


def named(rendering: Rendering, kind: str, name: str) -> Manifest:
    (found,) = [found for found in of_kind(rendering, kind) if found["metadata"]["name"] == name]
    return found


def workload(rendering: Rendering, which: Workload) -> Manifest:
    return named(rendering, which.kind, f"pdserve-{which.value}")


def pod(rendering: Rendering, which: Workload) -> Manifest:
    """Returns the specification of the workload's pods."""
    spec: Manifest = workload(rendering, which)["spec"]["template"]["spec"]
    return spec


def container(rendering: Rendering, which: Workload) -> Manifest:
    only: Manifest
    (only,) = pod(rendering, which)["containers"]
    return only
