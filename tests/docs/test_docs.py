"""Tests that the documentation is true: settings, commands, fields, messages, metrics and links."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shlex
import subprocess
from itertools import product
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec
import pytest

from benchmarks.__main__ import STUDIES
from benchmarks.goodput.plots import GOODPUT_PLOT, LATENCY_PLOT
from benchmarks.pages import goodput_page, planning_page, results_plot, sizing_page, speculation_table, stream_tables
from lab import clusters_page
from lab.fault_matrix import page as reliability_page
from lab.fault_matrix.figures import read_figures
from lab.fault_matrix.table import CELLS, TESTED, Fault, Phase, Victim
from lab.scale import page as scale_page
from lab.simulation.scale.figures import read as read_scale
from lab.soak import page as soak_page
from lab.soak.report import read as read_soak
from pdserve.api.node.node_metrics import NodeMetrics
from pdserve.api.replay.replayable_answers import ReplayableAnswers, ReplayLimits, ReplayMetrics
from pdserve.api.requests.openai_request import ChatRequest, CompletionRequest
from pdserve.bench.report import Better, Report, Unit, changes, read_report
from pdserve.cli.chat.command import chat_flags
from pdserve.cli.main import ALIASES, SUBCOMMANDS
from pdserve.config import Dtype, NodeConfig, RoutingPolicy
from pdserve.metrics import BuildInfo, own_process
from pdserve.models.rank_cache import rank_sizes
from pdserve.settings import ROOTS, load
from pdserve.settings.load import CONFIGS
from pdserve.settings.other_servers import MEANINGS
from pdserve.settings.setting import settings_of
from pdserve.tracing.tracing import SpanCounts
from pdserve.wire import discovery, engine, proxy_workers, rank, transfer
from pdserve.wire.engine import EngineStats
from pdserve_proxy.metrics import ProxyMetrics, render_families
from pdserve_proxy.registry.registry import Registry
from tests.benchmarks.goodput.outcomes import SHAPE, goodput_report
from tests.docs import models_page
from tests.docs.configuration_table import PAGE, render
from tests.gpu import verdict

ROOT = Path(__file__).parents[2]
OPERATIONS = [page for folder in ("how-to", "reference", "runbooks") for page in ROOT.glob(f"docs/{folder}/*.md")]
REPORTS = sorted(ROOT.glob("docs/benchmarks/*.json"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md")])


def name(path: Path) -> str:
    return path.name


def anchors(page: Path) -> set[str]:
    """Returns the anchors that the repository's view gives a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]
    again = {f"{slug}-{count}" for slug in slugs for count in range(1, slugs.count(slug))}
    return {*slugs, *again, *re.findall(r'<a id="([^"]+)">', text)}


def commands() -> list[tuple[str, list[str]]]:
    """Returns every shell command of every page, as the page's name and the command's words."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if "'{" not in line and "'" not in line else []
                if words:
                    found.append((page.name, words))
    return found


PDSERVE_COMMANDS = [(page, words) for page, words in commands() if words[0] == "pdserve" and words[1] != "SUBCOMMAND"]
WITH_MODEL = {"up", "serve", "chat", "pull", "models"}
"""Subcommands whose first word may be a model, before the flags."""


def test_the_configuration_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "python -m tests.docs.configuration_table writes it anew"
    for setting in (setting for root in ROOTS for setting in settings_of(root)):
        assert f"`--{setting.flag}` | `{setting.env}`" in PAGE.read_text()


def test_the_page_of_families_is_up_to_date() -> None:
    assert models_page.PAGE.read_text() == models_page.render(), "python -m tests.docs.models_page writes it anew"


def test_its_example_file_is_taken(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    file = tmp_path / "decode.toml"
    file.write_text(example)
    config = load(NodeConfig, ["--config", str(file)], {}, prog="pdserve decode")
    assert config.cache.kv_cache_mib == 4096
    assert config.cpu.cores == tuple(range(8))


@pytest.mark.parametrize(
    ("page", "words"), PDSERVE_COMMANDS, ids=[f"{page}-{words[1]}" for page, words in PDSERVE_COMMANDS]
)
def test_every_command_is_one_that_pdserve_takes(page: str, words: list[str]) -> None:
    subcommand = ALIASES.get(words[1], words[1])
    assert subcommand in SUBCOMMANDS
    two_words = subcommand == "bench" or words[1:3] in (["plan", "profile"], ["plan", "memory"])
    name, flags = (" ".join(words[1:3]), words[3:]) if two_words else (subcommand, words[2:])
    if name in WITH_MODEL and flags and not flags[0].startswith("-"):
        flags = flags[1:]
    load(CONFIGS[name], chat_flags(flags) if name == "chat" else flags, {}, prog=f"pdserve {name}")


def test_every_study_is_one_that_the_checkout_has() -> None:
    studies = [words[3:] for _, words in commands() if words[:3] == ["python", "-m", "benchmarks"]]
    assert studies
    for name, *flags in studies:
        load(STUDIES[name].config, flags, {}, prog=f"python -m benchmarks {name}")


def test_there_are_commands_to_check() -> None:
    assert {words[1] for _, words in PDSERVE_COMMANDS} >= {"up", "proxy", "prefill", "decode"}


def test_every_make_target_is_there() -> None:
    targets = {words[1] for _, words in commands() if words[0] == "make"}
    assert targets >= {"demo", "check", "test", "test-all"}
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """As the repository's view shows them; the site is built in ``test_site.py``."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if not target.startswith("https://"):
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_flags_and_variables_in_the_text_exist(page: Path) -> None:
    text = page.read_text()
    roots = [*ROOTS, *(study.config for study in STUDIES.values())]
    settings = [setting for root in roots for setting in settings_of(root)]
    flags = {f"--{setting.flag}" for setting in settings} | {"--help", "--help-all", "--config", "--version"}
    foreign = {"--from-literal", "--replicas", "--extra-index-url"}
    other_names = {f"--{setting.former}" for setting in settings} | {f"--{flag}" for flag in MEANINGS}
    assert set(re.findall(r"(?<=`)--[a-z-]+", text)) <= flags | foreign | other_names
    assert set(re.findall(r"PDSERVE_[A-Z_]+[A-Z]", text)) <= {setting.env for setting in settings} | {"PDSERVE_CONFIG"}


def test_the_tables_of_streaming_are_those_of_the_committed_figures() -> None:
    text = stream_tables.PAGE.read_text()
    report = read_report(stream_tables.FIGURES)
    assert stream_tables.page_with(text, report) == text, "python -m benchmarks.pages.stream_tables writes them anew"


def test_the_report_of_a_gpu_is_that_of_the_committed_file() -> None:
    text = verdict.PAGE.read_text()
    again = "python -m tests.gpu.verdict --page writes it anew"
    assert verdict.page_with(text, read_report(verdict.REPORT)) == text, again


def test_the_table_of_speculation_is_that_of_the_committed_figures() -> None:
    text = speculation_table.PAGE.read_text()
    report = read_report(speculation_table.FIGURES)
    assert speculation_table.page_with(text, report) == text, (
        "python -m benchmarks.pages.speculation_table writes it anew"
    )


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NAMED_TESTS = sorted({found for page in PAGES for found in NAMED_TEST.findall(page.read_text())})


@pytest.mark.parametrize(("file", "test"), NAMED_TESTS, ids=[f"{file}::{test}" for file, test in NAMED_TESTS])
def test_every_test_that_a_page_names_exists(file: str, test: str) -> None:
    source = ROOT / file
    assert source.is_file()
    if test:
        assert re.search(rf"^ *(?:(?:async )?def {test}\(|class {test}\b|{test} = )", source.read_text(), re.MULTILINE)


def test_each_report_of_other_systems_has_a_test_that_exists() -> None:
    _, _, part = reliability_page.PAGE.read_text().partition("## What other systems' operators reported\n")
    rows = [line for line in part.partition("\n## ")[0].splitlines() if re.search(r"#\d+", line)]
    assert len(rows) == 10
    assert all(any(test for _, test in NAMED_TEST.findall(row)) for row in rows)


def test_the_page_of_faults_has_every_cell_and_the_committed_figures() -> None:
    text, figures = reliability_page.PAGE.read_text(), read_figures(reliability_page.FIGURES)
    assert figures.seconds.keys() <= {cell.name for cell in TESTED}
    again = "python -m lab.fault_matrix.page writes it anew"
    assert reliability_page.page_with(text, figures) == text, again
    assert {(cell.fault, cell.victim, cell.phase) for cell in CELLS} == set(product(Fault, Victim, Phase))
    assert all((cell.promise is None) is bool(cell.why_not) for cell in CELLS)
    assert sum(not cell.nightly for cell in TESTED) == int(re.findall(r"(\d+) of the tests run in", text)[0])


def test_committed_figures_name_no_path_of_the_machine_that_made_them() -> None:
    for file in ROOT.glob("docs/**/*.json"):
        assert not re.findall(r'": "(/[^"]*)"', file.read_text()), file


def test_goodput_is_shown_as_in_the_committed_figures() -> None:
    reports = goodput_page.read_runs()
    report = read_report(goodput_page.FIGURES)
    again = "python -m benchmarks.pages.goodput_page writes them anew"
    page, readme, decision = (
        file.read_text() for file in (goodput_page.PAGE, goodput_page.README, goodput_page.DECISION_PAGE)
    )
    assert goodput_page.page_with(page, reports) == page, again
    assert goodput_page.readme_with(readme, report) == readme, again
    assert goodput_page.decision_page_with(decision, reports["G"]) == decision, again
    for told in (goodput_page.TOLD_FIGURES, goodput_page.TOLD_SHAPES_FIGURES):
        assert read_report(told).settings["PDSERVE_TELL"] == "on"
    for plot in (GOODPUT_PLOT, LATENCY_PLOT):
        assert f"{report.machine.measured} UTC" in (goodput_page.DATA / plot).read_text(), again


def test_many_nodes_are_shown_as_in_the_committed_figures() -> None:
    of_policies, of_resumes = read_scale(scale_page.POLICIES), read_scale(scale_page.RESUMES)
    again = "python -m lab.scale.page writes it anew"
    text = scale_page.PAGE.read_text()
    assert scale_page.page_with(text, of_policies, of_resumes) == text, again
    assert f"{of_policies.machine.measured} UTC" in scale_page.PLOT.read_text(), again
    plans = {run.plan.policy: run.plan for run in of_policies.runs}
    assert set(plans) == set(RoutingPolicy)
    assert {dataclasses.replace(plan, policy=RoutingPolicy.TWO_CHOICES) for plan in plans.values()} == {
        plans[RoutingPolicy.TWO_CHOICES]
    }
    assert (plans[RoutingPolicy.TWO_CHOICES].nodes, plans[RoutingPolicy.TWO_CHOICES].streams) == (1000, 100_000)
    assert all(run.report.loss and run.report.loss.resumed for run in (*of_policies.runs, *of_resumes.runs))


def test_the_soak_is_shown_as_in_the_committed_figures() -> None:
    report, text = read_soak(soak_page.FIGURES), soak_page.PAGE.read_text()
    again = "python -m lab.soak.page writes it anew"
    assert soak_page.written(text, soak_page.figures(report)) == text, again
    assert f"{report.machine.measured} UTC" in soak_page.PLOT.read_text(), again
    assert report.minutes >= 60
    assert report.outcomes["wrong"] == 0


def test_goodput_is_shown_with_verdicts_and_pictures() -> None:
    report = goodput_report()
    verdicts = goodput_page.verdict_table({"A": report})
    assert "| good answers, tight target : those of the better of one node and `always` | at least 1 | met " in verdicts
    shown = goodput_page.figures(report)
    assert "| 4 clients | one node | 0.25 |" in shown
    compared = goodput_page.loads_table({"A": report})
    assert f"| A | {SHAPE} | 4 clients | 0.25 / 0 / " in compared
    assert f"| A | {SHAPE} | rate 75 % | 0.25 / 0 / 0.75 |" in compared
    assert f"/{LATENCY_PLOT})" in goodput_page.plots()
    settings = {"PDSERVE_JSON": "goodput.json", "PDSERVE_SHAPES": "256/64", "PDSERVE_REPEATS": "5"}
    assert goodput_page.command(msgspec.structs.replace(report, settings=settings)) == (
        "python -m benchmarks goodput --shapes 256/64"
    )
    readme = goodput_page.readme_with(goodput_page.README.read_text(), report)
    assert goodput_page.readme_with(readme, report) == readme


def test_the_sizes_of_models_are_those_of_plans_own_code() -> None:
    text = sizing_page.PAGE.read_text()
    assert sizing_page.page_with(text) == text, "python -m benchmarks.pages.sizing_page writes it anew"
    assert len(sizing_page.MODELS) == 10
    for model in sizing_page.MODELS:
        found = sizing_page.size(model)
        assert found.weights == pytest.approx(model.parameters * 1e9, rel=0.01), model.name
        assert found.kv_bytes == rank_sizes(found.config, Dtype.BF16, 16)[0].block_bytes // 16


def test_simulated_clusters_are_those_that_plan_predicts() -> None:
    """The page has a line that is simulated anew here; ``python -m lab.clusters_page`` writes all lines anew."""
    text = clusters_page.PAGE.read_text()
    assert f"| {' | '.join(clusters_page.cells(clusters_page.CASES[0]))} |" in text
    rows = clusters_page.part_of(text)
    assert len(rows) == len(clusters_page.CASES)


def test_predictions_are_shown_as_in_the_committed_figures() -> None:
    shown = planning_page.figures(read_report(planning_page.FIGURES))
    page = planning_page.PAGE.read_text()
    assert planning_page.written(page, shown) == page, "python -m benchmarks.pages.planning_page writes it anew"


def test_the_plot_shows_every_row_of_the_results() -> None:
    rows = results_plot.results(results_plot.PAGE.read_text())
    assert len(rows) >= 8
    drawn = results_plot.PLOT.read_text()
    for row in rows:
        assert all(escape(text) in drawn for text in (row.what, row.shown)), (
            "python -m benchmarks.pages.results_plot draws it anew"
        )


def worsened(report: Report, times: float) -> Report:
    """Returns the report with every ratio worse by this factor."""
    rows = []
    for row in report.rows:
        figures = []
        for figure in row.figures:
            if figure.unit is Unit.RATIO and figure.better is not Better.NEITHER:
                value = figure.value / times if figure.better is Better.HIGHER else figure.value * times
                figures.append(msgspec.structs.replace(figure, value=value))
            else:
                figures.append(figure)
        rows.append(msgspec.structs.replace(row, figures=tuple(figures)))
    return msgspec.structs.replace(report, rows=tuple(rows))


@pytest.mark.parametrize("path", REPORTS, ids=name)
def test_a_new_run_can_be_compared_with_the_committed_figures(path: Path) -> None:
    """The comparison finds every ratio that has become worse."""
    report = read_report(path)
    assert not any(change.worse for change in changes(report, report, 0.0))
    assert not any(change.worse for change in changes(report, worsened(report, 1.2), 0.2))
    # A ratio of 0 cannot become worse.
    assert all(change.worse or change.old == 0 for change in changes(report, worsened(report, 2.0), 0.2))
    assert any(f"](benchmarks/{path.name})" in page.read_text() for page in (ROOT / "docs").glob("*.md")), (
        "a page leads to it"
    )


def test_every_request_field_is_explained() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for request in (ChatRequest, CompletionRequest):
        for field in msgspec.structs.fields(request):
            assert f"`{field.encode_name}`" in text


def test_every_message_is_in_the_protocol() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    for module in (discovery, engine, proxy_workers, rank, transfer):
        for name, value in vars(module).items():
            if (
                not name.startswith("_")
                and isinstance(value, type)
                and issubclass(value, msgspec.Struct)
                and value.__struct_config__.tag is not None
            ):
                assert re.search(rf"\b{value.__struct_config__.tag}\b", text), value


def test_every_metric_is_named_and_every_name_is_one() -> None:
    others = (
        own_process("api"),
        BuildInfo(),
        ReplayMetrics(ReplayableAnswers(ReplayLimits(0, 0, 0.0))),
        SpanCounts("pdserve"),
    )
    shown = asyncio.run(NodeMetrics(EngineStats, others=others).render())
    shown += asyncio.run(render_families(ProxyMetrics().export_families(Registry(1.0, 3).snapshot())))
    exported = set(re.findall(r"^# TYPE ([\w:]+)", shown.decode(), re.MULTILINE))
    names = re.compile(r"\b(?:pdserve_(?!proxy\b|kvtransfer\b|kernels\b)|vllm:|process_)\w+")
    listed = set(names.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    assert {name for name in exported if not name.startswith("vllm:")} <= listed
    assert {name for page in OPERATIONS for name in names.findall(page.read_text())} <= exported


def test_every_test_that_the_pages_name_is_there() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_[a-z_]+)`", page.read_text())}
    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    there = {"/".join(parts[at:]) for path in listed for parts in [path.split("/")] for at in range(len(parts))}
    named = set(re.findall(r"`([\w/]+\.(?:py|cpp|h))`", page.read_text()))
    assert named <= there
