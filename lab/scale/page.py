"""Writes the figures of many nodes in benchmarks.md, and their plot, from the files in docs/benchmarks/scale:
``python -m lab.scale.page``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.pages.page_part import markdown_table, with_part
from lab.scale.figures import ChoiceRuns, ProxyFigures, ProxyRuns
from lab.scale.figures import read as read_real
from lab.simulation.scale.cluster import LossReport, Plan
from lab.simulation.scale.figures import Figures, Run, read
from lab.simulation.scale.plot import write_plot
from pdserve.config import RoutingPolicy

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "benchmarks.md"
DATA = DOCS / "benchmarks" / "scale"
POLICIES = DATA / "policies.json"
RESUMES = DATA / "resumes.json"
ROUTING = DATA / "routing.json"
PROXY = DATA / "proxy.json"
PLOT = DATA / "plot.svg"
ROUTING_BEGIN = "<!-- written by lab/scale/page.py from scale/routing.json -->"
PROXY_BEGIN = "<!-- written by lab/scale/page.py from scale/proxy.json -->"
POLICIES_BEGIN = "<!-- written by lab/scale/page.py from scale/policies.json -->"
RESUMES_BEGIN = "<!-- written by lab/scale/page.py from scale/resumes.json -->"


def routing(figures: ChoiceRuns) -> str:
    """Returns what a choice of nodes takes, as Markdown."""
    ends = [min(figures.runs, key=lambda run: run.nodes), max(figures.runs, key=lambda run: run.nodes)]
    rows = [[f"{run.nodes:,}", *(f"{run.us[policy.value]:.0f} µs" for policy in RoutingPolicy)] for run in ends]
    return "\n\n".join(
        [
            markdown_table(["nodes", *(f"`{policy.value}`" for policy in RoutingPolicy)], rows),
            f"{figures.machine.cores} cores ({figures.machine.cpu}), {figures.machine.measured} UTC. "
            f"[All figures]({ROUTING.relative_to(DOCS)}).",
        ]
    )


def proxies(figures: ProxyRuns) -> str:
    """Returns what real proxies with many nodes take, as Markdown: a column for each number of workers and nodes."""
    # One node and a thousand show what more nodes cost; the file has the steps between.
    most = max(run.nodes for run in figures.runs)
    runs = [run for run in figures.runs if run.nodes in (1, most)]
    head = ["", *(f"{_counted(run.nodes, 'node')}, {_counted(run.workers, 'worker')}" for run in runs)]
    rows = [
        ("heartbeats alone, share of a core", [f"{run.idle_percent:.1f} %" for run in runs]),
        ("resident memory", [f"{run.rss_mib:.0f} MiB" for run in runs]),
        *(
            (f"a request, `{policy.value}`", [f"{_request_us(run, policy):.0f} µs" for run in runs])
            for policy in (RoutingPolicy.TWO_CHOICES, RoutingPolicy.PREFIX_AFFINITY)
        ),
        ("a fourth of the nodes dies: all known after", [_known(run) for run in runs]),
        ("requests that failed meanwhile", ["" if run.rack is None else str(run.rack.failed) for run in runs]),
        (
            "a proxy that starts again has all nodes after",
            [f"{run.restart_s:.1f} s, {run.restart_cpu_s:.1f} s of CPU" for run in runs],
        ),
        ("an answer of `/metrics`", [f"{run.pages_ms['/metrics']:.1f} ms" for run in runs]),
    ]
    return "\n\n".join(
        [
            markdown_table(head, ([name, *cells] for name, cells in rows)),
            f"{figures.machine.cores} cores ({figures.machine.cpu}), {figures.machine.measured} UTC. "
            f"[All figures]({PROXY.relative_to(DOCS)}).",
        ]
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _request_us(run: ProxyFigures, policy: RoutingPolicy) -> float:
    return next(found.request_us for found in run.policies if found.policy == policy.value)


def _known(run: ProxyFigures) -> str:
    return "" if run.rack is None else f"{run.rack.known_s:.1f} s"


def policies(figures: Figures) -> str:
    """Returns what a cluster does under each policy, and what a loss does to it, as Markdown."""
    runs = sorted(figures.runs, key=lambda run: list(RoutingPolicy).index(run.plan.policy))
    plan, machine = runs[0].plan, figures.machine
    prefill = round(plan.nodes * plan.prefill_share)
    return "\n\n".join(
        [
            f"`{command(plan)}`: {plan.nodes:,} nodes ({prefill:,} prefill), {plan.streams:,} streams, "
            f"{plan.proxies} proxies, prompts of about {plan.prompt_tokens} tokens, answers of {plan.answer_tokens}. "
            f"[All figures]({POLICIES.relative_to(DOCS)}).",
            _columns(
                "before the loss",
                runs,
                [
                    ("busiest decode node : mean", lambda run: shown(".2f", run.report.decode_imbalance)),
                    ("TTFT p50, p99", lambda run: shown(".2f", *run.report.ttft_s, unit="s")),
                    ("time between tokens p50, p99", lambda run: shown(".2f", *run.report.gap_s, unit="s")),
                    ("requests that go to the decode node of the one before", lambda run: _share(run.report.same_node)),
                ],
            ),
            _columns(
                f"the loss of {_loss(runs[0]).nodes} nodes",
                runs,
                [
                    ("streams that stand still", lambda run: f"{_loss(run).streams:,}"),
                    ("99 % have gone on after", lambda run: _seconds(_loss(run).most_resumed_s)),
                    ("others' TTFT until then p50, p99", lambda run: shown(".1f", *_loss(run).ttft_s, unit="s")),
                ],
            ),
            f"All times are simulated. The last run ended at {machine.measured} UTC.",
        ]
    )


def resumes(figures: Figures) -> str:
    """Returns what the number of resumes at once does to streams and to others, as Markdown."""
    sizes = sorted({run.plan.nodes for run in figures.runs})
    rows = [
        [
            f"{run.plan.nodes:,}, {run.plan.proxies}",
            f"{run.plan.max_resumes} a proxy" if run.plan.max_resumes else "two a prefill node",
            f"{_loss(run).streams:,}",
            _seconds(_loss(run).most_resumed_s),
            shown(".1f", _loss(run).ttft_before_s, unit="s"),
            shown(".1f", *_loss(run).ttft_s, unit="s"),
        ]
        for run in sorted(figures.runs, key=lambda run: (run.plan.nodes, run.plan.max_resumes or 33))
        if run.plan.nodes in (sizes[0], sizes[-1])
    ]
    head = ["nodes, proxies", "at once", "streams that stand still", "99 % have gone on after"]
    head += ["others' TTFT p99 before", "others' TTFT meanwhile p50, p99"]
    return "\n\n".join([markdown_table(head, rows), f"[All figures]({RESUMES.relative_to(DOCS)})."])


def command(plan: Plan) -> str:
    """Returns the command of a run with all policies."""
    default = Plan()
    flags = [f"--nodes {plan.nodes}", f"--streams {plan.streams}", f"--lose-rack {plan.lose:g}"]
    for name in ("proxies", "seconds", "warm_up_s", "max_resumes", "seed", "prompt_tokens", "answer_tokens"):
        if getattr(plan, name) != getattr(default, name):
            flags.append(f"--{name.replace('_', '-')} {getattr(plan, name):g}")
    return " ".join(["python -m lab.simulation.scale", *flags])


def page_with(text: str, of_policies: Figures, of_resumes: Figures) -> str:
    """Returns the page's ``text`` with its tables in their places."""
    text = with_part(text, ROUTING_BEGIN, routing(read_real(ROUTING, ChoiceRuns)))
    text = with_part(text, PROXY_BEGIN, proxies(read_real(PROXY, ProxyRuns)))
    plot = f"![share of streams that stand still over time]({PLOT.relative_to(DOCS)})"
    text = with_part(text, POLICIES_BEGIN, policies(of_policies))
    return with_part(text, RESUMES_BEGIN, f"{plot}\n\n{resumes(of_resumes)}")


def draw(of_policies: Figures, of_resumes: Figures, path: Path = PLOT) -> None:
    largest = max(run.plan.nodes for run in of_resumes.runs)
    by_number = [
        (str(run.plan.max_resumes) if run.plan.max_resumes else "two a prefill node", run)
        for run in of_resumes.runs
        if run.plan.nodes == largest
    ]
    panels = [
        (
            f"{of_policies.runs[0].plan.nodes:,} nodes, by policy",
            [(run.report.policy, run) for run in of_policies.runs],
        ),
        (f"{largest:,} nodes, by --max-resumes", by_number),
    ]
    write_plot(panels, of_policies.machine.measured, path)


def _columns(head: str, runs: Sequence[Run], rows: Sequence[tuple[str, Callable[[Run], str]]]) -> str:
    """Returns a table with a column for each run."""
    return markdown_table(
        [head, *(f"`{run.report.policy}`" for run in runs)], ([name, *map(shown, runs)] for name, shown in rows)
    )


def _loss(run: Run) -> LossReport:
    assert run.report.loss is not None, "these runs lose a rack"
    return run.report.loss


def shown(form: str, *values: float | None, unit: str = "") -> str:
    """Returns the values in this form and their unit; a dash where a run saw nothing."""
    if None in values:
        return "–"
    return ", ".join(format(value, form) for value in values) + (f" {unit}" if unit else "")


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f} s"


def _share(value: float) -> str:
    return f"{value * 100:.0f} %"


def main() -> None:
    of_policies, of_resumes = read(POLICIES), read(RESUMES)
    draw(of_policies, of_resumes)
    PAGE.write_text(page_with(PAGE.read_text(), of_policies, of_resumes))


if __name__ == "__main__":
    main()
