"""Tests that alert rules, the dashboard and the autoscaler ask for what nodes and proxies show."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggModifierType, AggregateExpr, Expr, MatchOp, VectorSelector

from pdserve.api.node.node_metrics import NodeMetrics
from pdserve.metrics import BuildInfo, own_process
from pdserve.wire.engine import EngineStats
from pdserve_proxy.metrics import ProxyMetrics, render_families
from pdserve_proxy.registry.snapshot import Snapshot
from tests.deploy.alert_cases import CASES
from tests.deploy.manifests import DEPLOY, Rendering, Workload, named, of_kind

RUNBOOKS = DEPLOY.parent / "docs" / "runbooks"
TARGET_LABELS = {"namespace", "pod", "component"}
"""The labels that the PodMonitor and Prometheus' operator give to each series."""
LATE_LABELS = {
    ("pdserve_proxy_requests_total", "status"),
    ("pdserve_kv_transfer_failures_total", "reason"),
    ("pdserve_build_info", "transports"),
    ("pdserve_build_info", "ucx"),
    ("process_start_time_seconds", "process"),  # one of them starts with the first grammar
}
"""Labels whose values are not known before something happens. No alert is about their first event."""


NOBODY = Snapshot(nodes=(), models=(), pairings={}, loads={})


@dataclass(frozen=True)
class Shown:
    """The series of fresh processes."""

    samples: dict[str, list[dict[str, str]]]

    def values(self, name: str, label: str) -> set[str]:
        return {labels[label] for labels in self.samples[name] if label in labels}


@pytest.fixture(scope="module")
def shown() -> Shown:
    """What a node and a proxy show before anything has happened. ``up`` is Prometheus' own."""
    node = asyncio.run(NodeMetrics(EngineStats, others=(own_process("api"), BuildInfo())).render())
    proxy = asyncio.run(render_families(ProxyMetrics().export_families(NOBODY)))
    samples: dict[str, list[dict[str, str]]] = {"up": [{}]}
    for family in text_string_to_metric_families((node + proxy).decode()):
        # A family whose labels come with events has no sample yet, and still its name.
        kinds = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("_total",)
        for name in (family.name, *(family.name + kind for kind in kinds)):
            samples.setdefault(name, [])
        for sample in family.samples:
            samples[sample.name].append(sample.labels)
    return Shown(samples)


def rules() -> list[dict[str, Any]]:
    groups = named(Rendering.MONITORING, "PrometheusRule", "pdserve")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    data = named(Rendering.MONITORING, "ConfigMap", "pdserve-dashboard")["data"]
    found: dict[str, Any] = json.loads(data["pdserve.json"])
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def triggers() -> list[tuple[str, str]]:
    return [
        (found["metadata"]["name"], trigger["metadata"]["query"])
        for found in of_kind(Rendering.AUTOSCALING, "ScaledObject")
        for trigger in found["spec"]["triggers"]
    ]


EXPRESSIONS = [
    *((rule["alert"], rule["expr"]) for rule in rules()),
    *((panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]),
    *triggers(),
]


def parse(expression: str) -> Expr:
    """Returns the expression as Prometheus reads it, with values for the variables that Grafana fills in."""
    filled = expression.replace("$__rate_interval", "1m").replace("$namespace", "pdserve")
    assert "$" not in filled, filled
    return promql_parser.parse(filled)


def parts(expression: Expr) -> Iterator[Expr]:
    found: list[Expr] = []
    promql_parser.walk(expression, found.append)
    return iter(found)


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_metric_and_label_exists_from_the_start(where: str, expression: str, shown: Shown) -> None:
    selectors = [part for part in parts(parse(expression)) if isinstance(part, VectorSelector)]
    assert selectors
    for selector in selectors:
        assert selector.name in shown.samples, f"{where} asks for a metric that nothing exports"
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            if (selector.name, matcher.name) in LATE_LABELS:
                continue
            values = shown.values(selector.name, matcher.name)
            wanted = matcher.value.split("|") if matcher.op in (MatchOp.Re, MatchOp.NotRe) else [matcher.value]
            assert set(wanted) <= values, f"{where} asks for {matcher} of {selector.name}, which has {values}"


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_sums_are_by_labels_that_their_series_have(where: str, expression: str, shown: Shown) -> None:
    for sum_ in (part for part in parts(parse(expression)) if isinstance(part, AggregateExpr)):
        if sum_.modifier is None:
            continue
        assert sum_.modifier.type is AggModifierType.By
        for selector in (part for part in parts(sum_.expr) if isinstance(part, VectorSelector)):
            known = {label for labels in shown.samples[selector.name or ""] for label in labels}
            late = {label for name, label in LATE_LABELS if name == selector.name}
            assert set(sum_.modifier.labels) <= known | late | TARGET_LABELS, where


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_says_what_it_means_and_where_to_read_on(rule: dict[str, Any]) -> None:
    page = DEPLOY.parent / rule["annotations"]["runbook"]
    assert page == RUNBOOKS / f"{rule['alert']}.md"
    title, *parts = re.split(r"^\*\*(.+?):\*\*", page.read_text(), flags=re.MULTILINE)
    assert title == f"# {rule['alert']}\n\n"
    assert parts[::2] == ["It means", "Users see", "Look", "Do"]
    assert all(len(part.strip()) > 5 for part in parts[1::2])
    assert rule["labels"]["severity"] in ("warning", "critical")
    for text in (rule["annotations"]["summary"], rule["annotations"]["description"]):
        assert text.endswith(".")


def test_every_page_about_an_alert_has_one() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == {*alerts, "index"}
    listed = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (\w+) \|", (RUNBOOKS / "index.md").read_text(), re.MULTILINE)
    assert listed == [(rule["alert"], rule["alert"], rule["labels"]["severity"]) for rule in rules()]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_every_alert_has_a_case_that_fires_and_one_that_does_not(rule: dict[str, Any]) -> None:
    cases = [case for case in CASES if case.alert == rule["alert"]]
    assert {case.fires is None for case in cases} == {True, False}


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_name_components_that_there_are(rule: dict[str, Any]) -> None:
    for selector in (part for part in parts(parse(rule["expr"])) if isinstance(part, VectorSelector)):
        for matcher in selector.matchers.matchers:
            if matcher.name == "component":
                assert set(matcher.value.split("|")) <= {which.value for which in Workload}


def test_every_label_in_a_panels_legend_is_there() -> None:
    for panel in panels():
        for target in panel["targets"]:
            outermost = {
                label
                for part in parts(parse(target["expr"]))
                if isinstance(part, AggregateExpr) and part.modifier
                for label in part.modifier.labels
            }
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= outermost, panel["title"]


def test_panels_have_their_own_numbers_and_places() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert place["x"] + place["w"] <= 24
