"""Renders the manifests with kustomize into ``deploy/rendered``: ``python -m tests.deploy.rendering``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.deploy.deploy_tools import DeployTool, run_tool
from tests.deploy.manifests import DEPLOY, HEADER, OVERLAYS, Manifest, Rendering, parse, sources_digest

_CHART = DEPLOY / "chart"


def kustomized(rendering: Rendering) -> str:
    return run_tool(DeployTool.KUBECTL, "kustomize", rendering.source)


def helm_template(*flags: str, namespace: str = "pdserve", chart: Path = _CHART) -> list[Manifest]:
    """Returns what the chart gives with ``flags``."""
    return parse(run_tool(DeployTool.HELM, "template", "--namespace", namespace, *flags, "pdserve", chart))


def of_chart(rendering: Rendering) -> list[Manifest]:
    """Returns those objects of the chart that should be those of ``rendering``."""
    if rendering in OVERLAYS:
        return helm_template("--values", f"{_CHART}/values-{rendering.value}.yaml")
    plain = by_name(helm_template())
    more = by_name(helm_template("--set", f"{rendering.value}.enabled=true"))
    assert plain.keys() <= more.keys()
    return [found for name, found in more.items() if name not in plain]


def by_name(manifests: Sequence[Manifest]) -> dict[tuple[str, str], Manifest]:
    found = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
    assert len(found) == len(manifests), "two objects have the same kind and name"
    return found


if __name__ == "__main__":
    for each in Rendering:
        each.path.write_text(f"{HEADER}{sources_digest()}\n{kustomized(each)}")
        print(each.path)
